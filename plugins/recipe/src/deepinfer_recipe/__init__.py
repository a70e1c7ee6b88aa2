"""Protocols, prompts, output markup and structured output for DeepInfer."""

from __future__ import annotations

import importlib.util
from typing import Any

from deepinfer_core.components import Component
from deepinfer_core.hookspecs import AnyComponent, hookimpl
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
