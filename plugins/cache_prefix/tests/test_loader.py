"""Pages come and go in the background; a store that is slow, hangs or fails is a miss."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from deepinfer_core.interfaces.kv_store import KvStoreContext, PageState, StoredPage
from deepinfer_core.testing.broken.kv_store import MemoryStore
from deepinfer_prefix.tiers.load import Load
from deepinfer_prefix.tiers.loader import LoaderConfig, PageLoader

KEYS = [bytes([at]) * 32 for at in range(8)]


def page(at: int, *, exact: bool = True) -> StoredPage:
    return StoredPage(data=bytes([at]) * 100, exact=exact)


class Gated(MemoryStore):
    """Lets ``get`` and ``put`` through when the test says so."""

    def __init__(self) -> None:
        super().__init__(KvStoreContext(namespace="n", clock=lambda: 0.0, directory=Path()))
        self.open = threading.Event()
        self.entered = threading.Semaphore(0)
        self.fault: Exception | None = None

    def get(self, key: bytes) -> StoredPage | None:
        self._pass()
        return super().get(key)

    def put(self, key: bytes, page: StoredPage, **times: Any) -> bool:
        self._pass()
        return super().put(key, page, **times)

    def _pass(self) -> None:
        self.entered.release()
        self.open.wait()
        if self.fault is not None:
            raise self.fault


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def store() -> Gated:
    return Gated()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def make(store: Gated, clock: Clock) -> Iterator[Callable[..., PageLoader]]:
    made = []

    def build(**options: Any) -> PageLoader:
        made.append(PageLoader(store, LoaderConfig(**options), clock=clock))
        return made[-1]

    yield build
    store.open.set()
    for loader in made:
        loader.close()


def fill(store: Gated, *ats: int) -> None:
    store.open.set()
    for at in ats:
        assert MemoryStore.put(store, KEYS[at], page(at))


def wait(load: Load, done: threading.Event) -> None:
    assert done.wait(30)
    assert load.done


def test_the_leading_run_arrives(store: Gated, make: Any) -> None:
    fill(store, 0, 1, 2, 4, 5)
    done = threading.Event()
    load = make(threads=3).load(KEYS, notify=done.set)
    wait(load, done)
    assert load.pages == (page(0), page(1), page(2))
    assert (load.tier, load.exact) == ("host", True)


def test_an_exact_run_ends_before_a_bounded_page(store: Gated, make: Any) -> None:
    fill(store, 0, 2)
    MemoryStore.put(store, KEYS[1], page(1, exact=False))
    loader = make()
    first, second = threading.Event(), threading.Event()
    exact = loader.load(KEYS, notify=first.set)
    bounded = loader.load(KEYS, exact_only=False, notify=second.set)
    wait(exact, first)
    wait(bounded, second)
    assert len(exact.pages) == 1
    assert exact.exact
    assert len(bounded.pages) == 3
    assert not bounded.exact


def test_nothing_asked_for_is_done_at_once(make: Any) -> None:
    assert make().load([]).done


def test_pages_are_delivered_in_the_background(store: Gated, make: Any) -> None:
    fill(store, *range(8))
    done, delivered = threading.Event(), {}

    def deliver(at: int, which: int, found: StoredPage) -> bool:
        assert threading.current_thread() is not threading.main_thread()
        delivered[at] = found
        return True

    load = make().load(KEYS, deliver=deliver, notify=done.set)
    wait(load, done)
    assert delivered == {at: page(at) for at in range(8)}
    assert [bytes(found.data) for found in load.pages] == [b""] * 8


def test_a_run_ends_after_a_page_that_nothing_may_follow(store: Gated, make: Any) -> None:
    fill(store, *range(8))
    done = threading.Event()
    load = make().load(KEYS, deliver=lambda at, which, found: at != 3, notify=done.set)
    wait(load, done)
    assert len(load.pages) == 4


def test_other_keys_are_tried_where_the_first_has_nothing(store: Gated, make: Any) -> None:
    fill(store, 0, 1, 3, 4)
    done, found = threading.Event(), {}

    def deliver(at: int, which: int, page: StoredPage) -> bool:
        found[at] = which, page
        return True

    def otherwise(at: int) -> list[bytes]:
        return [KEYS[7], KEYS[at + 1]]

    load = make().load(KEYS[:3], otherwise=otherwise, deliver=deliver, notify=done.set)
    wait(load, done)
    assert found == {0: (0, page(0)), 1: (0, page(1)), 2: (2, page(3))}


def test_a_delivery_that_fails_ends_the_run(store: Gated, make: Any) -> None:
    fill(store, *range(8))

    def deliver(at: int, which: int, found: StoredPage) -> bool:
        if at == 3:
            raise OSError("no")
        return True

    done = threading.Event()
    loader = make()
    load = loader.load(KEYS, deliver=deliver, notify=done.set)
    wait(load, done)
    assert len(load.pages) == 3
    assert loader.counters["errors"] == 1


def test_a_slow_store_is_a_miss(store: Gated, clock: Clock, make: Any) -> None:
    loader = make(timeout_s=2.0)
    load = loader.load(KEYS)
    assert store.entered.acquire(timeout=30)
    assert not loader.ready(load)
    clock.now_s = 2.5
    assert loader.ready(load)
    assert load.pages == ()
    assert loader.counters["timeouts"] == 1


def test_nothing_is_delivered_after_the_end(store: Gated, clock: Clock, make: Any) -> None:
    delivered: list[int] = []
    loader = make(threads=1, timeout_s=2.0)

    def deliver(at: int, which: int, found: StoredPage) -> bool:
        delivered.append(at)
        return True

    load = loader.load(KEYS, deliver=deliver)
    assert store.entered.acquire(timeout=30)
    clock.now_s = 2.5
    assert loader.ready(load)
    fill(store, *range(8))  # lets the call that hung return a page
    loader.flush()
    done = threading.Event()
    wait(loader.load(KEYS[:1], notify=done.set), done)
    assert delivered == []


def test_a_load_is_not_done_while_a_page_is_being_delivered(
    store: Gated, clock: Clock, make: Any
) -> None:
    fill(store, *range(8))
    inside, leave = threading.Event(), threading.Event()

    def deliver(at: int, which: int, found: StoredPage) -> bool:
        inside.set()
        return leave.wait()

    done = threading.Event()
    loader = make(threads=1)
    load = loader.load(KEYS, deliver=deliver, notify=done.set)
    assert inside.wait(30)
    load.cancel()
    assert not load.done
    leave.set()
    wait(load, done)
    assert len(load.pages) == 1


def test_a_store_that_hangs_is_left_alone(store: Gated, clock: Clock, make: Any) -> None:
    loader = make(threads=2, timeout_s=2.0)
    loads = [loader.load(KEYS[:1]), loader.load(KEYS[1:2])]
    for _ in loads:
        assert store.entered.acquire(timeout=30)
    clock.now_s = 2.5
    assert loader.load(KEYS).done
    assert loader.counters["refused_loads"] == 1


def test_too_many_loads_are_misses(store: Gated, make: Any) -> None:
    loader = make(max_loads=2)
    loads = [loader.load(KEYS) for _ in range(3)]
    assert [load.done for load in loads] == [False, False, True]
    assert loader.counters["refused_loads"] == 1


def test_a_failing_store_is_a_miss(store: Gated, make: Any) -> None:
    fill(store, 0)
    store.fault = OSError("broken")
    loader = make()
    done = threading.Event()
    load = loader.load(KEYS, notify=done.set)
    wait(load, done)
    assert load.pages == ()
    assert loader.save(KEYS[1], page(1))
    assert loader.flush()
    assert loader.counters["errors"] >= 2
    assert loader.counters["refused_pages"] == 1


def test_pages_are_written_in_the_background(store: Gated, make: Any) -> None:
    store.open.set()
    loader = make()
    assert all(loader.save(KEYS[at], page(at)) for at in range(8))
    assert loader.flush()
    assert store.contains(KEYS) == 8
    assert loader.counters["written_pages"] == 8


def test_what_waits_to_be_written_is_bounded(store: Gated, make: Any) -> None:
    loader = make(max_write_bytes=250)
    kept = [loader.save(KEYS[at], page(at)) for at in range(8)]
    assert False in kept
    assert kept.count(True) in {2, 3}  # one may be on its way already
    assert loader.counters["dropped_pages"] == kept.count(False)


def test_loads_go_on_while_a_write_hangs(store: Gated, make: Any) -> None:
    loader = make(threads=2)
    loader.save(KEYS[7], page(7))
    assert store.entered.acquire(timeout=30)
    load = loader.load(KEYS[:1])
    assert store.entered.acquire(timeout=30), "the load waits for the write"
    assert not load.done


def test_closing_writes_what_waits_and_closes_the_store(store: Gated, make: Any) -> None:
    store.open.set()
    loader = make()
    loader.save(KEYS[0], page(0))
    loader.close()
    loader.close()
    assert loader.counters["written_pages"] == 1
    assert loader.load(KEYS).done
    assert loader.save(KEYS[1], page(1)) is False
    assert store.put(KEYS[1], page(1)) is False


def test_stats_never_wait_for_the_store(store: Gated, clock: Clock, make: Any) -> None:
    loader = make(threads=1)
    loader.load(KEYS[:1])
    assert store.entered.acquire(timeout=30)
    assert loader.stats() == {**dict.fromkeys(loader.counters, 0), "loads": 1}


def test_stats_of_the_store_are_kept(store: Gated, clock: Clock, make: Any) -> None:
    fill(store, 0, 1)
    loader = make(threads=1)
    clock.now_s = 10.0
    loader.save(KEYS[2], page(2))  # wakes the thread, which then finds maintenance due
    done = threading.Event()
    wait(loader.load(KEYS[:1], notify=done.set), done)
    loader.close()
    assert loader.stats()["store.pages"] >= 2


def test_a_miss_is_explained(store: Gated, make: Any) -> None:
    fill(store, 0, 1, 3)
    MemoryStore.put(store, KEYS[2], page(2), expires_at_s=-1.0)
    done = threading.Event()
    load = make().load(KEYS, notify=done.set)
    wait(load, done)
    assert len(load.pages) == 2
    assert load.missing is not None
    assert load.missing.state is PageState.EXPIRED
