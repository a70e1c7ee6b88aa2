"""Small floating-point numbers against slow implementations that share nothing with them."""

from __future__ import annotations

import math
import struct
from bisect import bisect_left
from fractions import Fraction
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_deepseek.quant.numbers import (
    E2M1,
    E4M3,
    Minifloat,
    decode_e8m0,
    encode_e8m0,
    fitting_power,
    pack_nibbles,
    power_of_two,
    unpack_nibbles,
)


def value_of(code: int, exponent_bits: int, mantissa_bits: int) -> Fraction:
    """The definition of a minifloat, in exact arithmetic."""
    bias = 2 ** (exponent_bits - 1) - 1
    sign = -1 if code >> (exponent_bits + mantissa_bits) else 1
    exponent = (code >> mantissa_bits) & (2**exponent_bits - 1)
    mantissa = Fraction(code & (2**mantissa_bits - 1), 2**mantissa_bits)
    if exponent == 0:
        return sign * mantissa * power(1 - bias)
    return sign * (1 + mantissa) * power(exponent - bias)


def power(exponent: int) -> Fraction:
    return Fraction(2**exponent) if exponent >= 0 else Fraction(1, 2**-exponent)


# All codes without a sign, in ascending order of their numbers; E4M3's last one is NaN.
POSITIVE = {
    "E4M3": [value_of(code, 4, 3) for code in range(127)],
    "E2M1": [value_of(code, 2, 1) for code in range(8)],
}
FORMATS = pytest.mark.parametrize("number", [E4M3, E2M1], ids=lambda number: number.name)


def nearest(x: float, values: list[Fraction]) -> Fraction:
    """Round by comparing distances; of two equally near codes the even one wins."""
    exact = abs(Fraction(x))
    above = min(bisect_left(values, exact), len(values) - 1)
    below = max(above - 1, 0)
    if exact >= values[above]:
        found = above
    else:
        up, down = values[above] - exact, exact - values[below]
        found = above if up < down or (up == down and above % 2 == 0) else below
    return values[found]


def reals(number: Minifloat) -> st.SearchStrategy[float]:
    """Numbers of all sizes, many of them ties or next to one."""
    values = POSITIVE[number.name]
    halves = [float(a + b) / 2 for a, b in pairwise(values)]
    near = st.sampled_from(halves).flatmap(
        lambda x: st.sampled_from([x, math.nextafter(x, 0), math.nextafter(x, 1e9)])
    )
    anything = st.floats(allow_nan=False, allow_infinity=False)
    return st.tuples(near | anything, st.sampled_from([1, -1])).map(lambda pair: pair[0] * pair[1])


@FORMATS
@given(data=st.data())
def test_rounding_is_to_the_nearest_even(number: Minifloat, data: st.DataObject) -> None:
    x = data.draw(reals(number))
    found = float(number.round(torch.tensor([x], dtype=torch.float64)))
    assert abs(found) == nearest(x, POSITIVE[number.name])
    assert math.copysign(1, found) == math.copysign(1, x)


@given(x=st.floats(width=32, min_value=-448, max_value=448))
def test_float32_rounds_as_torch_casts(x: float) -> None:
    given = torch.tensor([x], dtype=torch.float32)
    assert E4M3.round(given).equal(given.to(torch.float8_e4m3fn).float())


def test_every_float16_rounds_as_torch_casts() -> None:
    bits = torch.arange(65536, dtype=torch.int32).to(torch.uint16)
    x = bits.view(torch.float16).float()
    x = x[x.isfinite()].clamp(-448, 448)
    assert E4M3.round(x).equal(x.to(torch.float8_e4m3fn).float())


@FORMATS
def test_what_is_too_large_saturates(number: Minifloat) -> None:
    x = torch.tensor([1.0001 * number.largest, -1e30, math.inf])
    assert number.round(x).tolist() == [number.largest, -number.largest, number.largest]
    assert number.round(torch.tensor([math.nan])).isnan().all()


def test_ties_of_four_bits() -> None:
    given = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert E2M1.round(given).tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]


def test_all_256_codes_of_e4m3() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    found = E4M3.decode(codes)
    assert found[[127, 255]].isnan().all()
    rest = torch.cat([codes[:127], codes[128:255]])
    assert [Fraction(x) for x in found[rest.long()].tolist()] == [
        value_of(code, 4, 3) for code in rest.tolist()
    ]
    assert E4M3.encode(found[rest.long()]).equal(rest)
    assert E4M3.round(found[rest.long()]).equal(found[rest.long()])


def test_all_16_codes_of_e2m1() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    found = E2M1.decode(codes)
    assert [Fraction(x) for x in found.tolist()] == [value_of(code, 2, 1) for code in range(16)]
    assert torch.signbit(found).tolist() == [False] * 8 + [True] * 8
    assert E2M1.encode(found).equal(codes)
    assert E2M1.round(found).equal(found)


def test_all_256_scales() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    found = decode_e8m0(codes)
    assert found[255].isnan()
    assert found[:255].tolist() == [math.ldexp(1.0, code - 127) for code in range(255)]
    assert encode_e8m0(found[:255]).equal(codes[:255])
    assert power_of_two(torch.arange(-127, 128)).equal(found[:255])


@given(
    x=st.floats(min_value=2.0**-110, max_value=2.0**120, width=32),
    limit=st.sampled_from([448.0, 6.0]),
)
def test_the_fitting_power_is_the_smallest_that_fits(x: float, limit: float) -> None:
    found = Fraction(float(fitting_power(torch.tensor([x]), limit)))
    assert Fraction(x) <= Fraction(limit) * found
    assert Fraction(x) > Fraction(limit) * found / 2


@given(
    x=st.floats(min_value=2.0**-100, max_value=2.0**100, width=32),
    limit=st.sampled_from([448.0, 6.0]),
)
def test_the_fitting_power_is_what_the_bits_of_a_quotient_say(x: float, limit: float) -> None:
    """The published kernels multiply by the reciprocal and look at exponent and mantissa."""
    quotient = torch.tensor(x) * (torch.tensor(1.0) / torch.tensor(limit))
    (bits,) = struct.unpack("<I", struct.pack("<f", float(quotient)))
    exponent = (bits >> 23) - 127 + (1 if bits & 0x7FFFFF else 0)
    assert float(fitting_power(torch.tensor([x]), limit)) == 2.0**exponent


@given(
    codes=st.lists(st.integers(0, 15), min_size=2, max_size=20).filter(lambda c: len(c) % 2 == 0)
)
def test_nibbles_lie_with_the_even_one_low(codes: list[int]) -> None:
    packed = pack_nibbles(torch.tensor(codes, dtype=torch.uint8))
    expected = [low | high << 4 for low, high in zip(codes[::2], codes[1::2], strict=True)]
    assert packed.tolist() == expected
    assert unpack_nibbles(packed).tolist() == codes
