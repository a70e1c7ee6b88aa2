"""Anthropic Messages: reading, and the complete and streamed reply."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from deepinfer_core.interfaces.parser import EventKind
from deepinfer_core.interfaces.wire import Fault, Generation, ReadContext, ServerEvent
from deepinfer_recipe.conversation import Conversation
from deepinfer_recipe.json_text import read_arguments
from deepinfer_recipe.kit import Kit, Prompt
from deepinfer_recipe.wire import sampling
from deepinfer_recipe.wire.anthropic_read import read_conversation
from deepinfer_recipe.wire.exchange import BaseReply, Choice, Exchange, Section
from deepinfer_recipe.wire.fields import Fields, read_object
from deepinfer_recipe.wire.retention import cache_control
from deepinfer_recipe.wire.sampling import unused_budget
from deepinfer_recipe.wire.turn import Piece, Turn, finish_word

FINISH = {
    "stop": "end_turn",
    "stop_string": "stop_sequence",
    "calls": "tool_use",
    "length": "max_tokens",
    "other": "end_turn",
}
_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
_IGNORED = ("metadata", "service_tier", "context_management", "inference_geo", "speed")


def error_body(fault: Fault) -> Mapping[str, Any]:
    """Return the body of an error."""
    default = "invalid_request_error" if fault.status < 500 else "api_error"
    kind = _ERRORS.get(fault.status, default)
    return {"type": "error", "error": {"type": kind, "message": fault.message}, "request_id": None}


class MessagesFormat:
    """See `deepinfer_core.interfaces.wire.WireFormat`."""

    name = "anthropic.messages"
    path = "/v1/messages"

    def __init__(self, kit: Kit) -> None:
        self._kit = kit

    def error(self, fault: Fault) -> Mapping[str, Any]:
        """Return the body of an error."""
        return error_body(fault)

    def read(self, body: bytes, context: ReadContext) -> Exchange:
        """Understand a request."""
        fields = Fields(read_object(body))
        model, stream = fields.text("model"), fields.flag("stream")
        limit = fields.integer("max_tokens", 1)
        if limit is None:
            raise fields.error("max_tokens", "is missing; it must be an integer >= 1")
        conversation = read_conversation(fields)
        prompt = self._kit.renderer.prompt(conversation)
        stop = sampling.stop_strings(fields, "stop_sequences")
        params = sampling.params(
            temperature=fields.number("temperature", 0, 2, 1.0),
            top_p=fields.number("top_p", 0, 1, 1.0) or 1e-9,
            **sampling.read_extras(fields),
            max_tokens=limit,
            structured=self._kit.structured(prompt, conversation),
            thinking_limit=self._kit.thinking_limit(prompt, conversation),
        )
        generation = Generation(
            prompt_token_ids=prompt.token_ids,
            params=params,
            cache_salt=context.cache_salt,
            cache_retain_s=cache_control(fields),
        )
        return Exchange(
            model=model,
            make=partial(self._reply, conversation, prompt, generation, stop, model),
            generations=(generation,),
            stream=stream,
            ignored=(*fields.without_effect(_IGNORED), *unused_budget(conversation, params)),
        )

    def _reply(
        self,
        conversation: Conversation,
        prompt: Prompt,
        generation: Generation,
        stop: Sequence[str],
        model: str,
        identity: str,
        created_s: int,
    ) -> MessagesReply:
        turn = self._kit.turn(prompt, conversation, stop)
        return MessagesReply(f"msg_{identity}", model, turn, generation, self._kit)


class CountFormat:
    """Anthropic's count of tokens."""

    name = "anthropic.count_tokens"
    path = "/v1/messages/count_tokens"

    def __init__(self, kit: Kit) -> None:
        self._kit = kit

    def error(self, fault: Fault) -> Mapping[str, Any]:
        """Return the body of an error."""
        return error_body(fault)

    def read(self, body: bytes, context: ReadContext) -> Exchange:
        """Understand a request; the answer is known at once."""
        fields = Fields(read_object(body))
        model = fields.text("model")
        conversation = read_conversation(fields)
        prompt = self._kit.renderer.prompt(conversation)
        fields.used("max_tokens")
        size = len(prompt.token_ids)
        return Exchange(
            model=model,
            make=lambda identity, created_s: CountReply(identity, size, self._kit),
            ignored=fields.without_effect(_IGNORED),
        )


class CountReply(BaseReply):
    """A count."""

    def __init__(self, identity: str, size: int, kit: Kit) -> None:
        super().__init__(identity, (), (), kit.codec)
        self._size = size

    def body(self) -> Mapping[str, Any]:
        """Return it."""
        return {"input_tokens": self._size}

    def failure_events(self, fault: Fault) -> Sequence[ServerEvent]:
        """Say what failed."""
        return [ServerEvent(name="error", data=error_body(fault))]


class MessagesReply(BaseReply):
    """An output becoming a message."""

    def __init__(
        self, identity: str, model: str, turn: Turn, generation: Generation, kit: Kit
    ) -> None:
        super().__init__(identity, [[turn]], [generation], kit.codec)
        self._model = model
        self._open: Section | None = None
        self._pinged = False

    # -------------------------------------------------------------------- streamed

    def first_events(self) -> Sequence[ServerEvent]:
        """Begin the message."""
        return [_event("message_start", message={**self._frame(), "content": []})]

    def piece_events(self, choice: Choice, section: Section, piece: Piece) -> Sequence[ServerEvent]:
        """Send a piece, in its block."""
        events: list[ServerEvent] = []
        place = len(choice.sections) - 1
        if section is not self._open:
            events += self._close(choice)
            self._open = section
            block = self._block(choice, place, empty=True)
            events.append(_event("content_block_start", index=place, content_block=block))
            if not self._pinged:
                self._pinged = True
                events.append(_event("ping"))
        text = piece.event.text
        if text:
            delta = {
                EventKind.TEXT: {"type": "text_delta", "text": text},
                EventKind.THINKING: {"type": "thinking_delta", "thinking": text},
            }.get(piece.event.kind, {"type": "input_json_delta", "partial_json": text})
            events.append(_event("content_block_delta", index=place, delta=delta))
        return events

    def choice_ended(self, choice: Choice) -> Sequence[ServerEvent]:
        """Close the last block."""
        return self._close(choice)

    def last_events(self) -> Sequence[ServerEvent]:
        """Say why it ended, and the counts."""
        reason, stop = self._ending()
        delta = {"stop_reason": reason, "stop_sequence": stop, "stop_details": None}
        delta["container"] = None
        usage = self._usage()
        return [_event("message_delta", delta=delta, usage=usage), _event("message_stop")]

    def failure_events(self, fault: Fault) -> Sequence[ServerEvent]:
        """Send the error; there is no end."""
        return [ServerEvent(name="error", data=error_body(fault))]

    def _close(self, choice: Choice) -> list[ServerEvent]:
        if self._open is None:
            return []
        place = choice.sections.index(self._open)
        events = []
        if self._open.kind is EventKind.THINKING:
            delta = {"type": "signature_delta", "signature": _signature(self._open.text)}
            events.append(_event("content_block_delta", index=place, delta=delta))
        self._open = None
        return [*events, _event("content_block_stop", index=place)]

    # -------------------------------------------------------------------- complete

    def body(self) -> Mapping[str, Any]:
        """Return the message."""
        (choice,) = self.choices
        blocks = [self._block(choice, place) for place in range(len(choice.sections))]
        return {**self._frame(), "content": blocks}

    def _frame(self) -> dict[str, Any]:
        reason, stop = self._ending()
        return {
            "id": self.identity,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": reason,
            "stop_sequence": stop,
            "stop_details": None,
            "container": None,
            "usage": self._usage(),
        }

    def _ending(self) -> tuple[str | None, str | None]:
        turn = self.choices[0].turn
        return (finish_word(turn, FINISH), turn.stop) if turn.done else (None, None)

    def _block(self, choice: Choice, place: int, *, empty: bool = False) -> Mapping[str, Any]:
        section = choice.sections[place]
        text = "" if empty else section.text
        if section.kind is EventKind.TEXT:
            return {"type": "text", "text": text, "citations": None}
        if section.kind is EventKind.THINKING:
            signature = "" if empty else _signature(text)
            return {"type": "thinking", "thinking": text, "signature": signature}
        return {
            "type": "tool_use",
            "id": f"toolu_{self.identity.removeprefix('msg_')}_{place}",
            "name": section.name,
            "input": {} if empty else _input(text),
            "caller": {"type": "direct"},
        }

    def _usage(self) -> Mapping[str, Any]:
        return {
            "input_tokens": self.prompt_tokens - self.cached_tokens,
            "cache_read_input_tokens": self.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_creation": None,
            "output_tokens": self.completion_tokens,
            "output_tokens_details": {"thinking_tokens": self.reasoning_tokens},
            "server_tool_use": None,
            "service_tier": "standard",
            "inference_geo": None,
        }


def _event(name: str, **data: Any) -> ServerEvent:
    return ServerEvent(name=name, data={"type": name, **data})


def _signature(text: str) -> str:
    """Return a digest: clients want some, and send it back; nothing is proved by it."""
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _input(text: str) -> Any:
    """Return a call's arguments as the object that the protocol wants, losing nothing."""
    found = read_arguments(text)
    return {"arguments": text} if found is None else found
