"""The container format of GGUF files: metadata and where each tensor lies.

Only the container is here; what the metadata and the tensors mean for a model is in ``gguf``. The
parser is our own because it has to say what is wrong with a damaged file, and because it reads the
header of a model with 50,000 tokens in a tenth of a second.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from deepinfer_core.checkpoint.mapped import map_file
from deepinfer_core.errors import CheckpointError, reason

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_DIMENSIONS = 8
_STRING, _ARRAY = 8, 9
_SCALARS: Mapping[int, str] = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip


@attrs.frozen(kw_only=True)
class GgufTensor:
    """Where one tensor lies.

    Attributes:
        name: as the file spells it.
        shape: dense shape, outermost dimension first (the file lists it innermost first).
        kind: name of the block format in lower case (``f32``, ``q4_1``, ...).
        block_size: dense elements per block.
        bytes_per_block: bytes per block.
        offset: of the first byte, from the start of the file.
        num_bytes: size in the file.
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    block_size: int
    bytes_per_block: int
    offset: int
    num_bytes: int


class GgufFile:
    """A memory-mapped GGUF file with a parsed header.

    Args:
        path: the file.

    Raises:
        CheckpointError: the file is not GGUF, is truncated, or has a header that makes no sense.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._data = _map(path)
        cursor = _Cursor(path, self._data)
        self.version = _read_version(cursor)
        num_tensors, num_entries = cursor.scalar("Q"), cursor.scalar("Q")
        self.metadata: Mapping[str, Any] = _read_metadata(cursor, num_entries)
        self.tensors: Mapping[str, GgufTensor] = _read_tensors(
            cursor, num_tensors, _alignment(path, self.metadata)
        )

    def rows(self, tensor: GgufTensor) -> npt.NDArray[np.uint8]:
        """Return the bytes of a tensor: ``[*shape[:-1], bytes_per_row]``, uint8, not copied."""
        raw = self._data[tensor.offset : tensor.offset + tensor.num_bytes]
        return raw.reshape((*tensor.shape[:-1], -1)) if tensor.shape else raw

    def read(self, tensor: GgufTensor, index: int | None = None) -> npt.NDArray[np.uint8]:
        """Return a copy of ``rows``, or of one entry along its first dimension.

        Memory of a copy is given back once it was used; pages of the mapping would stay, so that
        weights that are repacked would be in memory twice.

        Raises:
            CheckpointError: the file was closed, or is shorter than it was.
        """
        parts = 1 if index is None else tensor.shape[0]
        count = tensor.num_bytes // parts
        if not self._data.size:
            raise CheckpointError(f"{self.path} was closed; open it again")
        start = tensor.offset + count * (index or 0)
        data = np.fromfile(self.path, np.uint8, count, offset=start)
        if len(data) != count:
            raise _bad(self.path, f"it was cut short while {tensor.name!r} was read")
        shape = tensor.shape if index is None else tensor.shape[1:]
        return data.reshape((*shape[:-1], -1))

    def close(self) -> None:
        """Let go of the mapping; arrays that were handed out stay valid."""
        self._data = np.empty(0, dtype=np.uint8)


def _map(path: Path) -> npt.NDArray[np.uint8]:
    try:
        if path.stat().st_size < len(MAGIC):
            raise _bad(path, "the file is shorter than a GGUF signature")
        return map_file(path)
    except OSError as error:
        raise CheckpointError(f"cannot open {path}: {reason(error)}") from error


def _bad(path: Path, *problems: str) -> CheckpointError:
    return CheckpointError(f"{path} is not a usable GGUF file; fetch it again", problems)


class _Cursor:
    """Reads a header front to back and refuses to run past the end."""

    def __init__(self, path: Path, data: npt.NDArray[np.uint8]) -> None:
        self.path = path
        self.buffer = memoryview(data.data)
        self.offset = 0

    @property
    def size(self) -> int:
        return len(self.buffer)

    def take(self, num_bytes: int, what: str = "the header") -> int:
        """Advance over ``num_bytes`` and return where they start."""
        start = self.offset
        if num_bytes > self.size - start:
            raise _bad(
                self.path,
                f"truncated: {what} needs {num_bytes:,} bytes at byte {start:,}, "
                f"but the file ends at byte {self.size:,}",
            )
        self.offset = start + num_bytes
        return start

    def scalar(self, code: str) -> Any:
        start = self.take(struct.calcsize(f"<{code}"))
        return struct.unpack_from(f"<{code}", self.buffer, start)[0]

    def string(self) -> str:
        length = self.scalar("Q")
        start = self.take(length, "a string")
        try:
            return str(self.buffer[start : start + length], "utf-8")
        except UnicodeDecodeError as error:
            raise _bad(self.path, f"a string at byte {start:,} is not UTF-8") from error

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY and depth < _MAX_DIMENSIONS:
            return self._array(depth)
        raise _bad(self.path, f"unknown metadata type {kind} at byte {self.offset:,}")

    def _array(self, depth: int) -> list[Any]:
        kind, length = self.scalar("I"), self.scalar("Q")
        if kind in _SCALARS:
            code = _SCALARS[kind]
            start = self.take(length * struct.calcsize(f"<{code}"), "an array")
            return list(struct.unpack_from(f"<{length}{code}", self.buffer, start))
        if length > self.size - self.offset:
            raise _bad(self.path, f"an array of {length:,} entries does not fit into the file")
        if kind == _STRING:
            return self._strings(length)
        return [self.value(kind, depth + 1) for _ in range(length)]

    def _strings(self, count: int) -> list[str]:
        """As ``count`` times ``string``, in a tight loop.

        Vocabularies are a hundred thousand strings; one by one they are half of a start.
        """
        strings: list[str] = []
        buffer, size, unpack = self.buffer, self.size, struct.Struct("<Q").unpack_from
        at = self.offset
        for _ in range(count):
            end = at + 8 + unpack(buffer, at)[0] if at + 8 <= size else size + 1
            if end > size:
                break
            try:
                strings.append(str(buffer[at + 8 : end], "utf-8"))
            except UnicodeDecodeError:
                break
            at = end
        self.offset = at
        # Whatever stopped the loop is met again, and named, by the careful way.
        return strings + [self.string() for _ in range(count - len(strings))]


def _read_version(cursor: _Cursor) -> int:
    start = cursor.take(len(MAGIC))
    if bytes(cursor.buffer[start : start + len(MAGIC)]) != MAGIC:
        raise _bad(cursor.path, "it does not start with the GGUF signature")
    version = int(cursor.scalar("I"))
    if version not in _VERSIONS:
        hint = " (a big-endian file?)" if version & 0xFFFF == 0 else ""
        raise _bad(cursor.path, f"GGUF version {version}{hint} is not one of {_VERSIONS}")
    return version


def _read_metadata(cursor: _Cursor, num_entries: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for _ in range(num_entries):
        key = cursor.string()
        if key in metadata:
            raise _bad(cursor.path, f"metadata key {key!r} appears twice")
        metadata[key] = cursor.value(cursor.scalar("I"))
    return metadata


def _alignment(path: Path, metadata: Mapping[str, Any]) -> int:
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise _bad(path, f"general.alignment must be a power of two: {alignment!r}")
    return alignment


def _read_tensors(cursor: _Cursor, num_tensors: int, alignment: int) -> dict[str, GgufTensor]:
    raw = []
    for _ in range(num_tensors):
        name, num_dimensions = cursor.string(), cursor.scalar("I")
        if num_dimensions > _MAX_DIMENSIONS:
            raise _bad(cursor.path, f"tensor {name!r} claims {num_dimensions} dimensions")
        shape = tuple(cursor.scalar("Q") for _ in range(num_dimensions))[::-1]
        raw.append((name, shape, cursor.scalar("I"), cursor.scalar("Q")))
    base = -(-cursor.offset // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    problems: list[str] = []
    for name, shape, kind, offset in raw:
        try:
            if name in tensors:
                raise ValueError("appears twice")
            tensors[name] = _place(name, shape, kind, base + offset, cursor.size)
        except ValueError as error:
            problems.append(f"tensor {name!r}: {error}")
    if problems:
        raise _bad(cursor.path, *problems)
    return tensors


# Code -> name, elements per block, bytes per block. These numbers are part of the file format; the
# package knows many more, but takes a quarter of a second to import.
COMMON_KINDS: Mapping[int, tuple[str, int, int]] = {
    0: ("f32", 1, 4),
    1: ("f16", 1, 2),
    2: ("q4_0", 32, 18),
    3: ("q4_1", 32, 20),
    8: ("q8_0", 32, 34),
    30: ("bf16", 1, 2),
}


def _kind(code: int) -> tuple[str, int, int]:
    if code in COMMON_KINDS:
        return COMMON_KINDS[code]
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        quantization = GGMLQuantizationType(code)
        return (quantization.name.lower(), *GGML_QUANT_SIZES[quantization])
    except (ValueError, KeyError):
        raise ValueError(f"unknown quantisation type {code}") from None


def _place(name: str, shape: tuple[int, ...], code: int, offset: int, size: int) -> GgufTensor:
    kind, block_size, bytes_per_block = _kind(code)
    row = shape[-1] if shape else 1
    if row % block_size:
        raise ValueError(
            f"rows of {row} elements do not divide into {kind.upper()} blocks of {block_size}"
        )
    num_elements = 1
    for length in shape:
        num_elements *= length
    if not num_elements:
        raise ValueError(f"has no elements: shape {shape}")
    num_bytes = num_elements // block_size * bytes_per_block
    if offset + num_bytes > size:
        raise ValueError(
            f"truncated: its {num_bytes:,} bytes start at byte {offset:,}, "
            f"but the file ends at byte {size:,}"
        )
    return GgufTensor(
        name=name,
        shape=shape,
        kind=kind,
        block_size=block_size,
        bytes_per_block=bytes_per_block,
        offset=offset,
        num_bytes=num_bytes,
    )
