"""Protocols, prompts, output markup and structured output for DeepInfer."""

from __future__ import annotations

import importlib.util
from typing import Any

from deepinfer_core.capabilities import Facts
from deepinfer_core.components import Component, Priority
from deepinfer_core.hookspecs import AnyComponent, hookimpl
from deepinfer_recipe.config import ChatConfig, DeepseekConfig, MistralConfig, ParserConfig
from deepinfer_recipe.constraint.config import XgrammarConfig

DEEPINFER_API = 1


def _build_xgrammar(config: Any, context: Any) -> Any:
    from deepinfer_recipe.constraint.compiler import build

    return build(config, context)


def _xgrammar_missing() -> str | None:
    if importlib.util.find_spec("xgrammar") is None:
        return "xgrammar is not installed; pip install 'deepinfer-recipe[xgrammar]'"
    return None


@hookimpl
def deepinfer_constraints() -> tuple[AnyComponent, ...]:
    """Offer grammars by xgrammar."""
    return (
        Component(
            name="xgrammar",
            build=_build_xgrammar,
            config_type=XgrammarConfig,
            available=_xgrammar_missing,
            summary="JSON schema, regex, EBNF, choices and tool calls, by xgrammar",
        ),
    )


def _parser(name: str) -> Any:
    def build(config: Any, context: Any) -> Any:
        from deepinfer_recipe.parse import dialects

        return getattr(dialects, name)(config, context)

    return build


@hookimpl
def deepinfer_parsers() -> tuple[AnyComponent, ...]:
    """Offer the dialects of output markup."""
    dialects = {
        "thinking": ("Dialect", "thoughts between <think> and </think>, no calls"),
        "hermes": ("Hermes", "calls as JSON between <tool_call> and </tool_call>"),
        "llama": ("Llama", "calls as JSON objects, bare or after <|python_tag|>"),
        "mistral": ("Mistral", "calls after [TOOL_CALLS]"),
        "deepseek_v4": ("DeepseekV4", "DSML of DeepSeek V4"),
        "deepseek_v4_1": ("DeepseekV41", "DSML of DeepSeek V4.1"),
    }
    return tuple(
        Component(
            name=name,
            build=_parser(kind),
            config_type=MistralConfig if name == "mistral" else ParserConfig,
            summary=summary,
        )
        for name, (kind, summary) in dialects.items()
    )


def _recipe(name: str) -> Any:
    def build(config: Any, context: Any) -> Any:
        from deepinfer_recipe import recipe

        return getattr(recipe, name)(config, context)

    return build


def _is(version: str) -> Any:
    def fits(facts: Facts) -> str | None:
        if facts.architecture.lower().startswith(f"deepseek{version}for"):
            return None
        return f"renders DeepSeek {version} only, not {facts.architecture or 'an unknown model'}"

    return fits


@hookimpl
def deepinfer_recipes() -> tuple[AnyComponent, ...]:
    """Offer the chat template with every wire format."""
    return (
        Component(
            name="chat",
            build=_recipe("build"),
            config_type=ChatConfig,
            summary="the checkpoint's chat template; OpenAI and Anthropic protocols",
        ),
        Component(
            name="deepseek_v4",
            build=_recipe("build_deepseek_v4"),
            config_type=DeepseekConfig,
            priority=Priority.SPECIALIZED,
            fits=_is("v4"),
            summary="DeepSeek V4's encoding; OpenAI and Anthropic protocols",
        ),
        Component(
            name="deepseek_v4_1",
            build=_recipe("build_deepseek_v4_1"),
            config_type=DeepseekConfig,
            priority=Priority.SPECIALIZED,
            fits=_is("v41"),
            summary="DeepSeek V4.1's encoding; OpenAI and Anthropic protocols",
        ),
    )
