"""Turns of groups of layers: whoever computes finds the weights and the sums of its group in the slots it is told."""

from itertools import chain

import pytest
from schedule_cases import all_tables, wave_tables

from sppo_jax.schedule.generators import make_table
from sppo_jax.schedule.table import Unit
from sppo_jax.schedule.turns import collective_counts, slot_counts, turns_of

TABLES = [table for table in chain(all_tables(), wave_tables()) if table.name == "breadth-first"]
HALF = TABLES[::2]


def run(table, kv, *, train=True):
    """Runs a table on a machine that gathers, adds and scatters as it is told; returns how often it does the first."""
    turns, weights, sums = turns_of(table, kv, train=train), {}, {}
    scattered, last = [], table.num_groups - 1
    for index, tick in enumerate(table.ticks):
        if index in turns.gathers:
            group, slot = turns.gathers[index]
            assert slot < turns.num_weights
            weights[slot] = group
        for unit in tick.units if tick.is_compute and (train or tick.op == "F") else ():
            if unit is None:
                continue
            group, wave = unit.virtual_stage // table.num_stages, unit.sequence // table.wave
            assert weights[turns.weight_slot(unit, table)] == group
            if unit.op == "F":
                continue
            if kv == "rebuild" and group > 0:
                before = Unit("B", unit.sequence, unit.chunk, unit.virtual_stage - table.num_stages)
                assert weights[turns.weight_slot(before, table)] == group - 1
            assert turns.sum_slot(unit, table) < turns.num_sums
            owner, parts = sums.setdefault(turns.sum_slot(unit, table), ((wave, group), []))
            assert owner == (wave, group)
            parts.append(unit)
        if index in turns.scatters:
            group, slot = turns.scatters[index]
            owner, parts = sums.pop(slot)
            assert owner[1] == group and len(parts) == table.wave * table.num_chunks * table.num_stages
            scattered.append(owner)
    waves = table.num_sequences // table.wave
    assert not sums and sorted(scattered) == sorted(
        (wave, group) for wave in range(waves if train else 0) for group in range(last + 1)
    )
    return len(turns.gathers)


@pytest.mark.parametrize("kv", ["keep", "rebuild"])
def test_every_unit_finds_its_weights_and_its_sums(kv):
    for table in HALF:
        groups, waves = table.num_groups, table.num_sequences // table.wave
        if kv == "rebuild" and table.num_chunks == 1:
            continue
        assert (run(table, kv), waves * groups) == collective_counts(groups, waves)
        # In an evaluation the last group of a wave and the first group of the next wave differ.
        assert run(table, kv, train=False) == waves * groups


@pytest.mark.parametrize("kv", ["keep", "rebuild"])
def test_slots_are_those_charged(kv):
    for table in TABLES:
        if kv == "rebuild" and table.num_chunks == 1:
            continue
        turns = turns_of(table, kv)
        needed, charged = (turns.num_weights, turns.num_sums), slot_counts(table.num_stages, table.num_groups, kv)
        if table.wave * table.num_chunks > 1:
            assert needed == charged
        else:  # one chunk is never on two stages at once
            assert all(one <= other for one, other in zip(needed, charged, strict=True))


def test_one_stage_holds_one_group_and_several_stages_hold_two():
    one, four = (make_table("breadth-first", stages, 1, (1,) * 8, 4, 1) for stages in (1, 4))
    assert [slot_counts(1, 4, kv) for kv in ("keep", "rebuild")] == [(1, 1), (2, 1)]
    assert [slot_counts(4, 4, kv) for kv in ("keep", "rebuild")] == [(2, 2), (3, 2)]
    assert turns_of(one, "rebuild").gathers[0] == (0, 0) and turns_of(four, "rebuild").gathers[0] == (0, 0)
