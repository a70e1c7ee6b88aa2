"""Store ``disk``: pages in files that survive the process, the oldest removed a bucket at a time.

Pages that expire about the same time share segments, so a bucket of time is removed by unlinking
its files. A page that is used past its bucket is written again into a later one.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from typing import TypeVar

import lmdb
from attrs import define, evolve

from deepinfer_core.interfaces.kv_store import KvStoreContext, PageState, PageStatus, StoredPage
from deepinfer_core.log import get_logger
from deepinfer_prefix.tiers.configs import DiskConfig
from deepinfer_prefix.tiers.directory import Directory, add_record, leave
from deepinfer_prefix.tiers.history import explain, sweep
from deepinfer_prefix.tiers.index import (
    NAMESPACE_ID_BYTES,
    Entry,
    Index,
    IndexView,
    SegmentInfo,
)
from deepinfer_prefix.tiers.segment import (
    HEADER_BYTES,
    MAX_KEY_BYTES,
    NEVER,
    DamagedSegment,
    Segment,
    record_bytes,
    record_of,
)
from deepinfer_prefix.tiers.times import Rule, Times

MAX_OPEN_BUCKETS = 8
MAX_MOVES = 4096
COMPLAIN_EVERY_S = 60.0
SWEEP_EVERY_S = 3600.0
COUNTERS = (
    "errors",
    "hits",
    "misses",
    "puts",
    "refused",
    "moved",
    "corrupt",
    "evicted",
    "expired",
)

T = TypeVar("T")


@define(kw_only=True)
class _OpenSegment:
    """A segment this process appends to; ``end`` is where the next record goes."""

    number: int
    file: Segment
    end: int = HEADER_BYTES


def namespace_id(namespace: str) -> bytes:
    """The digest that stands for a namespace in files."""
    return hashlib.blake2b(namespace.encode(), digest_size=NAMESPACE_ID_BYTES).digest()


class DiskStore:
    """Pages in a folder, within a quota. See ``KvStore``.

    Raises:
        CompositionError: the folder cannot be used.
    """

    tier = "disk"

    def __init__(self, config: DiskConfig, context: KvStoreContext) -> None:
        self._config, self._clock = config, context.clock
        self._rule = Rule(expire_after_s=config.expire_after_s, retain_s=config.retain_s)
        self._namespace = namespace_id(context.namespace)
        self._labels = {**context.labels, "namespace": context.namespace}
        self._writing = threading.RLock()  # before ``_lock``
        self._lock = threading.RLock()  # never held while pages are read or written
        self._open: OrderedDict[int, _OpenSegment] = OrderedDict()
        self._moves: OrderedDict[bytes, None] = OrderedDict()
        self._counters = dict.fromkeys(COUNTERS, 0.0)
        self._complained_s: dict[str, float] = {}
        self._swept_s = context.clock()
        self._closed = False
        self._next_number = self._total_bytes = 0
        path = Path(config.directory).expanduser() if config.directory else context.directory
        self._directory = Directory(path, read_only=config.read_only, now_s=self._clock())
        self._started()

    # ------------------------------------------------------------------ the store

    def put(
        self,
        key: bytes,
        page: StoredPage,
        *,
        expires_at_s: float | None = None,
        retain_until_s: float | None = None,
    ) -> bool:
        """Append a page to the segment of its bucket."""
        times = self._rule.times(self._clock(), expires_at_s, retain_until_s)

        def put() -> bool:
            kept = self._put(key, page, times)
            self._counters["puts" if kept else "refused"] += 1
            if not kept:
                self._delete(key)
            return kept

        with self._writing:
            return self._guarded("put", False, put)

    def get(self, key: bytes) -> StoredPage | None:
        """Read a page and check that it is what was put."""
        page = self._guarded("get", None, lambda: self._get(key))
        self._counters["misses" if page is None else "hits"] += 1
        return page

    def contains(self, keys: Sequence[bytes]) -> int:
        """Return how many leading keys the index has."""
        return self._guarded("contains", 0, lambda: self._contains(keys))

    def delete(self, key: bytes) -> bool:
        """Drop a page; whether it was there."""
        with self._writing:
            return self._guarded("delete", False, lambda: self._delete(key))

    def explain(self, key: bytes, content: bytes = b"") -> PageStatus:
        """Say what the index remembers of a key, or of the same tokens elsewhere."""
        unknown = PageStatus(tier=self.tier)
        return self._guarded("explain", unknown, lambda: self._explain(key, content))

    def maintain(self) -> None:
        """Remove buckets that expired, write pages again that outlived theirs, forget old ones."""
        with self._writing:
            if self._directory.writable:
                self._guarded("maintain", None, self._maintain)
            elif not self._closed:
                self._follow()

    def size_bytes(self) -> int:
        """Return the bytes of the records of live pages."""
        return self._guarded("size", 0, lambda: sum(info.live_bytes for info in self._infos()))

    def stats(self) -> Mapping[str, float]:
        """Count pages, bytes, segments, hits and misses."""
        none: list[SegmentInfo] = []
        infos = self._guarded("stats", none, self._infos)
        return {
            **self._counters,
            "pages": sum(info.live for info in infos),
            "bytes": sum(info.live_bytes for info in infos),
            "file_bytes": sum(info.end for info in infos),
            "segments": len(infos),
            "quota_bytes": self._config.quota_bytes,
            "read_only": float(not self._directory.writable),
        }

    def close(self) -> None:
        """Seal what is open and let go of the folder."""
        with self._writing, self._lock:
            if self._closed:
                return
            for segment in self._open.values():
                self._guarded("sync", None, segment.file.sync)
            self._closed = True
            self._open.clear()
            self._directory.close()

    # ------------------------------------------------------------------ putting

    def _put(self, key: bytes, page: StoredPage, times: Times) -> bool:
        now_s, size = self._clock(), record_bytes(len(page.data))
        if not self._directory.writable or len(key) > MAX_KEY_BYTES:
            return False
        if times.expires_at_s <= now_s or not self._make_room(size, now_s):
            return False
        if times.retain_until_s > now_s and not self._may_retain(size, now_s):
            times = evolve(times, retain_until_s=0.0)
        record = record_of(key, page.data, times=times, exact=page.exact, content=page.content)
        segment = self._segment_for(self._bucket(times), size)
        segment.file.append(segment.end, record, page.data)
        with self._change() as view:
            earlier = view.entry(self._namespace, key)
            info = view.segment(segment.number)
            if info is None:
                raise OSError(f"segment {segment.number} is not in the index")
            add_record(view, info, segment.end, record)
        segment.end += size
        self._total_bytes += size
        self._bury(earlier)
        return True

    def _bucket(self, times: Times) -> int:
        if times.expires_at_s >= NEVER:
            return NEVER
        step_s = self._config.bucket_s
        return math.ceil(math.ceil(times.expires_at_s / step_s) * step_s)

    def _segment_for(self, bucket: int, size: int) -> _OpenSegment:
        """The open segment of a bucket, a new one if there is none or it is full."""
        found = self._open.get(bucket)
        if found is not None and found.end + size <= self._config.segment_bytes:
            self._open.move_to_end(bucket)
            return found
        if found is not None:
            self._seal(bucket)
        while len(self._open) >= MAX_OPEN_BUCKETS:
            self._seal(next(iter(self._open)))
        number, now_s = self._next_number, self._clock()
        self._next_number += 1
        info = SegmentInfo(
            number=number, bucket=bucket, namespace_id=self._namespace, end=HEADER_BYTES
        )
        path = self._directory.segment_path(info)
        file = Segment.create(path, self._namespace, bucket, now_s)
        with self._change() as view:
            view.set_segment(info)
            self._directory.keep(number, file)
        self._open[bucket] = _OpenSegment(number=number, file=file)
        self._total_bytes += HEADER_BYTES
        return self._open[bucket]

    def _seal(self, bucket: int) -> None:
        segment = self._open.pop(bucket)
        segment.file.sync()
        with self._change() as view:
            info = view.segment(segment.number)
            if info is not None:
                view.set_segment(evolve(info, sealed=True))

    def _bury(self, entry: Entry | None) -> None:
        """Mark the record of an entry dead that has been left, and remove an empty segment."""
        if entry is None or entry.state is not PageState.PRESENT:
            return
        with self._look() as view:
            info = view.segment(entry.segment)
            if info is None or info.state is not PageState.PRESENT:
                return
            file = self._file(info)
        if not info.live:
            self._remove(info, PageState.DELETED, self._clock())
        elif file is not None:
            file.kill(entry.offset)

    # ------------------------------------------------------------------ getting

    def _get(self, key: bytes) -> StoredPage | None:
        with self._look() as view:
            entry = self._alive(view, key)
            info = None if entry is None else view.segment(entry.segment)
            if entry is None or info is None:
                return None
            file = self._file(info)
        read = None if file is None else file.read(entry.offset, entry.size, key)
        if read is None:
            self._counters["corrupt"] += 1
            self._forget(key, entry)
            return None
        self._touch(key, entry, info)
        record, data = read
        return StoredPage(
            data=data,
            exact=record.exact,
            content=record.content,
            tier=self.tier,
            expires_at_s=entry.times.hard_expiry_s,
        )

    def _file(self, info: SegmentInfo) -> Segment | None:
        """The file of a segment, None if it is lost; under the lock."""
        try:
            return self._directory.segment(info)
        except (FileNotFoundError, DamagedSegment):
            return None

    def _alive(self, view: IndexView, key: bytes) -> Entry | None:
        entry = view.entry(self._namespace, key)
        if entry is None or entry.state is not PageState.PRESENT:
            return None
        return None if entry.times.expires_at_s <= self._clock() else entry

    def _contains(self, keys: Iterable[bytes]) -> int:
        with self._look() as view:
            return sum(1 for _ in takewhile(lambda key: self._alive(view, key), keys))

    def _touch(self, key: bytes, entry: Entry, info: SegmentInfo) -> None:
        """Note an access: in the index, or by writing the page again where its bucket ends."""
        times = self._rule.touched(entry.times, self._clock())
        if times is None or not self._directory.writable:
            return
        if times.sliding and self._bucket(times) > info.bucket:
            if len(self._moves) < MAX_MOVES:
                self._moves[key] = None
            return
        with self._change() as view:
            if view.entry(self._namespace, key) == entry:
                view.set_entry(self._namespace, key, evolve(entry, times=times))
                segment = view.segment(info.number)
                if segment is not None:
                    view.set_segment(evolve(segment, accessed_s=times.accessed_s))

    # ------------------------------------------------------------------ dropping

    def _delete(self, key: bytes) -> bool:
        if not self._directory.writable:
            return False
        with self._look() as view:
            entry = self._alive(view, key)
        if entry is not None:
            self._forget(key, entry)
        return entry is not None

    def _forget(self, key: bytes, entry: Entry) -> None:
        """Take a page out of the index; does nothing if there is another by now."""
        if not self._directory.writable:
            return
        with self._writing:
            with self._change() as view:
                if view.entry(self._namespace, key) != entry:
                    return
                leave(view, entry)
                gone = evolve(entry, state=PageState.DELETED, since_s=self._clock())
                view.set_entry(self._namespace, key, gone)
            self._bury(entry)

    def _remove(self, info: SegmentInfo, state: PageState, since_s: float) -> None:
        """Remove a segment as a whole."""
        opened = self._open.get(info.bucket)
        if opened is not None and opened.number == info.number:
            del self._open[info.bucket]
        with self._change() as view:
            gone = evolve(info, live=0, live_bytes=0, sealed=True, state=state, since_s=since_s)
            view.set_segment(gone)
        with self._lock:
            self._directory.remove(info)
        self._total_bytes -= info.end
        if state is not PageState.DELETED:
            self._counters[str(state)] += info.live

    def _make_room(self, size: int, now_s: float) -> bool:
        """Remove segments until ``size`` more bytes fit; whether they do."""
        room = self._config.quota_bytes - size - HEADER_BYTES
        if room < 0 or self._total_bytes <= room:
            return room >= 0
        for info in sorted(self._infos(), key=lambda info: info.accessed_s):
            if self._total_bytes <= room:
                break
            if info.retain_until_s <= now_s:
                self._remove(info, PageState.EVICTED, now_s)
        return self._total_bytes <= room

    def _may_retain(self, size: int, now_s: float) -> bool:
        retained = sum(info.live_bytes for info in self._infos() if info.retain_until_s > now_s)
        return retained + size <= self._config.retain_share * self._config.quota_bytes

    # ------------------------------------------------------------------ maintaining

    def _maintain(self) -> None:
        now_s = self._clock()
        for info in self._infos():
            if info.bucket <= now_s:
                self._remove(info, PageState.EXPIRED, float(info.bucket))
        for key in list(self._moves):
            self._move(key, now_s)
        self._moves.clear()
        if now_s - self._swept_s >= SWEEP_EVERY_S:
            self._swept_s = now_s
            with self._change() as view:
                sweep(view, now_s - self._config.remember_s)

    def _follow(self) -> None:
        """Take over from a writer that is gone, or look whether there is one by now."""
        with self._lock:
            if not self._config.read_only and self._directory.try_to_write(self._clock()):
                self._started()
            else:
                self._directory.try_to_read()

    def _move(self, key: bytes, now_s: float) -> None:
        """Write a page again, into the bucket of its new expiry."""
        with self._look() as view:
            entry = self._alive(view, key)
        page = self._get(key)
        if entry is None or page is None:
            return
        times = self._rule.times(now_s, page.expires_at_s, entry.times.retain_until_s)
        if self._put(key, page, times):
            self._counters["moved"] += 1

    def _explain(self, key: bytes, content: bytes) -> PageStatus:
        with self._look() as view:
            return explain(view, self._namespace, key, content, self._clock())

    # ------------------------------------------------------------------ helpers

    def _started(self) -> None:
        """Take stock of a folder just attached."""
        if not self._directory.writable:
            get_logger("kv_store").warning(
                "kv_store.read_only",
                directory=str(self._directory.path),
                writer_pid=self._directory.writer_pid(),
            )
            return
        with self._change() as view:
            view.set_labels(self._namespace, self._labels)
            infos = list(view.segments())
        self._next_number = max((info.number for info in infos), default=0) + 1
        self._total_bytes = sum(info.end for info in infos if info.state is PageState.PRESENT)

    def _infos(self) -> list[SegmentInfo]:
        """Every segment that is there."""
        with self._look() as view:
            return [info for info in view.segments() if info.state is PageState.PRESENT]

    @contextmanager
    def _look(self) -> Iterator[IndexView]:
        with self._lock, self._index().reading() as view:
            yield view

    @contextmanager
    def _change(self) -> Iterator[IndexView]:
        with self._lock, self._index().writing() as view:
            yield view

    def _index(self) -> Index:
        if self._directory.index is None:
            raise OSError("the store is closed")
        return self._directory.index

    def _guarded(self, call: str, otherwise: T, work: Callable[[], T]) -> T:
        """Do some work; whatever the disk does to it is counted and logged, and a miss."""
        if self._closed or self._directory.index is None:
            return otherwise
        try:
            return work()
        except (OSError, lmdb.Error) as error:
            self._counters["errors"] += 1
            now_s = self._clock()
            if now_s - self._complained_s.get(call, -math.inf) >= COMPLAIN_EVERY_S:
                self._complained_s[call] = now_s
                get_logger("kv_store").warning(
                    "kv_store.failed", tier=self.tier, call=call, error=repr(error)
                )
            return otherwise


def build(config: DiskConfig, context: KvStoreContext) -> DiskStore:
    """Make store ``disk``."""
    return DiskStore(config, context)
