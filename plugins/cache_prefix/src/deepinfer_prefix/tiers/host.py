"""Store ``host``: pages in memory, least recently used first to go."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence

from attrs import define, evolve, field

from deepinfer_core.interfaces.kv_store import KvStoreContext, PageState, PageStatus, StoredPage
from deepinfer_prefix.tiers.configs import HostConfig
from deepinfer_prefix.tiers.times import Rule, Times

REMEMBERED = 65536
"""Keys of pages that are gone, kept for explanations."""


@define
class _Kept:
    page: StoredPage
    times: Times


@define
class _Memory:
    """What the store holds and remembers; guarded by its lock."""

    pages: OrderedDict[bytes, _Kept] = field(factory=OrderedDict)
    gone: OrderedDict[bytes, PageStatus] = field(factory=OrderedDict)
    contents: dict[bytes, bytes] = field(factory=dict)
    num_bytes: int = 0
    counters: dict[str, float] = field(
        factory=lambda: dict.fromkeys(
            ("errors", "hits", "misses", "puts", "refused", "evicted", "expired"), 0.0
        )
    )


class HostStore:
    """Pages in memory, within a quota. See ``KvStore``."""

    tier = "host"

    def __init__(self, config: HostConfig, context: KvStoreContext) -> None:
        self._config, self._clock = config, context.clock
        self._rule = Rule(expire_after_s=config.expire_after_s, retain_s=config.retain_s)
        self._lock = threading.Lock()
        self._memory = _Memory()
        self._closed = False

    def put(
        self,
        key: bytes,
        page: StoredPage,
        *,
        expires_at_s: float | None = None,
        retain_until_s: float | None = None,
    ) -> bool:
        """Keep a copy of a page, in place of those not used for longest."""
        data = bytes(page.data)
        with self._lock:
            memory, now_s = self._memory, self._clock()
            self._drop(key)
            times = self._rule.times(now_s, expires_at_s, retain_until_s)
            if self._closed or times.expires_at_s <= now_s or not self._make_room(len(data), now_s):
                memory.counters["refused"] += 1
                return False
            if times.retain_until_s > now_s and not self._may_retain(len(data), now_s):
                times = evolve(times, retain_until_s=0.0)
            kept = evolve(page, data=data, tier=self.tier, expires_at_s=times.hard_expiry_s)
            memory.pages[key] = _Kept(page=kept, times=times)
            memory.num_bytes += len(data)
            memory.counters["puts"] += 1
            memory.gone.pop(key, None)
            if page.content:
                memory.contents[page.content] = key
            return True

    def get(self, key: bytes) -> StoredPage | None:
        """Return the page, or None; the page becomes the one used last."""
        with self._lock:
            kept = self._alive(key)
            self._memory.counters["misses" if kept is None else "hits"] += 1
            if kept is None:
                return None
            self._memory.pages.move_to_end(key)
            kept.times = self._rule.touched(kept.times, self._clock()) or kept.times
            return kept.page

    def contains(self, keys: Sequence[bytes]) -> int:
        """Return how many leading keys are present."""
        with self._lock:
            for count, key in enumerate(keys):
                if self._alive(key) is None:
                    return count
            return len(keys)

    def delete(self, key: bytes) -> bool:
        """Drop a page; whether it was there."""
        with self._lock:
            there = self._alive(key) is not None
            if there:
                self._remove(key, PageState.DELETED)
            return there

    def explain(self, key: bytes, content: bytes = b"") -> PageStatus:
        """Say what is remembered of a key, and of the same tokens under another salt."""
        with self._lock:
            if self._alive(key) is not None:
                return PageStatus(state=PageState.PRESENT, tier=self.tier)
            if key in self._memory.gone:
                return self._memory.gone[key]
            other = self._memory.contents.get(content) if content else None
            if other is not None and self._alive(other) is not None:
                return PageStatus(state=PageState.OTHER_SALT, tier=self.tier)
            return PageStatus(tier=self.tier)

    def maintain(self) -> None:
        """Drop what expired."""
        with self._lock:
            for key in list(self._memory.pages):
                self._alive(key)

    def size_bytes(self) -> int:
        """Return the bytes of all pages."""
        with self._lock:
            return self._memory.num_bytes

    def stats(self) -> Mapping[str, float]:
        """Count pages, bytes, hits and misses."""
        with self._lock:
            memory = self._memory
            return {
                **memory.counters,
                "pages": len(memory.pages),
                "bytes": memory.num_bytes,
                "quota_bytes": self._config.quota_bytes,
            }

    def close(self) -> None:
        """Give the memory back."""
        with self._lock:
            self._closed = True
            self._memory = _Memory(counters=self._memory.counters)

    # ------------------------------------------------------------------ under the lock

    def _alive(self, key: bytes) -> _Kept | None:
        """Look a page up; one that expired goes."""
        kept = self._memory.pages.get(key)
        if kept is not None and kept.times.expires_at_s <= self._clock():
            self._memory.counters["expired"] += 1
            self._remove(key, PageState.EXPIRED, kept.times.expires_at_s)
            return None
        return kept

    def _make_room(self, size: int, now_s: float) -> bool:
        memory, quota = self._memory, self._config.quota_bytes
        if size > quota:
            return False
        for _ in range(len(memory.pages)):
            if memory.num_bytes + size <= quota:
                break
            key, kept = next(iter(memory.pages.items()))
            if self._alive(key) is None:
                continue
            if kept.times.retain_until_s > now_s:
                memory.pages.move_to_end(key)
                continue
            memory.counters["evicted"] += 1
            self._remove(key, PageState.EVICTED)
        return memory.num_bytes + size <= quota

    def _may_retain(self, size: int, now_s: float) -> bool:
        """Whether the budget for retained pages has room for one more."""
        retained = sum(
            len(kept.page.data)
            for kept in self._memory.pages.values()
            if kept.times.retain_until_s > now_s
        )
        return retained + size <= self._config.retain_share * self._config.quota_bytes

    def _remove(self, key: bytes, state: PageState, since_s: float | None = None) -> None:
        self._drop(key)
        since_s = self._clock() if since_s is None else since_s
        gone = self._memory.gone
        gone[key] = PageStatus(state=state, since_s=since_s, tier=self.tier)
        if len(gone) > REMEMBERED:
            gone.popitem(last=False)

    def _drop(self, key: bytes) -> None:
        memory = self._memory
        kept = memory.pages.pop(key, None)
        if kept is None:
            return
        memory.num_bytes -= len(kept.page.data)
        if memory.contents.get(kept.page.content) == key:
            del memory.contents[kept.page.content]


def build(config: HostConfig, context: KvStoreContext) -> HostStore:
    """Make store ``host``."""
    return HostStore(config, context)
