"""Wrong eviction policies, each a small change of the builtin one."""

from __future__ import annotations

from collections.abc import Hashable
from random import Random

from deepinfer_core.builtin.lru import LruEviction
from deepinfer_core.interfaces.eviction import EvictionContext
from deepinfer_core.testing.contracts.base import Factory


class _VictimPinned(LruEviction):
    def pin(self, key: Hashable) -> None:
        """Do nothing."""

    def unpin(self, key: Hashable) -> None:
        """Do nothing."""


class _PinsDoNotCount(LruEviction):
    def unpin(self, key: Hashable) -> None:
        self._pins[key] = 1
        super().unpin(key)


class _NeverUnpins(LruEviction):
    def unpin(self, key: Hashable) -> None:
        self._pins[key] = max(1, self._pins[key] - 1)


class _MostRecentFirst(LruEviction):
    def victim(self) -> Hashable | None:
        return self._idle.popitem()[0] if self._idle else None


class _TouchIgnored(LruEviction):
    def touch(self, key: Hashable) -> None:
        """Do nothing."""


class _VictimStays(LruEviction):
    def victim(self) -> Hashable | None:
        return next(iter(self._idle), None)


class _LosesTheLast(LruEviction):
    def victim(self) -> Hashable | None:
        return super().victim() if len(self._idle) > 1 else None


class _RaisesWhenEmpty(LruEviction):
    def victim(self) -> Hashable | None:
        return self._idle.popitem(last=False)[0]


class _LenIgnoresPinned(LruEviction):
    def __len__(self) -> int:
        return len(self._idle)


class _RemoveKeepsPins(LruEviction):
    def remove(self, key: Hashable) -> None:
        self._idle.pop(key, None)


class _RemoveUnknownRaises(LruEviction):
    def remove(self, key: Hashable) -> None:
        self.touch(key)
        super().remove(key)


class _RemembersVictims(LruEviction):
    def __init__(self) -> None:
        super().__init__()
        self._seen: set[Hashable] = set()

    def add(self, key: Hashable, *, cost: int = 1) -> None:
        if key not in self._seen:
            super().add(key, cost=cost)
        self._seen.add(key)


class _RandomOrder(LruEviction):
    _random = Random()

    def victim(self) -> Hashable | None:
        if not self._idle:
            return None
        key = self._random.choice(list(self._idle))
        self.remove(key)
        return key


def _made(policy: type[LruEviction]) -> Factory:
    def build(context: EvictionContext) -> LruEviction:
        return policy()

    return build


CORRECT: Factory = _made(LruEviction)

BROKEN: dict[str, tuple[Factory, str]] = {
    "pinned entries are victims": (_made(_VictimPinned), "test_pinned_entries_are_never_victims"),
    "pins do not count": (_made(_PinsDoNotCount), "test_pins_count"),
    "the last pin stays": (_made(_NeverUnpins), "test_pins_count"),
    "most recently used first": (_made(_MostRecentFirst), "test_use_protects"),
    "touch is ignored": (_made(_TouchIgnored), "test_use_protects"),
    "victims stay": (_made(_VictimStays), "test_every_entry_is_a_victim_once"),
    "the last entry never goes": (_made(_LosesTheLast), "test_every_entry_is_a_victim_once"),
    "raises when empty": (_made(_RaisesWhenEmpty), "test_an_empty_policy_has_no_victim"),
    "len ignores pinned entries": (_made(_LenIgnoresPinned), "test_len_counts_pinned_entries"),
    "remove keeps pinned entries": (_made(_RemoveKeepsPins), "test_removed_entries_are_gone"),
    "remove of an unknown key raises": (
        _made(_RemoveUnknownRaises),
        "test_removing_an_unknown_entry_is_ignored",
    ),
    "a victim cannot come back": (_made(_RemembersVictims), "test_a_victim_can_be_added_again"),
    "order by chance": (_made(_RandomOrder), "test_the_order_is_reproducible"),
}
