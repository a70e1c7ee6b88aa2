"""Slot ``kv_store``: pages kept outside the device (host memory, disk, network)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from attrs import frozen


@frozen(kw_only=True)
class KvStoreContext:
    """What a store builder receives.

    Attributes:
        namespace: digest of model and layout; part of every key.
        clock: seconds since the epoch; the only source of time.
    """

    namespace: str
    clock: Callable[[], float]


@frozen(kw_only=True)
class StoredPage:
    """One page as it lies in a store.

    Attributes:
        data: bytes of every group for one page span, as the cache composed them.
        exact: provenance; an exact request never matches a page that is not.
    """

    data: bytes
    exact: bool = True


class KvStore(Protocol):
    """A store of pages by key. Safe to call from several threads.

    A store may lose pages at any time (``get`` then returns None), but never returns anything else
    than
    what was put under the key, and never fails a request: errors become misses.
    """

    tier: str

    def put(self, key: bytes, page: StoredPage, *, expires_at_s: float | None = None) -> bool:
        """Keep a page; False if it was not kept (full, closed, too large)."""
        ...

    def get(self, key: bytes) -> StoredPage | None:
        """The page, or None; counts as an access."""
        ...

    def contains(self, keys: Sequence[bytes]) -> int:
        """How many leading keys are present, without loading them."""
        ...

    def delete(self, key: bytes) -> bool:
        """Drop a page; whether it was there."""
        ...

    def size_bytes(self) -> int:
        """Bytes held now."""
        ...

    def close(self) -> None:
        """Flush and give everything back; may be called twice."""
        ...
