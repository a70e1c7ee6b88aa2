"""A store in a dictionary, and wrong ones, each a small change of it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, ClassVar

from attrs import evolve, frozen

from deepinfer_core.interfaces.kv_store import KvStoreContext, PageState, PageStatus, StoredPage
from deepinfer_core.testing.contracts.base import Factory


@frozen
class _Kept:
    page: StoredPage
    expires_at_s: float | None


class MemoryStore:
    """The simplest store that is right: a dictionary behind a lock.

    Args:
        context: clock and namespace.
        capacity_bytes: data it keeps at most; more is refused.
    """

    tier = "host"

    def __init__(self, context: KvStoreContext, capacity_bytes: int = 1 << 20) -> None:
        self._clock = context.clock
        self._capacity = capacity_bytes
        self._pages: dict[bytes, _Kept] = {}
        self._lock = threading.RLock()
        self._closed = False

    def put(
        self,
        key: bytes,
        page: StoredPage,
        *,
        expires_at_s: float | None = None,
        retain_until_s: float | None = None,
    ) -> bool:
        """Keep a page if there is room; nothing is evicted, so all are retained."""
        with self._lock:
            self.delete(key)
            if self._closed or self.size_bytes() + len(page.data) > self._capacity:
                return False
            data = bytes(page.data)
            page = evolve(page, data=data, tier=self.tier, expires_at_s=expires_at_s)
            self._pages[key] = _Kept(page, expires_at_s)
            return True

    def get(self, key: bytes) -> StoredPage | None:
        """The page, or None."""
        with self._lock:
            kept = self._pages.get(key)
            if kept is None or self._expired(kept):
                return None
            return kept.page

    def contains(self, keys: Sequence[bytes]) -> int:
        """How many leading keys are present."""
        for count, key in enumerate(keys):
            if self.get(key) is None:
                return count
        return len(keys)

    def delete(self, key: bytes) -> bool:
        """Drop a page."""
        with self._lock:
            there = self.get(key) is not None
            self._pages.pop(key, None)
            return there

    def explain(self, key: bytes, content: bytes = b"") -> PageStatus:
        """What is known of a key; what was deleted is forgotten."""
        with self._lock:
            kept = self._pages.get(key)
            if kept is None:
                return PageStatus(tier=self.tier)
            state = PageState.EXPIRED if self._expired(kept) else PageState.PRESENT
            return PageStatus(state=state, tier=self.tier)

    def maintain(self) -> None:
        """Drop what expired."""
        with self._lock:
            self._pages = {
                key: kept for key, kept in self._pages.items() if not self._expired(kept)
            }

    def size_bytes(self) -> int:
        """Bytes of data."""
        with self._lock:
            return sum(len(kept.page.data) for kept in self._pages.values())

    def stats(self) -> dict[str, float]:
        """Nothing fails here."""
        return {"errors": 0, "pages": len(self._pages)}

    def close(self) -> None:
        """Forget everything."""
        with self._lock:
            self._closed = True
            self._pages.clear()

    def _expired(self, kept: _Kept) -> bool:
        return kept.expires_at_s is not None and self._clock() >= kept.expires_at_s


class _ShortKeys(MemoryStore):
    def put(self, key: bytes, page: StoredPage, **times: Any) -> bool:
        return super().put(key[:-1], page, **times)

    def get(self, key: bytes) -> StoredPage | None:
        return super().get(key[:-1])

    def delete(self, key: bytes) -> bool:
        return super().delete(key[:-1])


class _TextKeys(MemoryStore):
    def put(self, key: bytes, page: StoredPage, **times: Any) -> bool:
        return super().put(key.strip(), page, **times)


class _ForgetsProvenance(MemoryStore):
    def get(self, key: bytes) -> StoredPage | None:
        page = super().get(key)
        return page and StoredPage(data=page.data)


class _TruncatesData(MemoryStore):
    def get(self, key: bytes) -> StoredPage | None:
        page = super().get(key)
        return page and StoredPage(data=page.data[:4000], exact=page.exact)


class _FirstPutStays(MemoryStore):
    def put(self, key: bytes, page: StoredPage, **times: Any) -> bool:
        return self.get(key) is not None or super().put(key, page, **times)


class _IgnoresExpiry(MemoryStore):
    def put(self, key: bytes, page: StoredPage, **times: Any) -> bool:
        return super().put(key, page)


class _RetainPostponesExpiry(MemoryStore):
    def put(self, key: bytes, page: StoredPage, **times: Any) -> bool:
        wanted = [time for time in times.values() if time is not None]
        return super().put(key, page, expires_at_s=max(wanted, default=None))


class _KeepsTheMemory(MemoryStore):
    def put(self, key: bytes, page: StoredPage, **times: Any) -> bool:
        kept = super().put(key, page, **times)
        if kept:
            self._pages[key] = evolve(self._pages[key], page=page)
        return kept


class _MaintenanceDropsAll(MemoryStore):
    def maintain(self) -> None:
        self._pages.clear()


class _NeverMaintained(MemoryStore):
    def maintain(self) -> None:
        """Let what expired lie."""


class _BlamesEviction(MemoryStore):
    def explain(self, key: bytes, content: bytes = b"") -> PageStatus:
        found = super().explain(key)
        if found.state is PageState.UNKNOWN and not self._closed:
            return PageStatus(state=PageState.EVICTED)
        return found


class _SaysPresent(MemoryStore):
    def explain(self, key: bytes, content: bytes = b"") -> PageStatus:
        return PageStatus(state=PageState.PRESENT)


class _ForgetsTheTier(MemoryStore):
    def get(self, key: bytes) -> StoredPage | None:
        page = super().get(key)
        return page and evolve(page, tier="")


class _MissesAreErrors(MemoryStore):
    _misses = 0

    def get(self, key: bytes) -> StoredPage | None:
        page = super().get(key)
        self._misses += page is None
        return page

    def stats(self) -> dict[str, float]:
        return {"errors": self._misses}


class _ExpiryIsAnInterval(MemoryStore):
    def put(self, key: bytes, page: StoredPage, **times: Any) -> bool:
        if times.get("expires_at_s") is not None:
            times["expires_at_s"] %= 3600
        return super().put(key, page, **times)


class _ContainsCountsAll(MemoryStore):
    def contains(self, keys: Sequence[bytes]) -> int:
        return sum(self.get(key) is not None for key in keys)


class _ContainsSeesExpired(MemoryStore):
    def contains(self, keys: Sequence[bytes]) -> int:
        for count, key in enumerate(keys):
            if key not in self._pages:
                return count
        return len(keys)


class _DeleteLies(MemoryStore):
    def delete(self, key: bytes) -> bool:
        super().delete(key)
        return True


class _DeleteDoesNothing(MemoryStore):
    def delete(self, key: bytes) -> bool:
        return key in self._pages


class _SizeOnlyGrows(MemoryStore):
    _put_bytes = 0

    def put(self, key: bytes, page: StoredPage, **times: Any) -> bool:
        self._put_bytes += len(page.data)
        return super().put(key, page, **times)

    def size_bytes(self) -> int:
        return self._put_bytes


class _RaisesWhenFull(MemoryStore):
    def put(self, key: bytes, page: StoredPage, **times: Any) -> bool:
        if not super().put(key, page, **times):
            raise OSError("no space left")
        return True


class _RaisesWhenClosed(MemoryStore):
    def get(self, key: bytes) -> StoredPage | None:
        if self._closed:
            raise OSError("closed")
        return super().get(key)


class _OneNamespace(MemoryStore):
    _shared: ClassVar[dict[bytes, _Kept]] = {}

    def close(self) -> None:
        """Leave the pages where they are."""

    def __init__(self, context: KvStoreContext) -> None:
        super().__init__(context)
        self._pages = self._shared


class _ForgetsDeletions(MemoryStore):
    _files: ClassVar[dict[str, dict[bytes, _Kept]]] = {}

    def __init__(self, context: KvStoreContext) -> None:
        super().__init__(context)
        self._file = self._files.setdefault(f"{context.directory}{context.namespace}", {})
        self._pages = dict(self._file)

    def put(self, key: bytes, page: StoredPage, **times: Any) -> bool:
        kept = super().put(key, page, **times)
        self._file.update(self._pages)
        return kept


class _ForgetsTheExpiry(MemoryStore):
    def get(self, key: bytes) -> StoredPage | None:
        page = super().get(key)
        return page and evolve(page, expires_at_s=None)


class _TornPages(MemoryStore):
    """Keeps the halves of a page under two locks."""

    def put(self, key: bytes, page: StoredPage, **times: Any) -> bool:
        half = len(page.data) // 2
        first = super().put(key + b"1", StoredPage(data=page.data[:half], exact=page.exact))
        threading.Event().wait(0.0005)
        return first and super().put(key + b"2", StoredPage(data=page.data[half:]))

    def get(self, key: bytes) -> StoredPage | None:
        first, second = super().get(key + b"1"), super().get(key + b"2")
        if first is None or second is None:
            return None
        return StoredPage(data=bytes(first.data) + bytes(second.data), exact=first.exact)

    def delete(self, key: bytes) -> bool:
        return super().delete(key + b"1") and super().delete(key + b"2")


def _made(store: type[MemoryStore]) -> Factory:
    def build(context: KvStoreContext) -> MemoryStore:
        return store(context)

    return build


CORRECT: Factory = _made(MemoryStore)

BROKEN: dict[str, tuple[Factory, str]] = {
    "another key's page": (_made(_ShortKeys), "test_an_unknown_key_is_a_miss"),
    "keys are taken for text": (_made(_TextKeys), "test_any_bytes_are_a_key_and_a_page"),
    "provenance is forgotten": (
        _made(_ForgetsProvenance),
        "test_a_page_comes_back_as_it_was_put",
    ),
    "data is cut off": (_made(_TruncatesData), "test_a_page_comes_back_as_it_was_put"),
    "the first put stays": (_made(_FirstPutStays), "test_a_second_put_replaces_the_first"),
    "expiry is ignored": (_made(_IgnoresExpiry), "test_an_expired_page_is_gone"),
    "expiry is taken for an interval": (
        _made(_ExpiryIsAnInterval),
        "test_an_expired_page_is_gone",
    ),
    "retaining postpones expiry": (
        _made(_RetainPostponesExpiry),
        "test_retaining_does_not_postpone_expiry",
    ),
    "the caller's memory is kept": (_made(_KeepsTheMemory), "test_a_put_page_is_copied"),
    "maintenance drops all": (
        _made(_MaintenanceDropsAll),
        "test_maintaining_keeps_what_is_there",
    ),
    "nothing is ever removed": (_made(_NeverMaintained), "test_maintaining_keeps_what_is_there"),
    "eviction is blamed": (_made(_BlamesEviction), "test_explanations_agree_with_get"),
    "says present of all": (_made(_SaysPresent), "test_explanations_agree_with_get"),
    "the tier is forgotten": (_made(_ForgetsTheTier), "test_it_names_its_tier"),
    "misses are errors": (_made(_MissesAreErrors), "test_it_counts_its_errors"),
    "contains counts beyond a gap": (
        _made(_ContainsCountsAll),
        "test_contains_counts_leading_keys",
    ),
    "contains sees expired pages": (_made(_ContainsSeesExpired), "test_an_expired_page_is_gone"),
    "delete lies": (_made(_DeleteLies), "test_a_deleted_page_is_gone"),
    "delete does nothing": (_made(_DeleteDoesNothing), "test_a_deleted_page_is_gone"),
    "size only grows": (_made(_SizeOnlyGrows), "test_size_follows_what_is_held"),
    "raises when full": (_made(_RaisesWhenFull), "test_a_full_store_refuses_quietly"),
    "raises when closed": (_made(_RaisesWhenClosed), "test_a_closed_store_misses"),
    "one namespace for all": (_made(_OneNamespace), "test_namespaces_do_not_meet"),
    "deletions are forgotten": (_made(_ForgetsDeletions), "test_a_reopened_store_is_right"),
    "the expiry is forgotten": (_made(_ForgetsTheExpiry), "test_it_names_its_tier"),
    "pages are torn": (_made(_TornPages), "test_threads_see_whole_pages"),
}
