"""The disk store: time, room, damage, other processes, and what a killed process leaves."""

from __future__ import annotations

import hashlib
import os
import random
import resource
import shutil
import signal
import stat
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from attrs import define

from deepinfer_core.errors import CompositionError
from deepinfer_core.interfaces.kv_store import KvStoreContext, PageState, StoredPage
from deepinfer_prefix.tiers.configs import DiskConfig
from deepinfer_prefix.tiers.disk import DiskStore
from deepinfer_prefix.tiers.index import Index
from deepinfer_prefix.tiers.segment import HEADER_BYTES, record_bytes

HOUR_S = 3600.0
DAY_S = 86400.0


@define
class Clock:
    now_s: float = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now_s


def key(name: object) -> bytes:
    return hashlib.blake2b(repr(name).encode(), digest_size=32).digest()


def page(name: object, size: int = 1000, *, exact: bool = True, content: bytes = b"") -> StoredPage:
    return StoredPage(data=random.Random(repr(name)).randbytes(size), exact=exact, content=content)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def make(tmp_path: Path, clock: Clock) -> Iterator[Callable[..., DiskStore]]:
    made: list[DiskStore] = []

    def build(name: str = "kv", namespace: str = "n", **options: Any) -> DiskStore:
        context = KvStoreContext(namespace=namespace, clock=clock, directory=tmp_path / name)
        made.append(DiskStore(DiskConfig(**options), context))
        return made[-1]

    yield build
    for store in made:
        store.close()


def segments(path: Path) -> list[Path]:
    return sorted((path / "segments").iterdir())


def abandon(store: DiskStore, path: Path, to: Path) -> Path:
    """Copy a folder as a process that is killed now would leave it."""
    assert store.size_bytes() >= 0
    shutil.copytree(path, to)
    return to


# ---------------------------------------------------------------------- time


def test_accesses_postpone_expiry(make: Any, clock: Clock) -> None:
    store = make(expire_after_s=DAY_S)
    store.put(key(1), page(1))
    store.put(key(2), page(2))
    for _ in range(5):
        clock.now_s += 20 * HOUR_S
        assert store.get(key(1)) == page(1)
        store.maintain()
    assert store.get(key(2)) is None
    assert store.stats()["moved"] >= 1
    clock.now_s += DAY_S + 1
    assert store.contains([key(1)]) == 0


def test_an_access_within_the_bucket_counts_too(make: Any, clock: Clock) -> None:
    store = make(expire_after_s=60.0, bucket_s=100_000.0)
    clock.now_s = 1_800_000_000.0
    store.put(key(1), page(1))
    clock.now_s += 50
    assert store.get(key(1)) == page(1)
    clock.now_s += 50
    assert store.get(key(1)) == page(1)
    assert store.stats()["moved"] == 0
    clock.now_s += 61
    assert store.get(key(1)) is None


def test_accesses_do_not_postpone_an_expiry_that_was_asked_for(make: Any, clock: Clock) -> None:
    store = make()
    end_s = clock.now_s + 3 * HOUR_S
    store.put(key(1), page(1), expires_at_s=end_s)
    for _ in range(2):
        clock.now_s += HOUR_S
        found = store.get(key(1))
        assert found == page(1)
        assert found.expires_at_s == end_s
        store.maintain()
    clock.now_s = end_s
    assert store.get(key(1)) is None


def test_an_expired_bucket_goes_file_by_file(make: Any, clock: Clock, tmp_path: Path) -> None:
    store = make(segment_bytes=4000, bucket_s=HOUR_S)
    for name in range(12):
        store.put(key(name), page(name), expires_at_s=clock.now_s + 600)
    store.put(key("late"), page("late"), expires_at_s=clock.now_s + DAY_S)
    assert len(segments(tmp_path / "kv")) == 5
    clock.now_s += 600
    assert store.contains([key(3)]) == 0, "expiry is to the second, whenever files go"
    clock.now_s += 2 * HOUR_S
    store.maintain()
    assert len(segments(tmp_path / "kv")) == 1
    assert store.get(key("late")) == page("late")
    assert store.stats()["expired"] == 12


def test_pages_may_stay_for_ever(make: Any, clock: Clock) -> None:
    store = make(expire_after_s=0.0)
    store.put(key(1), page(1))
    clock.now_s += 10_000 * DAY_S
    store.maintain()
    assert store.get(key(1)) == page(1)


def test_what_is_gone_is_explained_and_then_forgotten(make: Any, clock: Clock) -> None:
    store = make(remember_s=DAY_S)
    end_s = clock.now_s + 600
    store.put(key(1), page(1), expires_at_s=end_s)
    clock.now_s += 5 * HOUR_S
    for _ in range(2):
        status = store.explain(key(1))
        assert (status.state, status.since_s) == (PageState.EXPIRED, end_s)
        store.maintain()
    clock.now_s += 2 * DAY_S
    store.maintain()
    assert store.explain(key(1)).state is PageState.UNKNOWN


def test_the_same_tokens_elsewhere_are_named(make: Any, clock: Clock) -> None:
    tokens = bytes(range(16))
    store = make(namespace="n")
    store.put(key("salt a"), page(1, content=tokens))
    assert store.explain(key("salt b"), tokens).state is PageState.OTHER_SALT
    assert store.explain(key("salt b"), bytes(16)).state is PageState.UNKNOWN
    store.close()
    other = make(namespace="m")
    assert other.explain(key("salt a"), tokens).state is PageState.OTHER_LAYOUT


# ---------------------------------------------------------------------- room


def test_files_never_exceed_the_quota(make: Any, tmp_path: Path, clock: Clock) -> None:
    store = make(quota_bytes=20_000, segment_bytes=5000)
    for name in range(100):
        clock.now_s += 1
        assert store.put(key(name), page(name))
        used = sum(file.stat().st_size for file in segments(tmp_path / "kv"))
        assert used <= 20_000
        assert used == store.stats()["file_bytes"]
    assert store.get(key(99)) == page(99)
    assert store.explain(key(0)).state is PageState.EVICTED
    assert store.stats()["evicted"] > 80


def test_segments_not_used_for_longest_go_first(make: Any, clock: Clock) -> None:
    store = make(quota_bytes=10_000, segment_bytes=2500)
    for name in range(6):
        store.put(key(name), page(name))
    clock.now_s += DAY_S / 2
    assert store.get(key(0)) == page(0)
    store.maintain()
    for name in range(6, 10):
        store.put(key(name), page(name))
    assert store.get(key(0)) == page(0)
    assert store.get(key(2)) is None


def test_retained_pages_are_not_evicted(make: Any, clock: Clock) -> None:
    store = make(quota_bytes=20_000, segment_bytes=3000, retain_share=0.5)
    later_s = clock.now_s + HOUR_S
    store.put(key("kept"), page("kept"), retain_until_s=later_s)
    for name in range(50):
        clock.now_s += 1
        store.put(key(name), page(name))
    assert store.get(key("kept")) == page("kept")
    clock.now_s += HOUR_S
    for name in range(50, 100):
        clock.now_s += 1
        store.put(key(name), page(name))
    assert store.get(key("kept")) is None


def test_the_budget_of_retained_pages_is_bounded(make: Any, clock: Clock) -> None:
    store = make(quota_bytes=20_000, segment_bytes=3000, retain_share=0.5)
    for name in range(100):
        assert store.put(key(name), page(name), retain_until_s=clock.now_s + HOUR_S), name
        clock.now_s += 1


def test_a_page_beyond_the_quota_is_refused(make: Any) -> None:
    store = make(quota_bytes=5000)
    assert store.put(key(1), page(1, size=6000)) is False
    assert store.put(key(2), page(2, size=3000)) is True


def test_keys_that_are_too_long_are_refused(make: Any) -> None:
    store = make()
    assert store.put(bytes(65), page(1)) is False
    assert store.put(bytes(64), page(1)) is True
    assert store.get(bytes(64)) == page(1)
    assert store.get(bytes(65)) is None


def test_a_segment_without_pages_is_removed(make: Any, tmp_path: Path) -> None:
    store = make(segment_bytes=3000)
    for name in range(4):
        store.put(key(name), page(name))
    assert len(segments(tmp_path / "kv")) == 2
    store.delete(key(0))
    store.put(key(1), page("again"))
    assert len(segments(tmp_path / "kv")) == 2
    assert not (tmp_path / "kv" / "segments" / "000000000001.seg").exists()


# ---------------------------------------------------------------------- disks that fail


def test_a_full_disk_is_a_miss_and_heals(make: Any) -> None:
    store = make(segment_bytes=1 << 20)
    store.put(key(0), page(0))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (6000, hard))
    try:
        results = [store.put(key(name), page(name)) for name in range(1, 9)]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert False in results
    assert store.stats()["errors"] > 0
    assert store.get(key(0)) == page(0)
    for name, kept in enumerate(results, 1):
        assert store.get(key(name)) == (page(name) if kept else None)
    assert store.put(key("later"), page("later"))
    assert store.get(key("later")) == page("later")


def test_a_folder_that_vanishes_is_a_miss(make: Any, tmp_path: Path) -> None:
    store = make(segment_bytes=2500)
    for name in range(4):
        store.put(key(name), page(name))
    shutil.rmtree(tmp_path / "kv")
    for name in range(4, 9):
        store.put(key(name), page(name))
    for name in range(9):
        assert store.get(key(name)) in (None, page(name))
    store.maintain()
    assert store.stats()["errors"] > 0


LOST_PERMISSION = """
    import os
    import structlog  # its files may be out of reach below
    structlog.get_logger().info("imports what it needs")
    root = Path(sys.argv[1])
    os.chmod(root, 0o777)
    if os.geteuid() == 0:
        os.seteuid(65534)
    store = opened(root / "kv", segment_bytes=2500)
    for name in range(3):
        assert store.put(key(name), page(name))
    os.chmod(root / "kv" / "segments", 0o000)
    kept = [store.put(key(name), page(name)) for name in range(3, 7)]
    assert False in kept, "nothing failed"
    assert store.stats()["errors"] > 0
    assert store.get(key(2)) == page(2), "an open segment can still be read"
    os.chmod(root / "kv" / "segments", 0o700)
    assert store.put(key(9), page(9)), "it does not heal"
    assert store.get(key(0)) == page(0)
    print("done")
"""


def test_lost_permission_is_a_miss_and_heals(child: Any, tmp_path: Path) -> None:
    for parent in [tmp_path, *tmp_path.parents]:
        if parent.stat().st_uid == os.geteuid() and "pytest" in str(parent):
            parent.chmod(0o755)
    assert child(LOST_PERMISSION, tmp_path).communicate()[0].strip().endswith("done")


def test_a_folder_that_cannot_be_used_is_refused(make: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CompositionError, match=r"set kv_store\.directory"):
        make("file")


def test_files_are_for_their_owner_only(make: Any, tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        store = make()
        store.put(key(1), page(1))
    finally:
        os.umask(old)
    for path in [tmp_path / "kv", *(tmp_path / "kv").rglob("*")]:
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path


# ---------------------------------------------------------------------- damage


def test_a_tail_cut_at_any_byte_loses_nothing_else(make: Any, clock: Clock, tmp_path: Path) -> None:
    store = make()
    for name in range(3):
        store.put(key(name), page(name, 100))
    before = abandon(store, tmp_path / "kv", tmp_path / "before")
    store.put(key("last"), page("last", 200))
    store.put(key(1), page("again", 100))
    [file] = segments(tmp_path / "kv")
    whole = file.read_bytes()
    begin = HEADER_BYTES + 3 * record_bytes(100)
    assert len(whole) == begin + record_bytes(200) + record_bytes(100)
    seen = set()
    for cut in [*range(begin, len(whole), 7), len(whole)]:
        shutil.copytree(before, tmp_path / f"{cut}")
        (tmp_path / f"{cut}" / "segments" / file.name).write_bytes(whole[:cut])
        with_tail = make(f"{cut}")
        assert with_tail.get(key(0)) == page(0, 100)
        assert with_tail.get(key(2)) == page(2, 100)
        assert with_tail.get(key(1)) in (page(1, 100), page("again", 100), None)
        found = with_tail.get(key("last"))
        assert found in (None, page("last", 200))
        seen.add((found is None, with_tail.get(key(1)) == page("again", 100)))
        assert with_tail.put(key("new"), page("new"))
        assert with_tail.get(key("new")) == page("new")
        with_tail.close()
    assert (True, False) in seen
    assert (False, True) in seen


@pytest.mark.parametrize("rebuilt", [False, True], ids=["index kept", "index lost"])
def test_a_flipped_bit_anywhere_is_a_miss(
    make: Any, tmp_path: Path, clock: Clock, rebuilt: bool
) -> None:
    store = make()
    for name in range(3):
        store.put(key(name), page(name, 150, exact=bool(name % 2)))
    store.close()
    [file] = segments(tmp_path / "kv")
    whole = file.read_bytes()
    misses = 0
    for at in range(0, len(whole), 17):
        damaged = tmp_path / f"{at}"
        shutil.copytree(tmp_path / "kv", damaged)
        raw = bytearray(whole)
        raw[at] ^= 1 << random.Random(at).randrange(8)
        (damaged / "segments" / file.name).write_bytes(raw)
        if rebuilt:
            shutil.rmtree(damaged / "index")
        reopened = make(f"{at}")
        for name in range(3):
            found = reopened.get(key(name))
            assert found in (None, page(name, 150, exact=bool(name % 2))), at
            misses += found is None
        assert reopened.put(key("new"), page("new"))
        assert reopened.get(key("new")) == page("new")
        reopened.close()
        shutil.rmtree(damaged)
    assert misses > 20


def test_a_damaged_page_is_dropped_and_counted(make: Any, tmp_path: Path) -> None:
    store = make()
    store.put(key(1), page(1))
    [file] = segments(tmp_path / "kv")
    raw = bytearray(file.read_bytes())
    raw[HEADER_BYTES * 2 + 10] ^= 4
    file.write_bytes(raw)
    assert store.get(key(1)) is None
    assert store.stats()["corrupt"] == 1
    assert store.contains([key(1)]) == 0
    assert store.explain(key(1)).state is PageState.DELETED


def test_pages_swapped_in_a_file_are_misses(make: Any, tmp_path: Path) -> None:
    store = make()
    for name in range(2):
        store.put(key(name), page(name))
    [file] = segments(tmp_path / "kv")
    raw, size = file.read_bytes(), record_bytes(1000)
    first, second = raw[HEADER_BYTES : HEADER_BYTES + size], raw[HEADER_BYTES + size :]
    file.write_bytes(raw[:HEADER_BYTES] + second + first)
    assert store.get(key(0)) is None
    assert store.get(key(1)) is None


def test_a_segment_of_another_namespace_is_a_miss(make: Any, tmp_path: Path) -> None:
    for namespace in ("n", "m"):
        store = make(namespace, namespace=namespace)
        store.put(key(1), page(namespace))
        store.close()
    [mine], [other] = segments(tmp_path / "n"), segments(tmp_path / "m")
    mine.write_bytes(other.read_bytes())
    assert make("n", namespace="n").get(key(1)) is None


@pytest.mark.parametrize("content", [b"", b"no index at all", os.urandom(1 << 16)])
def test_a_damaged_index_is_built_anew(make: Any, tmp_path: Path, content: bytes) -> None:
    store = make()
    store.put(key(1), page(1))
    store.delete(key(1))
    store.put(key(2), page(2))
    store.close()
    (tmp_path / "kv" / "index" / "data.mdb").write_bytes(content)
    store = make()
    assert store.get(key(2)) == page(2)
    assert store.get(key(1)) is None, "a deleted page is back"


def test_an_index_cut_short_is_built_anew(make: Any, tmp_path: Path) -> None:
    store = make()
    for name in range(300):
        store.put(key(name), page(name, 10))
    store.close()
    data = tmp_path / "kv" / "index" / "data.mdb"
    os.truncate(data, data.stat().st_size // 2 // 4096 * 4096)
    store = make()
    assert all(store.get(key(name)) == page(name, 10) for name in range(300))


def test_the_index_is_not_trusted_after_a_restart_of_the_machine(make: Any, tmp_path: Path) -> None:
    store = make()
    for name in range(5):
        store.put(key(name), page(name))
    store.put(key(3), page("again"))
    store.delete(key(4))
    left = abandon(store, tmp_path / "kv", tmp_path / "left")
    index = Index(left / "index")
    with index.writing() as view:
        view.set_meta(b"boot", b"an earlier one")
        for namespace_id, page_key, _ in list(view.entries()):
            view.drop_entry(namespace_id, page_key)
    index.close()
    store = make("left")
    assert store.get(key(0)) == page(0)
    assert store.get(key(3)) == page("again")
    assert store.get(key(4)) is None


def test_no_page_is_pickled() -> None:
    import deepinfer_prefix.tiers as package

    for file in Path(str(package.__file__)).parent.glob("*.py"):
        assert "pickle" not in file.read_text(), file


# ---------------------------------------------------------------------- processes

PRELUDE = """
import hashlib, random, sys, time
from pathlib import Path
from deepinfer_core.interfaces.kv_store import KvStoreContext, StoredPage
from deepinfer_prefix.tiers.configs import DiskConfig
from deepinfer_prefix.tiers.disk import DiskStore

def key(name):
    return hashlib.blake2b(repr(name).encode(), digest_size=32).digest()

def page(name, size=1000):
    return StoredPage(data=random.Random(repr(name)).randbytes(size))

def opened(path, **options):
    clock = lambda: 1_800_000_000.0
    context = KvStoreContext(namespace="n", clock=clock, directory=Path(path))
    return DiskStore(DiskConfig(**options), context)
"""


@pytest.fixture
def child() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def start(code: str, *args: object) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", PRELUDE + textwrap.dedent(code), *map(str, args)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


WRITES_FOR_EVER = """
    store = opened(sys.argv[1], segment_bytes=20_000)
    shapes = random.Random(sys.argv[2])
    for step in range(1_000_000):
        name, version = shapes.randrange(40), f"{sys.argv[2]}-{step}"
        if shapes.random() < 0.2:
            print("delete", name, flush=True)
            store.delete(key(name))
            print("deleted", name, flush=True)
            continue
        size = shapes.randrange(1, 6000)
        print("put", name, version, size, flush=True)
        assert store.put(key(name), page((name, version), size))
        print("kept", name, version, size, flush=True)
"""


def test_a_killed_process_loses_nothing_it_was_told_is_kept(
    child: Any, make: Any, tmp_path: Path
) -> None:
    moments = random.Random(7)
    known: dict[int, list[StoredPage | None]] = {}
    for life in range(6):
        process = child(WRITES_FOR_EVER, tmp_path / "kv", life)
        lines = [process.stdout.readline() for _ in range(moments.randrange(2, 300))]
        process.send_signal(signal.SIGKILL)
        lines += process.stdout.read().splitlines(keepends=True)
        for line in lines:
            if not line.endswith("\n"):  # cut short: what it was to say was not said
                break
            word, name, *rest = line.split()
            last = page((int(name), rest[0]), int(rest[1])) if len(rest) == 2 else None
            if word in {"put", "delete"}:  # on its way: the old or the new
                known[int(name)] = [*known.get(int(name), [None]), last]
            elif word in {"kept", "deleted"}:
                known[int(name)] = [last]
        store = make()
        assert store.stats()["read_only"] == 0
        for name, allowed in known.items():
            found = store.get(key(name))
            assert found in allowed, f"life {life}, page {name}"
            known[name] = [found]
        assert store.stats()["corrupt"] == 0
        store.close()
    assert sum(allowed != [None] for allowed in known.values()) > 5


WRITES_ON_DEMAND = """
    store = opened(sys.argv[1])
    print(store.stats()["read_only"], flush=True)
    for line in sys.stdin:
        print(store.put(key(int(line)), page(int(line))), flush=True)
"""


def tell(process: Any, name: int) -> str:
    process.stdin.write(f"{name}\n")
    process.stdin.flush()
    return str(process.stdout.readline().strip())


def test_a_second_process_reads_and_takes_over(child: Any, make: Any, tmp_path: Path) -> None:
    writer = child(WRITES_ON_DEMAND, tmp_path / "kv")
    assert writer.stdout.readline().strip() == "0.0"
    assert tell(writer, 1) == "True"
    reader = make()
    assert reader.stats()["read_only"] == 1
    assert reader.get(key(1)) == page(1)
    assert reader.put(key(2), page(2)) is False
    assert reader.delete(key(1)) is False
    assert tell(writer, 3) == "True"
    assert reader.get(key(3)) == page(3), "it does not see what was written since"
    assert reader.explain(key(3)).state is PageState.PRESENT
    reader.maintain()
    assert reader.stats()["read_only"] == 1
    writer.kill()
    writer.wait()
    reader.maintain()
    assert reader.stats()["read_only"] == 0
    assert reader.put(key(2), page(2)) is True
    assert reader.contains([key(1), key(2), key(3)]) == 3
    second = child(WRITES_ON_DEMAND, tmp_path / "kv")
    assert second.stdout.readline().strip() == "1.0"
    assert tell(second, 5) == "False"


def test_a_process_may_be_told_only_to_read(make: Any, tmp_path: Path) -> None:
    store = make()
    store.put(key(1), page(1))
    store.close()
    before = [file.read_bytes() for file in segments(tmp_path / "kv")]
    reader = make(read_only=True)
    assert reader.get(key(1)) == page(1)
    assert reader.put(key(2), page(2)) is False
    reader.maintain()
    reader.close()
    assert [file.read_bytes() for file in segments(tmp_path / "kv")] == before


def test_one_process_opens_a_folder_once(make: Any) -> None:
    make()
    with pytest.raises(CompositionError, match="open in this process already"):
        make()


READS_WHILE_OTHERS_EVICT = """
    store = opened(sys.argv[1], read_only=True)
    wrong = hits = 0
    print("ready", flush=True)
    sys.stdin.readline()
    for step in range(3000):
        name = step % 50
        found = store.get(key(name))
        hits += found is not None
        wrong += found is not None and found != page(name)
    print(hits > 0, wrong, flush=True)
"""


def test_a_reader_never_sees_half_a_page(child: Any, make: Any, tmp_path: Path) -> None:
    store = make(quota_bytes=40_000, segment_bytes=5000)
    for name in range(25):
        store.put(key(name), page(name))
    reader = child(READS_WHILE_OTHERS_EVICT, tmp_path / "kv")
    assert reader.stdout.readline().strip() == "ready"
    reader.stdin.write("go\n")
    reader.stdin.flush()
    step = 0
    while reader.poll() is None and step < 20_000:
        store.put(key(step % 50), page(step % 50))
        step += 1
    assert reader.stdout.readline().strip() == "True 0"
