"""Counters of an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attrs import define, field, frozen

from deepinfer_core.interfaces.cache import CacheUsage


@define
class Counters:
    """Totals since the engine was made."""

    num_steps: int = 0
    num_requests: int = 0
    num_finished: int = 0
    num_failed: int = 0
    num_preemptions: int = 0
    num_failed_steps: int = 0
    num_computed_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    num_draws: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    drafted_by_position: list[int] = field(factory=list)
    accepted_by_position: list[int] = field(factory=list)
    expected_by_position: list[float] = field(factory=list)
    step_s: float = 0.0
    draft_s: float = 0.0

    def count_drafts(self, verified: int, accepted: int, confidences: Sequence[float] = ()) -> None:
        """Add one sequence's part in a step.

        Args:
            verified: leading drafts that were judged.
            accepted: leading drafts that were accepted.
            confidences: the drafter's, of each of its drafts given those before it.
        """
        self.num_draws += 1
        self.num_drafted += verified
        self.num_accepted += accepted
        for totals in (
            self.drafted_by_position,
            self.accepted_by_position,
            self.expected_by_position,
        ):
            totals += [0] * (verified - len(totals))
        survival = 1.0
        for position in range(verified):
            survival *= confidences[position] if position < len(confidences) else 0.0
            self.drafted_by_position[position] += 1
            self.accepted_by_position[position] += position < accepted
            self.expected_by_position[position] += survival


@frozen(kw_only=True)
class EngineStats:
    """What an engine is doing.

    Attributes:
        running: sequences that hold pages.
        waiting: sequences that hold none.
        pages: one entry a cache group.
        kv_store: figures of the store behind the cache, by name; empty without one.
        num_draws: times a token was drawn for a sequence in a step, with or without drafts before.
        num_drafted: drafts verified.
        num_accepted: drafts accepted.
        drafted_by_position: how many of them stood at each place of a draft, first place first.
        accepted_by_position: the same of those accepted.
        expected_by_position: how many of them the drafter's confidences had promised.
        step_s: seconds from the launch of steps to their end, what a drafter does left out.
        draft_s: seconds of draft passes, and of what drafter and budget do after steps.
        (others: totals since the engine was made, see ``Counters``)
    """

    running: int
    waiting: int
    pages: tuple[CacheUsage, ...]
    kv_store: Mapping[str, float] = field(factory=dict)
    num_steps: int
    num_requests: int
    num_finished: int
    num_failed: int
    num_preemptions: int
    num_failed_steps: int
    num_computed_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    num_draws: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    drafted_by_position: tuple[int, ...] = field(default=(), converter=tuple)
    accepted_by_position: tuple[int, ...] = field(default=(), converter=tuple)
    expected_by_position: tuple[float, ...] = field(default=(), converter=tuple)
    step_s: float = 0.0
    draft_s: float = 0.0

    @property
    def confidence_error(self) -> float:
        """How far the drafter's confidences are off: expected minus accepted, by place.

        The mean of the distances, weighed by the drafts at each place; 0 without drafts.
        """
        places = zip(self.expected_by_position, self.accepted_by_position, strict=True)
        off = sum(abs(expected - accepted) for expected, accepted in places)
        return off / self.num_drafted if self.num_drafted else 0.0

    @property
    def tau(self) -> float:
        """Tokens per draw: accepted drafts and the one after them; 1 without drafts."""
        return 1.0 + self.num_accepted / self.num_draws if self.num_draws else 1.0

    @property
    def kv_pages_used(self) -> int:
        """Pages that sequences hold, over all groups."""
        return sum(usage.used for usage in self.pages)

    @property
    def kv_pages_total(self) -> int:
        """Pages there are, over all groups."""
        return sum(usage.total for usage in self.pages)
