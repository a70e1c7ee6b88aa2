"""Blocks and cache records: against plain Python, and packed equals rounded."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deepinfer_deepseek.quant.blocks import (
    FP4,
    FP4_16,
    FP8,
    FP8_64,
    BlockFormat,
    Record,
)

WINDOW = Record(format=FP8, dim=512)
ENTRY = Record(format=FP4_16, dim=512)
INDEX = Record(format=FP4, dim=128)
V4 = Record(format=FP8_64, dim=448, tail=64, padding=1)
RECORDS = pytest.mark.parametrize(
    "record", [WINDOW, ENTRY, INDEX, V4], ids=["528", "288", "68", "584"]
)
FORMATS = pytest.mark.parametrize(
    "format", [FP8, FP8_64, FP4, FP4_16], ids=["8", "8/64", "4", "4/16"]
)

E4M3_CODES = [float(x) for x in torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)]
E2M1_CODES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E2M1_CODES += [-x for x in E2M1_CODES]


def vectors(count: int, dim: int, seed: int = 0) -> Tensor:
    """Numbers of very different sizes in one tensor, some zero."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(count, dim, generator=generator)
    sizes = torch.randint(-20, 9, (count, dim // 16), generator=generator)
    values = values * torch.exp2(sizes.float()).repeat_interleave(16, -1)
    return values.masked_fill(torch.rand(count, dim, generator=generator) < 0.1, 0)


def nearest(x: float, codes: list[float]) -> float:
    """Of the codes' numbers the nearest to x, of two the one with the even code."""
    ranked = [
        (abs(x - value), code % 2, value)
        for code, value in enumerate(codes)
        if not math.isnan(value) and math.copysign(1, value) == math.copysign(1, x)
    ]
    return min(ranked)[2]


def slow_block(values: list[float], largest: float, floor: float, codes: list[float],
               scale_of: Callable[[float], float]) -> list[float]:  # fmt: skip
    """A block as the specification words it, number by number."""
    top = max([abs(value) for value in values] + [floor])
    scale = scale_of(top / largest)
    return [nearest(value / scale, codes) * scale for value in values]


def ceil_power(x: float) -> float:
    power = 2.0**-149
    while power < x:
        power *= 2
    return power


SLOW = {
    FP8: (448.0, 1e-4, E4M3_CODES, ceil_power),
    FP8_64: (448.0, 1e-4, E4M3_CODES, ceil_power),
    FP4: (6.0, 6 * 2.0**-126, E2M1_CODES, ceil_power),
    FP4_16: (6.0, 6 * 2.0**-9, E2M1_CODES, lambda x: nearest(x, E4M3_CODES)),
}


@FORMATS
def test_blocks_are_what_the_specification_says(format: BlockFormat) -> None:
    x = vectors(3, 128).double()
    found = format.round(x)
    largest, floor, codes, scale_of = SLOW[format]
    expected = [
        [
            value
            for start in range(0, 128, format.block)
            for value in slow_block(
                row[start : start + format.block], largest, floor, codes, scale_of
            )
        ]
        for row in x.tolist()
    ]
    assert found.tolist() == expected


@FORMATS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_rounding_twice_changes_nothing(format: BlockFormat, dtype: torch.dtype) -> None:
    x = vectors(20, 128, seed=1)
    if format.scale is not None:
        x[:, ::16] = 0.1  # smaller scales would have fewer bits, and move what they scale
    once = format.round(x.to(dtype))
    assert once.dtype == dtype
    assert format.round(once).equal(once)


@FORMATS
def test_no_number_moves_by_more_than_half_a_step(format: BlockFormat) -> None:
    x = vectors(50, 128, seed=2)
    moved = (format.round(x) - x).abs().unflatten(-1, (-1, format.block))
    top = x.abs().unflatten(-1, (-1, format.block)).amax(-1, keepdim=True)
    # A power of two wastes up to a bit, so that the largest steps of E4M3 are a seventh of the
    # largest number, those of E2M1 two thirds. An E4M3 scale is off by a sixteenth, or by half the
    # smallest scale.
    share = {FP8: 1 / 14, FP8_64: 1 / 14, FP4: 1 / 3, FP4_16: 1 / 6 * 17 / 16}[format]
    floor = torch.tensor(4 * format.floor / format.number.largest)
    assert (moved <= torch.maximum(top * share, floor)).all()


def test_records_have_the_published_sizes() -> None:
    assert [record.num_bytes for record in (WINDOW, ENTRY, INDEX, V4)] == [528, 288, 68, 584]
    # Three owners of ratio 2 and one of ratio 1: 890 bytes for a token of V4.1.
    entry = ENTRY.num_bytes + INDEX.num_bytes
    assert 3 * entry / 2 + entry == 890


@RECORDS
@given(seed=st.integers(0, 2**32))
@settings(max_examples=20)
def test_a_record_gives_back_what_rounding_gives(record: Record, seed: int) -> None:
    x = vectors(4, record.dim + record.tail, seed)
    packed = record.pack(x)
    assert packed.dtype == torch.uint8
    assert packed.shape == (4, record.num_bytes)
    found = record.unpack(packed)
    assert found.equal(record.round(x))
    assert record.unpack(record.pack(x[0])).equal(found[0])


def test_the_layout_of_a_window_record() -> None:
    x = torch.zeros(512)
    x[0], x[33], x[511] = 448.0, -3.0, 2.0**-10
    packed = WINDOW.pack(x).tolist()
    assert packed[0] == 0x7E  # the largest number, at scale 1
    # -3 at scale 2^-7 is -384: sign, exponent 15, mantissa 4.
    assert packed[33] == 0xFC
    assert packed[512:514] == [127, 120]
    assert packed[511] == 0x78  # 2^-10 at scale 2^-18 is 256
    assert packed[527] == 127 - 18
    assert packed[514:527] == [127 - 22] * 13  # blocks of zeros: 1e-4 at least


def test_the_layout_of_a_compressed_record() -> None:
    x = torch.zeros(512)
    x[0], x[1], x[2] = 12.0, -1.0, 3.5
    packed = ENTRY.pack(x).tolist()
    # At scale 2 the numbers are 6, -0.5 and 1.75, which is halfway and goes to 2.
    assert packed[:2] == [0x97, 0x04]
    assert packed[256:258] == [0x40, 0x01]  # 2.0, and the smallest scale for zeros
    assert len(packed) == 288


def test_the_tail_of_a_v4_record_is_bfloat16() -> None:
    x = torch.arange(512).float() / 7
    packed = V4.pack(x)
    tail = struct.unpack("<64H", bytes(packed[448:576].tolist()))
    expected = x[448:].bfloat16().view(torch.int16).tolist()
    assert list(tail) == expected
    assert packed[583] == 0


def test_dimensions_that_blocks_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="500 numbers do not fill blocks of 32"):
        Record(format=FP8, dim=500)
