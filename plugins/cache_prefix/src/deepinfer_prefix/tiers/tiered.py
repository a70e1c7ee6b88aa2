"""Store ``tiered``: a fast store in front of a lasting one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from deepinfer_core.interfaces.kv_store import (
    KvStore,
    KvStoreContext,
    PageState,
    PageStatus,
    StoredPage,
)
from deepinfer_prefix.tiers.configs import TieredConfig


class TieredStore:
    """Two stores as one: pages are put into both, and come back to the first when used.

    Args:
        front: the faster one.
        back: the one that keeps more, for longer.
    """

    tier = "tiered"

    def __init__(self, front: KvStore, back: KvStore) -> None:
        self._front, self._back = front, back

    def put(
        self,
        key: bytes,
        page: StoredPage,
        *,
        expires_at_s: float | None = None,
        retain_until_s: float | None = None,
    ) -> bool:
        """Keep a page in both; whether one of them did."""
        times = {"expires_at_s": expires_at_s, "retain_until_s": retain_until_s}
        in_front = self._front.put(key, page, **times)
        return self._back.put(key, page, **times) or in_front

    def get(self, key: bytes) -> StoredPage | None:
        """Return a page of the first, or of the second, which is copied to the first."""
        page = self._front.get(key)
        if page is None:
            page = self._back.get(key)
            if page is not None:
                self._front.put(key, page, expires_at_s=page.expires_at_s)
        return page

    def contains(self, keys: Sequence[bytes]) -> int:
        """Return how many leading keys one of them has."""
        count = 0
        while count < len(keys):
            more = self._front.contains(keys[count:])
            more += self._back.contains(keys[count + more :])
            if not more:
                break
            count += more
        return count

    def delete(self, key: bytes) -> bool:
        """Drop a page from both; whether one had it."""
        in_front = self._front.delete(key)
        return self._back.delete(key) or in_front

    def explain(self, key: bytes, content: bytes = b"") -> PageStatus:
        """Say what the lasting one remembers, unless the first has the page or knows more."""
        front, back = self._front.explain(key, content), self._back.explain(key, content)
        if front.state is PageState.PRESENT or back.state is PageState.UNKNOWN:
            return front
        return back

    def maintain(self) -> None:
        """Maintain both."""
        self._front.maintain()
        self._back.maintain()

    def size_bytes(self) -> int:
        """Return the bytes held by both."""
        return self._front.size_bytes() + self._back.size_bytes()

    def stats(self) -> Mapping[str, float]:
        """Return the figures of both, each with the tier's name before it, and all errors."""
        found = {}
        errors = 0.0
        for store in (self._front, self._back):
            stats = store.stats()
            errors += stats["errors"]
            found.update({f"{store.tier}.{name}": value for name, value in stats.items()})
        return {"errors": errors, **found}

    def close(self) -> None:
        """Close both."""
        self._front.close()
        self._back.close()


def build(config: TieredConfig, context: KvStoreContext) -> TieredStore:
    """Make store ``tiered``."""
    from deepinfer_prefix.tiers.disk import DiskStore
    from deepinfer_prefix.tiers.host import HostStore

    return TieredStore(HostStore(config.host, context), DiskStore(config.disk, context))
