"""Slot ``kv_store``: pages kept outside the device (host memory, disk, network).

A store is a plain object whose methods may take as long as they like: whoever owns it (the device
cache) calls it from threads of its own, never from the engine's round, and gives up on a call that
takes too long. So a store needs no threads, no queues and no deadlines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from attrs import field, frozen


@frozen(kw_only=True)
class KvStoreContext:
    """What a store builder receives.

    Attributes:
        namespace: digest of model and layout; part of every key.
        clock: seconds since the epoch; the only source of time.
        directory: folder of a store that keeps files, unless its configuration names another; it
            need not exist yet, and other namespaces keep their files there too.
        labels: what the namespace stands for, in words (model, dtype, page size), for people only.
    """

    namespace: str
    clock: Callable[[], float]
    directory: Path
    labels: Mapping[str, str] = field(factory=dict)


@frozen(kw_only=True)
class StoredPage:
    """One page as it lies in a store.

    Attributes:
        data: bytes of every group for one page span, as the cache composed them. Whoever gets a
            page may keep it, and must not write into it.
        exact: provenance; an exact request never matches a page that is not.
        content: digest of the tokens alone, without salt and layout, or b""; stores use it for
            explanations only and need not give it back.
        tier: set by ``get``: which tier the page came from ("host", "disk").
        expires_at_s: set by ``get``: as it was given to ``put``, so that a page can be moved from
            one store to another.
    """

    data: bytes | memoryview
    exact: bool = True
    content: bytes = field(default=b"", eq=False)
    tier: str = field(default="", eq=False)
    expires_at_s: float | None = field(default=None, eq=False)


class PageState(StrEnum):
    """What a store knows of a key."""

    PRESENT = "present"
    """``get`` returns it."""
    EXPIRED = "expired"
    """It was kept until its time came."""
    EVICTED = "evicted"
    """It gave way to others."""
    DELETED = "deleted"
    """Somebody deleted it, or its bytes turned out to be damaged."""
    OTHER_SALT = "other salt"
    """Never under this key, but the same tokens are there under another salt."""
    OTHER_LAYOUT = "other layout"
    """Never under this key, but the same tokens are there for another model or layout."""
    UNKNOWN = "unknown"
    """Never seen, or forgotten."""


@frozen(kw_only=True)
class PageStatus:
    """Answer of ``KvStore.explain``.

    Attributes:
        state: what is known.
        since_s: when it came to that, seconds since the epoch; None where that is not known.
        tier: the tier that says so.
    """

    state: PageState = PageState.UNKNOWN
    since_s: float | None = None
    tier: str = ""


class KvStore(Protocol):
    """A store of pages by key. Safe to call from several threads; any call may block its caller.

    A store may lose pages at any time (``get`` then returns None), but never returns anything else
    than what was put under the key, and never fails a request: errors become misses and are
    counted.

    Two times of a page are kept apart. From *expires at* on it is not there, however much room
    there is. Until *retain until* it is not evicted for the room of others, as far as the store's
    budget for such pages reaches; retaining does not postpone expiry.

    Attributes:
        tier: what responses say about a hit, a short name.
    """

    tier: str

    def put(
        self,
        key: bytes,
        page: StoredPage,
        *,
        expires_at_s: float | None = None,
        retain_until_s: float | None = None,
    ) -> bool:
        """Keep a page; False if it was not kept (full, closed, too large, read-only).

        Args:
            key: digest of tokens, salt and namespace, up to 64 bytes.
            page: what to keep; a page under the same key is replaced.
            expires_at_s: not there from this time on, accessed or not; None leaves it to the store
                (in-tree stores: so many seconds after the last access).
            retain_until_s: not evicted before; None leaves it to the store.
        """
        ...

    def get(self, key: bytes) -> StoredPage | None:
        """The page, or None; counts as an access."""
        ...

    def contains(self, keys: Sequence[bytes]) -> int:
        """How many leading keys are present, without loading them; no access."""
        ...

    def delete(self, key: bytes) -> bool:
        """Drop a page; whether it was there."""
        ...

    def explain(self, key: bytes, content: bytes = b"") -> PageStatus:
        """Why a page is not there, as far as the store remembers; no access.

        Args:
            key: what was looked for.
            content: digest of its tokens alone, as in ``StoredPage.content``, or b"".
        """
        ...

    def maintain(self) -> None:
        """Do what is due: remove what expired, write what waits. Called every few seconds."""
        ...

    def size_bytes(self) -> int:
        """Bytes held now."""
        ...

    def stats(self) -> Mapping[str, float]:
        """Counters and gauges, by names that stay: at least "errors", calls that failed inside."""
        ...

    def close(self) -> None:
        """Flush and give everything back; may be called twice."""
        ...
