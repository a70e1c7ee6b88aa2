"""Huawei Ascend 950 backend for DeepInfer.

Wiring verified under our reading of the documentation; not verified on hardware.

Nothing heavy is imported here; builders import their modules when an engine is built.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from attrs import Attribute, field, frozen, validators

from deepinfer_core import Component, Facts, Feature, Priority, Verified, hookimpl
from deepinfer_core.typed import typed

DEEPINFER_API = 1

LABEL = str(Verified.WIRED)
"""What may be said of everything in this package."""

MX_FORMATS = ("off", "mxfp8", "mxfp4")


@frozen(kw_only=True, field_transformer=typed)
class AscendConfig:
    """Options of accelerator ``ascend``.

    Attributes:
        device: number of the device, as ``npu-smi`` counts.
        devices: devices that share the model. More than one needs the multi-process executor, which
            does not exist yet; the accelerator says so.
        hccl_timeout_s: how long a process waits for the others before the first collective.
        hccl_buffer_mb: memory that a communicator takes for exchange.
        hccl_deterministic: reductions add in one order.
    """

    device: int = field(default=0, validator=validators.ge(0))
    devices: int = field(default=1, validator=validators.ge(1))
    hccl_timeout_s: int = field(default=1800, validator=validators.ge(120))
    hccl_buffer_mb: int = field(default=200, validator=validators.ge(1))
    hccl_deterministic: bool = field(default=True, validator=validators.instance_of(bool))


@frozen(kw_only=True, field_transformer=typed)
class AscendKernelsConfig:
    """Options of kernel set ``ascend``.

    Attributes:
        mx: format in which experts, and projections that a model lets be rounded, are multiplied:
            ``mxfp8``, or ``mxfp4`` for weights of experts with ``mxfp8`` for what they meet. It
            changes numbers, so it is ``off`` unless asked for.
        int8: multiply the same matrices in INT8 instead: rows scaled one by one as they come, each
            output of a matrix by its own scale. Changes numbers, so ``false`` unless asked for.
        triton: norms, rotation and gated activations by kernels in Triton, which Triton-Ascend
            compiles. They were emulated, never compiled for a chip, so ``false`` unless asked for.
        graphs: replay steps that only decode as captured ACL graphs.
    """

    mx: str = field(default="off", validator=validators.in_(MX_FORMATS))
    int8: bool = field(default=False, validator=validators.instance_of(bool))
    triton: bool = field(default=False, validator=validators.instance_of(bool))
    graphs: bool = field(default=False, validator=validators.instance_of(bool))

    @graphs.validator
    def _eager_kernels(self, attribute: Attribute[bool], value: bool) -> None:
        if value and self.triton:
            raise ValueError("graphs and triton exclude each other: set one of them")

    @int8.validator
    def _one_format(self, attribute: Attribute[bool], value: bool) -> None:
        if value and self.mx != "off":
            raise ValueError(f"int8 and mx = {self.mx!r} exclude each other: set one of them")


def _lazy(module: str, name: str = "build") -> Callable[[Any, Any], Any]:
    """Return a builder that imports its module when it is called."""

    def build(config: Any, context: Any) -> Any:
        return getattr(importlib.import_module(f"deepinfer_ascend.{module}"), name)(config, context)

    return build


def _why_not() -> str | None:
    from deepinfer_ascend.probe import why_not

    return why_not()


def _attention_why_not(facts: Facts) -> str | None:
    from deepinfer_ascend.limits import attention_objection

    return attention_objection(facts)


def _on_npu(facts: Facts) -> str | None:
    return None if facts.device_type == "npu" else f"runs on npu, not {facts.device_type}"


_CONTRACTS = "deepinfer_ascend.testing.conformance"


@hookimpl
def deepinfer_accelerators() -> tuple[Component[Any], ...]:
    """Offer one Ascend 950."""
    return (
        Component(
            name="ascend",
            build=_lazy("accelerator"),
            config_type=AscendConfig,
            priority=Priority.SPECIALIZED,
            tags={"npu"},
            available=_why_not,
            offers={Feature.GRAPHS},
            verified=Verified.WIRED,
            summary="Huawei Ascend 950 through torch_npu",
            conformance=f"{_CONTRACTS}:DeviceContract",
        ),
    )


@hookimpl
def deepinfer_kernels() -> tuple[Component[Any], ...]:
    """Offer core's ops through torch_npu."""
    return (
        Component(
            name="ascend",
            build=_lazy("kernels"),
            config_type=AscendKernelsConfig,
            priority=Priority.SPECIALIZED,
            available=_why_not,
            fits=_on_npu,
            verified=Verified.WIRED,
            summary="ops through torch_npu",
            conformance=f"{_CONTRACTS}:NpuKernelsContract",
        ),
    )


@hookimpl
def deepinfer_attentions() -> tuple[Component[Any], ...]:
    """Offer fused attention over pages, and a slow one for what it does not know."""
    return (
        Component(
            name="ascend",
            build=_lazy("attention"),
            offers={Feature.PAGED_KV, Feature.MIXED_BATCH, Feature.WINDOW},
            priority=Priority.SPECIALIZED,
            available=_why_not,
            fits=_attention_why_not,
            verified=Verified.WIRED,
            summary="npu_fused_infer_attention_score_v2 over pages",
            conformance=f"{_CONTRACTS}:NpuAttentionContract",
        ),
        Component(
            name="ascend-torch",
            build=_lazy("torch_attention"),
            offers={Feature.PAGED_KV, Feature.MIXED_BATCH, Feature.WINDOW, Feature.SINKS},
            auto=False,
            available=_why_not,
            fits=_on_npu,
            verified=Verified.WIRED,
            summary="plain torch over pages on the device, slow",
            conformance=f"{_CONTRACTS}:NpuTorchAttentionContract",
        ),
    )
