"""What every store of pages must do: keep what it was given, or nothing, and never fail."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import tempfile
import threading
import time
import weakref
from pathlib import Path
from random import Random

from attrs import define

from deepinfer_core.components import Slot
from deepinfer_core.interfaces.kv_store import KvStore, KvStoreContext, PageState, StoredPage
from deepinfer_core.testing.contracts.base import Contract

NAMESPACE = "test-namespace"


@define
class _Clock:
    """Seconds since the epoch, as the test wants them."""

    now_s: float = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now_s


def key_of(name: object) -> bytes:
    """A key as caches make them: 32 bytes of a digest."""
    return hashlib.blake2b(repr(name).encode(), digest_size=32).digest()


def page_of(name: object, size: int = 4096, *, exact: bool = True) -> StoredPage:
    """A page with content of its own."""
    return StoredPage(data=Random(repr(name)).randbytes(size), exact=exact)


def _directory(owner: object) -> Path:
    """A folder that goes when its owner does."""
    path = tempfile.mkdtemp(prefix="deepinfer-contract-")
    weakref.finalize(owner, shutil.rmtree, path, ignore_errors=True)
    return Path(path)


class KvStoreContract(Contract):
    """Laws of the slot ``kv_store``."""

    slot = Slot.KV_STORE

    def store(
        self,
        clock: _Clock | None = None,
        namespace: str = NAMESPACE,
        directory: Path | None = None,
    ) -> KvStore:
        """Return a store, a new one unless it is given the directory of another."""
        context = KvStoreContext(
            namespace=namespace,
            clock=clock or _Clock(),
            directory=directory or _directory(self) / str(time.monotonic_ns()),
        )
        built: KvStore = self.make(context)
        return built

    def test_a_page_comes_back_as_it_was_put(self) -> None:
        """``get`` returns the very bytes and provenance of ``put``, for every key."""
        store = self.store()
        try:
            for name in range(20):
                kept = store.put(key_of(name), page_of(name, exact=bool(name % 2)))
                assert kept is True, "a new store refused a page of 4 KiB"
            for name in range(20):
                found = store.get(key_of(name))
                assert found == page_of(name, exact=bool(name % 2)), f"page {name}"
        finally:
            store.close()

    def test_an_unknown_key_is_a_miss(self) -> None:
        """``get`` of a key that was never put is None, however similar others are."""
        store = self.store()
        try:
            key = key_of("a")
            store.put(key, page_of("a"))
            for other in (key_of("b"), key[:-1] + bytes([key[-1] ^ 1]), bytes(32), b"\n" * 32):
                assert store.get(other) is None
        finally:
            store.close()

    def test_any_bytes_are_a_key_and_a_page(self) -> None:
        """Zero bytes, line ends and path separators are nothing special; a page may be empty."""
        store = self.store()
        try:
            keys = [bytes([byte]) * 32 for byte in (0, 10, 13, 46, 47, 92, 255)]
            for key in keys:
                assert store.put(key, StoredPage(data=key))
            for key in keys:
                assert store.get(key) == StoredPage(data=key)
            store.put(keys[0], StoredPage(data=b""))
            assert store.get(keys[0]) in (None, StoredPage(data=b""))
        finally:
            store.close()

    def test_a_second_put_replaces_the_first(self) -> None:
        """After two puts of one key, ``get`` never returns the older page."""
        store = self.store()
        try:
            store.put(key_of(1), page_of("old", exact=False))
            assert store.put(key_of(1), page_of("new"))
            assert store.get(key_of(1)) == page_of("new")
        finally:
            store.close()

    def test_a_put_page_is_copied(self) -> None:
        """Whoever put a page may use its memory again, and whoever got it cannot change it."""
        store = self.store()
        try:
            memory = bytearray(page_of(1).data)
            assert store.put(key_of(1), StoredPage(data=memoryview(memory)))
            memory[:] = bytes(len(memory))
            found = store.get(key_of(1))
            assert found == page_of(1), "the page changed with the memory it was put from"
            with contextlib.suppress(TypeError):
                memoryview(found.data)[:4] = b"evil"
            assert store.get(key_of(1)) == page_of(1), "a page was changed from outside"
        finally:
            store.close()

    def test_a_deleted_page_is_gone(self) -> None:
        """``delete`` says whether the page was there, and it is not there afterwards."""
        store = self.store()
        try:
            store.put(key_of(1), page_of(1))
            store.put(key_of(2), page_of(2))
            assert store.delete(key_of(1)) is True
            assert store.get(key_of(1)) is None
            assert store.delete(key_of(1)) is False
            assert store.delete(key_of("never")) is False
            assert store.get(key_of(2)) == page_of(2), "another page went with it"
        finally:
            store.close()

    def test_contains_counts_leading_keys(self) -> None:
        """``contains`` is the length of the run of present keys from the first one on."""
        store = self.store()
        try:
            for name in (0, 1, 3):
                store.put(key_of(name), page_of(name))
            assert store.contains([key_of(name) for name in range(5)]) == 2
            assert store.contains([key_of(3)]) == 1
            assert store.contains([key_of(2), key_of(3)]) == 0
            assert store.contains([]) == 0
        finally:
            store.close()

    def test_an_expired_page_is_gone(self) -> None:
        """From ``expires_at_s`` on, by the clock it was given, a page is not there."""
        clock = _Clock()
        store = self.store(clock)
        try:
            store.put(key_of(1), page_of(1), expires_at_s=clock.now_s + 60)
            store.put(key_of(2), page_of(2), expires_at_s=clock.now_s + 7200)
            clock.now_s += 59
            assert store.get(key_of(1)) == page_of(1), "it had a second left"
            clock.now_s += 2
            assert store.contains([key_of(1)]) == 0
            assert store.get(key_of(1)) is None
            assert store.get(key_of(2)) == page_of(2), "it has most of two hours left"
        finally:
            store.close()

    def test_retaining_does_not_postpone_expiry(self) -> None:
        """``retain_until_s`` protects from eviction only: an expired page is gone all the same."""
        clock = _Clock()
        store = self.store(clock)
        try:
            later = clock.now_s + 7200
            store.put(key_of(1), page_of(1), expires_at_s=clock.now_s + 60, retain_until_s=later)
            assert store.get(key_of(1)) == page_of(1)
            clock.now_s += 61
            assert store.get(key_of(1)) is None
        finally:
            store.close()

    def test_maintaining_keeps_what_is_there(self) -> None:
        """``maintain`` drops what expired, two hours later at most, and nothing else."""
        clock = _Clock()
        store = self.store(clock)
        try:
            empty = store.size_bytes()
            store.maintain()
            store.put(key_of(1), page_of(1), expires_at_s=clock.now_s + 60)
            store.put(key_of(2), page_of(2), expires_at_s=clock.now_s + 86_400)
            store.maintain()
            assert store.get(key_of(1)) == page_of(1)
            clock.now_s += 7200
            store.maintain()
            assert store.contains([key_of(1)]) == 0
            assert store.get(key_of(2)) == page_of(2), "maintenance dropped a live page"
            store.delete(key_of(2))
            store.maintain()
            assert store.size_bytes() == empty, "an expired page still counts"
        finally:
            store.close()

    def test_explanations_agree_with_get(self) -> None:
        """``explain`` says "present" exactly where ``get`` finds a page, and blames no live key."""
        clock = _Clock()
        store = self.store(clock)
        try:
            content = key_of("tokens")[:16]
            page = StoredPage(data=b"some", content=content)
            store.put(key_of(1), page, expires_at_s=clock.now_s + 60)
            assert store.explain(key_of(1)).state is PageState.PRESENT
            assert store.explain(key_of(2)).state is PageState.UNKNOWN
            other = store.explain(key_of(2), content).state
            assert other in {PageState.UNKNOWN, PageState.OTHER_SALT}, f"{other}: same namespace"
            clock.now_s += 61
            status = store.explain(key_of(1))
            assert status.state in {PageState.EXPIRED, PageState.UNKNOWN}, status
            assert status.since_s is None or status.since_s <= clock.now_s
            store.put(key_of(1), page_of(1))
            assert store.explain(key_of(1)).state is PageState.PRESENT
            store.delete(key_of(1))
            assert store.explain(key_of(1)).state in {PageState.DELETED, PageState.UNKNOWN}
        finally:
            store.close()

    def test_it_counts_its_errors(self) -> None:
        """``stats`` are numbers by name, "errors" among them; nothing here is an error."""
        store = self.store()
        store.put(key_of(1), page_of(1))
        store.get(key_of(2))
        found = store.stats()
        store.close()
        assert found["errors"] == 0, found
        for name, value in found.items():
            assert isinstance(value, int | float), f"{name}: {value!r}"
        assert isinstance(store.stats()["errors"], int | float), "a closed store has no stats"

    def test_size_follows_what_is_held(self) -> None:
        """``size_bytes`` is at least the data held, and comes back when all of it is deleted."""
        store = self.store()
        try:
            empty = store.size_bytes()
            for name in range(8):
                store.put(key_of(name), page_of(name))
            full = store.size_bytes()
            assert full >= empty + 8 * 4096
            store.put(key_of(0), page_of("again"))
            assert store.size_bytes() == full, "the page that was replaced still counts"
            for name in range(8):
                store.delete(key_of(name))
            assert store.size_bytes() == empty
        finally:
            store.close()

    def test_a_full_store_refuses_quietly(self) -> None:
        """Beyond its capacity a store says False or drops older pages; it never raises or lies."""
        store = self.store()
        try:
            for name in range(128):
                kept = store.put(key_of(name), page_of(name, size=65_536))
                assert kept in {True, False}
                if not kept:
                    assert store.get(key_of(name)) is None, "a refused page is there"
            for name in range(128):
                assert store.get(key_of(name)) in (None, page_of(name, size=65_536))
        finally:
            store.close()

    def test_namespaces_do_not_meet(self) -> None:
        """A page of one namespace is never found in another, not even by a later process."""
        directory = _directory(self)
        first = self.store(directory=directory)
        first.put(key_of(1), page_of(1))
        first.close()
        second = self.store(namespace="other-namespace", directory=directory)
        try:
            assert second.get(key_of(1)) is None
            assert second.contains([key_of(1)]) == 0
            assert second.explain(key_of(1)).state is not PageState.PRESENT
        finally:
            second.close()

    def test_a_reopened_store_is_right(self) -> None:
        """What a store finds of its earlier life is what was put last, and not yet expired."""
        clock, directory = _Clock(), _directory(self)
        first = self.store(clock, directory=directory)
        for name in range(6):
            first.put(key_of(name), page_of(name), expires_at_s=clock.now_s + 60 + name % 2 * 7200)
        first.put(key_of(1), page_of("again", exact=False))
        first.delete(key_of(3))
        first.close()
        clock.now_s += 3600
        second = self.store(clock, directory=directory)
        try:
            for name in (0, 2, 3, 4):
                assert second.get(key_of(name)) is None, f"page {name} is back"
            assert second.get(key_of(1)) in (None, page_of("again", exact=False))
            assert second.get(key_of(5)) in (None, page_of(5))
        finally:
            second.close()

    def test_a_closed_store_misses(self) -> None:
        """``close`` may be called twice; afterwards every call is a miss, none raises."""
        store = self.store()
        store.put(key_of(1), page_of(1))
        store.close()
        store.close()
        assert store.put(key_of(2), page_of(2)) is False
        assert store.get(key_of(1)) is None
        assert store.contains([key_of(1)]) == 0
        assert store.delete(key_of(1)) is False
        assert store.explain(key_of(2)).state is PageState.UNKNOWN
        store.maintain()
        assert store.size_bytes() == 0

    def test_threads_see_whole_pages(self) -> None:
        """Concurrent puts, gets and deletes never raise and never mix pages."""
        store = self.store()
        problems: list[str] = []

        def work(seed: int) -> None:
            random = Random(seed)
            try:
                for _ in range(150):
                    name = random.randrange(6)
                    action = random.choice((store.delete, store.put, store.get))
                    if action == store.put:
                        store.put(key_of(name), page_of((name, seed)))
                    elif action == store.delete:
                        store.delete(key_of(name))
                    elif (found := store.get(key_of(name))) not in allowed[name]:
                        problems.append(f"page {name} is {found!r:.60}")
                    store.contains([key_of(name)])
                    store.size_bytes()
            except Exception as error:
                problems.append(repr(error))

        allowed = [[None, *(page_of((name, seed)) for seed in range(4))] for name in range(6)]
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        store.close()
        assert not problems, problems[:3]

    def test_it_names_its_tier(self) -> None:
        """``tier`` is what responses say about a hit: a short name, which a page got bears too."""
        store = self.store()
        assert isinstance(store.tier, str)
        assert store.tier
        store.put(key_of(1), page_of(1))
        found = store.get(key_of(1))
        store.put(key_of(2), page_of(2), expires_at_s=1_800_000_900.0)
        expiring = store.get(key_of(2))
        store.close()
        assert found is not None
        assert found.tier, "the page does not say which tier it came from"
        assert found.expires_at_s is None
        assert expiring is not None
        assert expiring.expires_at_s == 1_800_000_900.0, "its expiry is lost"
