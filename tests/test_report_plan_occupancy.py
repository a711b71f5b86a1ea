"""Memory in use and copies, tick by tick."""

from collections import Counter

import pytest
from report_cases import HOST, MODEL, small_figures
from test_report_plan_figures import CASES

from sppo_jax.config import ModelConfig
from sppo_jax.plan.parts import StashPlan
from sppo_jax.predict.shape import MemoryShape
from sppo_jax.report.plan.occupancy import occupancy, unit_bytes
from sppo_jax.report.plan.text import copies_text
from sppo_jax.schedule.generators import make_table
from sppo_jax.schedule.waiting import waiting_room

GROUPS = [name for name in CASES if name != "copies too slow to hide"]


@pytest.mark.parametrize("name", GROUPS)
def test_use_begins_and_ends_empty_and_stays_within_what_is_allocated(name):
    figures = small_figures(**CASES[name])
    memory, table = figures.found.memory, figures.table
    for stage in range(table.num_stages):
        curve = occupancy(table, memory, figures.stashed, stage, figures.plan.stash.kv)
        assert max(curve.kv) <= memory.hbm["kv"] and max(curve.kv_grad) <= memory.hbm["kv_grad"]
        assert max(curve.host) <= memory.host
        assert max(curve.stash) <= memory.hbm["stash"]
        # What the last backward works on is all that is left in the last tick of the stage.
        last = max(index for index, tick in enumerate(table.ticks) if tick.units[stage] is not None)
        unit = table.ticks[last].units[stage]
        assert unit.op == "B"
        key = unit.sequence, unit.chunk, unit.virtual_stage
        assert (curve.stash[last], curve.host[last]) == figures.stashed[key]
        assert curve.kv_grad[: next(i for i, tick in enumerate(table.ticks) if tick.op == "B")] == (0,) * next(
            i for i, tick in enumerate(table.ticks) if tick.op == "B"
        )


def test_one_sequence_fills_all_of_keys_and_values():
    figures = small_figures()
    curve = occupancy(figures.table, figures.found.memory, figures.stashed, 0, figures.plan.stash.kv)
    assert max(curve.kv) == figures.found.memory.hbm["kv"]
    assert max(curve.host) > 0
    rising = curve.kv[: figures.table.num_chunks]
    assert list(rising) == sorted(rising)


@pytest.mark.parametrize("name", GROUPS)
def test_what_goes_to_the_host_comes_back_between_the_two_uses(name):
    figures = small_figures(**CASES[name])
    table, copies = figures.table, figures.copies
    out = {(copy.stage, *key(copy.unit)): copy for copy in copies if copy.out}
    back = {(copy.stage, *key(copy.unit)): copy for copy in copies if copy.unit.op == "B"}
    assert out.keys() == back.keys() and out
    for name_of, copy in out.items():
        assert copy.size_bytes == back[name_of].size_bytes
        assert copy.tick <= back[name_of].tick
        assert table.ticks[copy.tick].op != "H" != table.ticks[back[name_of].tick].op
    # Each device copies one stash out and one back behind a tick, at most.
    stashes = Counter((copy.stage, copy.tick, copy.out) for copy in copies if copy.out or copy.unit.op == "B")
    assert max(stashes.values()) == 1
    assert 0 < figures.link_busy_s[0] <= figures.link_busy_s[1]


def test_layer_inputs_come_back_a_second_time_where_keys_and_values_are_made_again():
    rebuilt = next(figures for name in GROUPS if (figures := small_figures(**CASES[name])).plan.stash.kv == "rebuild")
    table, again = rebuilt.table, [copy for copy in rebuilt.copies if not copy.out and copy.unit.op == "F"]
    assert again and {copy.unit.virtual_stage for copy in again} <= set(
        range(table.num_virtual_stages - table.num_stages)
    )
    for copy in again:
        following = next(tick for tick in table.ticks[copy.tick + 1 :] if tick.is_compute)
        unit = copy.unit._replace(op="B", virtual_stage=copy.unit.virtual_stage + table.num_stages)
        assert unit in following.units and copy.size_bytes > 0
    assert rebuilt.link_busy_s[1] > rebuilt.link_busy_s[0]


def test_early_chunks_copy_what_late_ones_copy_and_hold_less():
    table = make_table("breadth-first", 1, 1, (16,) * 4, 3)
    shape = MemoryShape(model=ModelConfig(**MODEL), layers=1, seq=1, ulysses=1, compute_bytes=2)
    alpha = tuple(float(bundle < 11) for bundle in table.diagonal_bundles)
    stash = StashPlan(inputs="host", attention="host", rest="recompute", alpha=alpha, attention_from=2)
    held, moved = (unit_bytes(table, shape, stash, moved=moved) for moved in (False, True))
    early, late = held[0, 1, 0][1], held[0, 2, 0][1]
    assert {size for _, size in moved.values()} == {late, 0} and 0 < early < late
    assert all(held[key] == moved[key] for key in held if key[1] >= 2)


def key(unit):
    return unit.sequence, unit.chunk, unit.virtual_stage


def test_chunks_that_wait_on_the_host_are_copied_there_and_back():
    groups = CASES["breadth-first"]
    kept, figures = small_figures(**groups), small_figures(**groups, stash={**HOST, "waiting": "host"})
    table, plan = figures.table, figures.plan
    assert (plan.stash.waiting, kept.plan.stash.waiting) == ("host", "keep")
    # Stashes, of two layers, have another size.
    one = max(plan.chunk_lengths) // plan.mesh.seq * MODEL["hidden_size"] * 2
    out, back = (
        [copy for copy in figures.copies if copy.size_bytes == one and copy.out == way] for way in (True, False)
    )
    room = waiting_room(table)
    assert {copy.tick for copy in out} == room.puts.keys() and {copy.tick for copy in back} == room.takes.keys()
    assert len(out) == len(back) == len(table.waits) > 0
    takes = {copy.unit: copy.tick for copy in back}
    for copy in out:
        came, used = table.waits[copy.unit]
        assert came < copy.tick <= takes[copy.unit] < used + (copy.unit.op == "H")
        assert copy.stage == (0 if copy.unit.op == "H" else copy.unit.virtual_stage % 4)
    assert len(figures.copies) - len(out) - len(back) == len(kept.copies)


def test_the_optimizer_on_the_host_is_there_all_the_time_and_its_copies_hide_behind_nothing():
    figures = small_figures(**CASES["breadth-first"], optimizer={"place": "host"})
    memory = figures.found.memory
    curve = occupancy(figures.table, memory, figures.stashed, 0, figures.plan.stash.kv)
    assert curve.host_fixed == memory.host_optimizer > 0
    assert memory.host_optimizer < curve.host_fixed + max(curve.host) <= memory.host
    assert "s more for the optimizer, exposed" in copies_text(figures)
    assert "optimizer" not in copies_text(small_figures(**CASES["breadth-first"]))
