"""OpenAI Chat Completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from attrs import frozen

from deepinfer_core.interfaces.parser import EventKind
from deepinfer_core.interfaces.wire import Fault, Generation, ReadContext, ServerEvent
from deepinfer_recipe.conversation import Conversation, ThinkingBudget
from deepinfer_recipe.kit import Kit, Prompt
from deepinfer_recipe.wire import openai, sampling
from deepinfer_recipe.wire.exchange import BaseReply, Choice, Exchange, Section
from deepinfer_recipe.wire.fields import Fields, read_object
from deepinfer_recipe.wire.retention import prompt_cache_retention
from deepinfer_recipe.wire.sampling import read_budget, unused_budget
from deepinfer_recipe.wire.turn import Piece, Turn, finish_word, token_report

FINISH = {
    "stop": "stop",
    "stop_string": "stop",
    "calls": "tool_calls",
    "length": "length",
    "other": "stop",
}
_IGNORED = (
    "user", "metadata", "store", "service_tier", "prompt_cache_key",
    "safety_identifier", "prediction", "verbosity",
)  # fmt: skip
_KNOWN = frozenset({"stream_options", "thinking", "chat_template_kwargs", "modalities", "audio"})


class ChatFormat:
    """See `deepinfer_core.interfaces.wire.WireFormat`."""

    name = "openai.chat"
    path = "/v1/chat/completions"

    def __init__(self, kit: Kit) -> None:
        self._kit = kit

    def error(self, fault: Fault) -> Mapping[str, Any]:
        """Return the body of an error."""
        return openai.error_body(fault)

    def read(self, body: bytes, context: ReadContext) -> Exchange:
        """Understand a request."""
        fields = Fields(read_object(body))
        fields.used(*_KNOWN)
        model, stream = fields.text("model"), fields.flag("stream")
        _refuse_audio(fields)
        conversation = read_conversation(fields)
        prompt = self._kit.renderer.prompt(conversation)
        stop = sampling.stop_strings(fields)
        params = sampling.params(
            **sampling.read_common(fields),
            **sampling.read_penalties(fields),
            max_tokens=max_tokens(fields),
            n=fields.integer("n", 1, 128, 1),
            logprobs=sampling.top_logprobs(fields),
            structured=self._kit.structured(prompt, conversation),
            thinking_limit=self._kit.thinking_limit(prompt, conversation),
        )
        generation = Generation(
            prompt_token_ids=prompt.token_ids,
            params=params,
            cache_salt=context.cache_salt,
            cache_retain_s=prompt_cache_retention(fields),
        )
        options = fields.object("stream_options", None)
        if options is not None and not stream:
            raise fields.error("stream_options", "needs stream: true")
        asked = Asked(
            model=model,
            usage=options is not None and options.flag("include_usage"),
            logprobs=params.logprobs is not None,
        )
        return Exchange(
            model=model,
            make=partial(self._reply, conversation, prompt, generation, stop, asked),
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
        asked: Asked,
        identity: str,
        created_s: int,
    ) -> ChatReply:
        turns = [self._kit.turn(prompt, conversation, stop) for _ in range(generation.params.n)]
        return ChatReply(f"chatcmpl-{identity}", created_s, asked, turns, generation, self._kit)


def read_conversation(fields: Fields) -> Conversation:
    """Return the conversation of a body."""
    messages = openai.read_messages(fields)
    tools, choice = openai.read_tools(fields)
    answer = openai.read_format(fields) or openai.read_structured(fields)
    thinking, effort = _thinking(fields)
    prefill = ""
    if messages[-1].role == "assistant" and _continues(fields):
        last = messages.pop()
        if last.calls:
            raise fields.error("messages", "cannot be continued after the calls of the last one")
        if not messages:
            raise fields.error("messages", "hold nothing before the prefix that is to be continued")
        prefill = last.content
    options = fields.object("chat_template_kwargs", None)
    return Conversation(
        messages=tuple(messages),
        tools=tools,
        tool_choice=choice,
        parallel_calls=fields.flag("parallel_tool_calls", True),
        thinking=thinking,
        effort=effort,
        budget=_budget(fields),
        answer=answer,
        prefill=prefill,
        options={} if options is None else fields.get("chat_template_kwargs"),
    )


def _continues(fields: Fields) -> bool:
    last = fields.objects("messages")[-1]
    return bool(last.flag("prefix") or fields.flag("continue_final_message"))


def _thinking(fields: Fields) -> tuple[bool | None, str | None]:
    effort = fields.one_of("reasoning_effort", openai.EFFORTS, None)
    thinking = None if effort is None else effort != "none"
    given = fields.object("thinking", None)
    if given is not None:
        word = given.one_of("type", ("enabled", "disabled", "adaptive", "auto"))
        thinking = word != "disabled"
    return thinking, None if effort == "none" else effort


def _budget(fields: Fields) -> ThinkingBudget | None:
    return read_budget(fields.object("thinking", None)) or read_budget(fields, "thinking_budget")


def max_tokens(fields: Fields) -> int | None:
    """Return the most tokens an answer may have."""
    newer = fields.integer("max_completion_tokens", 1)
    older = fields.integer("max_tokens", 1)
    return older if newer is None else newer


def _refuse_audio(fields: Fields) -> None:
    if fields.items("modalities", ["text"]) != ["text"]:
        raise fields.error("modalities", "only text is supported")
    for name in ("audio", "web_search_options"):
        if fields.has(name):
            raise fields.error(name, "is not supported")


@frozen(kw_only=True)
class Asked:
    """What a client wants to see.

    Attributes:
        model: as it named it.
        usage: whether a stream ends with counts.
        logprobs: whether tokens are reported.
    """

    model: str
    usage: bool
    logprobs: bool


class ChatReply(BaseReply):
    """Outputs becoming a chat completion."""

    def __init__(
        self,
        identity: str,
        created_s: int,
        asked: Asked,
        turns: Sequence[Turn],
        generation: Generation,
        kit: Kit,
    ) -> None:
        super().__init__(identity, [turns], [generation], kit.codec)
        self._created_s, self._asked = created_s, asked

    # -------------------------------------------------------------------- streamed

    def first_events(self) -> Sequence[ServerEvent]:
        """Open every choice."""
        opening = {"role": "assistant", "content": "", "refusal": None}
        return [self._chunk(choice, opening) for choice in self.choices]

    def piece_events(self, choice: Choice, section: Section, piece: Piece) -> Sequence[ServerEvent]:
        """Send a piece."""
        event = piece.event
        if event.kind is EventKind.TOOL_CALL_END:
            return ()
        if event.kind is EventKind.TEXT:
            delta: dict[str, Any] = {"content": event.text}
        elif event.kind is EventKind.THINKING:
            delta = {"reasoning_content": event.text}
        elif event.kind is EventKind.TOOL_CALL_BEGIN:
            call = self._call(choice, len(choice.calls) - 1, section)
            call["function"]["arguments"] = ""
            delta = {"tool_calls": [{"index": event.call_index, **call}]}
        else:
            call = {"index": event.call_index, "function": {"arguments": event.text}}
            delta = {"tool_calls": [call]}
        reported = [token for token in piece.tokens if token.logprob is not None]
        logprobs = self._logprobs(reported) if reported and self._asked.logprobs else None
        return [self._chunk(choice, delta, logprobs=logprobs)]

    def choice_ended(self, choice: Choice) -> Sequence[ServerEvent]:
        """Close a choice."""
        return [self._chunk(choice, {}, finish_reason=finish_word(choice.turn, FINISH))]

    def last_events(self) -> Sequence[ServerEvent]:
        """Send counts, if asked, and the end."""
        done = ServerEvent(data="[DONE]")
        if not self._asked.usage:
            return [done]
        return [ServerEvent(data={**self._frame(True), "choices": [], "usage": self.usage()}), done]

    def failure_events(self, fault: Fault) -> Sequence[ServerEvent]:
        """Send the error; there is no end."""
        return [ServerEvent(data=openai.error_body(fault))]

    def _chunk(
        self,
        choice: Choice,
        delta: Mapping[str, Any],
        *,
        logprobs: Any = None,
        finish_reason: str | None = None,
    ) -> ServerEvent:
        shape = {
            "index": choice.index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        return ServerEvent(data={**self._frame(True), "choices": [shape]})

    # -------------------------------------------------------------------- complete

    def body(self) -> Mapping[str, Any]:
        """Return the completion."""
        choices = [self._choice(choice) for choice in self.choices]
        return {**self._frame(False), "choices": choices, "usage": self.usage()}

    def _choice(self, choice: Choice) -> Mapping[str, Any]:
        content = choice.text(EventKind.TEXT)
        calls = [self._call(choice, at, call) for at, call in enumerate(choice.calls)]
        message: dict[str, Any] = {
            "role": "assistant",
            "content": content if content or not calls else None,
            "refusal": None,
        }
        if thought := choice.text(EventKind.THINKING):
            message["reasoning_content"] = thought
        if calls:
            message["tool_calls"] = calls
        logprobs = self._logprobs(choice.tokens) if self._asked.logprobs else None
        return {
            "index": choice.index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": finish_word(choice.turn, FINISH) if choice.turn.done else None,
        }

    def usage(self) -> Mapping[str, Any]:
        """Return the counts."""
        return chat_usage(self)

    def _frame(self, chunk: bool) -> dict[str, Any]:
        frame = {
            "id": self.identity,
            "object": "chat.completion.chunk" if chunk else "chat.completion",
            "created": self._created_s,
            "model": self._asked.model,
        }
        # Who asks for counts gets the field in every chunk; it is null in all but the last.
        return frame | {"usage": None} if chunk and self._asked.usage else frame

    def _call(self, choice: Choice, place: int, section: Section) -> dict[str, Any]:
        tail = self.identity.removeprefix("chatcmpl-")
        return {
            "id": f"call_{tail}_{choice.index}_{place}",
            "type": "function",
            "function": {"name": section.name, "arguments": section.text},
        }

    def _logprobs(self, tokens: Sequence[Any]) -> Mapping[str, Any]:
        return {
            "content": [token_report(self._codec, token) for token in tokens],
            "refusal": None,
        }


def chat_usage(reply: BaseReply) -> dict[str, Any]:
    """Return counts as both older OpenAI formats have them, with DeepSeek's cache counters."""
    return {
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": reply.completion_tokens,
        "total_tokens": reply.prompt_tokens + reply.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": reply.cached_tokens},
        "completion_tokens_details": {
            "reasoning_tokens": reply.reasoning_tokens,
            "accepted_prediction_tokens": reply.accepted_drafts,
            "rejected_prediction_tokens": reply.rejected_drafts,
        },
        "prompt_cache_hit_tokens": reply.cached_tokens,
        "prompt_cache_miss_tokens": reply.prompt_tokens - reply.cached_tokens,
    }
