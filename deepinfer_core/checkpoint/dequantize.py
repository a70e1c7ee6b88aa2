"""Packed blocks to dense float32.

The block formats that small models and experts mostly come in are expanded here with torch, on all
threads; the rest goes through the ``gguf`` package, which is slower and gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from deepinfer_core.checkpoint import mxfp4
from deepinfer_core.errors import CheckpointError

_BlockExpander = Callable[[Tensor, Tensor], None]


def dequantize(data: Tensor, kind: str, shape: tuple[int, ...]) -> Tensor:
    """Expand packed rows.

    Args:
        data: ``[*shape[:-1], bytes_per_row]``, uint8.
        kind: block format in lower case, such as ``q4_1``.
        shape: dense shape.

    Returns:
        ``shape``, float32.

    Raises:
        CheckpointError: the format cannot be expanded.
    """
    if kind in _FAST:
        block_size, bytes_per_block, expand = _FAST[kind]
        out = torch.empty(shape, dtype=torch.float32, device=data.device)
        expand(data.reshape(-1, bytes_per_block), out.view(-1, block_size))
        return out
    return _dequantize_any(data, kind, shape)


def can_dequantize(kind: str) -> bool:
    """Say whether ``dequantize`` knows a block format."""
    if kind in _FAST:
        return True
    import gguf

    # The package keeps no public list of what it expands; one block of zeros is a cheap question.
    try:
        quantization = gguf.GGMLQuantizationType[kind.upper()]
        _, num_bytes = gguf.GGML_QUANT_SIZES[quantization]
        _dequantize_any(torch.zeros(1, num_bytes, dtype=torch.uint8), kind, None)
    except (KeyError, CheckpointError):
        return False
    return True


def _dequantize_any(data: Tensor, kind: str, shape: tuple[int, ...] | None) -> Tensor:
    import gguf

    try:
        dense = gguf.dequantize(data.numpy(), gguf.GGMLQuantizationType[kind.upper()])
    except (NotImplementedError, ValueError) as error:
        raise CheckpointError(f"block format {kind.upper()} cannot be expanded: {error}") from error
    out = torch.from_numpy(dense)
    return out if shape is None else out.reshape(shape)


def _half(blocks: Tensor, start: int) -> Tensor:
    """Read one float16 of every block: ``[num_blocks, 1]``, float32."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor, out: Tensor) -> None:
    """Spread ``[num_blocks, 16]`` bytes: low halves to the first 16 elements, high to the rest."""
    out[:, :16].copy_(packed & 15)
    out[:, 16:].copy_(packed >> 4)


def _q4_0(blocks: Tensor, out: Tensor) -> None:
    _nibbles(blocks[:, 2:], out)
    out.sub_(8).mul_(_half(blocks, 0))


def _q4_1(blocks: Tensor, out: Tensor) -> None:
    _nibbles(blocks[:, 4:], out)
    out.mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q8_0(blocks: Tensor, out: Tensor) -> None:
    out.copy_(blocks[:, 2:].view(torch.int8))
    out.mul_(_half(blocks, 0))


_FAST: Mapping[str, tuple[int, int, _BlockExpander]] = {
    "q4_0": (32, 18, _q4_0),
    "q4_1": (32, 20, _q4_1),
    "q8_0": (32, 34, _q8_0),
    "mxfp4": (32, 17, mxfp4.expand_blocks),
}
