"""Blocks of small numbers that share a scale, as activations and caches are rounded."""

from __future__ import annotations

import torch
from attrs import Attribute, field, frozen
from torch import Tensor
from torch.nn import functional

from deepinfer_deepseek.quant.numbers import (
    E2M1,
    E4M3,
    Minifloat,
    decode_e8m0,
    encode_e8m0,
    fitting_power,
    pack_nibbles,
    unpack_nibbles,
)


@frozen(kw_only=True)
class BlockFormat:
    """How a run of numbers along the last dimension becomes codes and a scale.

    Attributes:
        number: what each number is rounded to, in units of its block's scale.
        block: numbers that share a scale.
        floor: the largest magnitude that a block is taken to have at least.
        scale: what scales are rounded to; None is the smallest power of two that lets the largest
            magnitude fit (code E8M0).
    """

    number: Minifloat
    block: int
    floor: float
    scale: Minifloat | None = None

    def round(self, x: Tensor) -> Tensor:
        """Quantise and expand again.

        Args:
            x: [..., n], finite, of any floating dtype; n is a multiple of ``block``.

        Returns:
            As ``x``. Rounding twice changes nothing, unless an E4M3 scale is subnormal.
        """
        numbers, scales = self.quantize(x)
        return (numbers * scales.unsqueeze(-1)).flatten(-2).to(x.dtype)

    def quantize(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Split into numbers and scales.

        Returns:
            Numbers in units of their scale, [..., n / block, block], and scales, [..., n / block];
            float64 for float64, else float32.
        """
        wide = x if x.dtype == torch.float64 else x.float()
        blocks = wide.unflatten(-1, (-1, self.block))
        largest = blocks.abs().amax(-1).clamp(self.floor)
        if self.scale is None:
            scales = fitting_power(largest, self.number.largest).to(wide.dtype)
        else:
            scales = self.scale.round(largest / self.number.largest)
        return self.number.round(blocks / scales.unsqueeze(-1)), scales

    def encode_scales(self, scales: Tensor) -> Tensor:
        """Codes of scales, uint8."""
        return encode_e8m0(scales) if self.scale is None else self.scale.encode(scales)

    def decode_scales(self, codes: Tensor) -> Tensor:
        """Scales of codes (uint8), float32."""
        return decode_e8m0(codes) if self.scale is None else self.scale.decode(codes)


FP8 = BlockFormat(number=E4M3, block=32, floor=1e-4)
"""Activations of V4.1, and the keys that its windows hold."""
FP8_64 = BlockFormat(number=E4M3, block=64, floor=1e-4)
"""Keys of V4."""
FP8_128 = BlockFormat(number=E4M3, block=128, floor=1e-4)
"""Activations of V4 and V3."""
FP4 = BlockFormat(number=E2M1, block=32, floor=6 * 2.0**-126)
"""Queries and keys of the indexer."""
FP4_16 = BlockFormat(number=E2M1, block=16, floor=6 * 2.0**-9, scale=E4M3)
"""Compressed keys of V4.1."""


@frozen(kw_only=True)
class Record:
    """The bytes of one vector in a cache: codes, then numbers kept in bfloat16, then scales.

    Attributes:
        format: of the leading numbers.
        dim: leading numbers that are quantised, a multiple of the format's block.
        tail: numbers behind them that are kept in bfloat16.
        padding: unused bytes at the end.
    """

    format: BlockFormat
    dim: int = field()
    tail: int = 0
    padding: int = 0

    @dim.validator
    def _whole_blocks(self, attribute: Attribute[int], value: int) -> None:
        if value < 1 or value % self.format.block:
            raise ValueError(f"{value} numbers do not fill blocks of {self.format.block}")

    @property
    def code_bytes(self) -> int:
        """Bytes of the codes."""
        return self.dim * self.format.number.bits // 8

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales."""
        return self.dim // self.format.block

    @property
    def num_bytes(self) -> int:
        """Bytes of a record."""
        return self.code_bytes + 2 * self.tail + self.scale_bytes + self.padding

    def round(self, x: Tensor) -> Tensor:
        """What a vector is after ``pack`` and ``unpack``: ``[..., dim + tail]``, dtype of ``x``."""
        head, tail = x.split([self.dim, self.tail], -1)
        return torch.cat([self.format.round(head), tail.bfloat16().to(x.dtype)], -1)

    def pack(self, x: Tensor) -> Tensor:
        """``[..., dim + tail]``, any floating dtype -> ``[..., num_bytes]``, uint8."""
        head, tail = x.split([self.dim, self.tail], -1)
        numbers, scales = self.format.quantize(head)
        codes = self.format.number.encode(numbers.flatten(-2))
        if self.format.number.bits == 4:
            codes = pack_nibbles(codes)
        parts = [codes, tail.bfloat16().contiguous().view(torch.uint8)]
        parts.append(self.format.encode_scales(scales))
        return functional.pad(torch.cat(parts, -1), (0, self.padding))

    def unpack(self, records: Tensor) -> Tensor:
        """``[..., num_bytes]``, uint8 -> ``[..., dim + tail]``, float32."""
        sizes = [self.code_bytes, 2 * self.tail, self.scale_bytes, self.padding]
        codes, tail, scales, _ = (part.contiguous() for part in records.split(sizes, -1))
        if self.format.number.bits == 4:
            codes = unpack_nibbles(codes)
        numbers = self.format.number.decode(codes).unflatten(-1, (-1, self.format.block))
        head = numbers * self.format.decode_scales(scales).unsqueeze(-1)
        return torch.cat([head.flatten(-2), tail.view(torch.bfloat16).float()], -1)
