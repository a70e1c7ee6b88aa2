"""What a checkpoint says about a tensor, and a tensor in its packed form."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import attrs

from deepinfer_core.errors import CheckpointError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

T = TypeVar("T")


def tensor_named(tensors: Mapping[str, T], name: str, path: Path) -> T:
    """Return what a checkpoint knows of a tensor.

    Raises:
        CheckpointError: ``path`` has no such tensor.
    """
    try:
        return tensors[name]
    except KeyError:
        raise CheckpointError(f"{path} has no tensor {name!r}") from None


def viewed(data: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Return the bytes of a file as numbers, copied only where they lie at an odd place."""
    if data.data_ptr() % dtype.itemsize:
        data = data.clone()
    return data.view(dtype).reshape(shape)


@attrs.frozen(kw_only=True)
class TensorInfo:
    """One tensor of a checkpoint, described without reading it.

    Attributes:
        name: in Hugging Face terms, such as ``model.layers.0.self_attn.q_proj.weight``.
        shape: of the dense tensor, outermost dimension first.
        dtype: of what ``read`` returns, as torch spells it: ``float32``, ``bfloat16``, ...
        format: how the file stores it: the dtype for dense tensors, else the name of the packed
            format in lower case (``q4_1``, ``q8_0``, ``q6_k``, ...).
        num_bytes: size in the file.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    format: str
    num_bytes: int


@attrs.frozen(kw_only=True)
class PackedTensor:
    """A tensor in the blocks of its file format, for kernels that keep weights packed.

    Attributes:
        format: name of the block format in lower case, such as ``q4_1``.
        data: ``[*shape[:-1], bytes_per_row]``, uint8; blocks lie along the last dimension. It may
            share memory with a mapped file, so do not write to it.
        shape: of the dense tensor that the blocks stand for.
        block_size: dense elements per block.
        bytes_per_block: bytes per block.
        scales: where the format keeps them apart from the blocks; None where blocks hold their own.
    """

    format: str
    data: Tensor
    shape: tuple[int, ...]
    block_size: int
    bytes_per_block: int
    scales: Tensor | None = None


class Kept(StrEnum):
    """How a model holds a weight while it runs."""

    DENSE = "dense"
    """In memory, in the dtype of the computation, unless kernels say that they take it packed."""
    PACKED = "packed"
    """In memory as the file stores it, expanded where it is used."""
    MAPPED = "mapped"
    """In the mapped file, from which single rows are read."""


@attrs.frozen(kw_only=True)
class WeightSpec:
    """One weight that a model expects.

    Attributes:
        name: in Hugging Face terms.
        shape: expected dense shape.
        optional: whether the checkpoint may lack it (a tied output head, for example).
        formats: what the file may store it as, in terms of ``TensorInfo.format``, that of published
            checkpoints first; empty means anything.
        kept: how the model holds it.
        stored_bytes: of the published format, 0 where that is a dtype.
    """

    name: str
    shape: tuple[int, ...]
    optional: bool = False
    formats: tuple[str, ...] = ()
    kept: Kept = Kept.DENSE
    stored_bytes: int = 0
