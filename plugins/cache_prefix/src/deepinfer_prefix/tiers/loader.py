"""Pages between a store and the device cache, moved by background threads.

A store may be slow, hang or fail; the engine's round must not notice. ``PageLoader`` owns the
threads: the engine asks for a run of keys and looks now and then whether it has arrived, and hands
over pages to be kept. Nothing here waits for a store on the caller's thread.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from attrs import define, field, frozen

from deepinfer_core.interfaces.kv_store import KvStore, PageStatus, StoredPage
from deepinfer_core.log import get_logger
from deepinfer_prefix.tiers.load import Deliver, Load, Otherwise

MAINTAIN_EVERY_S = 2.0


@frozen(kw_only=True)
class LoaderConfig:
    """Bounds of a ``PageLoader``.

    Attributes:
        threads: background threads; one of them at a time writes.
        max_loads: runs that may be under way; further ones are misses at once.
        max_write_bytes: bytes that may wait to be written; further pages are dropped.
        timeout_s: seconds after which a run counts as arrived with what is there.
    """

    threads: int = 2
    max_loads: int = 64
    max_write_bytes: int = 256 << 20
    timeout_s: float = 2.0


COUNTERS = (
    "loads",
    "loaded_pages",
    "timeouts",
    "refused_loads",
    "written_pages",
    "refused_pages",
    "dropped_pages",
    "errors",
)
"""Runs asked for; pages that arrived; runs given up; runs refused because too many were under way
or the store hangs; pages the store kept; pages it did not keep; pages dropped because too much
waited; calls of the store or of ``deliver`` that raised."""


@frozen(kw_only=True)
class _Write:
    key: bytes
    page: StoredPage
    expires_at_s: float | None
    retain_until_s: float | None


@define
class _Queues:
    """What waits; guarded by the loader's condition."""

    loads: deque[Load] = field(factory=deque)
    writes: deque[_Write] = field(factory=deque)
    write_bytes: int = 0
    writing: bool = False
    busy_since_s: dict[int, float] = field(factory=dict)


class PageLoader:
    """Owner of a store and of the threads that talk to it.

    Args:
        store: the store; closed with the loader.
        config: bounds.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        store: KvStore,
        config: LoaderConfig | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.store = store
        self.counters = dict.fromkeys(COUNTERS, 0)
        self._config = config or LoaderConfig()
        self._clock = clock
        self._queues = _Queues()
        self._under_way: set[Load] = set()
        self._changed = threading.Condition()
        self._closing = False
        self._store_stats: dict[str, float] = {}
        self._maintained_s = clock()
        self._threads = [
            threading.Thread(target=self._work, name=f"deepinfer-pages-{at}", daemon=True)
            for at in range(self._config.threads)
        ]
        for thread in self._threads:
            thread.start()

    # ------------------------------------------------------------------ on the engine's thread

    def load(
        self,
        keys: Sequence[bytes],
        *,
        otherwise: Otherwise | None = None,
        contents: Sequence[bytes] = (),
        exact_only: bool = True,
        deliver: Deliver | None = None,
        notify: Callable[[], None] | None = None,
    ) -> Load:
        """Begin to load the leading run of ``keys`` that the store has; returns at once.

        Args:
            keys: in the order of the pages.
            otherwise: says what else to try at a place where nothing is under its key.
            contents: digests of their tokens alone (``explain.contents``), or nothing; with them
                a miss is explained better.
            exact_only: end the run before a page that is not exact.
            deliver: called on a background thread with each page, in any order; the pages of the
                finished load then carry no data. Pages beyond the final run may be delivered too.
            notify: called once, on any thread, when the load is done.
        """
        load = Load(
            keys,
            contents,
            otherwise=otherwise,
            exact_only=exact_only,
            deliver=deliver,
            deadline_s=self._clock() + self._config.timeout_s,
            notify=notify,
        )
        with self._changed:
            self.counters["loads"] += 1
            if self._closing or len(self._under_way) >= self._config.max_loads or self._hangs():
                self.counters["refused_loads"] += 1
                load.cancel()
            elif not load.done:
                self._under_way.add(load)
                self._queues.loads.append(load)
                self._changed.notify_all()
        return load

    def ready(self, load: Load) -> bool:
        """Whether a load is done, with what is there once its time is up. Never blocks."""
        if load.expire(self._clock()):
            self._count("timeouts")
        if load.done:
            self._forget(load)
        return load.done

    def save(
        self,
        key: bytes,
        page: StoredPage,
        *,
        expires_at_s: float | None = None,
        retain_until_s: float | None = None,
    ) -> bool:
        """Hand a page over to be kept; False if too much waits already. Never blocks.

        The page's memory must stay as it is until it is written.
        """
        write = _Write(key=key, page=page, expires_at_s=expires_at_s, retain_until_s=retain_until_s)
        with self._changed:
            size = self._queues.write_bytes + len(page.data)
            if self._closing or size > self._config.max_write_bytes:
                self.counters["dropped_pages"] += 1
                return False
            self._queues.write_bytes = size
            self._queues.writes.append(write)
            self._changed.notify()
        return True

    def stats(self) -> dict[str, float]:
        """Counters, and the store's own figures of some seconds ago, their names after "store."."""
        with self._changed:
            found: dict[str, float] = dict(self.counters)
        return {**found, **{f"store.{name}": at for name, at in self._store_stats.items()}}

    def flush(self, timeout_s: float = 10.0) -> bool:
        """Wait until everything handed over is written; for tests and orderly ends."""
        with self._changed:
            return self._changed.wait_for(
                lambda: not self._queues.writes and not self._queues.writing, timeout_s
            )

    def close(self, timeout_s: float = 10.0) -> None:
        """Write what waits, as far as the time allows, and close the store."""
        if self._closing:
            return
        self.flush(timeout_s)
        with self._changed:
            self._closing = True
            self._queues.writes.clear()
            self._changed.notify_all()
        for load in list(self._under_way):
            load.cancel()
        for thread in self._threads:
            thread.join(timeout_s)
        if not any(thread.is_alive() for thread in self._threads):
            self._guard("close", self.store.close)

    # ------------------------------------------------------------------ on background threads

    def _work(self) -> None:
        while (task := self._next_task()) is not None:
            try:
                task()
            finally:
                with self._changed:
                    self._queues.busy_since_s.pop(threading.get_ident(), None)

    def _hangs(self) -> bool:
        """Whether every thread has been in one call for longer than anybody waits."""
        since_s = self._queues.busy_since_s.values()
        too_long_s = self._clock() - self._config.timeout_s
        return len(since_s) == len(self._threads) and max(since_s) < too_long_s

    def _next_task(self) -> Callable[[], None] | None:
        """Wait for something to do; None when the loader closes."""
        with self._changed:
            while not self._closing:
                task = self._due()
                if task is not None:
                    self._queues.busy_since_s[threading.get_ident()] = self._clock()
                    return task
                self._changed.wait(MAINTAIN_EVERY_S)
        return None

    def _due(self) -> Callable[[], None] | None:
        """What to do now; loads go before writes."""
        queues = self._queues
        while queues.loads:
            load = queues.loads[0]
            at = load.take()
            if at is not None:
                return partial(self._load, load, at)
            queues.loads.popleft()
        if queues.writes and not queues.writing:
            queues.writing = True
            write = queues.writes.popleft()
            queues.write_bytes -= len(write.page.data)
            return partial(self._write, write)
        now_s = self._clock()
        if now_s - self._maintained_s >= MAINTAIN_EVERY_S:
            self._maintained_s = now_s
            return partial(self._guard, "maintain", self._maintain)
        return None

    def _load(self, load: Load, at: int) -> None:
        page: StoredPage | None = None
        missing: PageStatus | None = None
        which = 0
        try:
            which, page = self._first_of(load.keys_at(at))
            if page is None:
                missing = self.store.explain(load.keys[at], load.contents[at])
        except Exception as error:
            self._failed("get", error)
        try:
            if load.arrive(at, page, missing, which=which):
                self._count("loaded_pages")
        except Exception as error:
            self._failed("deliver", error)
        if load.done:
            self._forget(load)

    def _first_of(self, keys: Iterable[bytes]) -> tuple[int, StoredPage | None]:
        """The first page that is there, and which of the keys it is under."""
        for which, key in enumerate(keys):
            page = self.store.get(key)
            if page is not None:
                return which, page
        return 0, None

    def _write(self, write: _Write) -> None:
        kept = False
        try:
            kept = self.store.put(
                write.key,
                write.page,
                expires_at_s=write.expires_at_s,
                retain_until_s=write.retain_until_s,
            )
        except Exception as error:
            self._failed("put", error)
        with self._changed:
            self.counters["written_pages" if kept else "refused_pages"] += 1
            self._queues.writing = False
            self._changed.notify_all()

    def _maintain(self) -> None:
        self.store.maintain()
        self._store_stats = dict(self.store.stats())

    def _guard(self, name: str, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            self._failed(name, error)

    def _failed(self, call: str, error: Exception) -> None:
        self._count("errors")
        get_logger("kv_store").warning(
            "kv_store.failed", tier=self.store.tier, call=call, error=repr(error)
        )

    def _count(self, name: str) -> None:
        with self._changed:
            self.counters[name] += 1

    def _forget(self, load: Load) -> None:
        with self._changed:
            self._under_way.discard(load)
