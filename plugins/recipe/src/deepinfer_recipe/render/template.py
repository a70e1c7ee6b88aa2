"""Prompts by the checkpoint's own chat template."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any

from deepinfer_core.builtin.template_recipe import TemplateRecipe
from deepinfer_core.errors import RequestError
from deepinfer_core.interfaces.recipe import RecipeContext
from deepinfer_recipe.conversation import Call, Conversation, Message
from deepinfer_recipe.json_text import read_arguments
from deepinfer_recipe.kit import Prompt
from deepinfer_recipe.render.tools_told import tools_told

_PROBE = ({"role": "user", "content": "x"},)


class TemplateRenderer:
    """See `deepinfer_recipe.kit.Renderer`.

    Args:
        context: the model's tokenizer and template.
        tells_tools: whether tools are told in messages, as the template knows none.
    """

    def __init__(self, context: RecipeContext, *, tells_tools: bool = False) -> None:
        self._tokenizer = context.tokenizer
        self._recipe = TemplateRecipe(context)
        self._tells_tools = tells_tools
        self._opening = functools.lru_cache(64)(self._probe)

    def prompt(self, conversation: Conversation) -> Prompt:
        """Render a conversation."""
        if self._tells_tools:
            conversation = tools_told(conversation)
        options = _options(conversation)
        tools = [tool.as_chat() for tool in conversation.tools] if conversation.offers_tools else []
        ids = self._recipe.render(
            [_message(message) for message in conversation.messages],
            tools=tools or None,
            options=options,
        )
        opening = self._opening(json.dumps(options, sort_keys=True))
        if conversation.prefill:
            prefill = self._tokenizer.encode_parts([conversation.prefill])
            ids, opening = [*ids, *prefill], (*opening, *prefill)
        return Prompt(token_ids=tuple(ids), opening=opening)

    def _probe(self, options: str) -> tuple[int, ...]:
        """Return what the template writes to begin an answer."""
        given = json.loads(options)
        try:
            without = self._recipe.render(_PROBE, add_generation_prompt=False, options=given)
            prompt = self._recipe.render(_PROBE, options=given)
        except RequestError:  # a template that wants more than one message
            return ()
        begins = prompt[: len(without)] == without
        return tuple(prompt[len(without) :]) if begins else ()


def _options(conversation: Conversation) -> dict[str, Any]:
    options = dict(conversation.options)
    thinking = False if conversation.prefill else conversation.thinking
    if thinking is not None:
        options |= {"enable_thinking": thinking, "thinking": thinking}
    if conversation.effort is not None:
        options["reasoning_effort"] = conversation.effort
    return options


def _message(message: Message) -> Mapping[str, Any]:
    role = "system" if message.role == "reminder" else message.role
    shape: dict[str, Any] = {"role": role, "content": message.content}
    if message.reasoning is not None:
        shape["reasoning_content"] = message.reasoning
    if message.calls:
        shape["tool_calls"] = [_call(call) for call in message.calls]
    if message.call_id is not None:
        shape["tool_call_id"] = message.call_id
    if message.name is not None:
        shape["name"] = message.name
    return shape


def _call(call: Call) -> Mapping[str, Any]:
    function = {"name": call.name, "arguments": arguments_of(call)}
    return {"id": call.call_id, "type": "function", "function": function}


def arguments_of(call: Call) -> Any:
    """Return a call's arguments as an object, or as they are where they are none."""
    found = read_arguments(call.arguments)
    return call.arguments if found is None else found
