"""The components that core brings along: a plugin like any other, of the lowest priority.

Nothing heavy is imported here; each builder imports its module when an engine is built.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from deepinfer_core.builtin.configs import (
    CpuConfig,
    FcfsConfig,
    FixedBudgetConfig,
    JsonlObserverConfig,
    LogObserverConfig,
)
from deepinfer_core.capabilities import Facts, Feature
from deepinfer_core.components import Component, Priority
from deepinfer_core.hookspecs import AnyComponent, hookimpl

DEEPINFER_API = 1

DECODER_ARCHITECTURES = frozenset(
    {
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
        "SmolLM3ForCausalLM",
    }
)
"""What model family "decoder" answers to."""

REFERENCE = Priority.REFERENCE


def _lazy(module: str, name: str = "build") -> Callable[[Any, Any], Any]:
    """Return a builder that imports its module when it is called."""

    def build(config: Any, context: Any) -> Any:
        return getattr(importlib.import_module(f"deepinfer_core.{module}"), name)(config, context)

    return build


def _on_cpu(facts: Facts) -> str | None:
    if facts.device_type not in ("", "cpu"):
        return f"addresses pages on a cpu, not {facts.device_type}"
    return None


def _reader(module: str, name: str) -> Callable[[Any, Any], Any]:
    """Return a builder of a class that takes no arguments."""

    def build(config: Any, context: Any) -> Any:
        return getattr(importlib.import_module(f"deepinfer_core.{module}"), name)()

    return build


@hookimpl
def deepinfer_models() -> tuple[AnyComponent, ...]:
    """Offer the decoder that many architectures share, and hybrids of window and full layers."""
    return (
        Component(
            name="decoder",
            build=_lazy("models.decoder"),
            offers={Feature.TAPS},
            priority=REFERENCE,
            tags=DECODER_ARCHITECTURES,
            summary="Llama, SmolLM2/3, Mistral, Qwen2, Qwen3, Qwen3-MoE",
        ),
        Component(
            name="gemma3",
            build=_lazy("models.gemma3"),
            offers={Feature.TAPS},
            priority=REFERENCE,
            tags={"Gemma3ForCausalLM"},
            summary="Gemma 3, text",
        ),
        Component(
            name="gpt-oss",
            build=_lazy("models.gpt_oss"),
            offers={Feature.TAPS},
            priority=REFERENCE,
            tags={"GptOssForCausalLM"},
            summary="GPT-OSS, experts dense or in MXFP4",
        ),
    )


@hookimpl
def deepinfer_checkpoints() -> tuple[AnyComponent, ...]:
    """Offer readers of safetensors directories and GGUF files."""
    return (
        Component(
            name="safetensors",
            build=_reader("checkpoint.safetensors", "SafetensorsFormat"),
            priority=REFERENCE,
            summary="directories in Hugging Face layout",
        ),
        Component(
            name="gguf",
            build=_reader("checkpoint.gguf", "GgufFormat"),
            priority=REFERENCE,
            summary="single files of llama.cpp's format",
        ),
    )


@hookimpl
def deepinfer_accelerators() -> tuple[AnyComponent, ...]:
    """Offer the host itself."""
    return (
        Component(
            name="cpu",
            build=_lazy("builtin.cpu"),
            config_type=CpuConfig,
            offers={Feature.BATCH_INVARIANT},
            priority=REFERENCE,
            summary="this machine's processor, through plain torch",
        ),
    )


@hookimpl
def deepinfer_kernels() -> tuple[AnyComponent, ...]:
    """Offer every op in plain torch."""
    return (
        Component(
            name="torch",
            build=_lazy("builtin.torch_kernels"),
            priority=REFERENCE,
            summary="every op in plain torch",
        ),
    )


@hookimpl
def deepinfer_attentions() -> tuple[AnyComponent, ...]:
    """Offer paged attention in plain torch."""
    return (
        Component(
            name="paged",
            build=_lazy("builtin.paged_attention"),
            fits=_on_cpu,
            offers={
                Feature.PAGED_KV,
                Feature.MIXED_BATCH,
                Feature.WINDOW,
                Feature.SINKS,
                Feature.BATCH_INVARIANT,
            },
            priority=REFERENCE,
            summary="over pages, in plain torch, for mixed batches",
        ),
    )


@hookimpl
def deepinfer_kv_stores() -> tuple[AnyComponent, ...]:
    """Offer nothing: core keeps pages on the device only."""
    return ()


@hookimpl
def deepinfer_evictions() -> tuple[AnyComponent, ...]:
    """Offer least recently used."""
    return (
        Component(
            name="lru",
            build=_lazy("builtin.lru"),
            priority=REFERENCE,
            summary="drops what was not used for longest",
        ),
    )


@hookimpl
def deepinfer_caches() -> tuple[AnyComponent, ...]:
    """Offer pages without reuse."""
    return (
        Component(
            name="pages",
            build=_lazy("builtin.pages"),
            needs={Feature.PAGED_KV},
            offers={Feature.ROLLBACK, Feature.FORK},
            priority=REFERENCE,
            summary="pages of each sequence, without reuse between requests",
        ),
    )


@hookimpl
def deepinfer_schedulers() -> tuple[AnyComponent, ...]:
    """Offer first come, first served."""
    return (
        Component(
            name="fcfs",
            build=_lazy("builtin.fcfs"),
            config_type=FcfsConfig,
            priority=REFERENCE,
            summary="first come, first served; priorities age; chunked prefill beside decodes",
        ),
    )


@hookimpl
def deepinfer_drafters() -> tuple[AnyComponent, ...]:
    """Offer to draft nothing."""
    return (
        Component(
            name="none",
            build=_lazy("builtin.nodraft"),
            priority=REFERENCE,
            summary="no drafts: one token a step",
        ),
    )


@hookimpl
def deepinfer_budgets() -> tuple[AnyComponent, ...]:
    """Offer a fixed number of drafts a sequence."""
    return (
        Component(
            name="fixed",
            build=_lazy("builtin.fixed_budget"),
            config_type=FixedBudgetConfig,
            priority=REFERENCE,
            summary="the same number of drafts for every sequence, as far as the step has room",
        ),
    )


@hookimpl
def deepinfer_constraints() -> tuple[AnyComponent, ...]:
    """Offer nothing: grammars come with plugins."""
    return ()


@hookimpl
def deepinfer_parsers() -> tuple[AnyComponent, ...]:
    """Offer to take all output for text."""
    return (
        Component(
            name="plain",
            build=_lazy("builtin.plain_parser"),
            priority=REFERENCE,
            summary="all output is text",
        ),
    )


@hookimpl
def deepinfer_recipes() -> tuple[AnyComponent, ...]:
    """Offer the chat template of the checkpoint."""
    return (
        Component(
            name="template",
            build=_lazy("builtin.template_recipe"),
            priority=REFERENCE,
            summary="the checkpoint's own chat template",
        ),
    )


@hookimpl
def deepinfer_observers() -> tuple[AnyComponent, ...]:
    """Offer events as log lines and as lines of JSON."""
    return (
        Component(
            name="log",
            build=_lazy("builtin.log_observer"),
            config_type=LogObserverConfig,
            priority=REFERENCE,
            auto=False,
            summary="engine events as log lines",
        ),
        Component(
            name="jsonl",
            build=_lazy("builtin.log_observer", "build_jsonl"),
            config_type=JsonlObserverConfig,
            priority=REFERENCE,
            auto=False,
            summary="engine events as lines of JSON in a file",
        ),
    )


@hookimpl
def deepinfer_commands() -> tuple[AnyComponent, ...]:
    """Offer nothing: core's own commands need no plugin."""
    return ()
