"""Summaries of measured values."""

from __future__ import annotations

import math
from collections.abc import Sequence

from attrs import frozen


@frozen(kw_only=True)
class Summary:
    """What is reported of a set of values; all NaN where there is none.

    Attributes:
        count: how many values there are.
        mean: arithmetic mean.
        p50: median.
        p90: nine of ten values are at most this.
        p99: ninety-nine of a hundred values are at most this.
        min: smallest value.
        max: largest value.
    """

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    min: float
    max: float

    def as_dict(self) -> dict[str, float | int | None]:
        """The summary for JSON; None stands for NaN."""
        named = {name: getattr(self, name) for name in ("mean", "p50", "p90", "p99", "min", "max")}
        return {
            "count": self.count,
            **{name: None if math.isnan(value) else value for name, value in named.items()},
        }


def percentile(values: Sequence[float], percent: float) -> float:
    """Return a percentile by linear interpolation between the closest ranks.

    Args:
        values: in any order; NaN is returned where there is none.
        percent: 0 to 100.

    >>> percentile([1.0, 2.0, 3.0, 4.0], 50)
    2.5
    """
    if not values:
        return math.nan
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def summarize(values: Sequence[float]) -> Summary:
    """Return the summary of values."""
    found = list(values)
    return Summary(
        count=len(found),
        mean=math.fsum(found) / len(found) if found else math.nan,
        p50=percentile(found, 50),
        p90=percentile(found, 90),
        p99=percentile(found, 99),
        min=min(found, default=math.nan),
        max=max(found, default=math.nan),
    )
