"""Recipe "template": the chat template that comes with the checkpoint."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

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
            messages: mappings with ``role`` and ``content``; at least one.
            tools: tool descriptions as JSON schemas.
            add_generation_prompt: end with the beginning of the assistant's turn.
            options: further names that the template sees, such as ``enable_thinking``.

        Raises:
            RequestError: the model has no template, a message is malformed, or the template
                refuses the conversation.
        """
        _check(messages)
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


def _check(messages: Any) -> None:
    """Refuse what templates would render as rubbish; the rest is checked by the template."""
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise RequestError("messages must be a list of mappings with 'role' and 'content'")
    if not messages:
        raise RequestError("messages is empty; give at least one, such as a user's question")
    for index, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        if not (content is None or isinstance(content, str | list | tuple)):
            raise RequestError(
                f"content of message {index} must be a string or a list of parts, "
                f"not {type(content).__name__}"
            )
