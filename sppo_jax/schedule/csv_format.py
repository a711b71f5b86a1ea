"""Schedule tables as CSV: a header of names and lengths, then one row a stage and one cell a tick."""

import re

from sppo_jax.schedule.table import Table, Tick, Unit

_CELL = re.compile(r"([FB])(\d+)\.(\d+)\.(\d+)|(H)(\d+)\.(\d+)")
_HEADER, _WAVE = ("name", "stages", "groups", "sequences", "chunk_lengths"), "wave"


def to_csv(table: Table) -> str:
    """Returns the table as text.

    The first line is `key=value` cells: name, stages, groups, sequences and chunk_lengths (spaces between), and wave
    where it is not 1. Each further line is a stage. A cell is `F0.3.1` or `B0.3.1` (sequence, chunk, virtual stage),
    `H0.3` (sequence, chunk) or empty.
    """
    lengths = " ".join(str(length) for length in table.chunk_lengths)
    values = (table.name, table.num_stages, table.num_groups, table.num_sequences, lengths)
    header = dict(zip(_HEADER, values, strict=True)) | ({_WAVE: table.wave} if table.wave != 1 else {})
    lines = [",".join(f"{key}={value}" for key, value in header.items())]
    for stage in range(table.num_stages):
        lines.append(",".join(_cell(tick.units[stage]) for tick in table.ticks))
    return "\n".join(lines) + "\n"


def from_csv(text: str) -> Table:
    """Reads a table that `to_csv` wrote or a user made; it is not checked, call `check` for that.

    Raises:
        ValueError: the text does not have the format.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        raise ValueError("a schedule CSV must begin with a header line, got no text")
    header = _read_header(lines[0])
    num_stages, num_groups = (_read_count(header, key) for key in ("stages", "groups"))
    rows = [line.split(",") for line in lines[1:]]
    if len(rows) != num_stages:
        raise ValueError(f"a schedule CSV must have one row for each of its {num_stages} stages, got {len(rows)} rows")
    widths = sorted({len(row) for row in rows})
    if len(widths) != 1:
        raise ValueError(f"all rows of a schedule CSV must have one cell a tick, got rows of {widths} cells")
    last = num_stages * num_groups - 1
    grid = [[_read_cell(cell, stage, last) for cell in row] for stage, row in enumerate(rows)]
    ticks = [_tick(index, units) for index, units in enumerate(zip(*grid, strict=True))]
    lengths = header["chunk_lengths"].split()
    if not all(length.isdigit() for length in lengths):
        raise ValueError(f"chunk_lengths of a schedule CSV must be whole numbers, got {header['chunk_lengths']!r}")
    return Table(
        num_stages=num_stages,
        num_groups=num_groups,
        num_sequences=_read_count(header, "sequences"),
        chunk_lengths=tuple(int(length) for length in lengths),
        ticks=tuple(ticks),
        name=header["name"],
        wave=_read_count(header, _WAVE),
    )


def _cell(unit: Unit | None) -> str:
    if unit is None:
        return ""
    text = f"{unit.op}{unit.sequence}.{unit.chunk}"
    return text if unit.op == "H" else f"{text}.{unit.virtual_stage}"


def _read_header(line: str) -> dict[str, str]:
    cells = [cell.strip().partition("=") for cell in line.split(",")]
    header = {key: value for key, _, value in cells}
    if set(header) - {_WAVE} != set(_HEADER):
        raise ValueError(
            f"the header of a schedule CSV must have the keys {', '.join(_HEADER)}, and may have {_WAVE}, got {line!r}"
        )
    return {_WAVE: "1", **header}


def _read_count(header: dict[str, str], key: str) -> int:
    if not header[key].isdigit() or int(header[key]) < 1:
        raise ValueError(f"{key} of a schedule CSV must be a positive whole number, got {header[key]!r}")
    return int(header[key])


def _read_cell(cell: str, stage: int, last: int) -> Unit | None:
    cell = cell.strip()
    if not cell:
        return None
    match = _CELL.fullmatch(cell)
    if match is None:
        raise ValueError(
            f"a cell of a schedule CSV must be empty or like F0.3.1, B0.3.1 or H0.3, got {cell!r} at stage {stage}"
        )
    op, sequence, chunk, virtual_stage, head, head_sequence, head_chunk = match.groups()
    if head:
        return Unit("H", int(head_sequence), int(head_chunk), last)
    return Unit(op, int(sequence), int(chunk), int(virtual_stage))


def _tick(index: int, units: tuple[Unit | None, ...]) -> Tick:
    ops = sorted({unit.op for unit in units if unit is not None})
    if len(ops) != 1:
        raise ValueError(
            f"a tick of a schedule CSV must hold units of one op, got {', '.join(ops) or 'no unit'} in tick {index}"
        )
    return Tick(ops[0], units)
