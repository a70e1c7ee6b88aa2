"""Segment files: the format of a record, and reading and appending.

A segment is a file header and records, each a header of 192 bytes and its data, padded to 64
bytes. All numbers are little endian. Headers and data carry checksums, seeded with the namespace
and the key, so that nothing that was torn, damaged or put elsewhere is taken for a page. A record
is never changed once it is written, but for one byte that marks it dead.

Files are read with positioned reads into memory of their own and not mapped: reading a mapped page
that cannot be read (a bad disk, a file cut short) kills the process, a failed read is a miss, and
while a read waits for the disk other threads go on.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path

import xxhash
from attrs import frozen

from deepinfer_prefix.tiers.times import Times

FILE_MAGIC = b"DIKVSEG1"
RECORD_MAGIC = b"DIPG"
HEADER_BYTES = 192
ALIGN = 64
MAX_KEY_BYTES = 64
CONTENT_BYTES = 16

_FILE = struct.Struct("<8s16sqd144sQ")
NEVER = 1 << 62
"""Bucket of pages that do not expire."""

_RECORD = struct.Struct("<4sBBBBQddd16s64sQ56x")
_SUM = struct.Struct("<Q")
_LIVE_AT = 4
_LIVE, _DEAD = 1, 0


def _sum(data: bytes | memoryview, seed: bytes) -> int:
    return xxhash.xxh3_64_intdigest(data, int.from_bytes(seed[:8].ljust(8, b"\0"), "little"))


def record_bytes(size: int) -> int:
    """Bytes of the file that a page of ``size`` bytes takes."""
    return HEADER_BYTES + -(-size // ALIGN) * ALIGN


@frozen(kw_only=True)
class Record:
    """A record's header.

    Attributes:
        key: the page's key.
        size: bytes of data.
        times: as they were when it was written.
        exact: provenance.
        content: digest of the tokens alone, or b"".
        checksum: of the data.
        live: False once it was replaced or deleted.
    """

    key: bytes
    size: int
    times: Times
    exact: bool
    content: bytes
    checksum: int
    live: bool = True

    @property
    def num_bytes(self) -> int:
        """Bytes of the file it takes."""
        return record_bytes(self.size)

    def pack(self, namespace_id: bytes) -> bytes:
        """Return the header's bytes."""
        head = _RECORD.pack(
            RECORD_MAGIC,
            _LIVE if self.live else _DEAD,
            self.exact,
            self.times.sliding,
            len(self.key),
            self.size,
            self.times.expires_at_s,
            self.times.retain_until_s,
            self.times.accessed_s,
            self.content,
            self.key,
            self.checksum,
        )
        return head + _SUM.pack(_header_sum(head, namespace_id))


def _header_sum(head: bytes, namespace_id: bytes) -> int:
    """Checksum of a header, whether live or dead."""
    return _sum(head[:_LIVE_AT] + head[_LIVE_AT + 1 :], namespace_id)


def unpack_record(raw: bytes, namespace_id: bytes) -> Record | None:
    """Read a record's header; None unless it is whole and of this namespace."""
    if len(raw) < HEADER_BYTES or not raw.startswith(RECORD_MAGIC):
        return None
    head = raw[: _RECORD.size]
    (expected,) = _SUM.unpack_from(raw, _RECORD.size)
    if _header_sum(head, namespace_id) != expected:
        return None
    (_, live, exact, sliding, key_len, size, expires, retain, accessed, content, key, checksum) = (
        _RECORD.unpack(head)
    )
    return Record(
        key=key[:key_len],
        size=size,
        times=Times(
            expires_at_s=expires,
            sliding=bool(sliding),
            retain_until_s=retain,
            accessed_s=accessed,
        ),
        exact=bool(exact),
        content=content.rstrip(b"\0"),
        checksum=checksum,
        live=live == _LIVE,
    )


def record_of(
    key: bytes, data: bytes | memoryview, *, times: Times, exact: bool, content: bytes
) -> Record:
    """Return the header for a page."""
    return Record(
        key=key,
        size=len(data),
        times=times,
        exact=exact,
        content=content[:CONTENT_BYTES],
        checksum=_sum(data, key),
    )


class DamagedSegment(OSError):
    """A file that is no whole segment, or another one than it should be."""


class Segment:
    """One open segment file. Closed when nobody holds it any more, so readers need no lock.

    Attributes:
        path: the file.
        namespace_id: digest of the namespace all its records belong to.
        bucket: second since the epoch by which all its pages have expired.
    """

    def __init__(self, path: Path, descriptor: int, namespace_id: bytes, bucket: int) -> None:
        self.path, self.namespace_id, self.bucket = path, namespace_id, bucket
        self._descriptor = descriptor

    @classmethod
    def create(cls, path: Path, namespace_id: bytes, bucket: int, now_s: float) -> Segment:
        """Make a new file, readable by its owner only.

        Raises:
            OSError: it exists, or cannot be written.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        segment = cls(path, os.open(path, flags, 0o600), namespace_id, bucket)
        head = _FILE.pack(FILE_MAGIC, namespace_id, bucket, now_s, b"", 0)[: -_SUM.size]
        try:
            segment._write(head + _SUM.pack(_sum(head, b"")), 0)
        except OSError:
            path.unlink(missing_ok=True)
            raise
        return segment

    @classmethod
    def open(cls, path: Path, *, writable: bool) -> Segment:
        """Open a file.

        Raises:
            OSError: it cannot be opened.
            DamagedSegment: it is no whole segment.
        """
        flags = (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC
        segment = cls(path, os.open(path, flags), b"", 0)
        raw = os.pread(segment._descriptor, HEADER_BYTES, 0)
        if len(raw) < HEADER_BYTES or not raw.startswith(FILE_MAGIC):
            raise DamagedSegment(f"{path} is not a segment of pages")
        _, segment.namespace_id, segment.bucket, _, _, expected = _FILE.unpack(raw)
        if _sum(raw[: -_SUM.size], b"") != expected:
            raise DamagedSegment(f"the header of {path} is damaged")
        return segment

    def __del__(self) -> None:
        os.close(self._descriptor)

    def append(self, offset: int, record: Record, data: bytes | memoryview) -> None:
        """Write a record at ``offset``, the end of what is valid.

        Raises:
            OSError: it could not be written as a whole; what lies beyond ``offset`` is void.
        """
        padding = bytes(record.num_bytes - HEADER_BYTES - record.size)
        parts = [record.pack(self.namespace_id), data, padding]
        written = os.pwritev(self._descriptor, parts, offset)
        if written < record.num_bytes:  # a signal, or the disk is nearly full: the rest raises
            self._write(b"".join(parts)[written:], offset + written)

    def kill(self, offset: int) -> None:
        """Mark the record at ``offset`` dead.

        Raises:
            OSError: it could not be written.
        """
        self._write(bytes([_DEAD]), offset + _LIVE_AT)

    def header(self, offset: int) -> Record | None:
        """Read a header; None unless it is whole.

        Raises:
            OSError: the disk failed.
        """
        return unpack_record(os.pread(self._descriptor, HEADER_BYTES, offset), self.namespace_id)

    def read(self, offset: int, size: int, key: bytes) -> tuple[Record, memoryview] | None:
        """Read a record with its data; None unless it is whole, live and under this key.

        Raises:
            OSError: the disk failed.
        """
        raw = os.pread(self._descriptor, HEADER_BYTES + size, offset)
        while len(raw) < HEADER_BYTES + size:
            more = os.pread(self._descriptor, HEADER_BYTES + size - len(raw), offset + len(raw))
            if not more:
                return None
            raw += more
        record, data = unpack_record(raw[:HEADER_BYTES], self.namespace_id), memoryview(raw)
        data = data[HEADER_BYTES:]
        if record is None or not record.live or record.key != key or record.size != size:
            return None
        if _sum(data, key) != record.checksum:
            return None
        return record, data

    def scan(self, offset: int = HEADER_BYTES) -> Iterator[tuple[int, Record]]:
        """Walk over whole records from ``offset`` on, up to the first that is torn.

        Raises:
            OSError: the disk failed.
        """
        end = self.num_bytes()
        while (record := self.header(offset)) is not None:
            if offset + HEADER_BYTES + record.size > end:
                return
            yield offset, record
            offset += record.num_bytes

    def num_bytes(self) -> int:
        """Return the size of the file."""
        return os.fstat(self._descriptor).st_size

    def sync(self) -> None:
        """Wait until everything written is on the disk.

        Raises:
            OSError: the disk failed.
        """
        os.fdatasync(self._descriptor)

    def _write(self, data: bytes, offset: int) -> None:
        while data:
            written = os.pwrite(self._descriptor, data, offset)
            data, offset = data[written:], offset + written
