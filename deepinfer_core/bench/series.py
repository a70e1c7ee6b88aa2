"""Pictures of several curves over the same axes, as SVG."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from html import escape

from attrs import field, frozen

from deepinfer_core.bench.charts import BOTTOM, GRID, HEIGHT, INK, LEFT, PAPER, TOP, WIDTH, ticks

COLOURS = ("#57606a", "#bf8700", "#1a7f37", "#0b6bcb", "#8250df", "#cf222e", "#116329", "#953800")
LEGEND = 170
"""Pixels at the right for the names of the curves."""


def _points(values: Iterable[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    return tuple(values)


@frozen(kw_only=True)
class Series:
    """One curve.

    Attributes:
        name: in the legend.
        points: (x, y) in order.
    """

    name: str
    points: tuple[tuple[float, float], ...] = field(converter=_points)


@frozen(kw_only=True)
class SeriesChart:
    """A picture.

    Attributes:
        title: above it.
        x_label: name and unit of the horizontal axis.
        y_label: name and unit of the vertical axis.
        series: the curves.
    """

    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]


def svg(chart: SeriesChart) -> str:
    """Return a picture as SVG text."""
    every = [point for series in chart.series for point in series.points]
    x_ticks = ticks(max((x for x, _ in every), default=0.0))
    y_ticks = ticks(max((y for _, y in every), default=0.0))
    right, bottom = WIDTH - LEGEND, HEIGHT - BOTTOM

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            LEFT + (right - LEFT) * x / x_ticks[-1],
            bottom - (bottom - TOP) * y / y_ticks[-1],
        )

    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
            f'width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" font-size="13" '
            f'fill="{INK}">'
        ),
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="{PAPER}"/>',
        _text(WIDTH / 2, 28, chart.title, "middle", 'font-size="16" font-weight="bold"'),
        _text((LEFT + right) / 2, HEIGHT - 14, chart.x_label, "middle"),
        _text(0, 0, chart.y_label, "middle", f'transform="translate(20 {HEIGHT / 2}) rotate(-90)"'),
    ]
    for value in x_ticks:
        x, _ = place(value, 0)
        parts.append(f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{bottom}" stroke="{GRID}"/>')
        parts.append(_text(x, bottom + 18, f"{value:g}", "middle"))
    for value in y_ticks:
        _, y = place(0, value)
        parts.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" stroke="{GRID}"/>')
        parts.append(_text(LEFT - 8, y + 4, f"{value:g}", "end"))
    for index, series in enumerate(chart.series):
        parts += _curve(series, COLOURS[index % len(COLOURS)], place, right + 12, TOP + 20 * index)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _curve(
    series: Series, colour: str, place: Callable[[float, float], tuple[float, float]],
    legend_x: float, legend_y: float,
) -> list[str]:  # fmt: skip
    spots = [place(x, y) for x, y in series.points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in spots)
    parts = [f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>']
    for (x, y), (value_x, value_y) in zip(spots, series.points, strict=True):
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}">'
            f"<title>{escape(series.name)}: {value_x:.4g}, {value_y:.4g}</title></circle>"
        )
    parts.append(
        f'<line x1="{legend_x}" y1="{legend_y}" x2="{legend_x + 18}" y2="{legend_y}" '
        f'stroke="{colour}" stroke-width="3"/>'
    )
    parts.append(_text(legend_x + 24, legend_y + 4, series.name, "start"))
    return parts


def _text(x: float, y: float, text: str, anchor: str, more: str = "") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f"<text {place}{' ' + more if more else ''}>{escape(text)}</text>"
