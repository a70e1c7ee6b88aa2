"""Keys and values of context features, sequence by sequence."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

KeysValues = Sequence[tuple[Tensor, Tensor]]
"""Per draft layer (keys, values), [n, num_kv_heads, head_dim] each."""

_FIRST = 128


class ContextCache:
    """What the draft layers see of one sequence; grows at the end, is cut back by length.

    Positions ascend but may have gaps: what a cached prefix hides was never computed here.

    Args:
        window: positions that are ever looked at, 0 = all; older ones are dropped in time.
    """

    def __init__(self, window: int = 0) -> None:
        self._window = window
        self._positions: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self._layers: list[tuple[Tensor, Tensor]] = []
        self.length = 0

    @property
    def stop(self) -> int:
        """One more than the last position, 0 if there is none."""
        return int(self._positions[self.length - 1]) + 1 if self.length else 0

    def append(self, positions: npt.NDArray[np.int64], rows: KeysValues) -> None:
        """Add rows behind what is there.

        Args:
            positions: [n], ascending; what is there from the first one on is replaced.
            rows: their keys and values.
        """
        if not len(positions):
            return
        self.cut(int(positions[0]))
        self._drop()
        count = len(positions)
        self._reserve(self.length + count, rows)
        span = slice(self.length, self.length + count)
        self._positions[span] = positions
        for (keys, values), (new_keys, new_values) in zip(self._layers, rows, strict=True):
            keys[span], values[span] = new_keys, new_values
        self.length += count

    def cut(self, stop: int) -> None:
        """Forget positions from ``stop`` on."""
        self.length = int(np.searchsorted(self._positions[: self.length], stop))

    def first_visible(self, position: int, window: int) -> int:
        """Return the row number from which a token at ``position`` sees the context."""
        if not window:
            return 0
        return int(np.searchsorted(self._positions[: self.length], position - window + 1))

    def rows(self, layer: int, start: int) -> tuple[Tensor, Tensor]:
        """Return keys and values from a row number on, [n, num_kv_heads, head_dim]: views."""
        keys, values = self._layers[layer]
        return keys[start : self.length], values[start : self.length]

    def copy(self) -> ContextCache:
        """Return an independent copy."""
        other = ContextCache(self._window)
        other._positions = self._positions.copy()
        other._layers = [(keys.clone(), values.clone()) for keys, values in self._layers]
        other.length = self.length
        return other

    def _reserve(self, size: int, like: KeysValues) -> None:
        have = len(self._positions)
        if size <= have:
            return
        size = max(size, 2 * have, _FIRST)
        self._positions = np.resize(self._positions, size)
        old = self._layers or [(k[:0], v[:0]) for k, v in like]
        self._layers = [
            (_grown(k, size, self.length), _grown(v, size, self.length)) for k, v in old
        ]

    def _drop(self) -> None:
        """Once half of the rows are out of sight for good, move the others to the front."""
        keep = self._window
        if not keep or self.length < 2 * keep + _FIRST:
            return
        span = slice(self.length - keep, self.length)
        self._positions[:keep] = self._positions[span].copy()
        for keys, values in self._layers:
            keys[:keep], values[:keep] = keys[span].clone(), values[span].clone()
        self.length = keep


class WaitingRows:
    """Context features of one sequence that no draft has needed yet.

    Attributes:
        chunks: (positions, features) in the order in which they came.
        count: rows of all.
    """

    def __init__(self) -> None:
        self.chunks: list[tuple[npt.NDArray[np.int64], Tensor]] = []
        self.count = 0

    def append(self, positions: npt.NDArray[np.int64], features: Tensor) -> None:
        """Add rows, [n] and [n, width]."""
        if len(positions):
            self.chunks.append((positions, features))
            self.count += len(positions)

    def cut(self, stop: int) -> None:
        """Forget positions from ``stop`` on."""
        while self.chunks and self.chunks[-1][0][-1] >= stop:
            positions, features = self.chunks.pop()
            kept = int(np.searchsorted(positions, stop))
            self.count -= len(positions)
            self.append(positions[:kept], features[:kept])


def _grown(rows: Tensor, size: int, used: int) -> Tensor:
    grown = rows.new_empty(size, *rows.shape[1:])
    grown[:used] = rows[:used]
    return grown


def tail(positions: npt.NDArray[np.int64], window: int) -> int:
    """Return from which of some ascending positions on they are of use to later ones."""
    return max(0, len(positions) - window) if window else 0


def feature_rows(taps: Sequence[Tensor], rows: Tensor | None) -> Tensor:
    """Layer outputs side by side, [n, m * hidden_size], float32; of some rows if given."""
    picked = taps if rows is None else [tap[rows] for tap in taps]
    return torch.cat([tap.float() for tap in picked], -1)
