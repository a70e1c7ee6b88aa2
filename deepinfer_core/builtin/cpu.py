"""Accelerator "cpu": the machine everybody has, through plain torch."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from deepinfer_core.interfaces.accelerator import AcceleratorContext, MemoryInfo, Pending
from deepinfer_core.ops.rows import padded_rows

T = TypeVar("T")


class CpuDone(Generic[T]):
    """A result that is there, or the error that came instead."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._error: Exception | None = None
        try:
            self._value = _without_autograd(work)
        except Exception as error:
            self._error = error

    def wait(self) -> T:
        """Return it."""
        if self._error is not None:
            raise self._error
        return self._value

    def done(self) -> bool:
        """Yes."""
        return True


class CpuPending(Generic[T]):
    """A result of the CPU's queue."""

    def __init__(self, future: Future[T]) -> None:
        self._future = future

    def wait(self) -> T:
        """Block until done."""
        return self._future.result()

    def done(self) -> bool:
        """Whether the result is there."""
        return self._future.done()


class CpuAccelerator:
    """The host as a device.

    With ``context.overlap`` one worker thread is the queue, so that the host's own work goes on
    while a
    step computes. Without it, work is done when it is launched: one thread, one OpenMP team.
    """

    name = "cpu"

    def __init__(self, config: Any, context: AcceleratorContext) -> None:
        self._threads = config.threads or context.num_threads or usable_cores()
        if torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)
        self._queue = ThreadPoolExecutor(1, "deepinfer-cpu") if context.overlap else None

    @property
    def device(self) -> torch.device:
        """The host."""
        return torch.device("cpu")

    def supported_dtypes(self) -> tuple[str, ...]:
        """bfloat16 first where the CPU multiplies it natively, else float32."""
        if has_native_bfloat16():
            return "bfloat16", "float32"
        return "float32", "bfloat16"

    def memory(self) -> MemoryInfo:
        """Main memory, or the control group's limit where that is lower."""
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        free = min(total, _available_bytes(total))
        limit = _control_group_free()
        return MemoryInfo(total_bytes=total, free_bytes=free if limit is None else min(free, limit))

    def launch(self, work: Callable[[], T]) -> Pending[T]:
        """Run ``work`` after everything launched before."""
        if self._queue is None:
            return CpuDone(work)
        return CpuPending(self._queue.submit(_without_autograd, work))

    def pad_tokens(self, num_tokens: int) -> int:
        """A ladder of sizes: oneDNN compiles and keeps a kernel for every row count it meets."""
        return padded_rows(num_tokens)

    def is_lost(self, error: BaseException) -> bool:
        """The host cannot be lost; running out of memory is a failed step."""
        return False

    def describe(self) -> dict[str, str]:
        """Threads and instruction level."""
        return {
            "threads": str(self._threads),
            "instructions": torch.backends.cpu.get_cpu_capability(),
            "bfloat16": "native" if has_native_bfloat16() else "emulated",
        }

    def close(self) -> None:
        """Finish what is queued."""
        if self._queue is not None:
            self._queue.shutdown(wait=True)


def _without_autograd(work: Callable[[], T]) -> T:
    with torch.inference_mode():
        return work()


def usable_cores() -> int:
    """Cores for computing: torch's own choice, or fewer if the process may use fewer."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(torch.get_num_threads(), allowed or 1))


def has_native_bfloat16() -> bool:
    """Whether oneDNN multiplies bfloat16 on this CPU without emulation."""
    try:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    except (AttributeError, RuntimeError):
        return False


def _available_bytes(total: int) -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return total // 2
    values = {line.split(":")[0]: line.split()[1] for line in lines if ":" in line}
    return int(values.get("MemAvailable", total // 2048)) * 1024


def _control_group_free() -> int | None:
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text().strip()
        used = (group / "memory.current").read_text().strip()
    except OSError:
        return None
    return None if limit == "max" else max(0, int(limit) - int(used))


def build(config: Any, context: AcceleratorContext) -> CpuAccelerator:
    """Make the accelerator."""
    return CpuAccelerator(config, context)
