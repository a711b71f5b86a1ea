"""A report on teams for a terminal, in ASCII: the gain and why, cells, attention, bytes, levels, all baselines."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from sppo_jax.files.format_bytes import format_bytes
from sppo_jax.flex.cells import TODAY
from sppo_jax.report.draw.columns import WIDTH, aligned, paragraph
from sppo_jax.report.flex.cells import CellFigures, cells_of
from sppo_jax.report.flex.figures import NAMES, TeamFigures
from sppo_jax.report.plan.words import name_of, runs_of, seconds

BASELINES = {
    "static": "no packing: every document alone, on as many members as the longest document needs",
    "packed": "the rows as packed, without teams: every document on all members",
    "per_batch": "one degree for all documents of a window, or the packed rows",
    "flex": "each document has its own degree",
}
_MOST_ROWS, _MOST_BLOCKS, _MOST_CELLS, _MOST_RUNS = 16, 2, 16, 40
# Characters of the longest bar, and of a line of levels.
_BAR, _LINE = 30, 80


def flex_text(figures: TeamFigures) -> str:
    """Returns the whole report, at most 100 columns wide where no single word is wider.

    Args:
        figures: the figures of the windows.
    """
    head = "\n".join([_subject(figures), _documents(figures), *_verdict(figures)])
    if figures.shape.members == 1:
        return head
    found = cells_of(figures.first)
    blocks = [
        head,
        _steps(figures),
        _cells(figures, found),
        _attention(found),
        _bytes(figures),
        _levels(figures),
    ]
    return "\n\n".join(blocks)


def gain_line(figures: TeamFigures) -> str:
    """Returns in one sentence the gain of teams over packed rows, or that teams gain nothing."""
    gain = figures.gain[TODAY]
    if figures.helps:
        return f"teams gain {gain:.2f}x over packed rows (simulated)"
    return f"teams gain nothing here ({gain:.3f}x, simulated)"


def _subject(figures: TeamFigures) -> str:
    plan, cluster = figures.plan, figures.cluster
    mesh = f"data {plan.mesh.data} x pipe {plan.mesh.pipe} x seq {plan.mesh.seq}"
    several = "" if plan.num_sequences == 1 else f"{plan.num_sequences} sequences of "
    return (
        f"{name_of(figures.model)}, {several}{plan.sequence_length:,} tokens per step, on {cluster.name}, {mesh}, "
        f"{plan.sequence_kind}"
    )


def _documents(figures: TeamFigures) -> str:
    windows, shape = len(figures.windows), figures.shape
    number = sum(len(pieces) for pieces in figures.windows)
    return (
        f"{figures.source}: {number:,} pieces in {_count(windows, 'window')} of {_count(shape.rows, 'row')}, "
        f"{figures.fill:.1%} full"
    )


def _verdict(figures: TeamFigures) -> list[str]:
    text = f"{gain_line(figures)}: {figures.why()}"
    return textwrap.wrap(text, WIDTH, break_long_words=False, break_on_hyphens=False)


def _steps(figures: TeamFigures) -> str:
    most = max(figures.seconds.values())
    rows = [
        (
            name,
            seconds(figures.seconds[name], most),
            f"{figures.rows[name]:.0f}",
            "" if name == "flex" else f"{figures.gain[name]:.3f}x",
            BASELINES[name],
        )
        for name in NAMES
    ]
    title = f"Ticks of a step, mean of {_count(len(figures.windows), 'window')} (simulated)"
    return f"{title}\n{aligned(('', 'seconds', 'rows', 'gain of flex', ''), rows, left=(0, 4), wrap=4)}"


def _cells(figures: TeamFigures, found: Sequence[CellFigures]) -> str:
    """Draws the cells of the first window as a matrix: the largest team, and the number of documents."""
    shape, first = figures.shape, figures.first
    texts = [_cell(cell) for cell in found]
    width = max(map(len, texts))
    label = max(len("chunk"), len(f"row {shape.rows - 1}"))
    columns = max(1, (WIDTH - 4 - label) // (width + 2))
    shown, rows = min(shape.num_chunks, columns * _MOST_BLOCKS), min(shape.rows, _MOST_ROWS)
    lines = [
        f"Cells of the first window ({_count(len(first.pieces), 'document')}; placement: {first.winner})",
        paragraph("", "each cell: largest team / documents; S: stream, on all members; -: empty", width=0),
    ]
    for begin in range(0, shown, columns):
        chunks = range(begin, min(shown, begin + columns))
        lines.append("  " + "chunk".ljust(label) + "".join(f"  {chunk:>{width}}" for chunk in chunks))
        for row in range(rows):
            cells = "".join(f"  {texts[row * shape.num_chunks + chunk]:>{width}}" for chunk in chunks)
            lines.append("  " + f"row {row}".ljust(label) + cells)
    left_out = len(found) - shown * rows
    if left_out:
        lines.append(f"  {_count(left_out, 'cell')} left out; --json has all")
    return "\n".join(lines)


def _cell(cell: CellFigures) -> str:
    if not cell.documents:
        return "-"
    return f"{'S' if cell.stream else 2**cell.level}/{cell.documents}"


def _attention(found: Sequence[CellFigures]) -> str:
    """Draws the attention of the members of some cells, relative to the largest of all cells."""
    shown = _some(found, _MOST_CELLS)
    most = max(1, max(cell.attention_max for cell in found))
    rows = [
        (
            f"{cell.row}.{cell.chunk}",
            f"{cell.tokens / cell.slots:.0%}",
            f"{cell.attention_max:.3g}",
            f"{cell.attention_max / cell.attention_mean:.2f}" if cell.attention_mean else "-",
            _bar(cell, most),
            teams_text(cell),
        )
        for cell in shown
    ]
    header = ("cell", "full", "pairs", "max/mean", "members compute (#), wait (+)", "teams: blocks x members")
    lines = ["Attention of the members of a cell, and the teams", aligned(header, rows, left=(4, 5), wrap=5)]
    if len(shown) < len(found):
        lines.append(f"  {len(shown)} of {len(found)} cells, some of each level; --json has all")
    total, top = sum(cell.attention_mean for cell in found), sum(cell.attention_max for cell in found)
    if total:
        lines.append(f"  over all cells, the busiest member has {top / total:.3f} times the mean attention")
    return "\n".join(lines)


def teams_text(cell: CellFigures) -> str:
    """Returns the teams of a cell in words: blocks of members, and how many documents these hold."""
    if cell.stream:
        return f"stream: {_count(cell.documents, 'document')}"
    parts = [
        f"{blocks} x {degree}: {_count(documents, 'document') if not number else documents}"
        for number, (degree, blocks, documents) in enumerate(cell.groups)
    ]
    in_order = cell.documents - sum(documents for _, _, documents in cell.groups)
    if in_order:
        parts.append(f"in natural order: {in_order}")
    return ", ".join(parts) or "empty"


def _bar(cell: CellFigures, most: int) -> str:
    mean, top = (round(value / most * _BAR) for value in (cell.attention_mean, cell.attention_max))
    return "#" * mean + "+" * (top - mean)


def _some(found: Sequence[CellFigures], most: int) -> list[CellFigures]:
    """Returns some cells: of each level about as many, evenly spaced, in the order of rows and chunks."""
    if len(found) <= most:
        return list(found)
    by_level: dict[int, list[CellFigures]] = {}
    for cell in found:
        by_level.setdefault(-1 if cell.stream else cell.level, []).append(cell)
    chosen: list[CellFigures] = []
    # The levels with the fewest cells come first, so that what these leave goes to the others.
    for number, cells in enumerate(sorted(by_level.values(), key=len)):
        share = min(len(cells), (most - len(chosen)) // (len(by_level) - number))
        chosen += [cells[at * len(cells) // share] for at in range(share)]
    return sorted(chosen, key=lambda cell: (cell.row, cell.chunk))


def _bytes(figures: TeamFigures) -> str:
    sent, members = figures.sent, figures.shape.members
    if not sent.ring:
        return "Bytes that a device sends per layer\n  none: a chunk is on one device"
    split = figures.plan.sequence_kind
    rows = [
        (name, format_bytes(value), f"{value / sent.ring:.3f}", text)
        for name, value, text in (
            ("ring", sent.ring, f"keys and values of each chunk on a ring of all {members} members, without prefixes"),
            ("packed", sent.today, f"packed rows with {split}, prefixes included"),
            (
                "flex",
                sent.flex,
                f"teams {format_bytes(sent.grouped)}, stream chunks by {split} {format_bytes(sent.stream)}",
            ),
        )
    ]
    title = "Bytes that a device sends per layer for the first window, forward and backward"
    return f"{title}\n{aligned(('', 'bytes', 'of ring', ''), rows, left=(0, 3), wrap=3)}"


def _levels(figures: TeamFigures) -> str:
    lines = ["Level of each tick of the first window: teams of 2^level members; S: stream, M: stream and teams"]
    levels = figures.levels()
    for op, name in (("F", "forward"), ("B", "backward")):
        digits = "".join(level for own, level in levels if own == op)
        lines.append(paragraph(name, digits if len(digits) <= _LINE else _runs(digits)))
    return "\n".join(lines)


def _runs(digits: str) -> str:
    """Returns levels as runs, e.g. "12 x S, 4 x 0"; of many runs the first."""
    runs = [f"{last - first + 1} x {level}" for first, last, level in runs_of(digits)]
    if len(runs) > _MOST_RUNS:
        runs = [*runs[:_MOST_RUNS], f"{len(runs) - _MOST_RUNS} more runs; --json has all"]
    return ", ".join(runs)


def _count(number: int, word: str) -> str:
    return f"{number:,} {word}" if number == 1 else f"{number:,} {word}s"
