"""Eviction ``lru``: the entry that has not been used for the longest time goes first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

from deepinfer_core.errors import EngineError
from deepinfer_core.interfaces.eviction import EvictionContext


def build(config: object, context: EvictionContext) -> LruEviction:
    """Build the policy; it has no options and needs no clock."""
    return LruEviction()


class LruEviction:
    """Least recently used. Adding, touching and the last ``unpin`` each count as a use.

    Every operation takes O(1). Methods raise EngineError for keys that were never added.
    """

    def __init__(self) -> None:
        self._idle: OrderedDict[Hashable, None] = OrderedDict()
        self._pins: dict[Hashable, int] = {}

    def add(self, key: Hashable, *, cost: int = 1) -> None:
        """Take a new entry as the most recently used; ``cost`` plays no part."""
        if key in self._idle or key in self._pins:
            raise EngineError(f"eviction entry {key!r} is known already; touch it instead")
        self._idle[key] = None

    def touch(self, key: Hashable) -> None:
        """Make an entry the most recently used."""
        if key in self._idle:
            self._idle.move_to_end(key)
        elif key not in self._pins:
            raise self._unknown(key)

    def pin(self, key: Hashable) -> None:
        """Protect an entry until ``unpin`` was called as often as ``pin``."""
        if key in self._idle:
            del self._idle[key]
        elif key not in self._pins:
            raise self._unknown(key)
        self._pins[key] = self._pins.get(key, 0) + 1

    def unpin(self, key: Hashable) -> None:
        """Undo one ``pin``; the last one makes the entry the most recently used."""
        if key not in self._pins:
            raise EngineError(f"eviction entry {key!r} is not pinned")
        self._pins[key] -= 1
        if not self._pins[key]:
            del self._pins[key]
            self._idle[key] = None

    def remove(self, key: Hashable) -> None:
        """Forget an entry, pinned or not; unknown keys are ignored."""
        self._idle.pop(key, None)
        self._pins.pop(key, None)

    def victim(self) -> Hashable | None:
        """Remove and return the least recently used entry; None when none is unpinned."""
        if not self._idle:
            return None
        key, _ = self._idle.popitem(last=False)
        return key

    def __len__(self) -> int:
        return len(self._idle) + len(self._pins)

    @staticmethod
    def _unknown(key: Hashable) -> EngineError:
        return EngineError(f"eviction entry {key!r} is not known; add it first")
