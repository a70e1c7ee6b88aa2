"""The index of a directory of segments, in LMDB: where each page lies, and why others do not.

One process writes, any number read. The index of pages that are gone stays for a while, so that
they can be explained; their segments are marked, so that expiry and eviction of a segment touch
one entry whatever it holds.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lmdb
from attrs import evolve, frozen

from deepinfer_core.interfaces.kv_store import PageState
from deepinfer_prefix.tiers.times import Times

MAP_BYTES = 1 << 30
"""Address space of the index, enough for some five million pages; the file grows as needed."""

NAMESPACE_ID_BYTES = 16

_ENTRY = struct.Struct("<QQQdddBBBd")
_SEGMENT = struct.Struct("<q16sQQQddBBd")
_NUMBER = struct.Struct(">Q")
_STATES = tuple(PageState)


@frozen(kw_only=True)
class Entry:
    """Where a page lies.

    Attributes:
        segment: number of its segment.
        offset: of its record.
        size: bytes of data.
        times: as of its last access that was noted.
        exact: provenance.
        state: PRESENT, or why it is gone.
        since_s: when it went.
    """

    segment: int
    offset: int
    size: int
    times: Times
    exact: bool
    state: PageState = PageState.PRESENT
    since_s: float = 0.0

    def pack(self) -> bytes:
        """Return the value for LMDB."""
        return _ENTRY.pack(
            self.segment,
            self.offset,
            self.size,
            self.times.expires_at_s,
            self.times.retain_until_s,
            self.times.accessed_s,
            self.times.sliding,
            self.exact,
            _STATES.index(self.state),
            self.since_s,
        )

    @classmethod
    def unpack(cls, raw: bytes) -> Entry:
        """Read a value."""
        segment, offset, size, expires, retain, accessed, sliding, exact, state, since = (
            _ENTRY.unpack(raw)
        )
        return cls(
            segment=segment,
            offset=offset,
            size=size,
            times=Times(
                expires_at_s=expires,
                sliding=bool(sliding),
                retain_until_s=retain,
                accessed_s=accessed,
            ),
            exact=bool(exact),
            state=_STATES[state],
            since_s=since,
        )


@frozen(kw_only=True)
class SegmentInfo:
    """What is known of a segment.

    Attributes:
        number: its number, unique in the directory.
        bucket: second since the epoch by which all its pages have expired.
        namespace_id: whose pages it holds.
        end: end of what is valid.
        live: pages that are present.
        live_bytes: bytes of their records.
        retain_until_s: latest of its pages'.
        accessed_s: latest of its pages'.
        sealed: nothing is appended any more.
        state: PRESENT, or why it is gone.
        since_s: when it went.
    """

    number: int
    bucket: int
    namespace_id: bytes
    end: int
    live: int = 0
    live_bytes: int = 0
    retain_until_s: float = 0.0
    accessed_s: float = 0.0
    sealed: bool = False
    state: PageState = PageState.PRESENT
    since_s: float = 0.0

    @property
    def file_name(self) -> str:
        """Name of its file."""
        return f"{self.number:012d}.seg"

    def pack(self) -> bytes:
        """Return the value for LMDB."""
        return _SEGMENT.pack(
            self.bucket,
            self.namespace_id,
            self.end,
            self.live,
            self.live_bytes,
            self.retain_until_s,
            self.accessed_s,
            self.sealed,
            _STATES.index(self.state),
            self.since_s,
        )

    @classmethod
    def unpack(cls, number: int, raw: bytes) -> SegmentInfo:
        """Read a value."""
        bucket, namespace_id, end, live, live_bytes, retain, accessed, sealed, state, since = (
            _SEGMENT.unpack(raw)
        )
        return cls(
            number=number,
            bucket=bucket,
            namespace_id=namespace_id,
            end=end,
            live=live,
            live_bytes=live_bytes,
            retain_until_s=retain,
            accessed_s=accessed,
            sealed=bool(sealed),
            state=_STATES[state],
            since_s=since,
        )


class Index:
    """An open index.

    Args:
        path: its folder.
        read_only: another process writes.

    Raises:
        lmdb.Error: it cannot be opened.
    """

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        # Without sync a killed process loses nothing; a machine that loses its power may leave the
        # index damaged, which is why the disk store builds it anew after a restart of the machine.
        self._env = lmdb.open(
            str(path),
            map_size=MAP_BYTES,
            max_dbs=8,
            mode=0o600,
            sync=False,
            readonly=read_only,
            create=not read_only,
        )
        if not read_only:
            self._env.reader_check()  # what killed readers left would keep old pages from reuse
        names = (b"pages", b"contents", b"segments", b"namespaces", b"meta")
        self._dbs = {name: self._env.open_db(name, create=not read_only) for name in names}

    def whole(self, num_bytes: int) -> bool:
        """Whether a file of so many bytes can hold it; reading one cut short ends the process."""
        pages = int(self._env.info()["last_pgno"]) + 1
        return pages * int(self._env.stat()["psize"]) <= num_bytes

    def close(self, *, sync: bool = False) -> None:
        """Close it, after writing it to the disk if asked to."""
        if sync:
            self._env.sync(True)
        self._env.close()

    @contextmanager
    def reading(self) -> Iterator[IndexView]:
        """One consistent view, for reading."""
        with self._env.begin() as transaction:
            yield IndexView(transaction, self._dbs)

    @contextmanager
    def writing(self) -> Iterator[IndexView]:
        """One change, all or nothing."""
        with self._env.begin(write=True) as transaction:
            yield IndexView(transaction, self._dbs)


class IndexView:
    """The index within one transaction."""

    def __init__(self, transaction: Any, dbs: Mapping[bytes, Any]) -> None:
        self._transaction, self._dbs = transaction, dbs

    # ------------------------------------------------------------------ pages

    def entry(self, namespace_id: bytes, key: bytes) -> Entry | None:
        """Where a page is or was; an entry of a segment that is gone says so."""
        raw = self._get(b"pages", namespace_id + key)
        if raw is None:
            return None
        entry = Entry.unpack(raw)
        if entry.state is PageState.PRESENT:
            segment = self.segment(entry.segment)
            if segment is None:
                return None
            if segment.state is not PageState.PRESENT:
                return evolve(entry, state=segment.state, since_s=segment.since_s)
        return entry

    def set_entry(self, namespace_id: bytes, key: bytes, entry: Entry) -> None:
        """Note where a page is."""
        self._put(b"pages", namespace_id + key, entry.pack())

    def entries(self, namespace_id: bytes = b"") -> Iterator[tuple[bytes, bytes, Entry]]:
        """Namespace, key and entry of every page, gone ones too, as they were written."""
        cursor = self._transaction.cursor(db=self._dbs[b"pages"])
        found = cursor.set_range(namespace_id) if namespace_id else cursor.first()
        while found and cursor.key().startswith(namespace_id):
            name = cursor.key()
            yield (
                name[:NAMESPACE_ID_BYTES],
                name[NAMESPACE_ID_BYTES:],
                Entry.unpack(cursor.value()),
            )
            found = cursor.next()

    def drop_entry(self, namespace_id: bytes, key: bytes) -> None:
        """Forget a page."""
        self._transaction.delete(namespace_id + key, db=self._dbs[b"pages"])

    # ------------------------------------------------------------------ contents

    def note_content(self, content: bytes, namespace_id: bytes, key: bytes) -> None:
        """Note under which key the tokens ``content`` lie."""
        self._put(b"contents", content + namespace_id, key)

    def by_content(self, content: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Namespace and key under which the same tokens were put last."""
        cursor = self._transaction.cursor(db=self._dbs[b"contents"])
        found = cursor.set_range(content)
        while found and cursor.key().startswith(content):
            yield cursor.key()[len(content) :], cursor.value()
            found = cursor.next()

    def drop_content(self, content_and_namespace: bytes) -> None:
        """Forget where tokens lie."""
        self._transaction.delete(content_and_namespace, db=self._dbs[b"contents"])

    def contents(self) -> Iterator[tuple[bytes, bytes, bytes]]:
        """Name, namespace and key of everything ``note_content`` noted."""
        cursor = self._transaction.cursor(db=self._dbs[b"contents"])
        for name, key in cursor:
            yield name, name[-NAMESPACE_ID_BYTES:], key

    # ------------------------------------------------------------------ segments

    def segment(self, number: int) -> SegmentInfo | None:
        """What is known of a segment."""
        raw = self._get(b"segments", _NUMBER.pack(number))
        return None if raw is None else SegmentInfo.unpack(number, raw)

    def set_segment(self, info: SegmentInfo) -> None:
        """Note what is known of a segment."""
        self._put(b"segments", _NUMBER.pack(info.number), info.pack())

    def segments(self) -> Iterator[SegmentInfo]:
        """Every segment, oldest first, gone ones too."""
        for name, raw in self._transaction.cursor(db=self._dbs[b"segments"]):
            yield SegmentInfo.unpack(_NUMBER.unpack(name)[0], raw)

    def drop_segment(self, number: int) -> None:
        """Forget a segment."""
        self._transaction.delete(_NUMBER.pack(number), db=self._dbs[b"segments"])

    # ------------------------------------------------------------------ the rest

    def labels(self) -> dict[bytes, dict[str, str]]:
        """What each namespace stands for."""
        cursor = self._transaction.cursor(db=self._dbs[b"namespaces"])
        return {name: json.loads(raw) for name, raw in cursor}

    def set_labels(self, namespace_id: bytes, labels: Mapping[str, str]) -> None:
        """Note what a namespace stands for."""
        self._put(b"namespaces", namespace_id, json.dumps(dict(labels)).encode())

    def meta(self, name: bytes) -> bytes:
        """A value of the directory as a whole, b"" if it is not set."""
        return self._get(b"meta", name) or b""

    def set_meta(self, name: bytes, value: bytes) -> None:
        """Set a value of the directory as a whole."""
        self._put(b"meta", name, value)

    def _get(self, db: bytes, name: bytes) -> bytes | None:
        found: bytes | None = self._transaction.get(name, db=self._dbs[db])
        return found

    def _put(self, db: bytes, name: bytes, value: bytes) -> None:
        self._transaction.put(name, value, db=self._dbs[db])
