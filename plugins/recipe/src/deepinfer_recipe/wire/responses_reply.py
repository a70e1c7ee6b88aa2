"""OpenAI Responses: the complete and the streamed reply, and what is kept of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import frozen

from deepinfer_core.interfaces.parser import EventKind
from deepinfer_core.interfaces.wire import Fault, Generation, ServerEvent, StoredResponse
from deepinfer_core.requests import FinishReason
from deepinfer_recipe.wire.exchange import BaseReply, Choice, Section
from deepinfer_recipe.wire.fields import Fields
from deepinfer_recipe.wire.turn import Codec, Piece, Turn, token_report


@frozen(kw_only=True, eq=False)
class Echo:
    """What a reply must know of its request.

    Attributes:
        model: as the client named it.
        background: whether the client waits elsewhere.
        store: whether the response is kept.
        fields: what the response object repeats.
        history: items before this request's input.
        body: the request.
    """

    model: str
    background: bool
    store: bool
    fields: Mapping[str, Any]
    history: tuple[Any, ...]
    body: Fields


class ResponsesReply(BaseReply):
    """An output becoming a response."""

    def __init__(
        self,
        identity: str,
        created_s: int,
        echo: Echo,
        items: tuple[Mapping[str, Any], ...],
        turn: Turn,
        generation: Generation,
        codec: Codec,
    ) -> None:
        super().__init__(f"resp_{identity}", [[turn]], [generation], codec)
        self._tail, self._created_s, self._echo, self._items = identity, created_s, echo, items
        self._sequence = 0
        self._open: Section | None = None

    # -------------------------------------------------------------------- streamed

    def first_events(self) -> Sequence[ServerEvent]:
        """Begin the response."""
        return [
            self._event("response.created", response=self.body()),
            self._event("response.in_progress", response=self.body()),
        ]

    def piece_events(self, choice: Choice, section: Section, piece: Piece) -> Sequence[ServerEvent]:
        """Send a piece, in its item."""
        events: list[ServerEvent] = []
        if section is not self._open:
            events += self._close(choice)
            self._open = section
            events += self._opening(choice, section)
        text = piece.event.text
        if not text:
            return events
        where = self._where(choice, section)
        if section.kind is EventKind.TOOL_CALL_BEGIN:
            del where["content_index"]
            events.append(
                self._event("response.function_call_arguments.delta", **where, delta=text)
            )
        elif section.kind is EventKind.THINKING:
            events.append(self._event("response.reasoning_text.delta", **where, delta=text))
        else:
            reports = self._reports(piece.tokens)
            events.append(
                self._event("response.output_text.delta", **where, delta=text, logprobs=reports)
            )
        return events

    def choice_ended(self, choice: Choice) -> Sequence[ServerEvent]:
        """Close the last item."""
        return self._close(choice)

    def last_events(self) -> Sequence[ServerEvent]:
        """Send the whole response."""
        return [self._event(f"response.{self._status()}", response=self.body())]

    def failure_events(self, fault: Fault) -> Sequence[ServerEvent]:
        """Send the response as failed."""
        return [self._event("response.failed", response=self.body())]

    def _opening(self, choice: Choice, section: Section) -> list[ServerEvent]:
        where = self._where(choice, section)
        place = where["output_index"]
        item = self._item(choice, place, empty=True)
        events = [self._event("response.output_item.added", output_index=place, item=item)]
        if section.kind is not EventKind.TOOL_CALL_BEGIN:
            part = self._part(section, empty=True)
            events.append(self._event("response.content_part.added", **where, part=part))
        return events

    def _close(self, choice: Choice) -> list[ServerEvent]:
        section, self._open = self._open, None
        if section is None:
            return []
        where = self._where(choice, section)
        place, text = where["output_index"], section.text
        item = self._item(choice, place)
        if section.kind is EventKind.TOOL_CALL_BEGIN:
            del where["content_index"]
            events = [
                self._event(
                    "response.function_call_arguments.done",
                    **where, name=section.name, arguments=text,
                )
            ]  # fmt: skip
        else:
            if section.kind is EventKind.THINKING:
                events = [self._event("response.reasoning_text.done", **where, text=text)]
            else:
                reports = self._reports(section.tokens)
                events = [
                    self._event("response.output_text.done", **where, text=text, logprobs=reports)
                ]
            part = self._part(section)
            events.append(self._event("response.content_part.done", **where, part=part))
        return [
            *events,
            self._event("response.output_item.done", output_index=place, item=item),
        ]

    def _where(self, choice: Choice, section: Section) -> dict[str, Any]:
        place = choice.sections.index(section)
        return {
            "item_id": self._item_id(section, place),
            "output_index": place,
            "content_index": 0,
        }

    def _event(self, kind: str, /, **data: Any) -> ServerEvent:
        shape = {"type": kind, "sequence_number": self._sequence, **data}
        self._sequence += 1
        return ServerEvent(name=kind, data=shape)

    # -------------------------------------------------------------------- complete

    def body(self) -> Mapping[str, Any]:
        """Return the response object."""
        (choice,) = self.choices
        status = self._status()
        short = status == "incomplete"
        shape = {
            "id": self.identity,
            "object": "response",
            "created_at": self._created_s,
            "status": status,
            "background": self._echo.background,
            "error": self._error(),
            "incomplete_details": {"reason": "max_output_tokens"} if short else None,
            "model": self._echo.model,
            "output": [self._item(choice, place) for place in range(len(choice.sections))],
            "store": self._echo.store,
            **self._echo.fields,
        }
        if self._finished:
            shape["usage"] = self._usage()
        return shape

    def stored(self) -> StoredResponse | None:
        """Return what to keep."""
        if not self._echo.store:
            return None
        return StoredResponse(
            identity=self.identity,
            body=self.body(),
            input_items=(*self._echo.history, *self._items),
        )

    def _status(self) -> str:
        turn = self.choices[0].turn
        if self.failure is not None:
            return "cancelled" if self.failure.status == 499 else "failed"
        if not self._finished:
            return "in_progress"
        return "incomplete" if turn.reason is FinishReason.LENGTH else "completed"

    def _error(self) -> Mapping[str, Any] | None:
        if self.failure is None or self.failure.status == 499:
            return None
        default = "invalid_prompt" if self.failure.status < 500 else "server_error"
        code = "rate_limit_exceeded" if self.failure.status == 429 else default
        return {"code": code, "message": self.failure.message}

    def _usage(self) -> Mapping[str, Any]:
        return {
            "input_tokens": self.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": self.cached_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": self.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }

    def _item_id(self, section: Section, place: int) -> str:
        prefix = {EventKind.TEXT: "msg", EventKind.THINKING: "rs"}.get(section.kind, "fc")
        return f"{prefix}_{self._tail}_{place}"

    def _item(self, choice: Choice, place: int, *, empty: bool = False) -> Mapping[str, Any]:
        section = choice.sections[place]
        identity, status = self._item_id(section, place), self._item_status(choice, place, empty)
        if section.kind is EventKind.TOOL_CALL_BEGIN:
            return {
                "id": identity,
                "type": "function_call",
                "call_id": f"call_{self._tail}_{place}",
                "name": section.name,
                "arguments": "" if empty else section.text,
                "status": status,
            }
        content = [] if empty else [self._part(section)]
        if section.kind is EventKind.THINKING:
            return {
                "id": identity,
                "type": "reasoning",
                "summary": [],
                "content": content,
                "status": status,
            }
        return {
            "id": identity,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": content,
        }

    def _item_status(self, choice: Choice, place: int, empty: bool) -> str:
        section, turn = choice.sections[place], choice.turn
        if empty or (section is self._open and not turn.done):
            return "in_progress"
        last = place == len(choice.sections) - 1
        cut = turn.reason is FinishReason.LENGTH and last
        return "incomplete" if cut or not section.complete else "completed"

    def _part(self, section: Section, *, empty: bool = False) -> Mapping[str, Any]:
        text = "" if empty else section.text
        if section.kind is EventKind.THINKING:
            return {"type": "reasoning_text", "text": text}
        reports = [] if empty else self._reports(section.tokens)
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": reports}

    def _reports(self, tokens: Sequence[Any]) -> list[Any]:
        return [token_report(self._codec, token) for token in tokens if token.logprob is not None]
