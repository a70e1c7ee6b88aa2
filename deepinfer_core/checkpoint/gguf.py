"""GGUF files: one file with weights, configuration and tokenizer.

Dense tensors share the memory-mapped file; blocks are read when they are asked for and not kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from deepinfer_core.checkpoint.dequantize import can_dequantize, dequantize
from deepinfer_core.checkpoint.gguf_config import architecture_of, translate_config
from deepinfer_core.checkpoint.gguf_file import MAGIC, GgufFile, GgufTensor
from deepinfer_core.checkpoint.gguf_names import ROPE_FACTORS, Source, map_names
from deepinfer_core.checkpoint.tensors import PackedTensor, TensorInfo, tensor_named, viewed
from deepinfer_core.errors import CheckpointError, reason
from deepinfer_core.text.tokenizer import Tokenizer

_DENSE: Mapping[str, torch.dtype] = {
    "f64": torch.float64,
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
}


class GgufFormat:
    """Recognises and opens GGUF files, or a directory that holds exactly one."""

    def why_not(self, path: Path) -> str | None:
        """Return None for a GGUF file, else why it is not one."""
        try:
            file = _single_file(path)
            with file.open("rb") as stream:
                found = stream.read(len(MAGIC))
        except CheckpointError as error:
            return error.summary
        except OSError as error:
            return f"cannot read {path}: {reason(error)}"
        return None if found == MAGIC else f"{file.name} does not start with the GGUF signature"

    def open(self, path: Path) -> GgufCheckpoint:
        """Open a file, or the only ``*.gguf`` of a directory.

        Raises:
            CheckpointError: see ``GgufCheckpoint``.
        """
        return GgufCheckpoint(_single_file(path))


def _single_file(path: Path) -> Path:
    if not path.is_dir():
        return path
    files = sorted(path.glob("*.gguf"))
    if len(files) != 1:
        names = ", ".join(file.name for file in files)
        raise CheckpointError(
            f"{path} holds {len(files)} GGUF files{f' ({names}); name one' if files else ''}"
        )
    return files[0]


class GgufCheckpoint:
    """An opened GGUF file in Hugging Face terms.

    Args:
        path: the file.

    Raises:
        CheckpointError: it is damaged, or its architecture or a block format is not supported.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = GgufFile(path)
        metadata, tensors = self._file.metadata, self._file.tensors
        architecture = architecture_of(metadata, str(path))
        _refuse_splits(path, metadata)
        _refuse_formats(path, tensors)
        factors = None
        if ROPE_FACTORS in tensors:
            factors = self._dense(Source(tensor=tensors[ROPE_FACTORS])).double().tolist()
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        config = translate_config(metadata, shapes, factors, str(path))
        self._config = MappingProxyType(config)
        self._sources = map_names(tensors, architecture, config, str(path))

    @property
    def path(self) -> Path:
        """The file."""
        return self._path

    @property
    def config(self) -> Mapping[str, Any]:
        """The model's configuration, translated from the metadata."""
        return self._config

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The file's own metadata, untranslated."""
        return self._file.metadata

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors in the file."""
        return sum(tensor.num_bytes for tensor in self._file.tensors.values())

    def names(self) -> tuple[str, ...]:
        """Return the Hugging Face names of all tensors, sorted."""
        return tuple(self._sources)

    def info(self, name: str) -> TensorInfo:
        """Describe a tensor without reading it."""
        source = self._source(name)
        dtype = _DENSE.get(source.tensor.kind, torch.float32)
        dense_name = str(dtype).removeprefix("torch.")
        return TensorInfo(
            name=name,
            shape=source.shape,
            dtype=dense_name,
            format=dense_name if source.tensor.kind in _DENSE else source.tensor.kind,
            num_bytes=source.num_bytes,
        )

    def read(self, name: str) -> Tensor:
        """Return a tensor, dense; packed ones as float32. It may share the mapped memory."""
        source = self._source(name)
        return _restore_rows(self._dense(source), source.rotary_heads)

    def read_packed(self, name: str) -> PackedTensor | None:
        """Return the raw blocks of a packed matrix, rows in Hugging Face order; else None."""
        source = self._source(name)
        # The rows of a packed vector cannot be reordered without breaking its blocks.
        if source.tensor.kind in _DENSE or len(source.shape) < 2:
            return None
        return PackedTensor(
            format=source.tensor.kind,
            data=_restore_rows(self._packed_rows(source), source.rotary_heads),
            shape=source.shape,
            block_size=source.tensor.block_size,
            bytes_per_block=source.tensor.bytes_per_block,
        )

    def tokenizer(self) -> Tokenizer:
        """Build the tokenizer from the metadata."""
        return Tokenizer.from_gguf(self._file.metadata, where=str(self._path))

    def chat_template(self) -> str | None:
        """Return the Jinja source of the default chat template, or None."""
        template = self._file.metadata.get("tokenizer.chat_template")
        return template if isinstance(template, str) else None

    def generation_config(self) -> Mapping[str, Any]:
        """Return the stop ids that the metadata names: end of sequence, end of turn."""
        keys = ("eos_token_id", "eot_token_id", "eom_token_id")
        ids = [self._file.metadata.get(f"tokenizer.ggml.{key}") for key in keys]
        found = list(dict.fromkeys(token_id for token_id in ids if token_id is not None))
        return {"eos_token_id": found} if found else {}

    def close(self) -> None:
        """Let go of the file. Tensors that were handed out stay valid."""
        self._file.close()

    def _source(self, name: str) -> Source:
        return tensor_named(self._sources, name, self._path)

    def _packed_rows(self, source: Source) -> Tensor:
        if source.tensor.kind not in _DENSE:
            return torch.from_numpy(self._file.read(source.tensor, source.expert))
        rows = self._file.rows(source.tensor)
        if not rows.size:
            raise CheckpointError(f"{self._path} was closed, or {source.tensor.name!r} is empty")
        return torch.from_numpy(rows if source.expert is None else rows[source.expert])

    def _dense(self, source: Source) -> Tensor:
        rows, kind = self._packed_rows(source), source.tensor.kind
        if kind not in _DENSE:
            return dequantize(rows, kind, source.shape)
        return viewed(rows, _DENSE[kind], source.shape)


def _restore_rows(rows: Tensor, heads: int) -> Tensor:
    """Put rows back from interleaved rotary order ``(pair, half)`` to ``(half, pair)``."""
    if not heads:
        return rows
    split = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return split.transpose(1, 2).reshape(rows.shape)


def _refuse_splits(path: Path, metadata: Mapping[str, Any]) -> None:
    count = metadata.get("split.count", 1)
    if count > 1:
        raise CheckpointError(f"{path} is one of {count} parts; merge them into one file first")


def _refuse_formats(path: Path, tensors: Mapping[str, GgufTensor]) -> None:
    kinds = {tensor.kind: name for name, tensor in tensors.items()}
    problems = [
        f"block format {kind.upper()} (tensor {name!r}) is not supported"
        for kind, name in sorted(kinds.items())
        if kind not in _DENSE and not can_dequantize(kind)
    ]
    if problems:
        raise CheckpointError(f"{path} cannot be expanded", problems)
