"""Recipe "template": the chat template that comes with the checkpoint."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from deepinfer_core import values
from deepinfer_core.errors import RequestError
from deepinfer_core.interfaces.recipe import RecipeContext

if TYPE_CHECKING:
    from deepinfer_core.interfaces.wire import WireFormat
    from deepinfer_core.text.chat_template import ChatTemplate

_RESERVED = frozenset({"self", "messages", "tools", "add_generation_prompt", "tokenizer"})


def build(config: Any, context: RecipeContext) -> TemplateRecipe:
    """Make the recipe."""
    return TemplateRecipe(context)


class TemplateRecipe:
    """Renders through ``ChatTemplate``; keeps nothing between calls.

    The template is compiled when it is first needed: an engine that only continues texts works with
    a checkpoint that has none, or one that cannot be read.
    """

    def __init__(self, context: RecipeContext) -> None:
        self._context = context

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        options: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the token ids of the prompt; see ``Recipe.render``.

        Args:
            messages: mappings with ``role`` and ``content``, a text or a list of text parts, which
                are joined; at least one.
            tools: tool descriptions as JSON schemas.
            add_generation_prompt: end with the beginning of the assistant's turn.
            options: further names that the template sees, such as ``enable_thinking``.

        Raises:
            RequestError: the model has no template, a message is malformed, or the template
                refuses the conversation.
        """
        messages = _read(messages)
        extra = dict(options or {})
        if reserved := sorted(_RESERVED.intersection(extra)):
            raise RequestError(
                f"options of a chat template cannot be called {', '.join(reserved)}; "
                "these names have a meaning of their own"
            )
        return self._template.render_ids(
            messages,
            self._context.tokenizer,
            tools,
            add_generation_prompt,
            **extra,
        )

    def formats(self) -> Sequence[WireFormat]:
        """Return none: this recipe only renders."""
        return ()

    @functools.cached_property
    def _template(self) -> ChatTemplate:
        from deepinfer_core.text.chat_template import ChatTemplate

        if self._context.chat_template is None:
            raise RequestError(
                "this model has no chat template; send a prompt instead of messages, "
                "or choose another recipe"
            )
        tokenizer = self._context.tokenizer
        return ChatTemplate(
            self._context.chat_template,
            bos_token="" if tokenizer.bos_id is None else tokenizer.token(tokenizer.bos_id),
            eos_token=tokenizer.token(tokenizer.eos_ids[0]) if tokenizer.eos_ids else "",
        )


def _read(messages: Any) -> list[Mapping[str, Any]]:
    """Return messages as every template can take them; refuse what it would fail on or mangle."""
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise RequestError("messages must be a list of mappings with 'role' and 'content'")
    if not messages:
        raise RequestError("messages is empty; give at least one, such as a user's question")
    return [_message(f"messages[{at}]", message) for at, message in enumerate(messages)]


def _message(where: str, message: Any) -> Mapping[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise values.refuse(where, message, "a mapping with a 'role' string")
    content = message.get("content")
    if content is None:
        if message["role"] == "assistant":  # may consist of calls or of thoughts
            return {**message, "content": ""}
        raise RequestError(f"{where}.content is missing; give a text")
    if isinstance(content, str):
        values.unicode_text(f"{where}.content", content)
        return message
    if not isinstance(content, list | tuple):
        raise values.refuse(f"{where}.content", content, "a text or a list of text parts")
    parts = [_part(f"{where}.content[{at}]", part) for at, part in enumerate(content)]
    return {**message, "content": "".join(parts)}


def _part(where: str, part: Any) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if isinstance(kind, str) and kind != "text":
        raise RequestError(f"{where}: {kind!r} is not supported; only parts of type 'text' are")
    if kind is None or not isinstance(part.get("text"), str):
        raise values.refuse(where, part, "a part such as {'type': 'text', 'text': 'Hello'}")
    return values.unicode_text(f"{where}.text", part["text"])
