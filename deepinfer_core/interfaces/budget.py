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
        step_ms: milliseconds of a step of n token rows, measured on the device when a number is
            asked for the first time; None where unknown. Asking costs a few such steps.
        max_batch_tokens: token rows a step may hold.
        max_sequences: sequences a step may hold.
        verification: "coupled" or "rejection". Under rejection, how many drafts are verified must
            not depend on those drafts; a policy that cannot promise it refuses (CompositionError).
        fingerprint: what measured times belong to: model, device, kernels and versions.
    """

    max_drafts: int
    step_ms: Callable[[int], float] | None = None
    max_batch_tokens: int = 2048
    max_sequences: int = 256
    verification: str = "coupled"
    fingerprint: str = ""


def _numbers(values: Iterable[float]) -> tuple[float, ...]:
    return tuple(values)


@frozen(kw_only=True)
class BudgetRequest:
    """One sequence with drafts.

    Attributes:
        sequence_id: the sequence.
        num_drafts: drafts it has.
        confidences: newest confidences of those drafts; empty when drafting is suspended and the
            core only asks whether it would pay again.
        lagged: confidences of the same sequence from the newest draft pass that lies at least two
            rounds back, empty without history.
    """

    sequence_id: int
    num_drafts: int
    confidences: tuple[float, ...] = field(default=(), converter=_numbers)
    lagged: tuple[float, ...] = field(default=(), converter=_numbers)


@frozen(kw_only=True)
class StepTime:
    """What a step took, and what it brought.

    Attributes:
        num_tokens: token rows of the step.
        step_ms: milliseconds of the step, the draft pass before it left out.
        draft_ms: milliseconds of that draft pass, 0 without one.
        num_drafting: sequences that took part in the pass.
        num_accepted: drafts accepted in the step.
    """

    num_tokens: int
    step_ms: float
    draft_ms: float = 0.0
    num_drafting: int = 0
    num_accepted: int = 0


class Budget(Protocol):
    """A policy for the number of rows spent on verification.

    A total of 0 in several rounds in a row suspends drafting; see ``engine/speculation.py``.
    """

    def total(self, requests: Sequence[BudgetRequest], num_other_tokens: int, limit: int) -> int:
        """Drafts to verify in this step, 0 .. limit.

        Must not depend on the newest confidences (they would leak a draft's own token into the
        decision about it), only on ``lagged`` and on counts.

        Args:
            requests: sequences with drafts; each has one row of its own besides them.
            num_other_tokens: further rows of the step, of sequences without drafts.
            limit: rows that the step has left.
        """
        ...

    def split(self, requests: Sequence[BudgetRequest], total: int) -> Sequence[int]:
        """How many of its leading drafts each request verifies; sums to at most ``total``."""
        ...

    def observe(self, step: StepTime) -> None:
        """Take note of what a step took; called after each, with drafts or without."""
        ...
