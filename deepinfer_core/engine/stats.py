"""Counters of an engine."""

from __future__ import annotations

from collections.abc import Mapping

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

    def count_drafts(self, verified: int, accepted: int) -> None:
        """Add one sequence's part in a step."""
        self.num_draws += 1
        self.num_drafted += verified
        self.num_accepted += accepted
        for totals, count in (
            (self.drafted_by_position, verified),
            (self.accepted_by_position, accepted),
        ):
            totals += [0] * (max(verified, accepted) - len(totals))
            for position in range(count):
                totals[position] += 1


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
