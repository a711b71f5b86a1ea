"""Line and point charts as SVG text: axes, grid, legend; panels side by side. No jax, no other package."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

FONT = "font-family='Helvetica,Arial,sans-serif'"
# Colours that stay apart for colour-blind readers too (Okabe and Ito).
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#555555")
GRID, INK, PALE = "#e6e6e6", "#333333", "#777777"
LEFT, RIGHT, TOP, BOTTOM = 62, 18, 40, 50
_CHARACTER = 6.1  # width of a character of 11 px
_ROW = 18  # of the legend


@dataclass(frozen=True, kw_only=True)
class Series:
    """Points of one colour: joined by a line, or as marks.

    Args:
        name: in the legend; empty: not in it.
        x: values along the horizontal axis.
        y: values along the vertical one; as many.
        color: index into the palette.
        line: whether points are joined.
        dashed: whether the line is dashed.
        mark: "" for none, "circle", "ring", "square" or "cross".
        labels: a text beside each point; empty for none.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    color: int = 0
    line: bool = True
    dashed: bool = False
    mark: str = ""
    labels: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One axis.

    Args:
        label: what it shows.
        log: whether it is logarithmic.
        low: where it begins; None: at the least value.
        high: where it ends; None: at the greatest value.
        percent: whether values are shares.
        names: what stands at 1, 2, ... instead of values.
    """

    label: str
    log: bool = False
    low: float | None = None
    high: float | None = None
    percent: bool = False
    names: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One chart of a picture."""

    title: str
    x: Axis
    y: Axis
    series: Sequence[Series]


def chart_svg(panels: Sequence[Panel], *, width: int = 480, height: int = 340, columns: int = 0) -> str:
    """Draws panels in rows, each with its own axes and legend.

    Args:
        panels: what to draw.
        width: of a panel, in pixels.
        height: of a panel without its legend, in pixels.
        columns: panels in a row; 0: all in one.

    Returns:
        A whole SVG document.

    Raises:
        ValueError: a panel has no points, a value is not finite, or a logarithmic axis meets one that is not above 0.
    """
    columns = columns or len(panels)
    rows = [panels[start : start + columns] for start in range(0, len(panels), columns)]
    parts, y = [], 0
    for row in rows:
        parts += [
            f"<g transform='translate({column * width},{y})'>{_panel(panel, width, height)}</g>"
            for column, panel in enumerate(row)
        ]
        y += height + max(_legend_height(panel, width) for panel in row)
    size = f"width='{columns * width}' height='{y}' viewBox='0 0 {columns * width} {y}'"
    background = f"<rect width='{columns * width}' height='{y}' fill='white'/>"
    return "\n".join([f"<svg xmlns='http://www.w3.org/2000/svg' {size}>", background, *parts, "</svg>"])


class _Scale:
    """Maps the values of an axis to pixels."""

    def __init__(self, axis: Axis, values: list[float], start: float, stop: float) -> None:
        if not values:
            raise ValueError("a chart needs at least one point, got none: give its series some")
        if any(not math.isfinite(value) or (axis.log and value <= 0) for value in values):
            wanted = "finite values above 0" if axis.log else "finite values"
            raise ValueError(f"the axis {axis.label!r} takes {wanted}, got others: drop them")
        low = min(values) if axis.low is None else axis.low
        high = max(values) if axis.high is None else axis.high
        if low == high:
            low, high = (low / 2, high * 2) if axis.log else (low - 1, high + 1)
        self.axis, self.start, self.stop = axis, start, stop
        low, high = (math.log10(low), math.log10(high)) if axis.log else (low, high)
        # Points at the rim are drawn whole.
        margin = 0.04 * (high - low)
        self.low, self.high = low - margin * (axis.low is None), high + margin * (axis.high is None)

    def __call__(self, value: float) -> float:
        value = math.log10(value) if self.axis.log else value
        return self.start + (value - self.low) / (self.high - self.low) * (self.stop - self.start)

    def ticks(self) -> list[float]:
        """Returns round values along the axis, or where its names stand."""
        if self.axis.names:
            return [float(number) for number in range(1, len(self.axis.names) + 1)]
        if not self.axis.log:
            step = _round_step((self.high - self.low) / 5)
            first = math.ceil(self.low / step - 1e-9)
            return [number * step for number in range(first, math.floor(self.high / step + 1e-9) + 1)]
        low, high = 10**self.low, 10**self.high
        if self.axis.percent:
            decades = range(math.floor(self.low), math.ceil(self.high))
            return [t * 10.0**d for d in decades for t in (1, 2, 5) if low <= t * 10.0**d <= high]
        powers = range(math.ceil(math.log2(low) - 1e-9), math.floor(math.log2(high) + 1e-9) + 1)
        thinned = [2.0**power for power in powers if power % max(1, len(powers) // 9 + 1) == 0]
        return (
            thinned if self.high - self.low < 4 else [10.0**p for p in range(math.ceil(self.low), int(self.high) + 1)]
        )

    def text(self, value: float) -> str:
        if self.axis.names:
            return self.axis.names[round(value) - 1]
        if self.axis.percent:
            return f"{value * 100:.3g}%"
        if value >= 1024 and value % 1024 == 0 and self.axis.log:
            return f"{value / 1024:.0f}K" if value < 2**20 else f"{value / 2**20:.0f}M"
        return f"{value:.4g}"


def _round_step(step: float) -> float:
    """Returns the least of 1, 2, 2.5, 5 times a power of ten that is at least `step`."""
    power = 10 ** math.floor(math.log10(step))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= step * (1 - 1e-9))


def _panel(panel: Panel, width: int, height: int) -> str:
    x = _Scale(panel.x, [v for s in panel.series for v in s.x], LEFT, width - RIGHT)
    y = _Scale(panel.y, [v for s in panel.series for v in s.y], height - BOTTOM, TOP)
    parts = [_text(LEFT, 22, panel.title, size=13, bold=True), *_axes(panel, x, y, width, height)]
    for series in panel.series:
        parts += _series(series, x, y)
    return "\n".join([*parts, *_legend(panel, width, height)])


def _axes(panel: Panel, x: _Scale, y: _Scale, width: int, height: int) -> list[str]:
    parts, floor, right = [], height - BOTTOM, width - RIGHT
    for value in y.ticks():
        at = y(value)
        parts.append(f"<line x1='{LEFT}' y1='{at:.1f}' x2='{right}' y2='{at:.1f}' stroke='{GRID}'/>")
        parts.append(_text(LEFT - 7, at + 4, y.text(value), anchor="end", color=PALE))
    for value in x.ticks():
        at = x(value)
        parts.append(f"<line x1='{at:.1f}' y1='{floor}' x2='{at:.1f}' y2='{floor + 4}' stroke='{PALE}'/>")
        parts.append(_text(at, floor + 18, x.text(value), anchor="middle", color=PALE))
    parts.append(f"<line x1='{LEFT}' y1='{floor}' x2='{right}' y2='{floor}' stroke='{PALE}'/>")
    parts.append(_text((LEFT + right) / 2, height - 12, panel.x.label, anchor="middle"))
    middle = (TOP + floor) / 2
    parts.append(f"<g transform='rotate(-90 15 {middle:.1f})'>{_text(15, middle, panel.y.label, anchor='middle')}</g>")
    return parts


def _series(series: Series, x: _Scale, y: _Scale) -> list[str]:
    color = PALETTE[series.color % len(PALETTE)]
    points = [(x(a), y(b)) for a, b in zip(series.x, series.y, strict=True)]
    parts = []
    if series.line and len(points) > 1:
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
        dash = " stroke-dasharray='5 4'" if series.dashed else ""
        parts.append(f"<polyline points='{path}' fill='none' stroke='{color}' stroke-width='1.8'{dash}/>")
    parts += [_mark(series.mark, a, b, color) for a, b in points if series.mark]
    for (a, b), label in zip(points, series.labels, strict=False):
        parts.append(_text(a + 7, b - 6, label, color=color))
    return parts


def _mark(kind: str, x: float, y: float, color: str) -> str:
    if kind == "circle":
        return f"<circle cx='{x:.1f}' cy='{y:.1f}' r='3.2' fill='{color}'/>"
    if kind == "ring":
        return f"<circle cx='{x:.1f}' cy='{y:.1f}' r='3.6' fill='white' stroke='{color}' stroke-width='1.5'/>"
    if kind == "square":
        return f"<rect x='{x - 3:.1f}' y='{y - 3:.1f}' width='6' height='6' fill='{color}'/>"
    arms = f"M{x - 3.4:.1f},{y - 3.4:.1f} l6.8,6.8 m0,-6.8 l-6.8,6.8"
    return f"<path d='{arms}' stroke='{color}' stroke-width='1.8' fill='none'/>"


def _places(panel: Panel, width: int) -> list[tuple[Series, float, int]]:
    """Returns each named series with its place in the legend: pixels from the left, and row."""
    placed: list[tuple[Series, float, int]] = []
    at, row = float(LEFT), 0
    for series in panel.series:
        if not series.name:
            continue
        taken = 34 + len(series.name) * _CHARACTER + 12
        if at + taken > width and at > LEFT:
            at, row = float(LEFT), row + 1
        placed.append((series, at, row))
        at += taken
    return placed


def _legend_height(panel: Panel, width: int) -> int:
    rows = [row for _, _, row in _places(panel, width)]
    return (max(rows) + 1) * _ROW + 8 if rows else 0


def _legend(panel: Panel, width: int, height: int) -> list[str]:
    parts = []
    for series, at, row in _places(panel, width):
        y = height + row * _ROW + 6
        color = PALETTE[series.color % len(PALETTE)]
        if series.line:
            dash = " stroke-dasharray='5 4'" if series.dashed else ""
            ends = f"x1='{at:.1f}' y1='{y}' x2='{at + 24:.1f}' y2='{y}'"
            parts.append(f"<line {ends} stroke='{color}' stroke-width='1.8'{dash}/>")
        if series.mark:
            parts.append(_mark(series.mark, at + 12, y, color))
        parts.append(_text(at + 30, y + 4, series.name))
    return parts


def _text(
    x: float, y: float, text: str, *, size: int = 11, anchor: str = "start", color: str = INK, bold: bool = False
) -> str:
    weight = " font-weight='bold'" if bold else ""
    place = f"x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}'"
    return f"<text {place} {FONT} font-size='{size}' fill='{color}'{weight}>{escape(text)}</text>"
