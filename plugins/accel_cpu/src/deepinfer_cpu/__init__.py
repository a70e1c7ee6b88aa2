"""Native CPU kernels for DeepInfer."""

from __future__ import annotations

from typing import Any

from deepinfer_core import Component, Feature, Priority, hookimpl

DEEPINFER_API = 1


def _why_not() -> str | None:
    from deepinfer_cpu.library import why_not

    return why_not()


def _attention_why_not(facts: Any) -> str | None:
    from deepinfer_cpu.attention import why_not

    return why_not(facts)


def _build_attention(config: Any, context: Any) -> Any:
    from deepinfer_cpu.attention import build

    return build(config, context)


@hookimpl
def deepinfer_attentions() -> tuple[Component[Any], ...]:
    """Offer attention over pages in native code."""
    return (
        Component(
            name="native",
            build=_build_attention,
            offers={
                Feature.PAGED_KV,
                Feature.MIXED_BATCH,
                Feature.WINDOW,
                Feature.SINKS,
                Feature.BATCH_INVARIANT,
            },
            available=_why_not,
            fits=_attention_why_not,
            priority=Priority.SPECIALIZED,
            summary="over pages, in native code, for mixed batches",
        ),
    )
