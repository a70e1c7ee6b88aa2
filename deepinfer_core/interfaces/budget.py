"""Slot ``budget``: how many drafts to verify in a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from attrs import field, frozen


@frozen(kw_only=True)
class BudgetContext:
    """What a budget builder receives.

    Attributes:
        max_drafts: most drafts a sequence may get.
        step_ms: milliseconds of a step of n token rows, profiled; None where unknown.
    """

    max_drafts: int
    step_ms: Callable[[int], float] | None = None


def _numbers(values: Iterable[float]) -> tuple[float, ...]:
    return tuple(values)


@frozen(kw_only=True)
class BudgetRequest:
    """One sequence with drafts.

    Attributes:
        sequence_id: the sequence.
        num_drafts: drafts it has.
        confidences: newest confidences of those drafts.
        lagged: confidences two rounds old for the same sequence, empty without history.
    """

    sequence_id: int
    num_drafts: int
    confidences: tuple[float, ...] = field(default=(), converter=_numbers)
    lagged: tuple[float, ...] = field(default=(), converter=_numbers)


class Budget(Protocol):
    """A policy for the number of rows spent on verification."""

    def total(self, requests: Sequence[BudgetRequest], num_other_tokens: int, limit: int) -> int:
        """Drafts to verify in this step, 0 .. limit.

        Must not depend on the newest confidences (they would leak a draft's own token into the
        decision about it), only on ``lagged`` and on counts.
        """
        ...

    def split(self, requests: Sequence[BudgetRequest], total: int) -> Sequence[int]:
        """How many of its leading drafts each request verifies; sums to at most ``total``."""
        ...

    def observe(self, num_tokens: int, step_ms: float) -> None:
        """A step of ``num_tokens`` rows took this long."""
        ...
