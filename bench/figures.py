"""Draws the pictures of docs/ that show measured or predicted points, with matplotlib (extra `dev`).

A picture is a list of the product's `Panel`s. The SVG carries a digest of these data. With the digest a test can tell
without drawing whether a stored picture shows today's data. `python -m bench.validation` draws all pictures again.
"""

import hashlib
import io
import json
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sppo_jax.report.draw.chart import GRID, INK, PALE, PALETTE, Axis, Panel, Series, axis_ends

# Inches. 72 points are 96 pixels of a page: two panels side by side are 900 pixels wide, one panel is 600.
_WIDTH, _SINGLE_WIDTH, _HEIGHT, _SQUARE_HEIGHT = 900 / 96, 600 / 96, 3.5, 4.6
_STYLE = {
    "svg.hashsalt": "sppo_jax",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    # Text is measured with the font that comes with matplotlib; browsers take the first of these that they have.
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 8.5,
    "axes.titlesize": 9,
    "axes.edgecolor": PALE,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "text.color": INK,
    "xtick.color": PALE,
    "ytick.color": PALE,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "legend.frameon": False,
}
_MARKS = {"": "", "circle": "o", "ring": "o", "square": "s", "cross": "x"}
# Under a text, so that no grid line crosses it.
_PAPER = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
_DIGEST = re.compile("sha256 of the data: ([0-9a-f]{64})")


def digest(panels: Sequence[Panel]) -> str:
    """Returns the sha256 of all that panels show, in hexadecimal; numbers count with six digits."""
    return hashlib.sha256(json.dumps(_plain([asdict(panel) for panel in panels])).encode()).hexdigest()


def stored_digest(svg: str) -> str:
    """Returns the digest that a picture carries; "" if it has none."""
    found = _DIGEST.search(svg)
    return found[1] if found else ""


def write(path: Path, panels: Sequence[Panel]) -> None:
    """Draws panels into a file."""
    path.write_text(draw(panels), encoding="utf-8")


def draw(panels: Sequence[Panel]) -> str:
    """Draws panels, two in a row; with one version of matplotlib, equal data give equal text.

    The fields `floor`, `strength` and `hint` of `Series` are for pages and are not drawn. Where the horizontal axis has
    no label, a series of one point has its name above the point. Other names are in a legend below the panel. If panels
    have equal legends, one legend is below the picture.

    Args:
        panels: the charts, at least one; an axis without a label has no ticks.

    Returns:
        An SVG document with the digest of the data in its description.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        ValueError: a panel has no points, a value is not finite, a value of a logarithmic axis is not above 0, or a
            value lies outside its axis.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        advice = "pip install -e '.[dev]', then run python -m bench.validation"
        raise ModuleNotFoundError(f"pictures of docs/ need matplotlib, which is not installed: {advice}") from error

    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    height = _SQUARE_HEIGHT if all(_is_square(panel) for panel in panels) else _HEIGHT
    with rc_context(_STYLE):
        size = (_WIDTH if columns == 2 else _SINGLE_WIDTH, rows * height)
        figure = Figure(figsize=size, layout="constrained", facecolor="white")
        figure.get_layout_engine().set(w_pad=0.12, h_pad=0.1)
        for place, panel in enumerate(panels, 1):
            _draw_panel(figure.add_subplot(rows, columns, place), panel)
        _draw_legends(figure)
        text = io.StringIO()
        metadata = {"Date": None, "Description": f"sha256 of the data: {digest(panels)}"}
        figure.savefig(text, format="svg", metadata=metadata)
    return "".join(f"{line.rstrip()}\n" for line in text.getvalue().splitlines())


def _plain(value: Any) -> Any:
    """Returns data as JSON takes them, with numbers as text."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if value is None or isinstance(value, str | bool):
        return value
    return f"{value:.6g}" if isinstance(value, int | float) else [_plain(item) for item in value]


def _is_square(panel: Panel) -> bool:
    """Returns whether both axes have the same values, so that a panel compares one figure with another."""
    x, y = panel.x, panel.y
    return x.low is not None and (x.low, x.high, x.log) == (y.low, y.high, y.log)


def _draw_panel(axes: Any, panel: Panel) -> None:
    axes.set_title(panel.title, loc="left")
    _set_axis(axes, "x", panel.x, [value for series in panel.series for value in series.x])
    _set_axis(axes, "y", panel.y, [value for series in panel.series for value in series.y])
    if _is_square(panel):
        axes.set_box_aspect(1)
    for rule in panel.rules:
        axes.axvline(rule.x, color=PALETTE[rule.color], linestyle=(0, (2, 3)), linewidth=1)
        place = {"xy": (rule.x, 1), "xycoords": axes.get_xaxis_transform(), "textcoords": "offset points"}
        axes.annotate(rule.title, **place, xytext=(4, -2), va="top", color=PALETTE[rule.color], bbox=_PAPER)
    for series in panel.series:
        _draw_series(axes, series, at_point=len(series.x) == 1 and bool(series.name) and not panel.x.label)


def _set_axis(axes: Any, name: str, axis: Axis, values: list[float]) -> None:
    """Sets scale, ends and ticks of an axis."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    low, high = axis_ends(axis, values)
    if min(values) < low or max(values) > high:
        raise ValueError(f"the axis {axis.label!r} takes values from {low:g} to {high:g}, got others: widen it")
    axes.set(**{f"{name}label": axis.label, f"{name}scale": "log" if axis.log else "linear", f"{name}lim": (low, high)})
    ticks = getattr(axes, f"{name}axis")
    if not axis.label:
        ticks.set_major_locator(NullLocator())
    elif axis.log and axis.whole:
        ticks.set_major_locator(LogLocator(base=2, numticks=12))
    elif axis.log:
        # numticks is the number above which the locator leaves ticks out.
        ticks.set_major_locator(LogLocator(subs=(1,) if high > 1e4 * low else (1, 2, 5), numticks=24))
    else:
        ticks.set_major_locator(MaxNLocator(8, steps=(1, 2, 2.5, 5, 10), integer=axis.whole))
    ticks.set_minor_locator(NullLocator())
    ticks.set_major_formatter(FuncFormatter(lambda value, _: _tick(axis, value)))


def _tick(axis: Axis, value: float) -> str:
    """Returns the text at a tick."""
    if axis.percent:
        return f"{value * 100:.3g}%"
    if axis.log and not axis.whole and value >= 1000:
        return f"{value / 1000:g}K"
    return f"{value:,.6g}".replace("e-0", "e-")


def _draw_series(axes: Any, series: Series, *, at_point: bool) -> None:
    color = PALETTE[series.color % len(PALETTE)]
    line = "" if not series.line else (0, (5, 4)) if series.dashed else "-"
    axes.plot(
        series.x,
        series.y,
        color=color,
        label="_" if at_point else series.name or "_",
        linestyle=line or "none",
        linewidth=0.75 * series.width,
        marker=_MARKS[series.mark],
        markersize=4.5,
        markerfacecolor="white" if series.mark == "ring" else color,
        zorder=2 if series.line else 3,
        clip_on=False,  # marks at the edge are drawn whole
    )
    if at_point:
        place = {"xytext": (0, 6), "textcoords": "offset points", "ha": "center", "va": "bottom"}
        axes.annotate(series.name, (series.x[0], series.y[0]), **place, color=color, bbox=_PAPER)


def _draw_legends(figure: Any) -> None:
    """Draws the legend of each panel below the panel, and one that several panels share below the picture."""
    users = defaultdict(list)
    for axes in figure.axes:
        users[tuple(axes.get_legend_handles_labels()[1])].append(axes)
    for names, panels in users.items():
        handles, shared = panels[0].get_legend_handles_labels()[0], len(panels) > 1
        if not names:
            continue
        points = 72 * (figure.get_figwidth() - 0.5) / (1 if shared else figure.axes[0].get_gridspec().ncols)
        look: dict[str, Any] = {"ncols": _legend_columns(names, points)}
        if shared:
            figure.legend(handles, names, loc="outside lower center", **look)
        else:
            look |= {"bbox_to_anchor": (0.5, 0), "borderaxespad": 4.5}
            panels[0].legend(handles, names, loc="upper center", **look)


def _legend_columns(names: Sequence[str], width: float) -> int:
    """Returns how many columns a legend has within a width in points: one row if the names fit into one."""
    widths = [41 + 4.5 * len(name) for name in names]  # a line or mark with its gaps, and characters
    return len(names) if sum(widths) <= width else max(1, int(width / max(widths)))
