"""Line and point charts as SVG text: axes, grid, legend; panels side by side. No jax, no other package."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

FONT = "font-family='Helvetica,Arial,sans-serif'"
# Colours that colour-blind readers can tell apart too (Okabe and Ito).
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#555555")
GRID, INK, PALE = "#e6e6e6", "#333333", "#777777"
LEFT, RIGHT, TOP, BOTTOM = 62, 18, 40, 50
# Pixels above a panel that has no title.
_BARE_TOP = 16
_CHARACTER = 6.1  # width of a character of 11 px
_ROW = 18  # of the legend
_MOST_DIGITS = 18  # a float has no more


@dataclass(frozen=True, kw_only=True)
class Look:
    """Colours of a picture: any that CSS takes, such as `var(--name)` if a page chooses the colours.

    Args:
        paper: the background.
        grid: grid lines.
        ink: titles and labels.
        pale: numbers along the axes.
        palette: colours of series.
        hover: whether lines carry the data that a page's script needs to show values under the pointer.
    """

    paper: str = "white"
    grid: str = GRID
    ink: str = INK
    pale: str = PALE
    palette: Sequence[str] = PALETTE
    hover: bool = False

    def color(self, index: int) -> str:
        """Returns a colour of the palette; indices past the end start again at the first colour."""
        return self.palette[index % len(self.palette)]


PRINT = Look()


@dataclass(frozen=True, kw_only=True)
class Series:
    """Points of one colour: joined by a line, or as marks.

    Args:
        name: the name in the legend; empty: not in the legend.
        x: values along the horizontal axis.
        y: values along the vertical axis; as many as x.
        color: index into the palette.
        line: whether points are joined.
        dashed: whether the line is dashed.
        mark: "" for none, "circle", "ring", "square" or "cross".
        floor: lower edge of an area whose upper edge is y; empty for none.
        strength: opacity, 0..1.
        width: of the line, in pixels.
        hint: the name of the line under the pointer; "": `name`.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    color: int = 0
    line: bool = True
    dashed: bool = False
    mark: str = ""
    floor: Sequence[float] = ()
    strength: float = 1.0
    width: float = 1.8
    hint: str = ""


@dataclass(frozen=True, kw_only=True)
class Marker:
    """A vertical line across a panel at a value of the horizontal axis, with a text for the pointer."""

    x: float
    title: str
    color: int = 6


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One axis.

    Args:
        label: what it shows.
        log: whether it is logarithmic.
        low: where the axis begins; None: at the smallest value.
        high: where the axis ends; None: at the largest value.
        percent: whether values are shares.
        whole: whether values are counts: ticks at whole numbers, with K and M for thousands and millions.
    """

    label: str
    log: bool = False
    low: float | None = None
    high: float | None = None
    percent: bool = False
    whole: bool = False


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One chart of a picture; a chart without a title is less high."""

    title: str
    x: Axis
    y: Axis
    series: Sequence[Series]
    rules: Sequence[Marker] = ()

    @property
    def top(self) -> int:
        """Pixels above the plot."""
        return TOP if self.title else _BARE_TOP


def chart_svg(panels: Sequence[Panel], *, width: int = 480, height: int = 340, look: Look = PRINT) -> str:
    """Draws panels side by side, each with its own axes and legend.

    Args:
        panels: the charts to draw.
        width: of a panel, in pixels.
        height: of a panel without its legend, in pixels.
        look: the colours.

    Returns:
        A whole SVG document.

    Raises:
        ValueError: a panel has no points, a value is not finite, or a value of a logarithmic axis is not above 0.
    """
    parts = [
        f"<g transform='translate({number * width},0)'>{_panel(panel, width, height, look)}</g>"
        for number, panel in enumerate(panels)
    ]
    across, down = len(panels) * width, height + max(_legend_height(panel, width) for panel in panels)
    size = f"width='{across}' height='{down}' viewBox='0 0 {across} {down}'"
    background = f"<rect width='{across}' height='{down}' fill='{look.paper}'/>"
    return "\n".join([f"<svg xmlns='http://www.w3.org/2000/svg' {size}>", background, *parts, "</svg>"])


def axis_ends(axis: Axis, values: Sequence[float]) -> tuple[float, float]:
    """Returns the values at which an axis begins and ends; points at an edge that the axis does not set lie inside.

    Args:
        axis: the axis.
        values: all values that are drawn along the axis.

    Raises:
        ValueError: there are no values, a value is not finite, or a value of a logarithmic axis is not above 0.
    """
    if not values:
        raise ValueError("a chart needs at least one point, got none: give its series some")
    if any(not math.isfinite(value) or (axis.log and value <= 0) for value in values):
        wanted = "finite values above 0" if axis.log else "finite values"
        raise ValueError(f"the axis {axis.label!r} takes {wanted}, got others: drop them")
    low = min(values) if axis.low is None else axis.low
    high = max(values) if axis.high is None else axis.high
    if low == high:
        low, high = (low / 2, high * 2) if axis.log else (low - 1, high + 1)
    before, after = 0.04 * (axis.low is None), 0.04 * (axis.high is None)
    if axis.log:
        return low / (high / low) ** before, high * (high / low) ** after
    return low - before * (high - low), high + after * (high - low)


class _Scale:
    """Maps the values of an axis to pixels."""

    def __init__(self, axis: Axis, values: list[float], start: float, stop: float) -> None:
        low, high = axis_ends(axis, values)
        self.axis, self.start, self.stop = axis, start, stop
        self.low, self.high = (math.log10(low), math.log10(high)) if axis.log else (low, high)

    def __call__(self, value: float) -> float:
        value = math.log10(value) if self.axis.log else value
        return self.start + (value - self.low) / (self.high - self.low) * (self.stop - self.start)

    def ticks(self) -> list[float]:
        """Returns round values along the axis."""
        if not self.axis.log:
            return self._even_ticks(self.low, self.high)
        low, high = 10**self.low, 10**self.high
        powers = range(math.ceil(math.log2(low) - 1e-9), math.floor(math.log2(high) + 1e-9) + 1)
        found = [2.0**power for power in powers if power % max(1, len(powers) // 9 + 1) == 0]
        if self.high - self.low >= 4:
            found = [10.0**p for p in range(math.ceil(self.low), int(self.high) + 1)]
        # A range of less than a power or two is about even.
        return found if len(found) > 1 else self._even_ticks(low, high)

    def _even_ticks(self, low: float, high: float) -> list[float]:
        step = _round_step((high - low) / 5)
        step = max(1.0, math.ceil(step)) if self.axis.whole else step
        first = math.ceil(low / step - 1e-9)
        return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]

    def labels(self) -> list[tuple[float, str]]:
        """Returns the ticks with their texts, of as many digits as it takes to tell ticks apart."""
        ticks = self.ticks()
        for digits in range(3 if self.axis.percent else 4, _MOST_DIGITS):
            texts = [self._text(value, digits) for value in ticks]
            if len(set(texts)) == len(texts):
                break
        return list(zip(ticks, texts, strict=True))

    def _text(self, value: float, digits: int) -> str:
        if self.axis.percent:
            return f"{value * 100:.{digits}g}%"
        if self.axis.whole and not self.axis.log:
            return count_text(value, digits)
        if value >= 1024 and value % 1024 == 0 and self.axis.log:
            return f"{value / 1024:.0f}K" if value < 2**20 else f"{value / 2**20:.0f}M"
        return f"{value:.{digits}g}"


def count_text(value: float, digits: int = 4) -> str:
    """Returns a count in short, with so many digits from 10,000 on: 950, 12K, 1.5M."""
    for least, size, unit in ((1e9, 1e9, "B"), (1e6, 1e6, "M"), (1e4, 1e3, "K")):
        if abs(value) >= least:
            return f"{value / size:.{digits}g}{unit}"
    return f"{value:,.0f}"


def _round_step(step: float) -> float:
    """Returns the smallest of 1, 2, 2.5, 5 times a power of ten that is at least `step`."""
    power = 10 ** math.floor(math.log10(step))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= step * (1 - 1e-9))


def _panel(panel: Panel, width: int, height: int, look: Look) -> str:
    across = [v for s in panel.series for v in s.x] + [rule.x for rule in panel.rules]
    x = _Scale(panel.x, across, LEFT, width - RIGHT)
    y = _Scale(panel.y, [v for s in panel.series for v in (*s.y, *s.floor)], height - BOTTOM, panel.top)
    parts = [_text(LEFT, 22, panel.title, size=13, bold=True, color=look.ink)] if panel.title else []
    parts += _axes(panel, x, y, width, height, look)
    for rule in panel.rules:
        at, color = x(rule.x), look.color(rule.color)
        line = f"x1='{at:.1f}' y1='{panel.top}' x2='{at:.1f}' y2='{height - BOTTOM}'"
        parts.append(f"<line {line} stroke='{color}' stroke-dasharray='2 3'><title>{escape(rule.title)}</title></line>")
    for series in panel.series:
        parts += _series(series, x, y, look)
    if look.hover:
        parts.insert(0, f"<g class='plot' data-x='{_mapping(x)}' data-y='{_mapping(y)}'>")
        parts.append("</g>")
    return "\n".join([*parts, *_legend(panel, width, height, look)])


def _mapping(scale: _Scale) -> str:
    """Returns the data that map pixels to values: first and last pixel, their values, and the kind of the axis."""
    percent = "percent" if scale.axis.percent else "log" if scale.axis.log else "plain"
    return f"{scale.start} {scale.stop} {scale.low:.8g} {scale.high:.8g} {percent}"


def _axes(panel: Panel, x: _Scale, y: _Scale, width: int, height: int, look: Look) -> list[str]:
    parts, floor, right = [], height - BOTTOM, width - RIGHT
    for value, text in y.labels():
        at = y(value)
        parts.append(f"<line x1='{LEFT}' y1='{at:.1f}' x2='{right}' y2='{at:.1f}' stroke='{look.grid}'/>")
        parts.append(_text(LEFT - 7, at + 4, text, anchor="end", color=look.pale))
    for value, text in x.labels():
        at = x(value)
        parts.append(f"<line x1='{at:.1f}' y1='{floor}' x2='{at:.1f}' y2='{floor + 4}' stroke='{look.pale}'/>")
        parts.append(_text(at, floor + 18, text, anchor="middle", color=look.pale))
    parts.append(f"<line x1='{LEFT}' y1='{floor}' x2='{right}' y2='{floor}' stroke='{look.pale}'/>")
    parts.append(_text((LEFT + right) / 2, height - 12, panel.x.label, anchor="middle", color=look.ink))
    middle = (panel.top + floor) / 2
    label = _text(15, middle, panel.y.label, anchor="middle", color=look.ink)
    parts.append(f"<g transform='rotate(-90 15 {middle:.1f})'>{label}</g>")
    return parts


def _series(series: Series, x: _Scale, y: _Scale, look: Look) -> list[str]:
    color = look.color(series.color)
    points = [(x(a), y(b)) for a, b in zip(series.x, series.y, strict=True)]
    parts = []
    if series.floor:
        edge = [(x(a), y(b)) for a, b in zip(series.x, series.floor, strict=True)]
        area = " ".join(f"{a:.1f},{b:.1f}" for a, b in [*points, *reversed(edge)])
        parts.append(f"<polygon points='{area}' fill='{color}' fill-opacity='{0.75 * series.strength:.2f}'/>")
    if series.line and len(points) > 1:
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
        dash = " stroke-dasharray='5 4'" if series.dashed else ""
        faint = f" opacity='{series.strength:.2f}'" if series.strength < 1 else ""
        shown = look.hover and (series.name or not series.dashed)
        name = f" data-name='{escape(series.hint or series.name, quote=True)}'" if shown else ""
        line = f"<polyline points='{path}' fill='none' stroke='{color}' stroke-width='{series.width}'"
        parts.append(f"{line}{dash}{faint}{name}/>")
    parts += [_mark(series.mark, a, b, color, look.paper) for a, b in points if series.mark]
    return parts


def _mark(kind: str, x: float, y: float, color: str, paper: str) -> str:
    if kind == "circle":
        return f"<circle cx='{x:.1f}' cy='{y:.1f}' r='3.2' fill='{color}'/>"
    if kind == "ring":
        return f"<circle cx='{x:.1f}' cy='{y:.1f}' r='3.6' fill='{paper}' stroke='{color}' stroke-width='1.5'/>"
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


def _legend(panel: Panel, width: int, height: int, look: Look) -> list[str]:
    parts = []
    for series, at, row in _places(panel, width):
        y = height + row * _ROW + 6
        color = look.color(series.color)
        if series.floor:
            parts.append(f"<rect x='{at + 4:.1f}' y='{y - 5}' width='16' height='10' fill='{color}'/>")
        elif series.line:
            dash = " stroke-dasharray='5 4'" if series.dashed else ""
            faint = f" opacity='{series.strength:.2f}'" if series.strength < 1 else ""
            ends = f"x1='{at:.1f}' y1='{y}' x2='{at + 24:.1f}' y2='{y}'"
            parts.append(f"<line {ends} stroke='{color}' stroke-width='{series.width}'{dash}{faint}/>")
        if series.mark:
            parts.append(_mark(series.mark, at + 12, y, color, look.paper))
        parts.append(_text(at + 30, y + 4, series.name, color=look.ink))
    return parts


def _text(
    x: float, y: float, text: str, *, size: int = 11, anchor: str = "start", color: str = INK, bold: bool = False
) -> str:
    weight = " font-weight='bold'" if bold else ""
    place = f"x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}'"
    return f"<text {place} {FONT} font-size='{size}' fill='{color}'{weight}>{escape(text)}</text>"
