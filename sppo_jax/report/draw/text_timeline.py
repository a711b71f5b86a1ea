"""A schedule table as text for a terminal: one row a stage, one column a tick."""

from sppo_jax.schedule.table import Table, Unit

_LABEL = 9  # "stage 12 "
_GROUP_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def text_timeline(table: Table, *, width: int = 100, max_blocks: int = 6) -> str:
    """Returns the table as text, wrapped to a width; the middle of a long table is left out.

    Args:
        table: the table to draw.
        width: columns of the terminal.
        max_blocks: wrapped blocks to show at most; a longer table shows its first and last ticks.

    Returns:
        Lines of text, with a legend at the end.
    """
    columns = [[_cell(unit, table) for unit in tick.units] for tick in table.ticks]
    cell = max(len(str(len(columns) - 1)), *(len(text) for column in columns for text in column)) + 1
    per_block = max(1, (width - _LABEL) // cell)
    starts = list(range(0, len(columns), per_block))
    shown = set(starts)
    if len(starts) > max_blocks:
        head = (max_blocks + 1) // 2
        shown = {*starts[:head], *starts[len(starts) - (max_blocks - head) :]}
    lines = [_headline(table)]
    left_out = 0
    for start in starts:
        if start not in shown:
            left_out += per_block
            continue
        if left_out:
            lines.append(f"  ... {left_out} ticks left out ...")
            left_out = 0
        lines += _block(columns, start, min(start + per_block, len(columns)), cell)
    return "\n".join([*lines, *_legend(table)])


def text_passes(table: Table) -> str:
    """Returns the passes of a breadth-first table in their order, which is the same on every stage.

    Args:
        table: the table.

    Returns:
        Lines of text, with a legend at the end.
    """
    passes = dict.fromkeys(
        (unit.op, unit.sequence // table.wave, unit.virtual_stage // table.num_stages)
        for tick in table.ticks
        for unit in tick.units[:1]
        if unit is not None and unit.op != "H"
    )
    words = [f"{op}{wave}{_GROUP_LETTERS[group % len(_GROUP_LETTERS)]}" for op, wave, group in passes]
    of = "a wave" if table.wave > 1 else "a sequence"
    legend = f"F forward, B backward; number: {of}; a, b, ...: first, second, ... group of layers of the stage"
    takes = "the only chunk" if table.num_chunks == 1 else f"all {table.num_chunks} chunks"
    return "\n".join([_headline(table), f"each pass takes {takes}: {' '.join(words)}", legend])


def _headline(table: Table) -> str:
    waves = f" in waves of {table.wave}" if table.wave > 1 else ""
    stages, groups = _count(table.num_stages, "stage"), _count(table.num_groups, "virtual stage")
    sequences, chunks = _count(table.num_sequences, "sequence"), _count(table.num_chunks, "chunk")
    return f"{table.name}: {stages} with {groups} each, {sequences} of {chunks}{waves}, {len(table.ticks)} ticks"


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def _block(columns: list[list[str]], start: int, stop: int, cell: int) -> list[str]:
    lines = [("tick".ljust(_LABEL) + "".join(str(index).ljust(cell) for index in range(start, stop))).rstrip()]
    for stage in range(len(columns[0])):
        cells = "".join(column[stage].ljust(cell) for column in columns[start:stop])
        lines.append((f"stage {stage}".ljust(_LABEL) + cells).rstrip())
    return lines


def _cell(unit: Unit | None, table: Table) -> str:
    if unit is None:
        return "."
    text = f"{unit.op}{unit.sequence}.{unit.chunk}"
    if table.num_groups == 1 or unit.op == "H":
        return text
    return text + _GROUP_LETTERS[unit.virtual_stage // table.num_stages % len(_GROUP_LETTERS)]


def _legend(table: Table) -> list[str]:
    legend = "F forward, B backward, H head and loss (all stages together); sequence.chunk; . idle"
    if table.num_groups > 1:
        legend += "; a, b, ...: first, second, ... group of layers of the stage"
    return [legend]
