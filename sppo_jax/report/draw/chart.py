"""Line and point charts as SVG text: axes, grid, legend; panels side by side and below each other. No jax."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from sppo_jax.report.draw.axis import Axis, Scale

FONT = "font-family='Helvetica,Arial,sans-serif'"
# Colours that colour-blind readers can tell apart too (Okabe and Ito).
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#555555")
GRID, INK, PALE = "#e6e6e6", "#333333", "#777777"
LEFT, RIGHT, TOP, BOTTOM = 62, 18, 40, 50
# Pixels above a panel that has no title.
_BARE_TOP = 16
_CHARACTER = 6.1  # width of a character of 11 px
_ROW = 18  # of the legend


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
    """A vertical line across a panel at a value of the horizontal axis, with a text at it or for the pointer."""

    x: float
    title: str
    color: int = 6


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


def chart_svg(
    panels: Sequence[Panel], *, width: int = 480, height: int = 340, columns: int | None = None, look: Look = PRINT
) -> str:
    """Draws panels in rows, each with its own axes; a legend that all panels share is below the picture.

    Where the horizontal axis has no label, it has no ticks, and a series of one point has its name above the point.

    Args:
        panels: the charts to draw.
        width: of a panel, in pixels.
        height: of a panel without its legend, in pixels.
        columns: panels in a row; None: all.
        look: the colours.

    Returns:
        A whole SVG document.

    Raises:
        ValueError: a panel has no points, a value is not finite, or a value of a logarithmic axis is not above 0.
    """
    columns = columns or len(panels)
    legends = {tuple(series.name for series in _in_legend(panel)) for panel in panels} - {()}
    is_shared = len(legends) == 1 and len(panels) > 1
    parts, down, across = [], 0, min(columns, len(panels)) * width
    for first in range(0, len(panels), columns):
        row = panels[first : first + columns]
        for number, panel in enumerate(row):
            drawn = _panel(panel, width, height, look)
            drawn += [] if is_shared else _legend(panel, width, height, look)
            text = "\n".join(drawn)
            parts.append(f"<g transform='translate({number * width},{down})'>{text}</g>")
        down += height + (0 if is_shared else max(_legend_height(panel, width) for panel in row))
    if is_shared:
        panel = next(panel for panel in panels if _in_legend(panel))
        parts += _legend(panel, across, down, look)
        down += _legend_height(panel, across)
    size = f"width='{across}' height='{down}' viewBox='0 0 {across} {down}'"
    background = f"<rect width='{across}' height='{down}' fill='{look.paper}'/>"
    return "\n".join([f"<svg xmlns='http://www.w3.org/2000/svg' {size}>", background, *parts, "</svg>"])


def _panel(panel: Panel, width: int, height: int, look: Look) -> list[str]:
    across = [v for s in panel.series for v in s.x] + [rule.x for rule in panel.rules]
    x = Scale(panel.x, across, LEFT, width - RIGHT)
    y = Scale(panel.y, [v for s in panel.series for v in (*s.y, *s.floor)], height - BOTTOM, panel.top)
    parts = [_text(LEFT, 22, panel.title, size=13, bold=True, color=look.ink)] if panel.title else []
    parts += _axes(panel, x, y, width, height, look)
    for rule in panel.rules:
        parts += _rule(rule, x(rule.x), panel.top, height - BOTTOM, look)
    for series in panel.series:
        parts += _series(series, x, y, look)
        if _is_named_at_point(series, panel.x):
            parts += _point_name(series, x, y, look)
    if look.hover:
        parts.insert(0, f"<g class='plot' data-x='{_mapping(x)}' data-y='{_mapping(y)}'>")
        parts.append("</g>")
    return parts


def _rule(rule: Marker, at: float, top: int, floor: int, look: Look) -> list[str]:
    """Returns a vertical line with its text at its upper end or, in a page, where the pointer stands on it."""
    color = look.color(rule.color)
    ends = f"x1='{at:.1f}' y1='{top}' x2='{at:.1f}' y2='{floor}'"
    line = f"<line {ends} stroke='{color}' stroke-dasharray='2 3'><title>{escape(rule.title)}</title></line>"
    return [line] if look.hover else [line, _text(at + 4, top + 10, rule.title, color=color, halo=look.paper)]


def _is_named_at_point(series: Series, x: Axis) -> bool:
    return bool(series.name) and len(series.x) == 1 and not x.label


def _point_name(series: Series, x: Scale, y: Scale, look: Look) -> list[str]:
    """Returns the lines of a series' name, the last one just above its only point."""
    lines, color = series.name.split("\n"), look.color(series.color)
    across, first = x(series.x[0]), y(series.y[0]) - 8 - 14 * (len(lines) - 1)
    return [
        _text(across, first + 14 * at, line, anchor="middle", color=color, halo=look.paper)
        for at, line in enumerate(lines)
    ]


def _mapping(scale: Scale) -> str:
    """Returns the data that map pixels to values: first and last pixel, their values, and its scale."""
    percent = "percent" if scale.axis.percent else "log" if scale.axis.log else "plain"
    return f"{scale.start} {scale.stop} {scale.low:.8g} {scale.high:.8g} {percent}"


def _axes(panel: Panel, x: Scale, y: Scale, width: int, height: int, look: Look) -> list[str]:
    parts, floor, right = [], height - BOTTOM, width - RIGHT
    for value, text in y.labels():
        at = y(value)
        parts.append(f"<line x1='{LEFT}' y1='{at:.1f}' x2='{right}' y2='{at:.1f}' stroke='{look.grid}'/>")
        parts.append(_text(LEFT - 7, at + 4, text, anchor="end", color=look.pale))
    for value, text in x.labels() if panel.x.label else ():
        at = x(value)
        parts.append(f"<line x1='{at:.1f}' y1='{floor}' x2='{at:.1f}' y2='{floor + 4}' stroke='{look.pale}'/>")
        parts.append(_text(at, floor + 18, text, anchor="middle", color=look.pale))
    parts.append(f"<line x1='{LEFT}' y1='{floor}' x2='{right}' y2='{floor}' stroke='{look.pale}'/>")
    parts.append(_text((LEFT + right) / 2, height - 12, panel.x.label, anchor="middle", color=look.ink))
    middle = (panel.top + floor) / 2
    label = _text(15, middle, panel.y.label, anchor="middle", color=look.ink)
    parts.append(f"<g transform='rotate(-90 15 {middle:.1f})'>{label}</g>")
    return parts


def _series(series: Series, x: Scale, y: Scale, look: Look) -> list[str]:
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


def _mark(mark: str, x: float, y: float, color: str, paper: str) -> str:
    if mark == "circle":
        return f"<circle cx='{x:.1f}' cy='{y:.1f}' r='3.2' fill='{color}'/>"
    if mark == "ring":
        return f"<circle cx='{x:.1f}' cy='{y:.1f}' r='3.6' fill='{paper}' stroke='{color}' stroke-width='1.5'/>"
    if mark == "square":
        return f"<rect x='{x - 3:.1f}' y='{y - 3:.1f}' width='6' height='6' fill='{color}'/>"
    arms = f"M{x - 3.4:.1f},{y - 3.4:.1f} l6.8,6.8 m0,-6.8 l-6.8,6.8"
    return f"<path d='{arms}' stroke='{color}' stroke-width='1.8' fill='none'/>"


def _in_legend(panel: Panel) -> list[Series]:
    return [series for series in panel.series if series.name and not _is_named_at_point(series, panel.x)]


def _places(panel: Panel, width: int) -> list[tuple[Series, float, int]]:
    """Returns each named series with its place in the legend: pixels from the left, and row."""
    placed: list[tuple[Series, float, int]] = []
    at, row = float(LEFT), 0
    for series in _in_legend(panel):
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
    x: float,
    y: float,
    text: str,
    *,
    size: int = 11,
    anchor: str = "start",
    color: str = INK,
    bold: bool = False,
    halo: str = "",
) -> str:
    """Returns a text; `halo` is the colour around its letters, which hides the lines that it crosses."""
    weight = " font-weight='bold'" if bold else ""
    around = f" stroke='{halo}' stroke-width='4' paint-order='stroke'" if halo else ""
    place = f"x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}'"
    return f"<text {place} {FONT} font-size='{size}' fill='{color}'{weight}{around}>{escape(text)}</text>"
