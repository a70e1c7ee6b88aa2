"""Reader of DeepSeek's safetensors directories: matrices in FP8 and FP4 as one tensor each.

A matrix and its scales, two tensors of the file, are one packed tensor here, so that models ask for
``X.weight`` whatever it is stored as. A matrix without scales that fit it, and scales without their
matrix, are listed as the file has them: comparing names, shapes and formats with what the model
expects then names them beside everything else that does not fit.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from deepinfer_core.checkpoint.safetensors import SafetensorsCheckpoint, SafetensorsFormat
from deepinfer_core.checkpoint.tensors import PackedTensor, TensorInfo, tensor_named
from deepinfer_core.errors import CheckpointError
from deepinfer_core.text.tokenizer import Tokenizer
from deepinfer_deepseek.checkpoint.matrices import FP4, FP8_ROWS, MatrixFormat, expand
from deepinfer_deepseek.quant.numbers import E4M3

MODEL_TYPES = ("deepseek_v41", "deepseek_v4", "deepseek_v3")
"""What ``model_type`` in config.json is for checkpoints that this reader takes."""

_PREFIX = "model."
_UNPREFIXED = ("deepseek_v41", "deepseek_v4")
"""Models whose names are published without a prefix."""
_DEFAULT_BLOCK = (128, 128)


class DeepSeekFormat:
    """Recognises and opens safetensors checkpoints of DeepSeek models."""

    def __init__(self) -> None:
        self._files = SafetensorsFormat()

    def why_not(self, path: Path) -> str | None:
        """Return None for a checkpoint of a DeepSeek model, else why it is not one."""
        reason = self._files.why_not(path)
        if reason is not None:
            return reason
        file = (path if path.is_dir() else path.parent) / "config.json"
        try:
            found = json.loads(file.read_text(encoding="utf-8")).get("model_type")
        except (OSError, ValueError, AttributeError):
            return f"{path.name} has no readable config.json"
        return None if found in MODEL_TYPES else f"model_type {found!r} is not one of DeepSeek's"

    def open(self, path: Path) -> DeepSeekCheckpoint:
        """Open a directory or file.

        Raises:
            CheckpointError: see ``DeepSeekCheckpoint``.
        """
        return DeepSeekCheckpoint(SafetensorsCheckpoint(path))


@frozen(kw_only=True)
class _Stored:
    """Where a tensor's numbers are: names in the file, and the format if there are scales."""

    name: str
    scales: str = ""
    format: MatrixFormat | None = None


class DeepSeekCheckpoint:
    """An opened checkpoint whose packed matrices are one tensor each.

    Args:
        files: the opened directory; closed with this object.

    Raises:
        CheckpointError: a tensor is there with and without the prefix ``model.``, or the block size
            in the configuration makes no sense.
    """

    def __init__(self, files: SafetensorsCheckpoint) -> None:
        self._files = files
        names = _without_prefix(files)
        self._tensors = dict(sorted(_pair(files, names, _block(files))))

    @property
    def path(self) -> Path:
        """The directory or file that was opened."""
        return self._files.path

    @property
    def config(self) -> Mapping[str, Any]:
        """The contents of ``config.json``."""
        return self._files.config

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors in all shards."""
        return self._files.total_bytes

    def names(self) -> tuple[str, ...]:
        """Return the names of all tensors, sorted; scales belong to their matrix."""
        return tuple(self._tensors)

    def info(self, name: str) -> TensorInfo:
        """Describe a tensor without reading it."""
        stored = self._stored(name)
        info = self._files.info(stored.name)
        if stored.format is None:
            return TensorInfo(
                name=name,
                shape=info.shape,
                dtype=info.dtype,
                format=info.format,
                num_bytes=info.num_bytes,
            )
        return TensorInfo(
            name=name,
            shape=stored.format.dense_shape(info.shape),
            dtype="float32",
            format=stored.format.name,
            num_bytes=info.num_bytes + self._files.info(stored.scales).num_bytes,
        )

    def read(self, name: str) -> Tensor:
        """Return a tensor, packed ones as float32; dense ones share the mapped memory."""
        packed = self.read_packed(name)
        return self._files.read(self._stored(name).name) if packed is None else expand(packed)

    def read_packed(self, name: str) -> PackedTensor | None:
        """Return bytes and scales of a packed matrix, sharing the mapped memory; else None."""
        stored = self._stored(name)
        if stored.format is None:
            return None
        data = self._files.read(stored.name).view(torch.uint8)
        return PackedTensor(
            format=stored.format.name,
            data=data,
            shape=stored.format.dense_shape(tuple(data.shape)),
            block_size=stored.format.columns,
            bytes_per_block=stored.format.columns * stored.format.number.bits // 8,
            scales=self._files.read(stored.scales),
        )

    def tokenizer(self) -> Tokenizer:
        """Build the tokenizer of the directory."""
        return self._files.tokenizer()

    def chat_template(self) -> str | None:
        """Return the default chat template."""
        return self._files.chat_template()

    def generation_config(self) -> Mapping[str, Any]:
        """Return ``generation_config.json``, end ids as a list."""
        return self._files.generation_config()

    def close(self) -> None:
        """Let go of the files. Tensors that were handed out stay valid."""
        self._files.close()

    def _stored(self, name: str) -> _Stored:
        return tensor_named(self._tensors, name, self.path)


def _block(files: SafetensorsCheckpoint) -> tuple[int, int]:
    """Rows and columns that share a scale of FP8 matrices."""
    table = files.config.get("quantization_config")
    found = table.get("weight_block_size") if isinstance(table, Mapping) else None
    if found is None:
        return _DEFAULT_BLOCK
    if (
        not isinstance(found, list)
        or len(found) != 2
        or not all(type(size) is int and size > 0 for size in found)
    ):
        raise CheckpointError(
            f"{files.path}: quantization_config.weight_block_size: expected two sizes, "
            f"got {found!r}"
        )
    return found[0], found[1]


def _without_prefix(files: SafetensorsCheckpoint) -> dict[str, str]:
    """Name here -> name in the file."""
    if files.config.get("model_type") not in _UNPREFIXED:
        return {name: name for name in files.names()}
    names: dict[str, str] = {}
    twice = []
    for name in files.names():
        bare = name.removeprefix(_PREFIX)
        if bare in names:
            twice.append(f"{bare} is there with and without the prefix {_PREFIX!r}")
        names[bare] = name
    if twice:
        raise CheckpointError(f"the checkpoint {files.path} cannot be used", twice)
    return names


def _pair(
    files: SafetensorsCheckpoint, names: Mapping[str, str], block: tuple[int, int]
) -> Iterator[tuple[str, _Stored]]:
    """Bring matrices and their scales together."""
    used = set()
    tensors = {}
    for name, stored in names.items():
        for scales in (f"{name.removesuffix('.weight')}.scale", f"{name}_scale_inv"):
            if scales not in names or scales == name:
                continue
            found = _format(files.info(stored), files.info(names[scales]), block)
            if found is not None:
                used.add(scales)
                tensors[name] = _Stored(name=stored, scales=names[scales], format=found)
    for name, stored in names.items():
        if name not in used:
            yield name, tensors.get(name, _Stored(name=stored))


def _format(data: TensorInfo, scales: TensorInfo, block: tuple[int, int]) -> MatrixFormat | None:
    """What a matrix is stored as, None if these scales do not fit it."""
    if len(data.shape) != 2 or scales.dtype not in ("float8_e8m0fnu", "float32"):
        return None
    if data.dtype == "float8_e4m3fn":
        square = MatrixFormat(number=E4M3, rows=block[0], columns=block[1])
        candidates = [square, FP8_ROWS]
    else:
        candidates = [FP4] if data.dtype in ("int8", "uint8") else []
    fitting = (
        candidate
        for candidate in candidates
        if scales.shape == candidate.grid(candidate.dense_shape(data.shape))
    )
    return next(fitting, None)


def build(config: Any, context: Any) -> DeepSeekFormat:
    """Make the format."""
    return DeepSeekFormat()
