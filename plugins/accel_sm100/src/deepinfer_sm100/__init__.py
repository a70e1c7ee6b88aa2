"""NVIDIA SM100 GPUs: accelerator, kernels and attention. Not verified on hardware."""

from __future__ import annotations

from typing import Any

from attrs import field, frozen, validators

from deepinfer_core import Component, Feature, Priority, hookimpl
from deepinfer_core.components import Verified
from deepinfer_core.typed import typed

DEEPINFER_API = 1

EMULATED = "sm100-emulated"
"""Accelerator on which the kernels of this package run on the host."""


@frozen(kw_only=True, field_transformer=typed)
class AcceleratorConfig:
    """Options of accelerator ``sm100``.

    Attributes:
        device: index of the GPU.
        allow_portable: run on GPUs of compute capability 8.x and 9.0 as well, through kernels in
            Triton and torch; plans and metrics then say ``portable``.
        reserve_mib: memory that is not given to pages: activations, captured graphs, libraries.
    """

    device: int = field(default=0, validator=validators.ge(0))
    allow_portable: bool = field(default=False, validator=validators.instance_of(bool))
    reserve_mib: int = field(default=4096, validator=validators.ge(0))


@frozen(kw_only=True, field_transformer=typed)
class KernelsConfig:
    """Options of kernel set ``sm100``.

    Attributes:
        libraries: use vendor libraries where they are installed and fit.
        fp8_activations: round activations to FP8 where a library multiplies FP8 by FP8.
        graph_tokens: steps of dense decoders with at most so many tokens are captured as CUDA
            graphs, one for each shape, and replayed; 0 = none.
    """

    libraries: bool = field(default=True, validator=validators.instance_of(bool))
    fp8_activations: bool = field(default=False, validator=validators.instance_of(bool))
    graph_tokens: int = field(default=512, validator=validators.ge(0))


@frozen(kw_only=True, field_transformer=typed)
class AttentionConfig:
    """Options of attention ``sm100``.

    Attributes:
        split: positions of a split; keys of longer sequences are read by several programs.
    """

    split: int = field(default=1024, validator=validators.ge(64))

    def __attrs_post_init__(self) -> None:
        """Refuse splits that blocks of keys do not divide."""
        if self.split % 64:
            raise ValueError(f"split must be a multiple of 64, not {self.split}")


def _no_triton() -> str | None:
    from importlib.util import find_spec

    if find_spec("triton") is None:
        return (
            "its kernels need triton, which is not installed; it comes with a CUDA build of torch, "
            "or: pip install triton"
        )
    return None


def _available() -> str | None:
    from deepinfer_sm100.probe import why_not

    return why_not()


def _accepts(config: AcceleratorConfig) -> str | None:
    from deepinfer_sm100.probe import why_not_as_configured

    return why_not_as_configured(config)


def _build_accelerator(config: Any, context: Any) -> Any:
    from deepinfer_sm100.accelerator import build

    return build(config, context)


def _build_emulated(config: Any, context: Any) -> Any:
    from deepinfer_sm100.emulated import build

    return build(config, context)


def _kernels_why_not(facts: Any) -> str | None:
    if facts.device_type == "cuda" or facts.accelerator == EMULATED:
        return None
    return f"runs on cuda, or on the host with accelerator {EMULATED!r}; not {facts.device_type}"


def _build_kernels(config: Any, context: Any) -> Any:
    from deepinfer_sm100.kernel_set import build

    return build(config, context)


def _attention_why_not(facts: Any) -> str | None:
    from deepinfer_sm100.attention import why_not

    return _kernels_why_not(facts) or why_not(facts)


def _build_attention(config: Any, context: Any) -> Any:
    from deepinfer_sm100.attention import build

    return build(config, context)


@hookimpl
def deepinfer_accelerators() -> tuple[Component[Any], ...]:
    """Offer SM100 GPUs, and their kernels emulated on the host."""
    return (
        Component(
            name="sm100",
            build=_build_accelerator,
            config_type=AcceleratorConfig,
            offers={Feature.BATCH_INVARIANT, Feature.GRAPHS},
            priority=Priority.SPECIALIZED,
            available=_available,
            accepts=_accepts,
            tags={"cuda"},
            verified=Verified.EMULATED,
            summary="NVIDIA GPUs of compute capability 10.0 and 10.3",
        ),
        Component(
            name=EMULATED,
            build=_build_emulated,
            offers={Feature.BATCH_INVARIANT},
            priority=Priority.REFERENCE,
            auto=False,
            available=_no_triton,
            tags={"cpu"},
            verified=Verified.EMULATED,
            summary="the SM100 kernels, slowly, on the host: to check them, not to serve",
        ),
    )


@hookimpl
def deepinfer_kernels() -> tuple[Component[Any], ...]:
    """Offer core's ops in kernels for these GPUs."""
    return (
        Component(
            name="sm100",
            build=_build_kernels,
            config_type=KernelsConfig,
            available=_no_triton,
            fits=_kernels_why_not,
            priority=Priority.SPECIALIZED,
            verified=Verified.EMULATED,
            conformance="deepinfer_sm100.conformance:Sm100KernelsContract",
            summary="ops through vendor libraries and own kernels in Triton",
        ),
    )


@hookimpl
def deepinfer_attentions() -> tuple[Component[Any], ...]:
    """Offer attention over pages for these GPUs."""
    return (
        Component(
            name="sm100",
            build=_build_attention,
            config_type=AttentionConfig,
            offers={
                Feature.PAGED_KV,
                Feature.MIXED_BATCH,
                Feature.WINDOW,
                Feature.SINKS,
                Feature.BATCH_INVARIANT,
            },
            available=_no_triton,
            fits=_attention_why_not,
            priority=Priority.SPECIALIZED + 1,
            verified=Verified.EMULATED,
            conformance="deepinfer_sm100.conformance:Sm100AttentionContract",
            summary="over pages, in Triton, keys split at fixed positions, for mixed batches",
        ),
    )
