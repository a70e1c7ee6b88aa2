"""A plugin whose parts are those of this package, with a CPU in place of the device.

What it composes runs every call of the backend through ``emulation``.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from attrs import evolve, frozen
from torch.utils._python_dispatch import TorchDispatchMode

from deepinfer_ascend import LABEL, AscendConfig, AscendKernelsConfig
from deepinfer_ascend.accelerator import AscendAccelerator, require_one_device
from deepinfer_ascend.attention import FusedAttention
from deepinfer_ascend.calls import Calls
from deepinfer_ascend.kernels import AscendKernels
from deepinfer_ascend.limits import attention_objection
from deepinfer_ascend.soc import ASCEND_950
from deepinfer_ascend.testing import flash_mla
from deepinfer_ascend.testing.emulation import install
from deepinfer_ascend.torch_attention import TorchAttention
from deepinfer_core import Component, Feature, Priority, Verified, hookimpl
from deepinfer_core.interfaces.accelerator import AcceleratorContext
from deepinfer_core.interfaces.attention import AttentionContext
from deepinfer_core.interfaces.kernels import KernelsContext

DEEPINFER_API = 1

NAME = "ascend"

WIDE = evolve(
    ASCEND_950,
    dtypes=("float32", "bfloat16"),
    attention_dtypes=("bfloat16", "float16", "float32"),
)
"""The chip as documented, and float32 besides: there wiring can be compared to the last digits."""


class EmulatedEvent:
    """An event of a device that is never behind."""

    def record(self) -> None:
        """Nothing is queued."""

    def synchronize(self) -> None:
        """Nothing is queued."""

    def query(self) -> bool:
        """Nothing is queued."""
        return True


class EmulatedRuntime:
    """A CPU that stands in for the device. See ``deepinfer_ascend.runtime.Runtime``."""

    soc = WIDE

    @property
    def device(self) -> torch.device:
        """The CPU."""
        return torch.device("cpu")

    def bind(self) -> None:
        """There is only one."""

    def memory(self) -> tuple[int, int]:
        """Enough for tiny models."""
        return 1 << 30, 1 << 31

    def event(self) -> EmulatedEvent:
        """A new mark."""
        return EmulatedEvent()

    def queue(self) -> AbstractContextManager[Any]:
        """The only queue."""
        return contextlib.nullcontext()

    def describe(self) -> dict[str, str]:
        """Say that this is no device."""
        return {"soc": "emulated"}


@frozen(kw_only=True, eq=False)
class _Recorded:
    function: Any
    args: tuple[Any, ...]
    options: dict[str, Any]
    results: tuple[torch.Tensor, ...]


class _Recorder(TorchDispatchMode):
    """Keeps every operation that runs within it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recorded: list[_Recorded] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        options = dict(kwargs or {})
        result = func(*args, **options)
        parts = result if isinstance(result, tuple | list) else (result,)
        tensors = tuple(part for part in parts if isinstance(part, torch.Tensor))
        self.recorded.append(_Recorded(function=func, args=args, options=options, results=tensors))
        return result


class EmulatedGraph:
    """Operations with the tensors they were captured with, computed again on replay.

    As a device would, it keeps every number that came from the host, except lengths of fused
    attention that a replay brings.
    """

    def __init__(self, recorded: list[_Recorded]) -> None:
        self._recorded = recorded
        self.replays = 0

    def replay(self, host_arguments: Mapping[str, Any]) -> None:
        """Compute everything again into the same memory."""
        self.replays += 1
        for each in self._recorded:
            options = each.options
            if "fused_infer_attention" in str(each.function):
                options = {**options, **host_arguments}
            result = each.function(*each.args, **options)
            parts = result if isinstance(result, tuple | list) else (result,)
            found = [part for part in parts if isinstance(part, torch.Tensor)]
            for new, kept in zip(found, each.results, strict=True):
                if new.data_ptr() != kept.data_ptr():
                    kept.copy_(new)


def capture(work: Callable[[], None]) -> EmulatedGraph:
    """Capture what ``work`` launches, and leave its results undefined, as a capture does."""
    with _Recorder() as recorder:
        work()
    return EmulatedGraph(recorder.recorded)


def build_accelerator(config: AscendConfig, context: AcceleratorContext) -> AscendAccelerator:
    """Make the accelerator."""
    require_one_device(config)
    return AscendAccelerator(EmulatedRuntime(), context)


def build_kernels(config: AscendKernelsConfig, context: KernelsContext) -> AscendKernels:
    """Make the kernel set."""
    install()
    return AscendKernels(
        config,
        Calls(WIDE),
        device_type="cpu",
        capture=capture,
        wide=True,
        flash_mla=flash_mla.library(),
        launch=triton_launcher() if config.triton else None,
    )


def triton_launcher(**options: Any) -> Any:
    """An emulation of Triton on the host, which comes with another plugin; None without it.

    Args:
        options: of it.
    """
    if any(importlib.util.find_spec(name) is None for name in ("deepinfer_sm100", "triton")):
        return None
    return importlib.import_module("deepinfer_sm100.emulation").Emulator(**options)


def build_attention(config: Any, context: AttentionContext) -> FusedAttention:
    """Make fused attention."""
    install()
    return FusedAttention(context, Calls(WIDE))


def build_torch_attention(config: Any, context: AttentionContext) -> TorchAttention:
    """Make plain attention."""
    return TorchAttention(context)


_SUMMARY = f"a CPU in place of an Ascend 950; {LABEL}"


def component(name: str, build: Callable[[Any, Any], Any], **fields: Any) -> Component[Any]:
    """Return a component that is used when it is named."""
    return Component(
        name=name,
        build=build,
        priority=Priority.OVERRIDE,
        verified=Verified.WIRED,
        summary=_SUMMARY,
        **fields,
    )


class EmulatedPlugin:
    """The plugin; give it to ``Engine.from_config`` instead of ``deepinfer_ascend``."""

    DEEPINFER_API = 1

    @hookimpl
    def deepinfer_accelerators(self) -> tuple[Component[Any], ...]:
        """Offer the CPU in place of the device."""
        return (component(NAME, build_accelerator, config_type=AscendConfig, tags={"cpu"}),)

    @hookimpl
    def deepinfer_kernels(self) -> tuple[Component[Any], ...]:
        """Offer ops through ``emulation``."""
        return (component(NAME, build_kernels, config_type=AscendKernelsConfig),)

    @hookimpl
    def deepinfer_attentions(self) -> tuple[Component[Any], ...]:
        """Offer attention through ``emulation``."""
        offers = {Feature.PAGED_KV, Feature.MIXED_BATCH, Feature.WINDOW}
        return (
            component(
                NAME,
                build_attention,
                offers=offers,
                fits=partial(attention_objection, soc=WIDE, device_type="cpu"),
            ),
            component(
                "ascend-torch", build_torch_attention, offers={*offers, Feature.SINKS}, auto=False
            ),
        )
