"""What a step of n token rows costs: a profiled table, corrected by what steps really take."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping
from statistics import median

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]

KEPT = 64
"""Measurements kept for each size."""
SIZES_LEAST = 3
"""Measurements of a size before it counts."""
RECENT = 9
"""Residuals of which the middle one is the constant part, and draft passes likewise."""
MOST_MS = 1e7
"""Longer steps are no measurements."""


class CostTable:
    """Milliseconds of a step by its number of rows.

    ``ms(n) = base(n) + slope * n + constant``: the base was profiled; ``slope`` grows with context
    lengths and is the median over sizes of the median excess per row; ``constant`` is the median
    of what is left in the last steps. Without a base it is built from measurements alone. The draft
    pass before a step is kept apart.

    Args:
        base: profiled ``rows -> ms`` for some sizes (sizes between cost what the next one does), a
            function for all, or None.
    """

    def __init__(self, base: Mapping[int, float] | Callable[[int], float] | None = None) -> None:
        self._function = base if callable(base) else None
        self._sizes = [] if base is None or callable(base) else sorted(base)
        self._costs = [] if base is None or callable(base) else [base[n] for n in self._sizes]
        self._learns = base is None or (not callable(base) and not base)
        self._excess: dict[int, deque[float]] = {}
        self._residuals: deque[float] = deque(maxlen=RECENT)
        self._drafting: deque[float] = deque(maxlen=RECENT)
        self._slope = 0.0
        self._cached: Float64 = np.zeros(0)

    @property
    def draft_ms(self) -> float:
        """Cost of a draft pass: the median of the last ones, 0 before the first."""
        return median(self._drafting) if self._drafting else 0.0

    def ms(self, num_rows: int) -> float:
        """Cost of a step."""
        return float(self.between(num_rows, num_rows + 1)[0])

    def between(self, start: int, stop: int) -> Float64:
        """[stop - start], costs of steps of ``start`` up to ``stop - 1`` rows."""
        have = len(self._cached)
        if stop > have:
            size = max(stop, 2 * have, 64)
            self._cached = np.array([self._corrected(n) for n in range(size)])
        return self._cached[start:stop]

    def observe(self, num_rows: int, step_ms: float, draft_ms: float = 0.0) -> None:
        """Take a measurement into account; sizes below 1 and times that are no times are ignored.

        Args:
            num_rows: of the step.
            step_ms: of the step.
            draft_ms: of the draft pass before it, 0 without one.
        """
        if 0.0 < draft_ms < MOST_MS:
            self._drafting.append(draft_ms)
        if num_rows < 1 or not 0.0 < step_ms < MOST_MS:
            return
        kept = self._excess.setdefault(num_rows, deque(maxlen=KEPT))
        if self._learns:
            kept.append(step_ms)
            self._rebuild()
        else:
            excess = step_ms - self._base(num_rows)
            kept.append(excess / num_rows)
            middles = [median(v) for v in self._excess.values() if len(v) >= SIZES_LEAST]
            self._slope = max(0.0, median(middles)) if middles else 0.0
            self._residuals.append(excess - self._slope * num_rows)
        self._cached = np.zeros(0)

    def _rebuild(self) -> None:
        known = {n: median(v) for n, v in self._excess.items() if len(v) >= SIZES_LEAST}
        self._sizes = sorted(known)
        self._costs = [known[n] for n in self._sizes]

    def _corrected(self, num_rows: int) -> float:
        constant = median(self._residuals) if self._residuals else 0.0
        # A step never costs nothing, however fast the last ones were.
        base = self._base(num_rows)
        return max(base + self._slope * num_rows + constant, 0.05 * base, 1e-6)

    def _base(self, num_rows: int) -> float:
        if self._function is not None:
            return float(self._function(num_rows))
        if not self._sizes:
            return 1.0
        at = bisect_left(self._sizes, num_rows)
        if at < len(self._sizes):
            return self._costs[at]
        return self._beyond(num_rows)

    def _beyond(self, num_rows: int) -> float:
        """Beyond the largest size, cost grows as between the outermost sizes, and never falls."""
        first, last = self._sizes[0], self._sizes[-1]
        if first == last:
            return self._costs[-1]
        slope = max(0.0, (self._costs[-1] - self._costs[0]) / (last - first))
        return self._costs[-1] + slope * (num_rows - last)
