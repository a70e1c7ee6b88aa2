"""The slow model with the roundings of published kernels, by comparing distances in numpy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from deepinfer_deepseek.testing.slow import Array, SlowV41

_E4M3 = np.array(
    [m / 8 * 2.0**-6 for m in range(8)]
    + [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)][:-1]
)
"""Numbers without a sign in the order of their codes; the last code is NaN."""
_E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def nearest(x: Array, values: Array) -> Array:
    """Nearest of ascending values, of two the one at the even place; signs are kept."""
    size = np.minimum(np.abs(x), values[-1])
    above = np.searchsorted(values, size)
    below = np.maximum(above - 1, 0)
    up, down = values[above] - size, size - values[below]
    place = np.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)
    result: Array = np.copysign(values[place], x)
    return result


def _blocks(x: Array, size: int, values: Array, floor: float, scale_of: Any) -> Array:
    blocks = np.asarray(x, np.float64).reshape(-1, size)
    out = np.empty_like(blocks)
    for at, block in enumerate(blocks):
        scale = scale_of(max(np.abs(block).max(), floor) / values[-1])
        out[at] = nearest(block / scale, values) * scale
    return out.reshape(np.shape(x))


def _power(x: float) -> float:
    return 2.0 ** math.ceil(math.log2(x))


def fp8(x: Array) -> Array:
    """Inputs of matrices, and windows."""
    return _blocks(x, 32, _E4M3, 1e-4, _power)


def fp4(x: Array) -> Array:
    """Queries and keys of the indexer."""
    return _blocks(x, 32, _E2M1, 6 * 2.0**-126, _power)


def fp4_16(x: Array) -> Array:
    """Compressed entries."""
    return _blocks(x, 16, _E2M1, 6 * 2.0**-9, lambda scale: float(nearest(scale, _E4M3)))


class _Matrix:
    """A matrix that rounds what it is multiplied with."""

    def __init__(self, values: Array) -> None:
        self._values = values

    def __matmul__(self, x: Array) -> Array:
        result: Array = self._values @ fp8(x)
        return result


_PLAIN = ("norm.weight", "embed.weight", "head.weight", "gate.weight", "wo_a.weight")
_PLAIN_PARTS = ("compressor.", "indexer.wk", "indexer.weights_proj", "hc_", "markov", "confidence")


class SlowQuantV41(SlowV41):
    """``SlowV41`` with rounded inputs and caches."""

    _ranking = False

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        weights: dict[str, Any] = self.w
        for name, values in weights.items():
            plain = name.endswith(_PLAIN) or any(part in name for part in _PLAIN_PARTS)
            if values.ndim == 2 and name.endswith(".weight") and not plain:
                weights[name] = _Matrix(values)

    def _window_key(
        self, layer: int, ratio: int, x: Array, p: int, base: str | None = None
    ) -> Array:
        return fp8(super()._window_key(layer, ratio, x, p, base))

    def _entries(self, *args: Any) -> dict[int, tuple[Array, Array]]:
        found = super()._entries(*args)
        return {j: (fp4_16(entry), fp4(key)) for j, (entry, key) in found.items()}

    def _rank(self, *args: Any) -> list[int]:
        self._ranking = True
        try:
            return super()._rank(*args)
        finally:
            self._ranking = False

    def _turn(self, x: Array, ratio: int, p: int, sign: int = 1) -> Array:
        turned = super()._turn(x, ratio, p, sign)
        return fp4(turned) if self._ranking else turned
