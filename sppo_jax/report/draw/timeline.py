"""A schedule as a picture: ticks by stages, widths to scale, as SVG text. No jax here."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate, groupby

from sppo_jax.predict.seconds.simulate import simulate
from sppo_jax.schedule.table import Table, TickShape, Unit

# Two shades of each op tell neighbouring sequences apart; a label is white on the first and dark on the second.
COLORS = {"F": ("#4878a8", "#a3c4e0"), "B": ("#3f8440", "#a5d19d"), "H": ("#e07b1a", "#ffc583")}
LABELS = ("#ffffff", "#14202c")
NAMES = {"F": "forward", "B": "backward", "H": "head and loss, all stages", "idle": "idle"}
IDLE = "#e6e6e6"
OUT, BACK = "#6b4c9a", "#b3446c"
ROW, GAP, LANE, LEFT, RIGHT, TOP = 30, 4, 6, 64, 8, 34
CHARACTER_WIDTH = 6.2
# Cells narrower than this are drawn together.
NARROW = 1.5
# Cells of a pass of one group of layers are drawn as one block where they are narrower than this.
PASS_CELL = 14
# The share of a debt that is left from one box to the next.
FADING = 0.98
# Without a gap, a box reaches under the next box, so that no seam is visible.
OVERLAP = 1.0
INVISIBLE = 0.25
FONT = "font-family='Helvetica,Arial,sans-serif' font-size='11' fill='#222'"


@dataclass(frozen=True, kw_only=True)
class LinkUse:
    """A copy between a device and its host: its stage, tick, direction, and seconds on the link."""

    stage: int
    tick: int
    out: bool
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Window:
    """The ticks that a picture shows, and their places in the picture.

    Args:
        first: the first tick.
        last: the last tick, inclusive.
        starts_s: start of each tick of the table in seconds, and the end of the last tick.
        width: width of the picture, in pixels.
    """

    first: int
    last: int
    starts_s: tuple[float, ...]
    width: int

    @property
    def scale(self) -> float:
        """Pixels a second."""
        return (self.width - LEFT - RIGHT) / (self.starts_s[self.last + 1] - self.starts_s[self.first])

    def x(self, seconds: float) -> float:
        """Returns the place of a moment of the step."""
        return LEFT + (seconds - self.starts_s[self.first]) * self.scale


def whole_step(tick_s: Sequence[float], width: int) -> Window:
    """Returns the window that shows all ticks."""
    starts = tuple(accumulate(tick_s, initial=0.0))
    return Window(first=0, last=len(tick_s) - 1, starts_s=starts, width=width)


def timeline_svg(
    table: Table,
    costs: Callable[[Unit, TickShape], float],
    *,
    width: int = 1000,
    title: str = "",
    links: Sequence[LinkUse] = (),
    window: Window | None = None,
) -> str:
    """Draws a schedule.

    Args:
        table: the schedule.
        costs: seconds of a unit in a tick of some shape, which give the widths.
        width: width of the picture, in pixels.
        title: a line above the picture; the table's name and the bubble by default.
        links: copies between devices and hosts, drawn as two lanes below each stage.
        window: the ticks to show; by default all.

    Returns:
        A whole SVG document.
    """
    result = simulate(table, costs)
    window = window or whole_step(result.tick_s, width)
    row = ROW + GAP + (2 * LANE + GAP if links else 0)
    height = TOP + table.num_stages * row + 50
    title = title or f"{table.name}: {table.num_stages} stages, bubble {result.bubble_fraction:.0%}"
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{width}' height='{height}' viewBox='0 0 {width} {height}'>",
        f"<rect width='{width}' height='{height}' fill='white'/>",
        f"<text x='{LEFT}' y='20' {FONT} font-weight='bold'>{escape(title)}</text>",
    ]
    for stage in range(table.num_stages):
        y = TOP + stage * row
        parts.append(f"<text x='8' y='{y + 19}' {FONT}>stage {stage}</text>")
        parts += _row(table, window, stage, y)
        if links:
            parts += _lanes([link for link in links if link.stage == stage], window, y + ROW + 2)
    parts += time_axis(window, TOP + table.num_stages * row + 2)
    labels = "labels: sequence.chunk" if table.num_sequences > 1 else "labels: chunk"
    if table.passes_groups_in_turn:
        labels += "; g3: all chunks through group 3"
    return "\n".join([*parts, *_legend(height - 10, bool(links), labels), "</svg>"])


def time_axis(window: Window, y: float) -> list[str]:
    """Returns marks with seconds below a picture."""
    begin, end = window.starts_s[window.first], window.starts_s[window.last + 1]
    step = next(
        size * 10.0**power for power in range(-7, 9) for size in (1, 2, 5) if (end - begin) / (size * 10.0**power) <= 10
    )
    parts, number = [], -(-begin // step)
    while number * step <= end:
        x = window.x(number * step)
        anchor = "end" if x > window.width - 40 else "middle"
        parts.append(f"<path d='M{x:.1f} {y}v4' stroke='#666'/>")
        parts.append(f"<text x='{x:.1f}' y='{y + 15}' {FONT} text-anchor='{anchor}'>{number * step:.6g} s</text>")
        number += 1
    return parts


def _row(table: Table, window: Window, stage: int, y: int) -> list[str]:
    parts: list[str] = []
    narrow: list[int] = []
    owed: dict[str, float] = {}
    for first, last in _blocks(table, window, stage):
        if (window.starts_s[last + 1] - window.starts_s[first]) * window.scale < NARROW:
            narrow += range(first, last + 1)
            continue
        parts += _merged(table, window, stage, narrow, y, owed)
        narrow = []
        parts += _cell(table, window, stage, first, y) if first == last else _pass(table, window, stage, first, last, y)
    return parts + _merged(table, window, stage, narrow, y, owed)


def _blocks(table: Table, window: Window, stage: int) -> Iterator[tuple[int, int]]:
    """Yields the first and the last tick of each box: a tick, or a pass of a group of layers where ticks are small."""

    key: tuple = ()

    def block_of(index: int) -> tuple:
        nonlocal key
        unit = table.ticks[index].units[stage]
        wide = (window.starts_s[index + 1] - window.starts_s[index]) * window.scale >= PASS_CELL
        if unit is None or wide or not table.passes_groups_in_turn:
            key = (index,)
        elif unit.op != "H" or key[:1] != ("F",):  # a small head belongs to the pass that it follows
            key = unit.op, unit.sequence // table.wave, unit.virtual_stage
        return key

    for _, ticks in groupby(range(window.first, window.last + 1), block_of):
        first, *others = ticks
        yield first, others[-1] if others else first


def _pass(table: Table, window: Window, stage: int, first: int, last: int, y: int) -> list[str]:
    """Draws a pass of one group of layers; shades tell neighbouring groups apart, and the label is the group's."""
    units = [unit for tick in table.ticks[first : last + 1] if (unit := tick.units[stage]) is not None]
    op, group = units[0].op, units[0].virtual_stage // table.num_stages
    x, end = window.x(window.starts_s[first]), window.x(window.starts_s[last + 1])
    chunks = f"chunks {min(unit.chunk for unit in units)}-{max(unit.chunk for unit in units)}"
    seconds = window.starts_s[last + 1] - window.starts_s[first]
    what = f"{NAMES[op]}, sequence {units[0].sequence}, {chunks}, layers of group {group}, {seconds:.4g} s"
    parts = [_box(x, y, end - x - 0.6, COLORS[op][group % 2], f"ticks {first}-{last}, stage {stage}: {what}")]
    if len(f"g{group}") * CHARACTER_WIDTH + 2 < end - x:
        font = FONT.replace("#222", LABELS[group % 2])
        parts.append(f"<text x='{(x + end) / 2:.2f}' y='{y + 19}' {font} text-anchor='middle'>g{group}</text>")
    return parts


def _cell(table: Table, window: Window, stage: int, index: int, y: int) -> list[str]:
    unit = table.ticks[index].units[stage]
    x, end = window.x(window.starts_s[index]), window.x(window.starts_s[index + 1])
    duration = window.starts_s[index + 1] - window.starts_s[index]
    what = "idle" if unit is None else _words(unit, table)
    # There is a gap between wide cells; between narrow cells the gaps would take most of the picture.
    width = end - x + (-0.6 if end - x > 8 else OVERLAP)
    box = _box(x, y, width, _fill(unit), f"tick {index}, stage {stage}: {what}, {duration:.4g} s")
    return [box] if unit is None else [box, *_label(unit, table, (x + end) / 2, y, end - x)]


def _words(unit: Unit, table: Table) -> str:
    group = f", layers of group {unit.virtual_stage // table.num_stages}" if table.num_groups > 1 else ""
    return f"{NAMES[unit.op]}, sequence {unit.sequence}, chunk {unit.chunk}{group if unit.op != 'H' else ''}"


def _merged(table: Table, window: Window, stage: int, ticks: list[int], y: int, owed: dict[str, float]) -> list[str]:
    """Draws neighbouring narrow cells as boxes of at least NARROW pixels, each op for its share of the time.

    A box has the fill of the op that is owed the most time among its ticks. The time that this op takes from the
    other ops is owed to them in the next box. Debts fade and small debts are not paid, so an op that takes a
    thousandth of the time does not appear once at a random place.
    """
    runs: list[tuple[str, int, int]] = []  # fill, first tick, last tick
    inside: dict[str, float] = {}
    begin = ticks[0] if ticks else 0
    for index in ticks:
        fill = _fill(table.ticks[index].units[stage])
        tick_s = window.starts_s[index + 1] - window.starts_s[index]
        inside[fill] = inside.get(fill, 0.0) + tick_s
        owed[fill] = owed.get(fill, 0.0) + tick_s
        seconds = window.starts_s[index + 1] - window.starts_s[begin]
        if seconds * window.scale >= NARROW or index == ticks[-1]:
            fill = max(inside, key=lambda name: owed[name])
            if owed[fill] < seconds / 2:
                fill = max(inside, key=lambda name: inside[name])
            owed[fill] -= seconds
            owed.update({name: FADING * debt for name, debt in owed.items()})
            if runs and runs[-1][0] == fill:
                runs[-1] = (fill, runs[-1][1], index)
            else:
                runs.append((fill, begin, index))
            begin, inside = index + 1, {}
    boxes = []
    for fill, first, last in runs:
        x, end = window.x(window.starts_s[first]), window.x(window.starts_s[last + 1])
        what = f"ticks {first}-{last}, stage {stage}; narrow ticks, each op for its share of the time"
        # With its overlap, a box that is too small to see would be visible.
        if end - x > INVISIBLE:
            boxes.append(_box(x, y, end - x + OVERLAP, fill, what))
    return boxes


def _box(x: float, y: int, width: float, fill: str, title: str) -> str:
    box = f"<rect x='{x:.2f}' y='{y}' width='{width:.2f}' height='{ROW}' fill='{fill}'>"
    return f"{box}<title>{escape(title)}</title></rect>"


def _fill(unit: Unit | None) -> str:
    return IDLE if unit is None else COLORS[unit.op][unit.sequence % 2]


def _label(unit: Unit, table: Table, middle: float, y: int, width: float) -> list[str]:
    """Writes sequence and chunk if they fit, else the chunk if it fits, else nothing."""
    full = f"{unit.sequence}.{unit.chunk}" if table.num_sequences > 1 else f"{unit.chunk}"
    text = next((t for t in (full, f"{unit.chunk}") if len(t) * CHARACTER_WIDTH + 2 < width), None)
    if text is None or unit.op == "H":
        return []
    font = FONT.replace("#222", LABELS[unit.sequence % 2])
    return [f"<text x='{middle:.2f}' y='{y + 19}' {font} text-anchor='middle'>{text}</text>"]


def _lanes(links: Iterable[LinkUse], window: Window, y: int) -> list[str]:
    """Draws the host link's use below a stage: a pixel is as high as the share of its time that a copy takes."""
    use = {True: [0.0] * window.width, False: [0.0] * window.width}
    for link in links:
        if window.first <= link.tick <= window.last:
            begin = window.starts_s[link.tick]
            _spread(use[link.out], window.x(begin), window.x(begin + link.seconds))
    parts, length = [], window.width - LEFT - RIGHT
    for out, top in ((True, y), (False, y + LANE)):
        parts.append(f"<rect x='{LEFT}' y='{top}' width='{length}' height='{LANE - 1}' fill='#f2f2f2'/>")
        bottom, bars = top + LANE - 1, []
        for x, share in enumerate(use[out]):
            if share > 0:
                high = max(0.6, min(1.0, share) * (LANE - 1))
                bars.append(f"M{x} {bottom}v{-high:.1f}h1v{high:.1f}z")
        if bars:
            parts.append(f"<path d='{''.join(bars)}' fill='{OUT if out else BACK}'/>")
    return parts


def _spread(pixels: list[float], begin: float, end: float) -> None:
    """Adds to each pixel the share of it that lies between two places."""
    for pixel in range(int(begin), min(len(pixels), int(end) + 1)):
        pixels[pixel] += max(0.0, min(end, pixel + 1) - max(begin, pixel))


def _legend(y: int, links: bool, labels: str) -> list[str]:
    fills = {NAMES[op]: COLORS[op][0] for op in COLORS} | {"idle": IDLE}
    if links:
        fills |= {"copy to the host": OUT, "copy back": BACK}
    parts, x = [], LEFT
    for name, fill in fills.items():
        parts.append(f"<rect x='{x}' y='{y - 10}' width='12' height='12' fill='{fill}'/>")
        parts.append(f"<text x='{x + 17}' y='{y}' {FONT}>{name}</text>")
        x += 34 + round(len(name) * CHARACTER_WIDTH)
    parts.append(f"<text x='{x}' y='{y}' {FONT}>{labels}</text>")
    return parts
