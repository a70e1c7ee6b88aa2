"""What a step of n token rows costs: a profiled table, corrected by what steps really take."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from statistics import median

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]

KEPT = 64
"""Measurements kept for each size."""
SIZES_LEAST = 3
"""Measurements of a size before it counts."""
RECENT = 9
"""Residuals of which the middle one is the constant part."""
MOST_MS = 1e7
"""Longer steps are no measurements."""
EVERY = 16
"""Up to here each number of rows is profiled, beyond it four in each doubling."""


def ladder(num_rows: int) -> int:
    """Return the profiled size that stands for a number of rows: the next one above.

    >>> [ladder(n) for n in (1, 16, 17, 33, 100)]
    [1, 16, 20, 40, 112]
    """
    if num_rows <= EVERY:
        return max(1, num_rows)
    step: int = 2 ** ((num_rows - 1).bit_length() - 3)
    return math.ceil(num_rows / step) * step


class CostTable:
    """Milliseconds of a step by its number of rows.

    ``ms(n) = base(n) + slope * n + constant``: the base was profiled; ``slope`` grows with context
    lengths and is the median over sizes of the median excess per row; ``constant`` is the median
    of what is left in the last steps. Without a base it is built from measurements alone. Draft
    passes are kept apart, by the number of sequences that take part.

    Args:
        base: profiles ``rows -> ms``, asked once for each size of the ladder; None if unknown.
    """

    def __init__(self, base: Callable[[int], float] | None = None) -> None:
        self._profile = base
        self._bases: Float64 = np.full(64, np.nan)
        self._measured: dict[int, deque[float]] = {}
        self._residuals: deque[float] = deque(maxlen=RECENT)
        self._drafting: CostTable | None = None
        self._slope = self._constant = 0.0
        self._sizes: list[int] = []
        self._costs: list[float] = []

    def draft_ms(self, num_sequences: int) -> float:
        """Cost of a draft pass for so many sequences, 0 before the first ones."""
        passes = self._drafting
        return passes.ms(num_sequences) if passes is not None and passes._sizes else 0.0

    def ms(self, num_rows: int) -> float:
        """Cost of a step."""
        return float(self.between(num_rows, num_rows + 1)[0])

    def between(self, start: int, stop: int) -> Float64:
        """[stop - start], costs of steps of ``start`` up to ``stop - 1`` rows."""
        base = self._base_between(start, stop)
        corrected = base + self._slope * np.arange(start, stop) + self._constant
        # A step never costs nothing, however fast the last ones were.
        return np.maximum(np.maximum(corrected, 0.05 * base), 1e-6)

    def observe(
        self, num_rows: int, step_ms: float, draft_ms: float = 0.0, num_drafting: int = 0
    ) -> None:
        """Take a measurement into account; sizes below 1 and times that are no times are ignored.

        Args:
            num_rows: of the step.
            step_ms: of the step.
            draft_ms: of the draft pass before it, 0 without one.
            num_drafting: sequences of the draft pass.
        """
        if 0.0 < draft_ms < MOST_MS:
            self._drafting = self._drafting or CostTable()
            self._drafting.observe(max(1, num_drafting), draft_ms)
        if num_rows < 1 or not 0.0 < step_ms < MOST_MS:
            return
        kept = self._measured.setdefault(ladder(num_rows), deque(maxlen=KEPT))
        if self._profile is None:
            kept.append(step_ms)
            self._rebuild()
            return
        excess = step_ms - float(self._base_between(num_rows, num_rows + 1)[0])
        kept.append(excess / num_rows)
        middles = [median(v) for v in self._measured.values() if len(v) >= SIZES_LEAST]
        self._slope = max(0.0, median(middles)) if middles else 0.0
        self._residuals.append(excess - self._slope * num_rows)
        self._constant = median(self._residuals)

    def _rebuild(self) -> None:
        known = {n: median(v) for n, v in self._measured.items() if len(v) >= SIZES_LEAST}
        self._sizes, self._costs = sorted(known), [known[n] for n in sorted(known)]
        self._bases = np.full(64, np.nan)

    def _base_between(self, start: int, stop: int) -> Float64:
        if stop > len(self._bases):
            missing = max(stop, 2 * len(self._bases)) - len(self._bases)
            self._bases = np.concatenate([self._bases, np.full(missing, np.nan)])
        for rows in (start + np.nonzero(np.isnan(self._bases[start:stop]))[0]).tolist():
            if np.isnan(self._bases[rows]):  # a smaller number may have asked for its size
                self._bases[rows] = self._base(rows)
        return self._bases[start:stop]

    def _base(self, num_rows: int) -> float:
        if num_rows < 1:
            return 0.0
        if self._profile is not None:
            size = ladder(num_rows)
            if size == num_rows:
                return float(self._profile(size))
            return float(self._base_between(size, size + 1)[0])
        if not self._sizes:
            return 1.0
        at = bisect_left(self._sizes, num_rows)
        return self._costs[at] if at < len(self._sizes) else self._beyond(num_rows)

    def _beyond(self, num_rows: int) -> float:
        """Beyond the largest size, cost grows as between the outermost sizes, and never falls."""
        first, last = self._sizes[0], self._sizes[-1]
        if first == last:
            return self._costs[-1]
        slope = max(0.0, (self._costs[-1] - self._costs[0]) / (last - first))
        return self._costs[-1] + slope * (num_rows - last)
