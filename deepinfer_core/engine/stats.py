"""Counters of an engine."""

from __future__ import annotations

from attrs import define, frozen

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


@frozen(kw_only=True)
class EngineStats:
    """What an engine is doing.

    Attributes:
        running: sequences that hold pages.
        waiting: sequences that hold none.
        pages: one entry a cache group.
        (others: totals since the engine was made, see ``Counters``)
    """

    running: int
    waiting: int
    pages: tuple[CacheUsage, ...]
    num_steps: int
    num_requests: int
    num_finished: int
    num_failed: int
    num_preemptions: int
    num_failed_steps: int
    num_computed_tokens: int
    num_output_tokens: int
    num_cached_tokens: int

    @property
    def kv_pages_used(self) -> int:
        """Pages that sequences hold, over all groups."""
        return sum(usage.used for usage in self.pages)

    @property
    def kv_pages_total(self) -> int:
        """Pages there are, over all groups."""
        return sum(usage.total for usage in self.pages)
