"""Calibration of confidences: sequential temperature scaling, and how well they were calibrated.

A confidence is ``sigmoid(logit / T_k)`` for the k-th draft of a block. The temperatures are fitted
one after another: T_k minimises the expected calibration error of the *survival* (the product of
the first k confidences), with the earlier ones fixed. Labels are probabilities of acceptance where
they are known, else 0 or 1.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from html import escape

import numpy as np
import numpy.typing as npt
from attrs import frozen

Float64 = npt.NDArray[np.float64]

GRID: tuple[float, ...] = tuple(float(t) for t in np.round(np.geomspace(0.25, 4.0, 65), 4))
"""Temperatures tried."""
BINS = 15
"""Of the calibration error."""


@frozen(kw_only=True)
class Bin:
    """One bar of a reliability diagram: what was promised, what happened, how often."""

    promised: float
    happened: float
    count: int


@frozen(kw_only=True)
class Quality:
    """How good confidences are.

    Attributes:
        ece: expected calibration error of the survivals, over all positions.
        auc: probability that an accepted draft had more survival than a rejected one.
        by_position: calibration error of each position's survival.
        bins: of the reliability diagram.
    """

    ece: float
    auc: float
    by_position: tuple[float, ...]
    bins: tuple[Bin, ...]


def survivals(logits: Float64, temperatures: Sequence[float]) -> Float64:
    """Products of confidences.

    Args:
        logits: [num_blocks, block_size], of the confidence head.
        temperatures: [block_size].

    Returns:
        [num_blocks, block_size].
    """
    scaled = np.clip(logits / np.asarray(temperatures), -60.0, 60.0)
    return np.asarray(np.cumprod(1.0 / (1.0 + np.exp(-scaled)), axis=1), np.float64)


def fit(logits: Float64, happened: Float64) -> tuple[float, ...]:
    """Return the temperature of each position.

    Args:
        logits: [num_blocks, block_size].
        happened: [num_blocks, block_size], whether the draft and all before it were accepted, or
            the probability of it; NaN where it is not known.
    """
    found: list[float] = []
    for position in range(logits.shape[1]):
        known = ~np.isnan(happened[:, position])
        part, truth = logits[known, : position + 1], happened[known, position]
        errors = [
            calibration_error(survivals(part, [*found, t])[:, -1], truth) if len(truth) else 0.0
            for t in GRID
        ]
        # Among equals, the one nearest to 1 changes least.
        best = min(range(len(GRID)), key=lambda i: (round(errors[i], 6), abs(np.log(GRID[i]))))
        found.append(GRID[best])
    return tuple(found)


def calibration_error(promised: Float64, happened: Float64) -> float:
    """Return the mean distance of promise and outcome over bins, weighted by their size."""
    if not len(promised):
        return 0.0
    bars = bins_of(promised, happened)
    return sum(b.count * abs(b.promised - b.happened) for b in bars) / len(promised)


def bins_of(promised: Float64, happened: Float64) -> tuple[Bin, ...]:
    """Return the bars of a reliability diagram, without empty ones."""
    places = np.minimum((promised * BINS).astype(int), BINS - 1)
    found = []
    for place in range(BINS):
        inside = places == place
        if inside.any():
            found.append(
                Bin(
                    promised=float(promised[inside].mean()),
                    happened=float(happened[inside].mean()),
                    count=int(inside.sum()),
                )
            )
    return tuple(found)


def area_under_curve(scores: Float64, labels: Float64) -> float:
    """Return the ROC area for labels that are probabilities: each counts as both, by its share."""
    order = np.argsort(scores, kind="stable")
    scores, good = scores[order], labels[order]
    bad = 1.0 - good
    # Scores that tie are taken together: half of their pairs count.
    starts = np.concatenate([[0], np.nonzero(np.diff(scores))[0] + 1]).astype(int)
    good_sums, bad_sums = np.add.reduceat(good, starts), np.add.reduceat(bad, starts)
    below = np.cumsum(bad_sums) - bad_sums
    pairs = good.sum() * bad.sum()
    return float((good_sums * (below + 0.5 * bad_sums)).sum() / pairs) if pairs > 0 else 0.5


def quality(logits: Float64, happened: Float64, temperatures: Sequence[float]) -> Quality:
    """Measure confidences with some temperatures; arguments as for `fit`."""
    promised = survivals(logits, temperatures)
    known = ~np.isnan(happened)
    by_position = tuple(
        calibration_error(promised[known[:, k], k], happened[known[:, k], k])
        for k in range(logits.shape[1])
    )
    return Quality(
        ece=calibration_error(promised[known], happened[known]),
        auc=area_under_curve(promised[known], happened[known]),
        by_position=by_position,
        bins=bins_of(promised[known], happened[known]) if known.any() else (),
    )


class OnlineCalibration:
    """Temperatures that follow what becomes of drafts.

    Args:
        block_size: drafts of a block.
        temperatures: to begin with; missing ones are 1.
        every: blocks after which they are fitted again; 0 = never.
        kept: last blocks that are looked at.
    """

    def __init__(
        self, block_size: int, temperatures: Sequence[float], *, every: int, kept: int = 1024
    ) -> None:
        own = tuple(temperatures[:block_size])
        self.temperatures = own + (1.0,) * (block_size - len(own))
        self._every, self._block = every, block_size
        self._blocks: deque[tuple[Float64, Float64]] = deque(maxlen=kept)
        self._new = 0

    def confidence(self, position: int, logit: float) -> float:
        """Return the probability that the draft at a position of its block is accepted."""
        scaled = min(60.0, max(-60.0, logit / self.temperatures[position]))
        return 1.0 / (1.0 + math.exp(-scaled))

    def add(
        self, logits: Sequence[float], verified: int, accepted: int, exact: Sequence[float] = ()
    ) -> None:
        """Take a judged block into account.

        Args:
            logits: of its drafts' confidences.
            verified: leading drafts that were judged.
            accepted: leading drafts that were accepted.
            exact: probabilities of acceptance, where the verification knows them.
        """
        if not self._every or verified < 1:
            return
        row, label = np.zeros(self._block), np.full(self._block, np.nan)
        row[: len(logits)] = logits
        label[:verified] = np.arange(min(verified, self._block)) < accepted
        # Reaching a draft is an outcome; what its own chance was then is known better.
        reached = min(len(exact), accepted + 1, verified, self._block)
        label[:reached] = exact[:reached]
        self._blocks.append((row, label))
        self._new += 1
        if self._new >= self._every and len(self._blocks) >= self._every:
            self._new = 0
            self.temperatures = fit(
                np.stack([block[0] for block in self._blocks]),
                np.stack([block[1] for block in self._blocks]),
            )


def reliability_svg(before: Quality, after: Quality, title: str) -> str:
    """Return the two reliability diagrams as one SVG picture."""
    size, margin = 340, 56
    width, height = 2 * (size + margin) + 24, size + 2 * margin
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" font-family="sans-serif" font-size="13" '
            'fill="#1b1f24">'
        ),
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        (
            f'<text x="{width / 2}" y="24" text-anchor="middle" font-weight="bold">'
            f"{escape(title)}</text>"
        ),
    ]
    for index, (name, found) in enumerate((("before", before), ("after", after))):
        left = margin + index * (size + margin)
        parts += _panel(left, margin, size, f"{name}: ECE {found.ece:.3f}", found.bins)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(left: int, top: int, size: int, title: str, bins: Sequence[Bin]) -> list[str]:
    bottom = top + size
    most = max((b.count for b in bins), default=1)
    parts = [
        f'<text x="{left + size / 2}" y="{top - 10}" text-anchor="middle">{escape(title)}</text>',
        f'<rect x="{left}" y="{top}" width="{size}" height="{size}" fill="none" stroke="#d8dee4"/>',
        (
            f'<line x1="{left}" y1="{bottom}" x2="{left + size}" y2="{top}" stroke="#8b949e" '
            'stroke-dasharray="4 4"/>'
        ),
        (
            f'<text x="{left + size / 2}" y="{bottom + 34}" text-anchor="middle">'
            "survival promised</text>"
        ),
        (
            f'<text transform="translate({left - 34} {top + size / 2}) rotate(-90)" '
            'text-anchor="middle">share accepted</text>'
        ),
    ]
    for value in (0.0, 0.5, 1.0):
        x, y = left + size * value, bottom - size * value
        parts.append(f'<text x="{x}" y="{bottom + 16}" text-anchor="middle">{value:g}</text>')
        parts.append(f'<text x="{left - 6}" y="{y + 4}" text-anchor="end">{value:g}</text>')
    for bar in bins:
        x, y = left + size * bar.promised, bottom - size * bar.happened
        radius = 3 + 9 * (bar.count / most) ** 0.5
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}" fill="#0b6bcb" fill-opacity="0.7">'
            f"<title>promised {bar.promised:.2f}, happened {bar.happened:.2f}, "
            f"{bar.count} drafts</title></circle>"
        )
    return parts
