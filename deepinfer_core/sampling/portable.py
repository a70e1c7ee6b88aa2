"""Logarithms and integer masses that are the same everywhere, bit for bit.

Library versions of `log` and `exp` differ in the last bits between devices, and some depend on
where a value stands in its vector; float sums depend on their order. What is drawn must depend
on none of it, so that both functions are built here from additions, multiplications, divisions
and comparisons, which IEEE 754 rounds exactly, and probabilities are summed as integers.

Each operation is a separate tensor operation, so that nothing is contracted to a fused
multiply-add. float64 throughout.
"""

from __future__ import annotations

import decimal
import functools
import math

import torch

MASS_BITS = 40
"""A mass is ``round(exp(x) * 2**MASS_BITS)``: the most likely token has 2**40.

Sums over a vocabulary of 2**22 tokens fit into int64."""

MASS_FLOOR = -(MASS_BITS + 1) * math.log(2.0)
"""Below this x (about -28.4) the mass is 0."""

_STEPS = 256  # steps of the exponential's table in one octave
_LOG_TERMS = 12
_LN2_HIGH = 0x162E42FEFA3800 * 2.0**-53  # upper 42 bits of ln 2: products with exponents are exact
_LN2_LOW = float(decimal.Decimal("5.4979230187083711552420206887059e-14"))
_SQRT_HALF = 0.7071067811865476


def log(x: torch.Tensor) -> torch.Tensor:
    """Return the natural logarithm, within two units of the last place.

    Args:
        x: any shape, float64, positive and normal.

    Returns:
        The shape of ``x``, float64.
    """
    mantissa, exponent = torch.frexp(x)
    low = mantissa < _SQRT_HALF
    mantissa = torch.where(low, mantissa * 2.0, mantissa)
    power = (exponent - low.to(exponent.dtype)).to(torch.float64)
    rest = mantissa - 1.0  # exact; the result is accurate relative to itself near 1
    s = rest / (rest + 2.0)
    z = s * s
    series = torch.full_like(z, 1.0 / (2 * _LOG_TERMS + 1))
    for term in range(_LOG_TERMS - 1, 0, -1):
        series = series * z
        series = series + 1.0 / (2 * term + 1)
    # log(1 + rest) = 2 atanh(s) = rest - s * (rest - 2 z series), which keeps `rest` exact.
    correction = series * z
    correction = rest - correction * 2.0
    correction = s * correction
    tail = power * _LN2_LOW
    tail = tail - correction
    return power * _LN2_HIGH + (rest + tail)


@functools.cache
def exponentials() -> tuple[float, ...]:
    """Return ``2**MASS_BITS * exp(-n ln2 / 256)`` for n from 0, correctly rounded."""
    context = decimal.Context(prec=30)
    step = context.divide(context.ln(decimal.Decimal(2)), decimal.Decimal(_STEPS))
    octave = [
        float(context.exp(context.multiply(step, decimal.Decimal(-n)))) for n in range(_STEPS)
    ]
    octaves = range(MASS_BITS + 3)
    return tuple(value * 2.0 ** (MASS_BITS - k) for k in octaves for value in octave)


@functools.lru_cache(maxsize=16)
def _table(device: torch.device) -> torch.Tensor:
    return torch.tensor(exponentials(), dtype=torch.float64, device=device)


def masses(x: torch.Tensor) -> torch.Tensor:
    """Return ``round(exp(x) * 2**40)`` as integers, within one.

    Args:
        x: any shape, float64, at most 0; -inf is allowed.

    Returns:
        The shape of ``x``, int64, from 0 to 2**40. Sums are exact in any order.
    """
    step = math.log(2.0) / _STEPS
    # A little below the floor every mass rounds to 0, and the table ends.
    rest = torch.clamp(x, min=MASS_FLOOR - 0.25)
    index = torch.round(rest * (-1.0 / step))
    found = torch.index_select(_table(x.device), 0, index.to(torch.int64).flatten())
    rest += index.mul_(step)
    series = rest * (1.0 / 6.0)
    series.add_(0.5).mul_(rest).add_(1.0).mul_(rest).add_(1.0)
    return series.mul_(found.view(x.shape)).round_().to(torch.int64)


def log_float(x: float) -> float:
    """Return the natural logarithm of one positive normal number: the bits that `log` gives."""
    mantissa, exponent = math.frexp(x)
    if mantissa < _SQRT_HALF:
        mantissa, exponent = mantissa * 2.0, exponent - 1
    rest = mantissa - 1.0
    s = rest / (rest + 2.0)
    z = s * s
    series = 1.0 / (2 * _LOG_TERMS + 1)
    for term in range(_LOG_TERMS - 1, 0, -1):
        series = series * z + 1.0 / (2 * term + 1)
    correction = s * (rest - series * z * 2.0)
    return exponent * _LN2_HIGH + (rest + (exponent * _LN2_LOW - correction))
