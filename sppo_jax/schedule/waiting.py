"""Chunks that wait between two groups of layers: their slots on the device; or on the host late heads, and rows.

What comes to a stage in one compute tick is written to its row during the next one, and is fetched during the compute
tick before its use. The output of the last layer waits there too, for a head right before the backward of its chunk: so
no dX of heads waits anywhere. As in `host_rows`, a row is of a tick and not of a stage.
"""

from collections.abc import Hashable
from dataclasses import dataclass, replace

from sppo_jax.schedule.slots import color_intervals, color_stages
from sppo_jax.schedule.table import MIN_HOST_GAP, Table, Tick, Unit


@dataclass(frozen=True)
class Room:
    """The rows of a waiting room.

    Args:
        num_rows: how many there are.
        puts: of each tick that writes what has come in the compute tick before, the row.
        takes: of each tick that fetches for the next compute tick, or for the head before that one, the row.
    """

    num_rows: int
    puts: dict[int, int]
    takes: dict[int, int]


def with_late_heads(table: Table) -> Table:
    """Returns the table with each head right before the backward of its chunk on the last virtual stage.

    Args:
        table: a table, or an outline whose rounds are whole sequences.
    """
    last = table.num_virtual_stages - 1
    ticks: list[Tick] = []
    for tick in table.ticks:
        unit = tick.units[-1]
        if tick.op == "B" and unit is not None and unit.virtual_stage == last:
            ticks.append(Tick("H", (unit._replace(op="H"),) * table.num_stages))
        if tick.op != "H":
            ticks.append(tick)
    return replace(table, ticks=tuple(ticks))


def room_ticks(table: Table) -> dict[Unit, tuple[int, int]]:
    """Returns, for each unit whose input waits, the ticks that write the input and that fetch it.

    Raises:
        ValueError: a chunk does not wait long enough to leave and to come back, or none waits.
    """
    compute = [index for index, tick in enumerate(table.ticks) if tick.is_compute]
    number = {index: place for place, index in enumerate(compute)}
    found: dict[Unit, tuple[int, int]] = {}
    for unit, (came, used) in table.waits.items():
        use = number[used if unit.op != "H" else used + 1]  # a late head is right before a backward
        if use - number[came] < MIN_HOST_GAP:
            raise ValueError(_too_soon(table))
        found[unit] = compute[number[came] + 1], compute[use - 1]
    if not found:
        raise ValueError(_too_soon(table))
    return found


def waiting_slots(table: Table) -> tuple[int, dict[Unit, int]]:
    """Returns the number of chunks that wait at once on the device, and a slot for each unit's input."""
    spans: dict[int, dict[Hashable, tuple[int, int]]] = {stage: {} for stage in range(table.num_stages)}
    for unit, (came, tick) in table.waits.items():
        # It comes at the end of a tick, and leaves at the start of another one.
        spans[table.waits_at(unit)][unit] = 2 * came + 1, 2 * tick
    return color_stages(spans)


def waiting_room(table: Table) -> Room:
    """Returns the rows of a table with late heads.

    Raises:
        ValueError: see `room_ticks`.
    """
    known = table.known_of_ticks
    if "waiting_room" not in known:
        known["waiting_room"] = _waiting_room(table)
    return known["waiting_room"]


def _waiting_room(table: Table) -> Room:
    # What comes in one tick has one row, whatever units use it.
    spans: dict[Hashable, tuple[int, int]] = {put: (put, take) for put, take in room_ticks(table).values()}
    num_rows, rows = color_intervals(spans)
    return Room(
        # Compilers know the only row, and drop what its number depends on.
        num_rows=max(2, num_rows),
        puts={spans[put][0]: row for put, row in rows.items()},
        takes={spans[put][1]: row for put, row in rows.items()},
    )


def _too_soon(table: Table) -> str:
    least = table.num_stages + MIN_HOST_GAP - 1
    chunks = f"chunks of a wave of {table.wave}" if table.wave > 1 else "chunks"
    return (
        f"stash.waiting=host must have a breadth-first schedule with at least {least} {chunks} on {table.num_stages} "
        f"stages, so that each waits for {MIN_HOST_GAP - 1} ticks or more, got {table.wave * table.num_chunks}; use "
        "more chunks, or stash.waiting=keep"
    )
