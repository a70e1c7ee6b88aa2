"""How close is close: tolerances by dtype and family of computation, and what to compare.

A result is compared with a float64 reference of the *rounded* inputs. Errors are measured against
the size of the whole result, not of single elements, for products of many terms cancel.
"""

from __future__ import annotations

from enum import StrEnum

import torch
from torch import Tensor


class Family(StrEnum):
    """What kind of computation a result came from."""

    COPY = "copy"
    """Moves numbers; must be exact."""
    ELEMENT = "element"
    """A few operations on each element."""
    REDUCTION = "reduction"
    """Norms, softmax: sums of one row."""
    PRODUCT = "product"
    """One matrix product."""
    ATTENTION = "attention"
    """Two products with a softmax between them."""
    MODEL = "model"
    """Several layers of everything."""


_ROUNDING = {
    "float64": 2.0**-53,
    "float32": 2.0**-24,
    "float16": 2.0**-11,
    "bfloat16": 2.0**-8,
}

_STEPS = {  # (float32 and float64, narrower dtypes: these add up in float32 and round seldom)
    Family.COPY: (0.0, 0.0),
    Family.ELEMENT: (4.0, 2.0),
    Family.REDUCTION: (8.0, 4.0),
    Family.PRODUCT: (16.0, 2.0),
    Family.ATTENTION: (16.0, 4.0),
    Family.MODEL: (64.0, 16.0),
}


def tolerance(dtype: str, family: Family) -> float:
    """Allowed error relative to the largest element of the result.

    Args:
        dtype: name of the computation dtype.
        family: what was computed.
    """
    return _STEPS[family][dtype not in {"float32", "float64"}] * _ROUNDING[dtype]


def error_of(found: Tensor, expected: Tensor) -> float:
    """Largest absolute error relative to the largest element expected; inf where NaN was found."""
    if expected.numel() == 0:
        return 0.0
    if not bool(torch.isfinite(found).all()):
        return float("inf")
    expected = expected.double()
    scale = max(float(expected.abs().max()), 1e-30)
    return float((found.double() - expected).abs().max()) / scale


def assert_close(
    found: Tensor, expected: Tensor, *, dtype: str, family: Family, what: str = "result"
) -> None:
    """Raise AssertionError unless ``found`` is ``expected`` within the tolerance.

    Args:
        found: what the component computed, on the CPU.
        expected: the reference in float64, same shape.
        dtype: name of the computation dtype.
        family: what was computed.
        what: names the result in the message.
    """
    assert found.shape == expected.shape, (
        f"{what}: shape {tuple(found.shape)}, expected {tuple(expected.shape)}"
    )
    error, allowed = error_of(found, expected), tolerance(dtype, family)
    assert error <= allowed, (
        f"{what}: relative error {error:.2e}, allowed {allowed:.2e} ({family}, {dtype})"
    )


def assert_same_bits(found: Tensor, expected: Tensor, what: str = "result") -> None:
    """Raise AssertionError unless both hold the same numbers, bit for bit."""
    assert found.shape == expected.shape, (
        f"{what}: shape {tuple(found.shape)}, expected {tuple(expected.shape)}"
    )
    assert found.dtype == expected.dtype, f"{what}: {found.dtype}, expected {expected.dtype}"
    different = int((found != expected).sum())
    assert not different, f"{what}: {different} of {found.numel()} numbers differ"
