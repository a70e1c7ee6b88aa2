"""Recipe "chat": the checkpoint's chat template, and every wire format."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from deepinfer_core.builtin.template_recipe import TemplateRecipe
from deepinfer_core.errors import ConfigError, RequestError
from deepinfer_core.interfaces.parser import Parser
from deepinfer_core.interfaces.recipe import RecipeContext
from deepinfer_core.interfaces.wire import WireFormat
from deepinfer_core.text.chat_template import plain_data
from deepinfer_recipe.config import ChatConfig, DeepseekConfig
from deepinfer_recipe.kit import Kit, Renderer
from deepinfer_recipe.render.deepseek import DeepseekRenderer
from deepinfer_recipe.render.template import TemplateRenderer
from deepinfer_recipe.render.tools_told import TOLD_DIALECT, knows_tools
from deepinfer_recipe.wire.anthropic import CountFormat, MessagesFormat
from deepinfer_recipe.wire.chat import ChatFormat, read_conversation
from deepinfer_recipe.wire.completions import CompletionsFormat
from deepinfer_recipe.wire.fields import Fields
from deepinfer_recipe.wire.responses import ResponsesFormat

_SIGNS = (
    ("<｜DSML｜ calls", "deepseek_v4_1"),
    ("｜DSML｜", "deepseek_v4"),
    ("[TOOL_CALLS]", "mistral"),
    ("<tool_call>", "hermes"),
    ("<|python_tag|>", "llama"),
    ("<think>", "thinking"),
)
"""What in a chat template betrays the dialect that a model answers in; the first wins."""


def build(config: ChatConfig, context: RecipeContext) -> ChatRecipe:
    """Make the recipe."""
    dialect = dialect_of(context.chat_template) if config.parser == "auto" else config.parser
    tells = dialect == TOLD_DIALECT and not knows_tools(context.chat_template)
    return ChatRecipe(dialect, context, TemplateRenderer(context, tells_tools=tells))


def build_deepseek_v4(config: DeepseekConfig, context: RecipeContext) -> ChatRecipe:
    """Make the recipe of DeepSeek V4."""
    return _deepseek(config, context, v41=False)


def build_deepseek_v4_1(config: DeepseekConfig, context: RecipeContext) -> ChatRecipe:
    """Make the recipe of DeepSeek V4.1."""
    return _deepseek(config, context, v41=True)


def _deepseek(config: DeepseekConfig, context: RecipeContext, *, v41: bool) -> ChatRecipe:
    own = "deepseek_v4_1" if v41 else "deepseek_v4"
    dialect = own if config.parser == "auto" else config.parser
    return DeepseekRecipe(dialect, context, _renderer(config, context, v41=v41))


def _renderer(config: DeepseekConfig, context: RecipeContext, *, v41: bool) -> Renderer:
    if config.renderer == "native":
        return DeepseekRenderer(context.tokenizer, v41=v41)
    try:
        from deepinfer_recipe.render.package import PackageRenderer

        return PackageRenderer(context.tokenizer, v41=v41)
    except ImportError as error:
        raise ConfigError(
            "recipe.renderer 'deepseek-recipe' needs a package that is not installed; "
            "pip install 'deepinfer-recipe[deepseek]', or set it to 'native'"
        ) from error


def dialect_of(template: str | None) -> str:
    """Return the name of the parser that fits a chat template."""
    found = next((name for sign, name in _SIGNS if sign in (template or "")), "plain")
    if template and found in ("plain", "thinking") and not knows_tools(template):
        return TOLD_DIALECT
    return found


class ChatRecipe(TemplateRecipe):
    """Renders, and speaks all protocols.

    Args:
        dialect: name of the parser.
        context: the model.
        renderer: makes the prompts of the protocols.
    """

    def __init__(self, dialect: str, context: RecipeContext, renderer: Renderer) -> None:
        super().__init__(context)
        self._parsers = context.parsers
        self._renderer = renderer
        self._tokenizer = context.tokenizer
        self._dialect = dialect

    def formats(self) -> Sequence[WireFormat]:
        """Return the wire formats."""
        return self._formats

    @functools.cached_property
    def _formats(self) -> tuple[WireFormat, ...]:
        kit = Kit(self._tokenizer, self._renderer, self._parser())
        return (
            ChatFormat(kit),
            CompletionsFormat(kit),
            ResponsesFormat(kit),
            MessagesFormat(kit),
            CountFormat(kit),
        )

    def _parser(self) -> Callable[[], Parser]:
        found = self._parsers.get(self._dialect)
        if found is None:
            from deepinfer_core.builtin.plain_parser import PlainParser

            if self._dialect != "plain" and self._parsers:
                raise RequestError(
                    f"recipe.parser {self._dialect!r} is not there; "
                    f"there are {', '.join(sorted(self._parsers))}"
                )
            return PlainParser
        return found


class DeepseekRecipe(ChatRecipe):
    """As `ChatRecipe`, with a renderer that needs no template."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        options: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the token ids of the prompt; see ``Recipe.render``.

        Raises:
            RequestError: a message is malformed.
        """
        if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
            raise RequestError("messages must be a list of mappings with 'role' and 'content'")
        body: dict[str, Any] = {"messages": plain_data(list(messages)), **(options or {})}
        if tools:
            body["tools"] = plain_data(list(tools))
        prompt = self._renderer.prompt(read_conversation(Fields(body)))
        ids = prompt.token_ids
        return list(ids if add_generation_prompt else ids[: len(ids) - len(prompt.opening)])
