"""Slot ``accelerator``: the device, its memory, its queue of work, its graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TypeVar

from attrs import frozen

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


@frozen(kw_only=True)
class AcceleratorContext:
    """What an accelerator builder receives.

    Attributes:
        num_threads: host threads for computing, 0 = the device's choice.
        overlap: whether launched work should run while the host goes on; without it, ``launch`` may
            do the work at once.
    """

    num_threads: int = 0
    overlap: bool = False


@frozen(kw_only=True)
class MemoryInfo:
    """Memory for weights and state, in bytes."""

    total_bytes: int
    free_bytes: int


class Pending(Protocol[T_co]):
    """Work that was launched; like a future, but of an in-order queue."""

    def wait(self) -> T_co:
        """Block until the work is done; return its result or raise what it raised."""
        ...

    def done(self) -> bool:
        """Whether ``wait`` would return at once."""
        ...


class Accelerator(Protocol):
    """A device. One engine owns one accelerator object and calls it from one thread."""

    name: str

    @property
    def device(self) -> torch.device:
        """Where tensors live."""
        ...

    def supported_dtypes(self) -> tuple[str, ...]:
        """Computation dtypes, best first ("bfloat16", "float32")."""
        ...

    def memory(self) -> MemoryInfo:
        """Memory now; called before pages are sized."""
        ...

    def launch(self, work: Callable[[], T]) -> Pending[T]:
        """Queue ``work``; pieces of work run one after another in the order of launching.

        ``work`` may itself enqueue device kernels; whatever it touches must not be changed by the
        caller until the result was waited for.
        """
        ...

    def pad_tokens(self, num_tokens: int) -> int:
        """Token rows a step of ``num_tokens`` is padded to (captured graphs); >= num_tokens."""
        ...

    def is_lost(self, error: BaseException) -> bool:
        """Whether ``error`` means that the device itself is gone and nothing can run any more."""
        ...

    def describe(self) -> dict[str, str]:
        """What ``plan`` and logs say about the device (threads, instruction level, driver)."""
        ...

    def close(self) -> None:
        """Finish queued work and give everything back; may be called twice."""
        ...
