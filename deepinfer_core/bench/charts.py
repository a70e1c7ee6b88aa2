"""Pictures of throughput against something: SVG by hand, PNG through matplotlib."""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Literal

from attrs import frozen

from deepinfer_core.errors import DeepInferError

WIDTH, HEIGHT = 720, 480
LEFT, RIGHT, TOP, BOTTOM = 80, 30, 50, 60
INK, PAPER, GRID, ACCENT = "#1b1f24", "#ffffff", "#d8dee4", "#0b6bcb"


class ChartError(DeepInferError):
    """A picture that cannot be drawn."""


@frozen(kw_only=True)
class Point:
    """One measured load.

    Attributes:
        x: horizontal value.
        y: vertical value.
        label: the load.
    """

    x: float
    y: float
    label: str


@frozen(kw_only=True)
class Chart:
    """A picture.

    Attributes:
        title: above it.
        x_label: name and unit of the horizontal axis.
        y_label: name and unit of the vertical axis.
        points: in order of load; those with a value that is not finite are left out.
        better_x: which way is better.
    """

    title: str
    x_label: str
    y_label: str
    points: tuple[Point, ...]
    better_x: Literal["low", "high"]

    @property
    def drawable(self) -> tuple[Point, ...]:
        """Points with finite values."""
        return tuple(p for p in self.points if math.isfinite(p.x) and math.isfinite(p.y))


def frontier(points: Sequence[Point], better_x: Literal["low", "high"]) -> list[Point]:
    """Return the points that no other beats in one value without losing in the other.

    More ``y`` is better. The result is sorted by ``x``.
    """
    sign = 1.0 if better_x == "low" else -1.0
    best, found = -math.inf, []
    for point in sorted(points, key=lambda point: (sign * point.x, -point.y)):
        if point.y > best:
            best = point.y
            found.append(point)
    return sorted(found, key=lambda point: point.x)


def ticks(largest: float, most: int = 6) -> list[float]:
    """Return round values from 0 to at least ``largest``.

    >>> ticks(7.3)
    [0.0, 2.0, 4.0, 6.0, 8.0]
    """
    if not largest > 0:
        return [0.0, 1.0]
    power = 10.0 ** math.floor(math.log10(largest / most))
    steps = (power * factor for factor in (1, 2, 5, 10, 20))
    step = next(step for step in steps if largest / step <= most - 1)
    # Multiples of a rounded step, so that 3 * 0.1 is written 0.3.
    return [round(step * at, 12) for at in range(math.ceil(largest / step - 1e-9) + 1)]


def draw(chart: Chart, path: Path) -> None:
    """Write a picture; the file's suffix says which kind.

    Raises:
        ChartError: the suffix is unknown, or matplotlib is missing for a PNG.
    """
    if path.suffix == ".svg":
        path.write_text(svg(chart), encoding="utf-8")
    elif path.suffix == ".png":
        _png(chart, path)
    else:
        raise ChartError(f"cannot draw {path}: the name must end in .svg or .png")


def svg(chart: Chart) -> str:
    """Return a picture as SVG text."""
    points = chart.drawable
    x_ticks = ticks(max((point.x for point in points), default=0.0))
    y_ticks = ticks(max((point.y for point in points), default=0.0))

    def x_of(value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * value / x_ticks[-1]

    def y_of(value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / y_ticks[-1]

    size = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
    font = f'font-family="sans-serif" font-size="13" fill="{INK}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font}>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="{PAPER}"/>',
        _text(WIDTH / 2, 28, chart.title, "middle", 'font-size="16" font-weight="bold"'),
        _text(WIDTH / 2, HEIGHT - 14, chart.x_label, "middle"),
        _text(0, 0, chart.y_label, "middle", f'transform="translate(20 {HEIGHT / 2}) rotate(-90)"'),
    ]
    for value in x_ticks:
        parts.append(_line(x_of(value), TOP, x_of(value), HEIGHT - BOTTOM))
        parts.append(_text(x_of(value), HEIGHT - BOTTOM + 18, f"{value:g}", "middle"))
    for value in y_ticks:
        parts.append(_line(LEFT, y_of(value), WIDTH - RIGHT, y_of(value)))
        parts.append(_text(LEFT - 8, y_of(value) + 4, f"{value:g}", "end"))
    best = frontier(points, chart.better_x)
    path = " ".join(f"{x_of(point.x):.1f},{y_of(point.y):.1f}" for point in best)
    parts.append(f'<polyline points="{path}" fill="none" stroke="{ACCENT}" stroke-width="2"/>')
    for point in points:
        x, y = x_of(point.x), y_of(point.y)
        fill = ACCENT if point in best else PAPER
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{fill}" stroke="{ACCENT}">'
            f"<title>{escape(point.label)}: {point.x:.4g}, {point.y:.4g}</title></circle>"
        )
        near_edge = x > WIDTH - RIGHT - 60
        side = (x - 8, "end") if near_edge else (x + 8, "start")
        parts.append(_text(side[0], y - 8, point.label, side[1]))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{GRID}"/>'


def _text(x: float, y: float, text: str, anchor: str, more: str = "") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f"<text {place}{' ' + more if more else ''}>{escape(text)}</text>"


def _png(chart: Chart, path: Path) -> None:
    try:
        # By name: type checkers need not find what is optional.
        agg = importlib.import_module("matplotlib.backends.backend_agg")
        shapes = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise ChartError(
            f"cannot draw {path}: PNG needs matplotlib (pip install matplotlib); SVG needs nothing"
        ) from error
    figure = shapes.Figure(figsize=(WIDTH / 100, HEIGHT / 100), dpi=150, layout="constrained")
    agg.FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    points, best = chart.drawable, frontier(chart.drawable, chart.better_x)
    axes.plot([p.x for p in best], [p.y for p in best], color=ACCENT)
    axes.scatter([p.x for p in points], [p.y for p in points], color=ACCENT)
    for point in points:
        axes.annotate(point.label, (point.x, point.y), (6, 6), textcoords="offset points")
    axes.set(title=chart.title, xlabel=chart.x_label, ylabel=chart.y_label)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.grid(visible=True, color=GRID)
    axes.set_axisbelow(True)
    figure.savefig(path)
