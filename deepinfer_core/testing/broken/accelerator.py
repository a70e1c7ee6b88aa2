"""Wrong accelerators, each a small change of the builtin ``cpu``."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

import torch
from attrs import frozen

from deepinfer_core.builtin.cpu import CpuAccelerator, CpuPending
from deepinfer_core.interfaces.accelerator import AcceleratorContext, MemoryInfo, Pending
from deepinfer_core.testing.contracts.base import Factory

T = TypeVar("T")


@frozen(kw_only=True)
class _Options:
    """The options that ``CpuAccelerator`` reads."""

    threads: int = 0


class _OutOfOrder(CpuAccelerator):
    def launch(self, work: Callable[[], T]) -> Pending[T]:
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(work())
            except Exception as error:
                future.set_exception(error)

        threading.Thread(target=run).start()
        return CpuPending(future)


class _Swallows(CpuAccelerator):
    def launch(self, work: Callable[[], T]) -> Pending[T]:
        def run() -> Any:
            try:
                return work()
            except Exception:
                return None

        return super().launch(run)


class _RaisesOnLaunch(CpuAccelerator):
    def launch(self, work: Callable[[], T]) -> Pending[T]:
        pending = super().launch(work)
        pending.wait()
        return pending


class _DiesOnError(CpuAccelerator):
    _dead = False

    def launch(self, work: Callable[[], T]) -> Pending[T]:
        def run() -> T:
            if self._dead:
                raise RuntimeError("the queue is dead")
            try:
                return work()
            except Exception:
                self._dead = True
                raise

        return super().launch(run)


class _Wrapped(Generic[T]):
    def __init__(self, pending: Pending[T]) -> None:
        self._pending = pending

    def wait(self) -> T:
        return self._pending.wait()

    def done(self) -> bool:
        return self._pending.done()


class _ImpatientPending(_Wrapped[T]):
    def wait(self) -> T:
        if not self._pending.done():
            return None  # type: ignore[return-value]
        return super().wait()


class _WaitsNotAtAll(CpuAccelerator):
    def launch(self, work: Callable[[], T]) -> Pending[T]:
        return _ImpatientPending(super().launch(work))


class _OncePending(_Wrapped[T]):
    _taken = False

    def wait(self) -> T:
        if self._taken:
            raise RuntimeError("the result was taken already")
        self._taken = True
        return super().wait()


class _WaitsOnce(CpuAccelerator):
    def launch(self, work: Callable[[], T]) -> Pending[T]:
        return _OncePending(super().launch(work))


class _AlwaysDone(_Wrapped[T]):
    def done(self) -> bool:
        return True


class _SaysDone(CpuAccelerator):
    def launch(self, work: Callable[[], T]) -> Pending[T]:
        return _AlwaysDone(super().launch(work))


class _NeverDone(_Wrapped[T]):
    def done(self) -> bool:
        return False


class _ForgetsToSayDone(CpuAccelerator):
    def launch(self, work: Callable[[], T]) -> Pending[T]:
        return _NeverDone(super().launch(work))


class _NeverOverlaps(CpuAccelerator):
    def __init__(self, config: Any, context: AcceleratorContext) -> None:
        super().__init__(config, context)
        self._queue = None


class _ShrinksPadding(CpuAccelerator):
    def pad_tokens(self, num_tokens: int) -> int:
        return min(256, -(-num_tokens // 8) * 8)


class _PadsTwice(CpuAccelerator):
    def pad_tokens(self, num_tokens: int) -> int:
        return num_tokens + 1


class _DropsQueueOnClose(CpuAccelerator):
    def close(self) -> None:
        if self._queue is not None:
            self._queue.shutdown(wait=True, cancel_futures=True)


class _ClosesOnce(CpuAccelerator):
    def close(self) -> None:
        super().close()
        if self.__dict__.setdefault("closed", False):
            raise RuntimeError("closed already")
        self.__dict__["closed"] = True


class _LosesTheDevice(CpuAccelerator):
    def is_lost(self, error: BaseException) -> bool:
        return isinstance(error, RuntimeError)


class _CountsMegabytes(CpuAccelerator):
    def memory(self) -> MemoryInfo:
        memory = super().memory()
        return MemoryInfo(total_bytes=memory.total_bytes >> 20, free_bytes=memory.free_bytes >> 20)


class _UnknownDtype(CpuAccelerator):
    def supported_dtypes(self) -> tuple[str, ...]:
        return "fp32", "bf16"


class _ComputesWrong(CpuAccelerator):
    def launch(self, work: Callable[[], T]) -> Pending[T]:
        def run() -> Any:
            result = work()
            if isinstance(result, torch.Tensor):
                return (result * 256).round() / 256
            return result

        return super().launch(run)


class _SharedPool(CpuAccelerator):
    def __init__(self, config: Any, context: AcceleratorContext) -> None:
        super().__init__(config, context)
        self._queue = ThreadPoolExecutor(4)


def _made(accelerator: type[CpuAccelerator]) -> Factory:
    def build(context: AcceleratorContext) -> CpuAccelerator:
        return accelerator(_Options(), context)

    return build


CORRECT: Factory = _made(CpuAccelerator)

BROKEN: dict[str, tuple[Factory, str]] = {
    "a thread for each piece of work": (
        _made(_OutOfOrder),
        "test_work_runs_in_the_order_of_launching",
    ),
    "four workers": (_made(_SharedPool), "test_work_runs_in_the_order_of_launching"),
    "exceptions are swallowed": (_made(_Swallows), "test_wait_raises_what_the_work_raised"),
    "launch raises": (_made(_RaisesOnLaunch), "test_wait_raises_what_the_work_raised"),
    "an exception ends the queue": (
        _made(_DiesOnError),
        "test_failed_work_does_not_disturb_later_work",
    ),
    "wait returns early": (_made(_WaitsNotAtAll), "test_wait_blocks_until_the_work_is_done"),
    "wait works once": (_made(_WaitsOnce), "test_wait_returns_the_result"),
    "done is always true": (_made(_SaysDone), "test_overlap_lets_the_host_go_on"),
    "done is never true": (
        _made(_ForgetsToSayDone),
        "test_done_is_true_once_it_was_waited_for",
    ),
    "overlap is ignored": (_made(_NeverOverlaps), "test_overlap_lets_the_host_go_on"),
    "padding shrinks": (_made(_ShrinksPadding), "test_padding_never_shrinks"),
    "padding is padded": (_made(_PadsTwice), "test_padding_never_shrinks"),
    "close drops queued work": (
        _made(_DropsQueueOnClose),
        "test_close_finishes_what_was_launched",
    ),
    "close works once": (_made(_ClosesOnce), "test_close_finishes_what_was_launched"),
    "any error loses the device": (
        _made(_LosesTheDevice),
        "test_ordinary_errors_do_not_lose_the_device",
    ),
    "memory in megabytes": (_made(_CountsMegabytes), "test_memory_is_plausible"),
    "dtypes torch does not know": (
        _made(_UnknownDtype),
        "test_supported_dtypes_are_torch_names",
    ),
    "results are rounded": (_made(_ComputesWrong), "test_work_computes_on_the_device"),
}
