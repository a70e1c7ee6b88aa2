"""Slot ``eviction``: which reusable page goes first when pages are short."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Protocol

from attrs import frozen


@frozen(kw_only=True)
class EvictionContext:
    """What an eviction builder receives.

    Attributes:
        clock: seconds, monotonic.
    """

    clock: Callable[[], float]


class Eviction(Protocol):
    """An order over reusable entries. The cache tells it what happens and asks for victims.

    An entry is *added* once, then *touched* any number of times, *pinned* and *unpinned* in pairs
    (pins count), and leaves by ``victim`` or ``remove``.
    """

    def add(self, key: Hashable, *, cost: int = 1) -> None:
        """A new entry, not pinned; ``cost`` = tokens that must be recomputed if it goes."""
        ...

    def touch(self, key: Hashable) -> None:
        """The entry was used."""
        ...

    def pin(self, key: Hashable) -> None:
        """The entry is in use; it must not be a victim."""
        ...

    def unpin(self, key: Hashable) -> None:
        """Undo one ``pin``."""
        ...

    def remove(self, key: Hashable) -> None:
        """The entry is gone for another reason; unknown keys are ignored."""
        ...

    def victim(self) -> Hashable | None:
        """Remove and return the entry to drop next; None when none is unpinned."""
        ...

    def __len__(self) -> int:
        """Entries known, pinned ones included."""
        ...
