"""Matrices in eight and four bits with scales beside them: names, shapes, and expansion.

A matrix ``X.weight`` has its scales in ``X.scale`` (codes E8M0) or, in older checkpoints, in
``X.weight_scale_inv`` (float32; despite the name, they multiply). FP4 lies two numbers to a byte,
the even column in the low half.
"""

from __future__ import annotations

import re

import torch
from attrs import frozen
from torch import Tensor
from torch.nn import functional

from deepinfer_core.checkpoint.tensors import PackedTensor
from deepinfer_core.errors import CheckpointError
from deepinfer_deepseek.quant.numbers import (
    E2M1,
    E4M3,
    Minifloat,
    encode_e8m0,
    fitting_power,
    pack_nibbles,
    unpack_nibbles,
)

_NAME = re.compile(r"fp([48])_(\d+)x(\d+)")


_WHOLE_PAIRS = {torch.float32: torch.int64, torch.bfloat16: torch.int32}
"""Words that hold two numbers."""


@frozen(kw_only=True)
class MatrixFormat:
    """Numbers of a few bits; a block of rows and columns shares a scale.

    Attributes:
        number: of each element.
        rows: rows of a block.
        columns: columns of a block.
    """

    number: Minifloat
    rows: int
    columns: int

    @property
    def name(self) -> str:
        """As in ``TensorInfo.format``: ``fp8_32x32``, ``fp4_1x32``, ..."""
        return f"fp{self.number.bits}_{self.rows}x{self.columns}"

    @classmethod
    def named(cls, name: str) -> MatrixFormat | None:
        """The format of a name, None if the name is of another kind."""
        found = _NAME.fullmatch(name)
        if found is None:
            return None
        bits, rows, columns = (int(part) for part in found.groups())
        return cls(number=E4M3 if bits == 8 else E2M1, rows=rows, columns=columns)

    def grid(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Shape of the scales of a matrix."""
        return -(-shape[0] // self.rows), -(-shape[1] // self.columns)

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Shape of the bytes of a matrix."""
        return shape[0], shape[1] * self.number.bits // 8

    def dense_shape(self, stored: tuple[int, ...]) -> tuple[int, int]:
        """Shape of the matrix of these bytes."""
        return stored[0], stored[1] * 8 // self.number.bits

    def num_bytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of a matrix with its scales in one byte each."""
        (rows, columns), (across, along) = self.stored_shape(shape), self.grid(shape)
        return rows * columns + across * along

    def expand(self, data: Tensor, scales: Tensor) -> Tensor:
        """Numbers of a matrix, or of some of its rows where a block has one row.

        Args:
            data: [rows, bytes of a row], uint8.
            scales: the grid, float8_e8m0fnu or float32.

        Returns:
            [rows, columns], float32; exact.
        """
        if self._pairs_of(scales, data) is not None:
            out = torch.empty(self.dense_shape(tuple(data.shape)), device=data.device)
            self.expand_into(out, data, scales)
            return out
        numbers = self.number.decode(unpack_nibbles(data) if self.number.bits == 4 else data)
        across, along = scales.shape
        if numbers.shape != (across * self.rows, along * self.columns):
            return numbers.mul_(self._spread(scales, numbers.shape))
        blocks = numbers.view(across, self.rows, along, self.columns)
        blocks.mul_(scales.float()[:, None, :, None])
        return numbers

    def expand_into(self, out: Tensor, data: Tensor, scales: Tensor) -> None:
        """Write what ``expand`` returns into a tensor, rounded to its dtype.

        Args:
            out: [rows, columns], contiguous.
            data: see ``expand``.
            scales: see ``expand``.
        """
        pairs = self._pairs_of(scales, data)
        if pairs is None or out.dtype not in _WHOLE_PAIRS:
            out.copy_(self.expand(data, scales))
            return
        # Both numbers of a byte are looked up at once, as one word.
        words = pairs.to(out.dtype).view(_WHOLE_PAIRS[out.dtype]).flatten()
        found = out.view(words.dtype).flatten()
        torch.index_select(words, 0, data.flatten().int(), out=found)
        # At most four significant bits times a power of two: bfloat16 holds all of it.
        blocks = out.view(out.shape[0], -1, self.columns)
        blocks.mul_(scales.float().to(out.dtype).unsqueeze(-1))

    def _pairs_of(self, scales: Tensor, data: Tensor) -> Tensor | None:
        """[256, 2]: the two numbers of a byte, if whole rows of blocks with powers of two are."""
        whole = scales.dtype == torch.float8_e8m0fnu and data.shape[1] * 2 % self.columns == 0
        if self.number.bits != 4 or self.rows != 1 or not whole:
            return None
        every = torch.arange(256, device=data.device)
        return self.number.decode(torch.stack([every & 15, every >> 4], -1))

    def quantize(self, matrix: Tensor) -> tuple[Tensor, Tensor]:
        """Round a matrix; each block has the smallest scale that lets its largest number fit.

        Args:
            matrix: [rows, columns], finite; for FP4 with an even number of columns.

        Returns:
            Bytes [rows, bytes of a row], uint8, and scales on the grid, float8_e8m0fnu.
        """
        wide = matrix.float()
        rows, columns = wide.shape
        across, along = self.grid((rows, columns))
        padded = functional.pad(
            wide, (0, along * self.columns - columns, 0, across * self.rows - rows)
        )
        blocks = padded.reshape(across, self.rows, along, self.columns)
        largest = blocks.abs().amax((1, 3)).clamp(self.number.largest * 2.0**-126)
        scales = fitting_power(largest, self.number.largest)
        numbers = self.number.round(wide / self._spread(scales, wide.shape))
        codes = self.number.encode(numbers)
        return (
            pack_nibbles(codes) if self.number.bits == 4 else codes,
            encode_e8m0(scales).view(torch.float8_e8m0fnu),
        )

    def _spread(self, scales: Tensor, shape: tuple[int, ...]) -> Tensor:
        """The scale of every element."""
        wide = scales.float()
        if self.rows > 1:
            wide = wide.repeat_interleave(self.rows, 0)[: shape[0]]
        return wide.repeat_interleave(self.columns, 1)[:, : shape[1]]


FP4 = MatrixFormat(number=E2M1, rows=1, columns=32)
"""Experts."""
FP8_ROWS = MatrixFormat(number=E4M3, rows=1, columns=32)
"""Tables of which single rows are read."""


def expand(packed: PackedTensor) -> Tensor:
    """Dense float32 of a packed matrix; exact.

    Raises:
        CheckpointError: its format is not one of this module's.
    """
    found, scales = _known(packed)
    return found.expand(packed.data, scales)


def expand_into(out: Tensor, packed: PackedTensor) -> None:
    """Write what ``expand`` returns into a tensor, rounded to its dtype; raises as it does."""
    found, scales = _known(packed)
    found.expand_into(out, packed.data, scales)


def _known(packed: PackedTensor) -> tuple[MatrixFormat, Tensor]:
    found = MatrixFormat.named(packed.format)
    if found is None or packed.scales is None:
        raise CheckpointError(f"block format {packed.format!r} is not one of FP8 or FP4 matrices")
    return found, packed.scales
