"""DeepSeek models for DeepInfer.

Nothing heavy is imported here; builders import their modules when an engine is built.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from deepinfer_core import Component, Facts, Feature, hookimpl
from deepinfer_core.components import Priority
from deepinfer_core.hookspecs import AnyComponent
from deepinfer_deepseek.options import V41Options

DEEPINFER_API = 1

LATENT = "deepseek.latent"
"""Feature of attention backends: vectors that are key and value at once, chosen entry by entry."""

ARCHITECTURES = frozenset({"DeepseekV4ForCausalLM", "DeepseekV41ForCausalLM"})
"""What the models with such caches answer to."""


_CONTRACTS = "deepinfer_deepseek.testing.conformance"


def _lazy(module: str) -> Callable[[Any, Any], Any]:
    """Return a builder that imports its module when it is called."""

    def build(config: Any, context: Any) -> Any:
        return importlib.import_module(f"deepinfer_deepseek.{module}").build(config, context)

    return build


def _serves(facts: Facts) -> str | None:
    if facts.architecture and facts.architecture not in ARCHITECTURES:
        return f"serves DeepSeek's latent caches, not {facts.architecture}"
    return None


@hookimpl
def deepinfer_checkpoints() -> tuple[AnyComponent, ...]:
    """Offer a reader of matrices in FP8 and FP4 with scales beside them."""
    return (
        Component(
            name="deepseek",
            build=_lazy("checkpoint.reader"),
            priority=Priority.SPECIALIZED,
            summary="directories of DeepSeek models, matrices in FP8 and FP4",
            conformance=f"{_CONTRACTS}:FilesContract",
        ),
    )


@hookimpl
def deepinfer_models() -> tuple[AnyComponent, ...]:
    """Offer DeepSeek-V4.1, V4 and V3."""
    return (
        Component(
            name="deepseek-v41",
            build=_lazy("model"),
            config_type=V41Options,
            needs={LATENT},
            offers={Feature.TAPS, Feature.BLOCK_DRAFT},
            tags={"DeepseekV41ForCausalLM"},
            summary="DeepSeek-V4.1, text",
            conformance=f"{_CONTRACTS}:V41Contract",
        ),
        Component(
            name="deepseek-v4",
            build=_lazy("v4.model"),
            needs={LATENT},
            offers={Feature.TAPS},
            tags={"DeepseekV4ForCausalLM"},
            summary="DeepSeek-V4-Flash",
            conformance=f"{_CONTRACTS}:V4Contract",
        ),
        Component(
            name="deepseek-v3",
            build=_lazy("v3"),
            offers={Feature.TAPS, Feature.BLOCK_DRAFT},
            tags={"DeepseekV3ForCausalLM"},
            summary="DeepSeek-V3 and R1: latent attention",
            conformance=f"{_CONTRACTS}:V3Contract",
        ),
    )


@hookimpl
def deepinfer_attentions() -> tuple[AnyComponent, ...]:
    """Offer attention to latent vectors, in plain torch."""
    return (
        Component(
            name="latent",
            build=_lazy("attention"),
            offers={
                Feature.PAGED_KV,
                Feature.MIXED_BATCH,
                Feature.WINDOW,
                Feature.SINKS,
                Feature.BATCH_INVARIANT,
                LATENT,
            },
            fits=_serves,
            summary="DeepSeek's windows and compressed entries, in plain torch",
            conformance=f"{_CONTRACTS}:LatentContract",
        ),
    )
