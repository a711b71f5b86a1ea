"""Transfers of weights and gradients between a device and its host: every part arrives, once, and before its turn."""

from itertools import chain

import pytest
from schedule_cases import all_tables, wave_tables

from sppo_jax.program.share_transfers import share_transfers
from sppo_jax.schedule.turns import turns_of

# Gradients leave once a step: all sequences are one wave.
TABLES = [
    table
    for table in chain(all_tables(), wave_tables())
    if table.name == "breadth-first" and table.num_sequences == table.wave
]


def run(table, kv):
    """Runs a table on a machine that copies as it is told; returns how many parts travel at a turn, of how many."""
    turns = turns_of(table, kv)
    transfers = share_transfers(table, turns)
    whole = set(range(transfers.num_parts))
    incoming, leaving, on_host, at_turns = {}, None, {}, 0
    for index, tick in enumerate(table.ticks):
        if index in turns.gathers:
            group, come = turns.gathers[index][0], transfers.come[index]
            assert {part for part in whole if incoming.get(part) == group} >= set(range(come))
            at_turns += transfers.num_parts - come
        if tick.is_compute:
            group, part = transfers.fetches[index]
            assert 0 <= group < table.num_groups and part in whole
            incoming[part] = group
        if tick.op == "B":
            group, part = transfers.writes[index]
            # What leaves before the first turn is written again.
            on_host.setdefault(group, {})[part] = leaving == group
        if index in turns.scatters:
            group, left = transfers.left[index]
            if leaving is not None:
                assert group == leaving
                on_host.setdefault(group, {}).update(dict.fromkeys(range(left, transfers.num_parts), True))
                at_turns += transfers.num_parts - left
            leaving = turns.scatters[index][0]
    assert leaving == 0  # what `flush` then writes
    on_host[0] = dict.fromkeys(whole, True)
    assert on_host == {group: dict.fromkeys(whole, True) for group in range(table.num_groups)}
    return at_turns, transfers.num_parts


@pytest.mark.parametrize("kv", ["keep", "rebuild"])
def test_every_part_arrives_and_nearly_all_travel_beside_a_tick(kv):
    assert TABLES
    for table in TABLES:
        if kv == "rebuild" and table.num_chunks == 1:
            continue
        at_turns, num_parts = run(table, kv)
        # The first group's weights; and those of the group before the last, which a rebuild needs at once.
        most = 2 if kv == "rebuild" and table.num_groups > 1 else 1
        assert at_turns <= most * num_parts, (table.num_stages, table.num_chunks, table.num_groups)
