"""MXFP4 blocks to dense numbers (OCP Microscaling Formats 1.0).

A block is 32 numbers of four bits (E2M1: a sign, two bits of exponent, one of mantissa) that share
one power of two (E8M0). As GGUF files and kernels have it: a byte of exponent, then 16 bytes with
number i in the low half of byte i and number i + 16 in the high one. Hugging Face checkpoints keep
exponents apart, and two neighbours in a byte.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_core.checkpoint.tensors import PackedTensor

BLOCK = 32
"""Numbers that share a scale."""

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""What the three low bits of a number stand for; the fourth is its sign."""
_BIAS = 127
_NAN = 255


def as_packed(blocks: Tensor, scales: Tensor) -> PackedTensor:
    """A matrix of a Hugging Face checkpoint as GGUF files have it.

    Args:
        blocks: [rows, num_blocks, 16], uint8.
        scales: [rows, num_blocks], uint8; exponents of two, biased by 127; 255 means NaN.
    """
    rows, num_blocks, _ = blocks.shape
    numbers = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2)
    halves = numbers[..., :16] | numbers[..., 16:] << 4
    data = torch.cat([scales.unsqueeze(-1), halves], -1).flatten(-2)
    return PackedTensor(
        format="mxfp4",
        data=data,
        shape=(rows, num_blocks * BLOCK),
        block_size=BLOCK,
        bytes_per_block=1 + BLOCK // 2,
    )


def expand(blocks: Tensor, scales: Tensor) -> Tensor:
    """Expand rows of a Hugging Face checkpoint, as ``as_packed`` takes them.

    Returns:
        [rows, num_blocks * 32], float32.
    """
    packed = as_packed(blocks, scales)
    out = torch.empty(packed.shape, device=blocks.device)
    expand_blocks(packed.data.view(-1, packed.bytes_per_block), out.view(-1, BLOCK))
    return out


def expand_blocks(blocks: Tensor, out: Tensor) -> None:
    """Expand blocks [n, 17], as GGUF files have them, to [n, 32] float32."""
    values = torch.tensor(MAGNITUDES + tuple(-value for value in MAGNITUDES))
    values = values.to(blocks.device)
    exponents, halves = blocks[:, :1], blocks[:, 1:]
    factors = torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents.int() - _BIAS)
    factors.masked_fill_(exponents == _NAN, torch.nan)
    torch.mul(values[torch.cat([halves & 15, halves >> 4], 1).int()], factors, out=out)
