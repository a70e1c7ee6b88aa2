"""Safetensors checkpoints: a Hugging Face directory, or a single file with its ``config.json``.

Shards are memory-mapped and opened once. Everything that is wrong with a directory is found when
it is opened and reported at once.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from deepinfer_core.checkpoint.mapped import map_file
from deepinfer_core.checkpoint.tensors import PackedTensor, TensorInfo, tensor_named, viewed
from deepinfer_core.errors import CheckpointError, reason
from deepinfer_core.text.tokenizer import Tokenizer

_INDEX = "model.safetensors.index.json"
_SUFFIX = ".safetensors"
_MAX_HEADER_BYTES = 100_000_000
DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""What the format calls them."""


class SafetensorsFormat:
    """Recognises and opens safetensors files and directories that hold them."""

    def why_not(self, path: Path) -> str | None:
        """Return None for a safetensors file or directory, else why it is not one."""
        if path.is_dir():
            if (path / _INDEX).is_file() or any(path.glob(f"*{_SUFFIX}")):
                return None
            return f"{path.name} holds no {_INDEX} and no *{_SUFFIX} file"
        if not path.is_file():
            return f"{path} does not exist"
        return None if path.suffix == _SUFFIX else f"{path.name} is not a *{_SUFFIX} file"

    def open(self, path: Path) -> SafetensorsCheckpoint:
        """Open a directory or file.

        Raises:
            CheckpointError: see ``SafetensorsCheckpoint``.
        """
        return SafetensorsCheckpoint(path)


@attrs.frozen(kw_only=True)
class _Entry:
    """One tensor by its shard's header: bytes ``start`` to ``end`` of the file."""

    shard: Path
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.start


class SafetensorsCheckpoint:
    """An opened safetensors checkpoint.

    Args:
        path: a directory in Hugging Face layout, or one file beside a ``config.json``.
        config_only: look for no weights; the checkpoint then has no tensors.

    Raises:
        CheckpointError: files are missing, damaged or contradict each other; all problems are
            listed.
    """

    def __init__(self, path: Path, *, config_only: bool = False) -> None:
        self._path = path
        self._directory = path if path.is_dir() else path.parent
        problems: list[str] = []
        self._config = _read_json(self._directory / "config.json", problems, required=True)
        self._entries = {} if config_only else _read_entries(path, problems)
        self._shards: dict[Path, npt.NDArray[np.uint8]] = {}
        for shard in sorted({entry.shard for entry in self._entries.values()}):
            try:
                self._shards[shard] = map_file(shard)
            except OSError as error:
                problems.append(f"{shard.name}: {reason(error)}")
        if problems:
            raise CheckpointError(f"the checkpoint {path} cannot be used", problems)

    @property
    def path(self) -> Path:
        """The directory or file that was opened."""
        return self._path

    @property
    def config(self) -> Mapping[str, Any]:
        """The contents of ``config.json``."""
        return self._config

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors in all shards."""
        return sum(entry.num_bytes for entry in self._entries.values())

    def names(self) -> tuple[str, ...]:
        """Return the names of all tensors, sorted."""
        return tuple(self._entries)

    def info(self, name: str) -> TensorInfo:
        """Describe a tensor without reading it."""
        entry = self._entry(name)
        dtype = str(entry.dtype).removeprefix("torch.")
        return TensorInfo(
            name=name, shape=entry.shape, dtype=dtype, format=dtype, num_bytes=entry.num_bytes
        )

    def read(self, name: str) -> Tensor:
        """Return a tensor in its stored dtype; it shares the mapped memory."""
        entry = self._entry(name)
        if entry.shard not in self._shards:
            raise CheckpointError(f"{self._path} was closed")
        data = torch.from_numpy(self._shards[entry.shard][entry.start : entry.end])
        return viewed(data, entry.dtype, entry.shape)

    def read_packed(self, name: str) -> PackedTensor | None:
        """Return None: safetensors files hold dense tensors."""
        self._entry(name)
        return None

    def tokenizer(self) -> Tokenizer:
        """Build the tokenizer of the directory."""
        return Tokenizer.from_directory(self._directory)

    def chat_template(self) -> str | None:
        """Return the default chat template: its own file, else the tokenizer configuration."""
        file = self._directory / "chat_template.jinja"
        if file.is_file():
            return file.read_text(encoding="utf-8")
        return _named_template(self._optional("tokenizer_config.json").get("chat_template"))

    def generation_config(self) -> Mapping[str, Any]:
        """Return ``generation_config.json``, end ids as a list, those of the model as fallback."""
        found = dict(self._optional("generation_config.json"))
        ends = found.pop("eos_token_id", None)
        ends = self._config.get("eos_token_id") if ends is None else ends
        if ends is not None:
            found["eos_token_id"] = list(ends) if isinstance(ends, list) else [ends]
        return found

    def close(self) -> None:
        """Let go of the files. Tensors that were handed out stay valid."""
        self._shards.clear()

    def _entry(self, name: str) -> _Entry:
        return tensor_named(self._entries, name, self._path)

    def _optional(self, name: str) -> Mapping[str, Any]:
        problems: list[str] = []
        found = _read_json(self._directory / name, problems, required=False)
        if problems:
            raise CheckpointError(f"the checkpoint {self._path} cannot be used", problems)
        return found


def _named_template(found: Any) -> str | None:
    """Take the default of a template, or of a list of named ones."""
    if isinstance(found, list):
        named = {entry.get("name"): entry.get("template") for entry in found if entry}
        found = named.get("default")
    return found if isinstance(found, str) else None


def _read_json(file: Path, problems: list[str], *, required: bool) -> Mapping[str, Any]:
    if not file.is_file():
        if required:
            problems.append(f"{file.name} is missing")
        return MappingProxyType({})
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        problems.append(f"{file.name} cannot be read: {reason(error)}")
        return MappingProxyType({})
    if not isinstance(found, dict):
        problems.append(f"{file.name} must hold a JSON object")
        return MappingProxyType({})
    return MappingProxyType(found)


def _read_entries(path: Path, problems: list[str]) -> dict[str, _Entry]:
    """Read the headers of all shards and compare them with the index, if there is one."""
    weight_map: Mapping[str, Any] | None = None
    if path.is_dir() and (path / _INDEX).is_file():
        weight_map = _weight_map(path / _INDEX, problems)
        shards = [path / name for name in sorted(set(weight_map.values()))]
    else:
        shards = sorted(path.glob(f"*{_SUFFIX}")) if path.is_dir() else [path]
    if not shards and weight_map is None:
        problems.append(f"there is no *{_SUFFIX} file")
    entries: dict[str, _Entry] = {}
    unread: set[str] = set()
    for shard in shards:
        try:
            found = _read_header(shard)
        except CheckpointError as error:
            problems.append(f"{shard.name}: {error}")
            unread.add(shard.name)
            continue
        problems += [
            f"tensor {name!r} is in both {entries[name].shard.name} and {shard.name}"
            for name in found.keys() & entries.keys()
        ]
        entries.update(found)
    if weight_map is not None:
        problems += _contradictions(weight_map, entries, unread)
    return dict(sorted(entries.items()))


def _weight_map(file: Path, problems: list[str]) -> Mapping[str, Any]:
    found = _read_json(file, problems, required=True).get("weight_map")
    if isinstance(found, dict) and all(_is_file_name(shard) for shard in found.values()):
        return found
    problems.append(f"{file.name} has no 'weight_map' from tensor names to file names")
    return {}


def _is_file_name(shard: Any) -> bool:
    # A path would let an index reach outside of its directory.
    return isinstance(shard, str) and shard not in {"", ".."} and Path(shard).name == shard


def _contradictions(
    weight_map: Mapping[str, Any], entries: Mapping[str, _Entry], unread: set[str]
) -> list[str]:
    problems = []
    for name, shard in sorted(weight_map.items()):
        if shard in unread:
            continue
        if name not in entries:
            problems.append(f"tensor {name!r} is not in {shard}, where the index places it")
        elif entries[name].shard.name != shard:
            problems.append(
                f"tensor {name!r} is in {entries[name].shard.name}, not in {shard}, "
                "where the index places it"
            )
    extra = sorted(entries.keys() - weight_map.keys())
    return problems + [
        f"tensor {name!r} of {entries[name].shard.name} is not in the index" for name in extra
    ]


def _read_header(shard: Path) -> dict[str, _Entry]:
    """Parse a shard's header and check it against the size of the file.

    As the format demands, tensors fill the file without holes or overlaps.
    """
    if not shard.is_file():
        raise CheckpointError("the file is missing")
    size = shard.stat().st_size
    with shard.open("rb") as stream:
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= length <= min(_MAX_HEADER_BYTES, size - 8):
            raise CheckpointError(f"corrupt or truncated: no header fits into {size:,} bytes")
        raw = stream.read(length)
    try:
        header = json.loads(raw)
        header.pop("__metadata__", None)
        start = end = 8 + length
        entries = {name: _entry(shard, start, value) for name, value in header.items()}
        for name, entry in sorted(entries.items(), key=_place):
            if entry.start != end:
                raise ValueError(f"tensor {name!r} does not begin where the one before it ends")
            end = entry.end
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"corrupt header: {error}") from error
    if end != size:
        raise CheckpointError(
            f"truncated or damaged: the header promises {end:,} bytes, the file has {size:,}"
        )
    return entries


def _place(item: tuple[str, _Entry]) -> tuple[int, int]:
    return item[1].start, item[1].end


def _entry(shard: Path, origin: int, value: Mapping[str, Any]) -> _Entry:
    shape, (start, end) = tuple(value["shape"]), value["data_offsets"]
    if value["dtype"] not in DTYPES:
        raise ValueError(f"unknown dtype {value['dtype']!r}")
    dtype = DTYPES[value["dtype"]]
    if not all(type(size) is int and size >= 0 for size in (*shape, start, end)):
        raise ValueError(f"shape {list(shape)} at {start}:{end} is not made of whole numbers")
    if end - start != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{value['dtype']} {list(shape)} does not fill bytes {start}:{end}")
    return _Entry(shard=shard, shape=shape, dtype=dtype, start=origin + start, end=origin + end)
