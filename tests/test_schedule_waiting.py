"""Waiting rooms on the host: what comes is written a tick later, comes back a tick early, and no row is taken twice."""

import pytest

from sppo_jax.schedule.check import check
from sppo_jax.schedule.generators import make_table
from sppo_jax.schedule.outline import make_outline
from sppo_jax.schedule.waiting import waiting_room, with_late_heads

# stages, sequences, chunks, groups of layers, sequences of a wave
SIZES = [
    (1, 1, 3, 2, 1),
    (1, 2, 5, 4, 1),
    (2, 1, 4, 2, 1),
    (2, 3, 7, 3, 1),
    (3, 2, 9, 2, 1),
    (4, 1, 6, 2, 1),
    (2, 4, 3, 2, 2),
]


def table_of(make, stages, sequences, chunks, groups, wave):
    return with_late_heads(make("breadth-first", stages, sequences, (1,) * chunks, groups, wave))


@pytest.mark.parametrize("sizes", SIZES)
def test_late_heads_change_nothing_else(sizes):
    stages, sequences, chunks, groups, wave = sizes
    table = table_of(make_table, *sizes)
    check(table)
    early = make_table("breadth-first", stages, sequences, (1,) * chunks, groups, wave)
    assert [tick for tick in table.ticks if tick.is_compute] == [tick for tick in early.ticks if tick.is_compute]
    assert sorted(map(str, table.ticks)) == sorted(map(str, early.ticks)) and table.head_peak == 1
    ops = "".join(tick.op for tick in table.ticks)
    assert ops.count("H") == ops.count("HB") == sequences * chunks


@pytest.mark.parametrize("sizes", SIZES)
def test_each_row_is_written_before_it_is_fetched_and_fetched_before_it_is_written_again(sizes):
    table = table_of(make_table, *sizes)
    room = waiting_room(table)
    compute = [index for index, tick in enumerate(table.ticks) if tick.is_compute]
    held, came = {}, {}
    for unit, (source, used) in table.waits.items():
        came.setdefault(source, []).append((unit, used))
    for place, index in enumerate(compute):
        if index in room.takes:  # the fetch comes first
            behind = compute[place + 1]
            uses = held.pop(room.takes[index])
            assert all(used in (behind, behind - 1) and index < used for _, used in uses)
        if index in room.puts:
            assert room.puts[index] not in held
            held[room.puts[index]] = came.pop(compute[place - 1])
    assert not held and not came
    # A pass has few more chunks under way than it has chunks.
    assert room.num_rows <= max(2, sizes[2] * sizes[4])
    outline = table_of(make_outline, *sizes)
    assert waiting_room(outline).num_rows == room.num_rows


@pytest.mark.parametrize("sizes", [(1, 1, 2, 2, 1), (2, 1, 3, 2, 1), (4, 2, 5, 2, 1)])
def test_chunks_that_come_back_too_soon_are_refused(sizes):
    with pytest.raises(ValueError, match=f"with at least {sizes[0] + 2} chunks on {sizes[0]} stages"):
        waiting_room(table_of(make_table, *sizes))
