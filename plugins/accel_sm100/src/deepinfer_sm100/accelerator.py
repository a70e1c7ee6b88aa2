"""Accelerator "sm100": one GPU, its stream, its memory. Not verified on hardware."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

import torch

from deepinfer_core.interfaces.accelerator import AcceleratorContext, MemoryInfo
from deepinfer_core.ops.rows import padded_rows
from deepinfer_sm100.probe import SM100

T = TypeVar("T")

_LOST = (
    "an illegal memory access",
    "an illegal instruction",
    "device-side assert",
    "unspecified launch failure",
    "misaligned address",
    "hardware stack error",
    "uncorrectable ECC",
    "uncorrectable NVLink",
    "unknown error",
    "no CUDA-capable device",
    "device is lost",
    "driver shutting down",
    "context is destroyed",
)
"""After these, nothing runs on the device in this process any more."""


class DevicePending(Generic[T]):
    """Work on a stream.

    Args:
        future: what the host's part of the work gave, and the event recorded after it.
    """

    def __init__(self, future: Future[tuple[T, Any]]) -> None:
        self._future = future

    def wait(self) -> T:
        """Block until the device has done it."""
        result, event = self._future.result()
        event.synchronize()
        return result

    def done(self) -> bool:
        """Whether the device has done it."""
        if not self._future.done():
            return False
        return self._future.exception() is not None or bool(self._future.result()[1].query())


class GpuAccelerator:
    """One GPU.

    With ``context.overlap`` a thread of its own starts kernels, so that the host's own work goes on
    meanwhile; without it, work is started when it is launched. In both cases everything runs on one
    stream, in the order of launching.

    Args:
        config: ``AcceleratorConfig``.
        context: see there.
        cuda: ``torch.cuda``, or what stands for it.
    """

    name = "sm100"

    def __init__(self, config: Any, context: AcceleratorContext, cuda: Any = torch.cuda) -> None:
        self._config, self._cuda = config, cuda
        cuda.set_device(config.device)
        self._device = torch.device("cuda", config.device)
        self._stream = cuda.Stream(self._device)
        self._queue = ThreadPoolExecutor(1, "deepinfer-sm100") if context.overlap else None
        self._capability: tuple[int, int] = tuple(cuda.get_device_capability(self._device))
        # One order of adding for every number of rows begins with not trading it for speed.
        torch.backends.cuda.matmul.allow_tf32 = False

    @property
    def device(self) -> torch.device:
        """The GPU."""
        return self._device

    @property
    def portable(self) -> bool:
        """Whether it is not the GPU that the kernels are made for."""
        return self._capability not in SM100

    def supported_dtypes(self) -> tuple[str, ...]:
        """What its tensor cores multiply, best first."""
        return "bfloat16", "float16", "float32"

    def memory(self) -> MemoryInfo:
        """What is free or cached by torch, without what steps themselves need."""
        free, total = self._cuda.mem_get_info(self._device)
        cached = self._cuda.memory_reserved(self._device) - self._cuda.memory_allocated(
            self._device
        )
        free = max(0, free + cached - self._config.reserve_mib * 2**20)
        return MemoryInfo(total_bytes=total, free_bytes=min(free, total))

    def launch(self, work: Callable[[], T]) -> DevicePending[T]:
        """Start ``work`` after everything launched before."""
        if self._queue is not None:
            return DevicePending(self._queue.submit(self._start, work))
        future: Future[tuple[T, Any]] = Future()
        try:
            future.set_result(self._start(work))
        except Exception as error:
            future.set_exception(error)
        return DevicePending(future)

    def _start(self, work: Callable[[], T]) -> tuple[T, Any]:
        event = self._cuda.Event(blocking=True)
        with (
            self._cuda.device(self._device),
            self._cuda.stream(self._stream),
            torch.inference_mode(),
        ):
            result = work()
            event.record(self._stream)
        return result, event

    def pad_tokens(self, num_tokens: int) -> int:
        """A ladder of sizes: kernels are compiled, and graphs captured, for few of them."""
        return padded_rows(num_tokens)

    def is_lost(self, error: BaseException) -> bool:
        """Whether the error is one after which CUDA answers nothing but errors."""
        if isinstance(error, torch.OutOfMemoryError):
            return False
        text = str(error)
        return "CUDA error" in text and any(sign in text for sign in _LOST)

    def describe(self) -> dict[str, str]:
        """The GPU, and how far all of this was verified."""
        major, minor = self._capability
        return {
            "gpu": str(self._cuda.get_device_name(self._device)).replace(" ", "-"),
            "capability": f"{major}.{minor}",
            "mode": "portable" if self.portable else "sm100",
            "cuda": str(torch.version.cuda),
            "verified": "not-on-hardware",
        }

    def close(self) -> None:
        """Finish what is queued."""
        if self._queue is not None:
            self._queue.shutdown(wait=True)
        self._stream.synchronize()


def build(config: Any, context: AcceleratorContext) -> GpuAccelerator:
    """Make the accelerator."""
    return GpuAccelerator(config, context)
