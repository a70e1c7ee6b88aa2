"""OpenAI Responses: reading, and what is stored."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from deepinfer_core.errors import ProtocolError
from deepinfer_core.interfaces.wire import Fault, Generation, ReadContext
from deepinfer_core.requests import MAX_LOGPROBS
from deepinfer_recipe.conversation import AnswerFormat, Conversation, Message
from deepinfer_recipe.kit import Kit, Prompt
from deepinfer_recipe.wire import openai, sampling
from deepinfer_recipe.wire.exchange import Exchange
from deepinfer_recipe.wire.fields import Fields, read_object
from deepinfer_recipe.wire.responses_read import input_items, messages_of, read_tools
from deepinfer_recipe.wire.responses_reply import Echo, ResponsesReply
from deepinfer_recipe.wire.retention import prompt_cache_retention
from deepinfer_recipe.wire.sampling import read_budget, unused_budget

_IGNORED = (
    "user", "service_tier", "prompt_cache_key", "safety_identifier",
    "max_tool_calls", "truncation", "stream_options", "context_management",
)  # fmt: skip
_REFUSED = ("conversation", "prompt")
_LOGPROBS = "message.output_text.logprobs"


class ResponsesFormat:
    """See `deepinfer_core.interfaces.wire.WireFormat`."""

    name = "openai.responses"
    path = "/v1/responses"

    def __init__(self, kit: Kit) -> None:
        self._kit = kit

    def error(self, fault: Fault) -> Mapping[str, Any]:
        """Return the body of an error."""
        return openai.error_body(fault)

    def read(self, body: bytes, context: ReadContext) -> Exchange:
        """Understand a request."""
        fields = Fields(read_object(body))
        for name in _REFUSED:
            if fields.has(name):
                raise fields.error(name, "is not supported; send input and previous_response_id")
        model, stream = fields.text("model"), fields.flag("stream")
        history = _history(fields, context)
        conversation = self._conversation(fields, history)
        prompt = self._kit.renderer.prompt(conversation)
        include = fields.items("include", [])
        stop = sampling.stop_strings(fields)
        limit = fields.integer("max_output_tokens", 1)
        top = fields.integer("top_logprobs", 0, MAX_LOGPROBS)
        params = sampling.params(
            **sampling.read_common(fields),
            max_tokens=limit,
            logprobs=(top or 0) if top or _LOGPROBS in include else None,
            structured=self._kit.structured(prompt, conversation),
            thinking_limit=self._kit.thinking_limit(prompt, conversation),
        )
        generation = Generation(
            prompt_token_ids=prompt.token_ids,
            params=params,
            cache_salt=context.cache_salt,
            cache_retain_s=prompt_cache_retention(fields),
        )
        store, background = fields.flag("store", True), fields.flag("background")
        if background and not store:
            raise fields.error("background", "needs store: true")
        if background and stream:
            raise fields.error("background", "goes without stream: true; fetch the response later")
        echo = Echo(
            model=model,
            background=background,
            store=store,
            fields=_echoed(fields, params.temperature, params.top_p),
            history=history,
            body=fields,
        )
        return Exchange(
            model=model,
            make=partial(self._reply, conversation, prompt, generation, stop, echo),
            generations=(generation,),
            stream=stream,
            background=background,
            ignored=(
                *fields.without_effect(_IGNORED),
                *(f"include[{at}]" for at, what in enumerate(include) if what != _LOGPROBS),
                *unused_budget(conversation, params),
            ),
        )

    def _conversation(self, fields: Fields, history: tuple[Any, ...]) -> Conversation:
        items = [*history, *input_items(fields, history, "new")]
        messages = messages_of(items, len(history))
        if not messages:
            raise fields.error("input", "is empty; give at least one message")
        instructions = fields.text("instructions", None)
        if instructions:
            messages.insert(0, Message(role="system", content=instructions))
        tools, choice = read_tools(fields)
        reasoning = fields.object("reasoning", None)
        effort = None
        if reasoning is not None:
            effort = reasoning.one_of("effort", openai.EFFORTS, None)
        return Conversation(
            messages=tuple(messages),
            tools=tools,
            tool_choice=choice,
            parallel_calls=fields.flag("parallel_tool_calls", True),
            thinking=None if effort is None else effort != "none",
            effort=None if effort == "none" else effort,
            budget=read_budget(fields, "thinking_budget"),
            answer=_format(fields),
        )

    def _reply(
        self,
        conversation: Conversation,
        prompt: Prompt,
        generation: Generation,
        stop: tuple[str, ...],
        echo: Echo,
        identity: str,
        created_s: int,
    ) -> ResponsesReply:
        turn = self._kit.turn(prompt, conversation, stop)
        items = tuple(input_items(echo.body, echo.history, identity))
        return ResponsesReply(identity, created_s, echo, items, turn, generation, self._kit.codec)


def _history(fields: Fields, context: ReadContext) -> tuple[Any, ...]:
    previous = fields.text("previous_response_id", None)
    if previous is None:
        return ()
    stored = context.stored(previous)
    if stored is None:
        raise ProtocolError(
            f"previous response {previous!r} is not stored here; it was not kept, or deleted, or "
            "its time is over",
            param="previous_response_id",
            status=404,
            code="previous_response_not_found",
        )
    if stored.body["status"] == "in_progress":
        raise ProtocolError(
            f"previous response {previous!r} is still being made; wait for its end, or cancel it",
            param="previous_response_id",
            code="previous_response_in_progress",
        )
    return (*stored.input_items, *stored.body["output"])


def _format(fields: Fields) -> AnswerFormat | None:
    text = fields.object("text", None)
    answer = None if text is None else openai.read_format(text, "format")
    return answer or openai.read_structured(fields)


def _echoed(fields: Fields, temperature: float, top_p: float) -> Mapping[str, Any]:
    """Return what a response repeats of its request."""
    text = {name: value for name, value in (fields.get("text") or {}).items() if value is not None}
    reasoning = fields.get("reasoning") or {}
    fields.object("metadata", None)  # is repeated, and so must be one
    # May be absent, but not null.
    key = fields.get("prompt_cache_key")
    named = {} if key is None else {"prompt_cache_key": key}
    return {
        **named,
        "instructions": fields.get("instructions"),
        "max_output_tokens": fields.get("max_output_tokens"),
        "max_tool_calls": fields.integer("max_tool_calls", 1),
        "metadata": fields.get("metadata") or {},
        "parallel_tool_calls": fields.flag("parallel_tool_calls", True),
        "previous_response_id": fields.get("previous_response_id"),
        "prompt_cache_retention": fields.get("prompt_cache_retention"),
        "reasoning": {"effort": reasoning.get("effort"), "summary": None},
        "service_tier": "default",
        "temperature": temperature,
        "text": {"format": {"type": "text"}, **text},
        "tool_choice": fields.get("tool_choice") or "auto",
        "tools": [
            {"strict": False, "description": None, "parameters": None, **tool}
            for tool in fields.get("tools") or []
        ],
        "top_logprobs": fields.get("top_logprobs") or 0,
        "top_p": top_p,
        "truncation": "disabled",
    }
