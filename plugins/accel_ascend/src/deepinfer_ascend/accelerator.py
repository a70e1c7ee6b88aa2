"""Accelerator "ascend": one device, its queue of work, its memory."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

import torch

from deepinfer_ascend import LABEL, AscendConfig
from deepinfer_ascend.runtime import Event, NpuRuntime, Runtime
from deepinfer_core.errors import CompositionError
from deepinfer_core.interfaces.accelerator import AcceleratorContext, MemoryInfo
from deepinfer_core.ops.rows import padded_rows

T = TypeVar("T")

_LOST = (
    "FORCE STOP",
    "UCE ERROR",
    "HBM MULTI BIT ECC ERROR",
    "SUSPECT MEM ERROR",
    "SUSPECT REMOTE ERROR",
    "HCCS LINK ERROR",
    "HCCL OP RETRY FAILED",
)
"""What torch_npu says when a device, its memory or its links have failed."""


class NpuPending(Generic[T]):
    """Work whose kernels may still run when the host is through with it."""

    def __init__(self, future: Future[tuple[T, Event]]) -> None:
        self._future = future

    def wait(self) -> T:
        """Block until host and device are done."""
        result, event = self._future.result()
        event.synchronize()
        return result

    def done(self) -> bool:
        """Whether both are done."""
        if not self._future.done():
            return False
        return self._future.exception() is not None or self._future.result()[1].query()


class AscendAccelerator:
    """The device.

    With ``context.overlap`` one thread launches work, so that the host's own work goes on
    meanwhile; kernels run in order in one queue of the device either way.

    Args:
        runtime: the device.
        context: see ``AcceleratorContext``.
    """

    name = "ascend"

    def __init__(self, runtime: Runtime, context: AcceleratorContext) -> None:
        self.runtime = runtime
        self._thread = (
            ThreadPoolExecutor(1, "deepinfer-ascend", initializer=runtime.bind)
            if context.overlap
            else None
        )

    @property
    def device(self) -> torch.device:
        """Where tensors live."""
        return self.runtime.device

    def supported_dtypes(self) -> tuple[str, ...]:
        """As the chip's family has them."""
        return self.runtime.soc.dtypes

    def memory(self) -> MemoryInfo:
        """As the driver says."""
        free, total = self.runtime.memory()
        return MemoryInfo(total_bytes=total, free_bytes=min(free, total))

    def launch(self, work: Callable[[], T]) -> NpuPending[T]:
        """Run ``work`` after everything launched before."""
        if self._thread is not None:
            return NpuPending(self._thread.submit(self._run, work))
        future: Future[tuple[T, Event]] = Future()
        try:
            future.set_result(self._run(work))
        except Exception as error:
            future.set_exception(error)
        return NpuPending(future)

    def _run(self, work: Callable[[], T]) -> tuple[T, Event]:
        with torch.inference_mode(), self.runtime.queue():
            result = work()
            event = self.runtime.event()
            event.record()
        return result, event

    def pad_tokens(self, num_tokens: int) -> int:
        """A ladder of sizes: the runtime prepares kernels for every shape that it meets."""
        return padded_rows(num_tokens)

    def is_lost(self, error: BaseException) -> bool:
        """Whether torch_npu says that the device failed."""
        return isinstance(error, RuntimeError) and any(mark in str(error) for mark in _LOST)

    def describe(self) -> dict[str, str]:
        """Chip, versions, and how far this is verified."""
        return {**self.runtime.describe(), "verified": f"({LABEL})"}

    def close(self) -> None:
        """Finish what is queued."""
        if self._thread is not None:
            self._thread.shutdown(wait=True)


def hccl_environment(config: AscendConfig) -> dict[str, str]:
    """What each process of a group would set before its first collective."""
    return {
        "HCCL_CONNECT_TIMEOUT": str(config.hccl_timeout_s),
        "HCCL_BUFFSIZE": str(config.hccl_buffer_mb),
        "HCCL_DETERMINISTIC": str(config.hccl_deterministic).lower(),
    }


def require_one_device(config: AscendConfig) -> None:
    """Refuse what needs several processes.

    Raises:
        CompositionError: more than one device is asked for.
    """
    if config.devices > 1:
        raise CompositionError(
            f"accelerator 'ascend': devices = {config.devices} needs the multi-process executor, "
            "which this version does not have; set accelerator.devices to 1"
        )


def build(config: AscendConfig, context: AcceleratorContext) -> AscendAccelerator:
    """Make the accelerator."""
    require_one_device(config)
    return AscendAccelerator(NpuRuntime(config.device), context)
