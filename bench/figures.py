"""Draws the pictures of docs/ and bench/results/ that show measured or predicted points.

A picture is a list of panels. The SVG carries a digest of these data. With the digest a test can tell without drawing
whether a stored picture shows today's data. `python -m bench.validation` draws all pictures again.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sppo_jax.report.draw.axis import Axis, axis_ends
from sppo_jax.report.draw.chart import BOTTOM, LEFT, RIGHT, TOP, Panel, chart_svg

# Pixels of a page: a panel alone, a square one or one of two in a row, and the height of those that are not square.
_SINGLE_WIDTH, _WIDTH, _HEIGHT = 600, 450, 336
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
    """Draws panels, two in a row; equal data give equal text.

    Args:
        panels: the charts, at least one.

    Returns:
        An SVG document with the digest of the data in its description.

    Raises:
        ValueError: a panel has no points, a value is not finite, a value of a logarithmic axis is not above 0, or a
            value lies outside its axis.
    """
    for panel in panels:
        _check_inside(panel.x, [value for series in panel.series for value in series.x])
        _check_inside(panel.y, [value for series in panel.series for value in series.y])
    is_square = all(_is_square(panel) for panel in panels)
    width = _WIDTH if len(panels) > 1 or is_square else _SINGLE_WIDTH
    height = width - LEFT - RIGHT + TOP + BOTTOM if is_square else _HEIGHT
    first, rest = chart_svg(panels, width=width, height=height, columns=2).split("\n", 1)
    return f"{first}\n<desc>sha256 of the data: {digest(panels)}</desc>\n{rest}\n"


def _check_inside(axis: Axis, values: Sequence[float]) -> None:
    low, high = axis_ends(axis, values)
    if min(values) < low or max(values) > high:
        raise ValueError(f"the axis {axis.label!r} takes values from {low:g} to {high:g}, got others: widen it")


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
