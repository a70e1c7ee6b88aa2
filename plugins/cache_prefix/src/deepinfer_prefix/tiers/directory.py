"""The folder of a disk store: who may write in it, and what a new writer finds there.

Any number of processes read; the one that holds the lock writes. It never appends to the segments
of an earlier writer, whose last record may be torn.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path

import lmdb
from attrs import evolve

from deepinfer_core.errors import CompositionError, reason
from deepinfer_core.interfaces.kv_store import PageState
from deepinfer_core.log import get_logger
from deepinfer_prefix.tiers.index import Entry, Index, IndexView, SegmentInfo
from deepinfer_prefix.tiers.segment import (
    CONTENT_BYTES,
    HEADER_BYTES,
    DamagedSegment,
    Record,
    Segment,
    record_bytes,
)

FORMAT = b"deepinfer-kv 1"
MAX_OPEN_FILES = 64
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Directory:
    """An attached folder. Its methods are called under the store's lock.

    Attributes:
        path: the folder.
        index: its index; None where another process has not made one yet.
        writable: whether this process writes.

    Raises:
        CompositionError: the folder cannot be used at all; says why and what to do.
    """

    def __init__(self, path: Path, *, read_only: bool = False, now_s: float) -> None:
        self.path = path
        self.index: Index | None = None
        self.writable = False
        self._lock_file: int | None = None
        self._segments: OrderedDict[int, Segment] = OrderedDict()
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not read_only:
                (path / "segments").mkdir(mode=0o700, exist_ok=True)
            if read_only or not self.try_to_write(now_s):
                self._refuse_twice()
                self.try_to_read()
        except (OSError, lmdb.Error) as error:
            raise CompositionError(
                f"kv_store: {path} cannot be used: {reason(error)}; "
                "set kv_store.directory to a local folder that this user may write"
            ) from error

    # ------------------------------------------------------------------ attaching

    def try_to_write(self, now_s: float) -> bool:
        """Become the writer, unless another process is; whether this one is now.

        Raises:
            OSError: the folder cannot be written.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        lock_file = os.open(self.path / "writer.lock", flags, 0o600)
        try:
            fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock_file)
            return False
        except OSError:
            os.close(lock_file)
            raise
        self._segments.clear()
        if self.index is not None:
            self.index.close()
            self.index = None
        os.truncate(lock_file, 0)
        os.pwrite(lock_file, str(os.getpid()).encode(), 0)
        self._lock_file = lock_file
        try:
            self.index = _recovered(self.path, now_s)
        except BaseException:
            self._unlock()
            raise
        self.writable = True
        return True

    def try_to_read(self) -> bool:
        """Attach to what another process writes; whether there is anything yet."""
        if self.index is None:
            with contextlib.suppress(lmdb.Error, OSError):  # not there yet
                num_bytes = (self.path / "index" / "data.mdb").stat().st_size
                index = Index(self.path / "index", read_only=True)
                if index.whole(num_bytes):
                    self.index = index
                else:
                    index.close()
        return self.index is not None

    def writer_pid(self) -> int | None:
        """The process that writes, as it said itself."""
        try:
            return int((self.path / "writer.lock").read_text())
        except (OSError, ValueError):
            return None

    def _refuse_twice(self) -> None:
        if self.writer_pid() == os.getpid():
            raise CompositionError(
                f"kv_store: {self.path} is open in this process already; "
                "give each engine a kv_store.directory of its own"
            )

    def close(self) -> None:
        """Let go of everything; a writer leaves an index that need not be checked."""
        self._segments.clear()
        index, self.index = self.index, None
        if index is not None:
            try:
                if self.writable:
                    with index.writing() as view:
                        for info in list(view.segments()):
                            if not info.sealed:
                                view.set_segment(evolve(info, sealed=True))
                        view.set_meta(b"clean", b"1")
                    index.close(sync=True)
                else:
                    index.close()
            except lmdb.Error as error:
                get_logger("kv_store").warning("kv_store.failed", call="close", error=repr(error))
        self.writable = False
        self._unlock()

    def _unlock(self) -> None:
        if self._lock_file is not None:
            os.truncate(self._lock_file, 0)
            fcntl.flock(self._lock_file, fcntl.LOCK_UN)  # even if a forked child holds it too
            os.close(self._lock_file)
            self._lock_file = None

    # ------------------------------------------------------------------ segments

    def segment_path(self, info: SegmentInfo) -> Path:
        """Where a segment's file lies."""
        return self.path / "segments" / info.file_name

    def segment(self, info: SegmentInfo) -> Segment:
        """An open segment.

        Raises:
            OSError: it cannot be opened.
            DamagedSegment: the file is not what the index says.
        """
        found = self._segments.get(info.number)
        if found is None:
            path = self.segment_path(info)
            found = Segment.open(path, writable=self.writable)
            if (found.namespace_id, found.bucket) != (info.namespace_id, info.bucket):
                raise DamagedSegment(f"{path} is another segment than the index knows")
            self.keep(info.number, found)
        self._segments.move_to_end(info.number)
        return found

    def keep(self, number: int, segment: Segment) -> None:
        """Keep a segment open for later readers, in place of the one not used for longest."""
        self._segments[number] = segment
        while len(self._segments) > MAX_OPEN_FILES:
            self._segments.popitem(last=False)

    def remove(self, info: SegmentInfo) -> None:
        """Remove a segment's file; one that cannot be removed is left to the next writer."""
        self._segments.pop(info.number, None)
        with contextlib.suppress(OSError):
            self.segment_path(info).unlink(missing_ok=True)


# ---------------------------------------------------------------------- recovery


def _recovered(path: Path, now_s: float) -> Index:
    """Open the index as its only writer and bring it up to what the segments hold."""
    index = _trusted(path)
    if index is None:
        shutil.rmtree(path / "index", ignore_errors=True)
        (path / "index").mkdir(mode=0o700)
        index = Index(path / "index")
    files = _files(path / "segments")
    with index.writing() as view:
        for info in list(view.segments()):
            _revise(view, info, files.pop(info.number, None), now_s)
        for number, file in sorted(files.items()):
            _adopt(view, number, file, now_s)
        view.set_meta(b"format", FORMAT)
        view.set_meta(b"boot", _boot_id())
        view.set_meta(b"clean", b"")
    return index


def _trusted(path: Path) -> Index | None:
    """The index as it lies there, unless it may be damaged.

    A killed process leaves it whole, since the system still holds what was written. A machine that
    stopped may not have.
    """
    data = path / "index" / "data.mdb"
    if not data.exists():
        return None
    num_bytes = data.stat().st_size
    try:
        index = Index(path / "index")
    except lmdb.Error:
        return None
    try:
        if not index.whole(num_bytes):
            raise ValueError("the index was cut short")
        with index.reading() as view:
            same_boot = _boot_id() != b"" and view.meta(b"boot") == _boot_id()
            whole = view.meta(b"clean") == b"1" or same_boot
            if view.meta(b"format") == FORMAT and whole:
                return index
    except (lmdb.Error, ValueError):
        pass
    index.close()
    return None


def _boot_id() -> bytes:
    try:
        return BOOT_ID.read_bytes().strip()
    except OSError:
        return b""


def _files(folder: Path) -> dict[int, Path]:
    return {int(file.stem): file for file in folder.glob("*.seg") if file.stem.isdecimal()}


def _revise(view: IndexView, info: SegmentInfo, file: Path | None, now_s: float) -> None:
    """Compare a segment of the index with its file."""
    if info.state is not PageState.PRESENT:
        if file is not None:
            file.unlink()
    elif file is None:
        view.set_segment(evolve(info, state=PageState.DELETED, since_s=now_s))
    elif not info.sealed:
        try:
            segment = Segment.open(file, writable=False)
            info = add_records(view, info, segment.scan(info.end))
        except OSError:
            info = evolve(info, state=PageState.DELETED, since_s=now_s)
            file.unlink()
        view.set_segment(evolve(info, sealed=True))


def _adopt(view: IndexView, number: int, file: Path, now_s: float) -> None:
    """Take a file into the index that it does not know."""
    try:
        segment = Segment.open(file, writable=False)
        info = SegmentInfo(
            number=number,
            bucket=segment.bucket,
            namespace_id=segment.namespace_id,
            end=HEADER_BYTES,
            sealed=True,
        )
        info = add_records(view, info, segment.scan())
    except OSError:
        file.unlink()
        return
    if info.live and info.bucket > now_s:
        view.set_segment(info)
    else:
        file.unlink()


def add_records(
    view: IndexView, info: SegmentInfo, records: Iterable[tuple[int, Record]]
) -> SegmentInfo:
    """Enter what a scan found into the index; returns what is known of the segment then."""
    view.set_segment(info)
    for offset, record in records:
        earlier = view.entry(info.namespace_id, record.key)
        superseded = earlier is not None and earlier.times.accessed_s > record.times.accessed_s
        if record.live and not superseded:
            info = add_record(view, info, offset, record)
        else:
            info = evolve(info, end=offset + record.num_bytes)
            view.set_segment(info)
    return info


def add_record(view: IndexView, info: SegmentInfo, offset: int, record: Record) -> SegmentInfo:
    """Make a record its page's place; returns what is known of its segment then."""
    earlier = view.entry(info.namespace_id, record.key)
    if earlier is not None:
        leave(view, earlier)
        info = view.segment(info.number) or info
    entry = Entry(
        segment=info.number,
        offset=offset,
        size=record.size,
        times=record.times,
        exact=record.exact,
    )
    view.set_entry(info.namespace_id, record.key, entry)
    if record.content:
        content = record.content.ljust(CONTENT_BYTES, b"\0")
        view.note_content(content, info.namespace_id, record.key)
    info = evolve(
        info,
        end=offset + record.num_bytes,
        live=info.live + 1,
        live_bytes=info.live_bytes + record.num_bytes,
        retain_until_s=max(info.retain_until_s, record.times.retain_until_s),
        accessed_s=max(info.accessed_s, record.times.accessed_s),
    )
    view.set_segment(info)
    return info


def leave(view: IndexView, entry: Entry) -> None:
    """Count a page out of its segment."""
    info = view.segment(entry.segment)
    if entry.state is not PageState.PRESENT or info is None:
        return
    left = info.live_bytes - record_bytes(entry.size)
    view.set_segment(evolve(info, live=info.live - 1, live_bytes=left))
