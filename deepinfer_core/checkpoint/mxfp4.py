"""MXFP4 blocks to dense numbers (OCP Microscaling Formats 1.0).

A block is 32 numbers of four bits (E2M1: a sign, two bits of exponent, one of mantissa) that share
one power of two (E8M0). Two numbers lie in a byte, the first one in its low half.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 32
"""Numbers that share a scale."""

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""What the three low bits of a number stand for; the fourth is its sign."""
_BIAS = 127


def expand(blocks: Tensor, scales: Tensor) -> Tensor:
    """Expand rows of blocks.

    Args:
        blocks: [rows, num_blocks, 16], uint8.
        scales: [rows, num_blocks], uint8; exponents of two, biased by 127; 255 means NaN.

    Returns:
        [rows, num_blocks * 32], float32.
    """
    values = torch.tensor(MAGNITUDES + tuple(-value for value in MAGNITUDES))
    values = values.to(blocks.device)
    halves = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2)
    exponents = scales.to(torch.int32) - _BIAS
    factors = torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents)
    factors = factors.masked_fill(scales == 255, torch.nan)
    return (values[halves.int()] * factors.unsqueeze(-1)).flatten(-2)
