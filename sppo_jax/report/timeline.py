"""A schedule as a picture: ticks by stages, widths to scale, as SVG text. No jax here."""

from collections.abc import Callable
from html import escape

from sppo_jax.schedule.simulate import simulate
from sppo_jax.schedule.table import Table, Unit

# Two shades a kind tell neighbouring sequences apart.
COLORS = {"F": ("#4e79a7", "#86aed1"), "B": ("#59a14f", "#8cc183"), "H": ("#f28e2b", "#ffbe7d")}
NAMES = {"F": "forward", "B": "backward", "H": "head and loss, all stages", "idle": "idle"}
IDLE = "#ececec"
ROW, GAP, LEFT, TOP = 30, 4, 64, 34
CHARACTER_WIDTH = 6.2
FONT = "font-family='Helvetica,Arial,sans-serif' font-size='11'"


def timeline_svg(
    table: Table,
    costs: Callable[[Unit, int], float],
    *,
    width: int = 1000,
    title: str = "",
) -> str:
    """Draw a schedule.

    Args:
        table: what runs when.
        costs: seconds of a unit padded to so many tokens; gives the widths.
        width: of the picture, in pixels.
        title: a line above it; the table's name and the bubble by default.

    Returns:
        A whole SVG document.
    """
    result = simulate(table, costs)
    scale = (width - LEFT - 8) / result.step_s
    height = TOP + table.num_stages * (ROW + GAP) + 30
    title = title or f"{table.name}: {table.num_stages} stages, bubble {result.bubble_fraction:.0%}"
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{width}' height='{height}' viewBox='0 0 {width} {height}'>",
        f"<rect width='{width}' height='{height}' fill='white'/>",
        f"<text x='{LEFT}' y='20' {FONT} font-weight='bold'>{escape(title)}</text>",
    ]
    for stage in range(table.num_stages):
        y = TOP + stage * (ROW + GAP)
        parts.append(f"<text x='8' y='{y + 19}' {FONT}>stage {stage}</text>")
        parts += _row(table, result.tick_s, stage, y, scale)
    return "\n".join([*parts, *_legend(height - 14), "</svg>"])


def _row(table: Table, tick_s: tuple[float, ...], stage: int, y: int, scale: float) -> list[str]:
    parts, start_s = [], 0.0
    for tick, seconds in zip(table.ticks, tick_s, strict=True):
        unit = tick.units[stage]
        x, width = LEFT + start_s * scale, seconds * scale
        fill = IDLE if unit is None else COLORS[unit.kind][unit.sequence % 2]
        parts.append(f"<rect x='{x:.2f}' y='{y}' width='{max(width - 0.6, 0.3):.2f}' height='{ROW}' fill='{fill}'/>")
        if unit is not None:
            parts += _label(unit, table, x + width / 2, y, width)
        start_s += seconds
    return parts


def _label(unit: Unit, table: Table, middle: float, y: int, width: float) -> list[str]:
    """Write sequence and chunk where there is room for them, else the chunk, else nothing."""
    full = f"{unit.sequence}.{unit.chunk}" if table.num_sequences > 1 else f"{unit.chunk}"
    text = next((t for t in (full, f"{unit.chunk}") if len(t) * CHARACTER_WIDTH + 2 < width), None)
    if text is None or unit.kind == "H":
        return []
    return [f"<text x='{middle:.2f}' y='{y + 19}' {FONT} fill='white' text-anchor='middle'>{text}</text>"]


def _legend(y: int) -> list[str]:
    parts, x = [], LEFT
    for kind, name in NAMES.items():
        fill = COLORS[kind][0] if kind in COLORS else IDLE
        parts.append(f"<rect x='{x}' y='{y - 10}' width='12' height='12' fill='{fill}'/>")
        parts.append(f"<text x='{x + 17}' y='{y}' {FONT}>{name}</text>")
        x += 40 + round(len(name) * CHARACTER_WIDTH)
    parts.append(f"<text x='{x}' y='{y}' {FONT}>labels: sequence.chunk</text>")
    return parts
