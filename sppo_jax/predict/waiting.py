"""Chunks that wait between two groups of layers: the bytes that they hold, and the seconds of their copies."""

from typing import NamedTuple

from sppo_jax.plan.parts import StashPlan
from sppo_jax.predict.shape import MemoryShape
from sppo_jax.schedule.table import Table, Unit
from sppo_jax.schedule.waiting import room_ticks, waiting_room


class Copy(NamedTuple):
    """A chunk on its way to the host or back.

    Attributes:
        tick: the tick beside which it moves.
        unit: the unit that reads the chunk.
        out: whether it goes to the host.
    """

    tick: int
    unit: Unit
    out: bool


def device_tokens(table: Table, shape: MemoryShape, stash: StashPlan) -> int:
    """Returns the tokens of a device that wait in its own memory."""
    local = _chunk_tokens(table, shape)
    if stash.waiting == "host":
        return 2 * local  # one chunk is used while the next one comes
    return (table.waiting_peak + 1) * local if table.waiting_peak else 0


def host_bytes(table: Table, shape: MemoryShape, stash: StashPlan) -> int:
    """Returns the bytes of the waiting room on a device's host."""
    return waiting_room(table).num_rows * chunk_bytes(table, shape) if stash.waiting == "host" else 0


def chunk_bytes(table: Table, shape: MemoryShape) -> int:
    """Returns the bytes that a device copies of a chunk: those of the longest tick."""
    return _chunk_tokens(table, shape) * shape.model.hidden_size * shape.compute_bytes


def copies(table: Table, stash: StashPlan) -> list[Copy]:
    """Returns the copies of a step between the waiting room and the devices."""
    if stash.waiting == "keep":
        return []
    return [
        Copy(tick, unit, out)
        for unit, (put, take) in room_ticks(table).items()
        for tick, out in ((put, True), (take, False))
    ]


def copy_seconds(table: Table, shape: MemoryShape, stash: StashPlan, link_bytes_s: float) -> tuple[float, ...]:
    """Returns the seconds for which each tick copies chunks to the host and back: one after the other."""
    if stash.waiting == "keep":
        return (0.0,) * len(table.ticks)
    room, one_s = waiting_room(table), chunk_bytes(table, shape) / link_bytes_s
    return tuple(one_s * ((index in room.puts) + (index in room.takes)) for index in range(len(table.ticks)))


def put_seconds(table: Table, shape: MemoryShape, stash: StashPlan, link_bytes_s: float) -> tuple[float, ...]:
    """Returns the seconds for which each tick copies a chunk to the host."""
    if stash.waiting == "keep":
        return (0.0,) * len(table.ticks)
    room, one_s = waiting_room(table), chunk_bytes(table, shape) / link_bytes_s
    return tuple(one_s * (index in room.puts) for index in range(len(table.ticks)))


def _chunk_tokens(table: Table, shape: MemoryShape) -> int:
    return -(-table.most_tokens // shape.seq)
