"""Native CPU kernels for DeepInfer."""

from __future__ import annotations

from typing import Any

from attrs import field, frozen, validators

from deepinfer_core import Component, Feature, Priority, hookimpl
from deepinfer_core.typed import typed

DEEPINFER_API = 1

LEVELS = ("portable", "avx2", "avx512", "amx", "neon", "dotprod")


@frozen(kw_only=True, field_transformer=typed)
class KernelsConfig:
    """Options of kernel set ``cpu``.

    Attributes:
        level: instruction level ("portable", "avx2", "avx512", "amx", "neon", "dotprod"); "" = the
            best that runs here.
        activation_bits: of the activations that meet weights of 4 bits in attention's output and
            in feed-forwards: 8, with a scale for every 16 numbers, or 16. All others have 16.
        w8a8: multiply with 8 bits a number, one scale for each output of a weight and for each row.
            Less exact than any other format, and labelled so in plans; figures are in
            ``docs/performance.md``.
        pin: keep helping threads on processors of their own; for a machine that nothing else uses.
    """

    level: str = field(default="", validator=validators.in_(("", *LEVELS)))
    activation_bits: int = field(default=8, validator=validators.in_((8, 16)))
    w8a8: bool = field(default=False, validator=validators.instance_of(bool))
    pin: bool = field(default=False, validator=validators.instance_of(bool))


def _why_not() -> str | None:
    from deepinfer_cpu.library import why_not

    return why_not()


def _build_kernels(config: Any, context: Any) -> Any:
    from deepinfer_cpu.kernels import build

    return build(config, context)


def _attention_why_not(facts: Any) -> str | None:
    from deepinfer_cpu.attention import why_not

    return why_not(facts)


def _build_attention(config: Any, context: Any) -> Any:
    from deepinfer_cpu.attention import build

    return build(config, context)


@hookimpl
def deepinfer_kernels() -> tuple[Component[Any], ...]:
    """Offer core's ops in native code."""
    return (
        Component(
            name="cpu",
            build=_build_kernels,
            config_type=KernelsConfig,
            available=_why_not,
            priority=Priority.SPECIALIZED,
            summary="ops in native code, weights of 4 and 8 bits as stored",
        ),
    )


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
