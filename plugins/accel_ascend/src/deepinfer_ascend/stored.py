"""Matrices that a checkpoint stores in eight or four bits, as products in blocks take them.

Formats are named as ``PackedTensor.format`` has them: in ``fp8_RxC`` and ``fp4_1x32`` R rows and C
columns share a scale, ``mxfp4`` are blocks of GGUF files. Numbers stay as they are: scales of
larger blocks are repeated for every 32 of a row.
"""

from __future__ import annotations

import re

import torch
from attrs import frozen
from torch import Tensor

from deepinfer_ascend.calls import MX_BLOCK
from deepinfer_core.checkpoint.tensors import PackedTensor

FP8_FORMATS = ("fp8_1x32", "fp8_32x32", "fp8_128x128")
FP4_FORMATS = ("fp4_1x32", "mxfp4")

_NAME = re.compile(r"fp[48]_(\d+)x(\d+)")
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS = 127


@frozen(kw_only=True, eq=False)
class Blocks:
    """A matrix whose rows consist of blocks of 32 numbers with a scale each.

    Attributes:
        data: [rows, columns] float8_e4m3fn, or [rows, columns / 2] uint8 with two numbers of E2M1,
            the first of them in the lower half.
        scales: [rows, columns / 32, rounded up], float32.
    """

    data: Tensor
    scales: Tensor

    def codes(self) -> Tensor | None:
        """Scales as products take them, [rows, columns / 64, 2] uint8.

        None where a scale is no power of two, or blocks do not come in pairs.
        """
        pairs = self._columns() % (2 * MX_BLOCK) == 0
        fractions, exponents = torch.frexp(self.scales)
        if not pairs or not bool((fractions == 0.5).all()):
            return None
        return (exponents - 1 + _BIAS).to(torch.uint8).unflatten(-1, (-1, 2))

    def dense(self) -> Tensor:
        """[rows, columns], float32; exact but for scales that are no powers of two."""
        if self.data.dtype == torch.uint8:
            table = torch.tensor([*_E2M1, *(-x for x in _E2M1)], device=self.data.device)
            pairs = torch.stack([self.data & 15, self.data >> 4], -1).flatten(-2)
            numbers = table[pairs.int()]
        else:
            numbers = self.data.float()
        wide = self.scales.repeat_interleave(MX_BLOCK, 1)
        return numbers * wide[:, : numbers.shape[1]]

    def _columns(self) -> int:
        return self.data.shape[1] * (2 if self.data.dtype == torch.uint8 else 1)


def blocks_of(weight: PackedTensor, device: torch.device) -> Blocks:
    """A matrix of one of the formats above, on a device."""
    data = weight.data.to(device)
    if weight.format == "mxfp4":
        return _of_gguf(data)
    found = _NAME.fullmatch(weight.format)
    assert found is not None, weight.format
    assert weight.scales is not None, weight.format
    rows, columns = (int(size) for size in found.groups())
    scales = weight.scales.to(device).float()
    scales = scales.repeat_interleave(rows, 0)[: weight.shape[0]]
    scales = scales.repeat_interleave(columns // MX_BLOCK, 1)[:, : -(-weight.shape[1] // MX_BLOCK)]
    if weight.format in FP8_FORMATS:
        data = data.view(torch.float8_e4m3fn)
    return Blocks(data=data.contiguous(), scales=scales)


def _of_gguf(data: Tensor) -> Blocks:
    """A byte of scale, then number i in the lower half of byte i and number i + 16 above it."""
    blocks = data.unflatten(-1, (-1, 1 + MX_BLOCK // 2))
    halves = blocks[..., 1:]
    numbers = torch.cat([halves & 15, halves >> 4], -1).flatten(-2)
    scales = blocks[..., 0].contiguous().view(torch.float8_e8m0fnu).float()
    return Blocks(data=numbers[..., ::2] | numbers[..., 1::2] << 4, scales=scales)
