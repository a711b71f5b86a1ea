"""The table of numbers that the executor follows: slots, places and copies, over many plans."""

from collections import Counter
from functools import lru_cache

import numpy as np
import pytest
from exactness import small_plan

from sppo_jax.plan.fold import unfold
from sppo_jax.plan.program import lower
from sppo_jax.plan.ring import AttentionShape
from sppo_jax.plan.tick_rows import FIELDS, HOST_ROWS

SHAPE = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=6, itemsize=4)
HOST = dict(places=("host", "host", "recompute"), alpha=(0.5, 1.0))
PLANS = {
    "one-stage": dict(chunks=(16, 12, 8, 8, 4), **HOST),
    "sppo": dict(chunks=(16,) * 8, mesh=(1, 4, 2), sequences=2, **HOST),
    "unequal": dict(chunks=(24, 8, 16, 8, 20), mesh=(1, 3, 2), places=("keep", "host", "host"), alpha=0.5),
    "gpipe": dict(chunks=(16, 12), mesh=(1, 2, 2), schedule="gpipe", sequences=4, **HOST),
    "1f1b": dict(chunks=(16,), mesh=(1, 4, 1), schedule="1f1b", sequences=6, **HOST),
    "seq1f1b": dict(chunks=(16,) * 6, mesh=(1, 2, 2), schedule="seq1f1b", sequences=4, **HOST),
    "interleaved": dict(
        chunks=(16,) * 4, mesh=(1, 4, 1), schedule="interleaved-seq1f1b", interleave=2, sequences=3, **HOST
    ),
    "keep": dict(chunks=(16,) * 4, mesh=(1, 2, 1)),
    "short": dict(chunks=(16,) * 2, mesh=(1, 4, 1)),
    "ring": dict(chunks=(16,) * 8, mesh=(1, 2, 4), kind="ring"),
    "breadth-first": dict(
        chunks=(16,) * 4, mesh=(1, 2, 1), schedule="breadth-first", interleave=3, sequences=2, wave=2, **HOST
    ),
}
# All units of a compute tick are of one wave and one diagonal.
SHARING = ("one-stage", "sppo", "unequal", "keep", "short", "ring", "breadth-first")


@lru_cache
def made(name, train=True):
    plan = small_plan(**PLANS[name])
    program = lower(plan, SHAPE, train=train)
    return plan, program, unfold(program.items)


@pytest.mark.parametrize("name", PLANS)
def test_rows_say_what_the_table_says(name):
    plan, program, specs = made(name)
    table = plan.table()
    assert set(program.rows) == set(FIELDS)
    assert len(specs) == len(table.ticks) and [s.kind for s in specs] == [t.kind for t in table.ticks]
    for index, tick in enumerate(table.ticks):
        for stage, unit in enumerate(tick.units):
            row = {field: int(value[index, stage]) for field, value in program.rows.items()}
            assert row["active"] == (unit is not None)
            if unit is None:
                continue
            assert row["sequence"] == unit.sequence
            assert row["start"] == sum(plan.chunk_lengths[: unit.chunk])
            assert row["length"] == plan.chunk_lengths[unit.chunk] <= specs[index].tokens * plan.mesh.seq
            assert row["group"] == unit.virtual_stage // plan.mesh.pipe
            assert row["first"] == (unit.virtual_stage == 0)
            assert row["last"] == (unit.virtual_stage == table.num_virtual_stages - 1)


@pytest.mark.parametrize("name", PLANS)
def test_interleaved_ticks_have_ends_where_a_chunk_is_on_the_first_or_last_virtual_stage(name):
    plan, program, specs = made(name)
    at_end = (program.rows["first"] | program.rows["last"]).any(1)
    if plan.schedule.interleave == 1:
        at_end[:] = True
    assert [spec.has_ends for spec in specs] == at_end.tolist()
    outline, count = plan.outline(), Counter()
    for tick, shape, rounds in zip(outline.ticks, outline.tick_shapes, outline.tick_rounds, strict=True):
        count[tick.kind, shape.has_ends] += rounds
    assert count == Counter((spec.kind, spec.has_ends) for spec in specs)


@pytest.mark.parametrize("name", PLANS)
def test_slots_are_in_range_and_idle_stages_hit_trash_and_room_only(name):
    plan, program, specs = made(name)
    rows = program.rows
    assert program.num_sequence_slots == plan.kv_slots
    assert program.num_kv_slots == plan.table().prefix_peaks.kept
    for index, spec in enumerate(specs):
        idle = rows["active"][index] == 0
        assert (rows["start"][index][idle] == plan.sequence_length).all() and not rows["length"][index][idle].any()
        assert not rows["first"][index][idle].any() and not rows["last"][index][idle].any()
        assert spec.tokens <= program.max_tokens  # so that the room behind the sequence takes a whole tick
        if spec.stash is not None:
            slots, trash = rows["stash_slot"][index], program.classes[spec.stash]
            assert (slots[idle] == trash).all() and (slots[~idle] < trash).all() and (slots >= 0).all()
            assert spec.stash.tokens == spec.tokens
            assert max(spec.stash.host_inputs, spec.stash.host_attention) <= spec.tokens
    assert (rows["sequence_slot"] < program.num_sequence_slots).all()
    assert (rows["kv_slot"] < program.num_kv_slots).all() and (rows["grad_slot"] < program.num_grad_slots).all()
    assert (rows["head_slot"] < program.num_head_slots).all()


@pytest.mark.parametrize("name", PLANS)
def test_a_stash_slot_is_never_overwritten_before_it_is_read(name):
    plan, program, specs = made(name)
    table, rows = plan.table(), program.rows
    holds = {}
    for index, (spec, tick) in enumerate(zip(specs, table.ticks, strict=True)):
        for stage, unit in enumerate(tick.units if spec.kind != "H" else ()):
            if unit is None:
                continue
            place = (stage, spec.stash, int(rows["stash_slot"][index, stage]))
            key = (unit.sequence, unit.chunk, unit.virtual_stage)
            if spec.kind == "F":
                assert place not in holds
                holds[place] = key
            else:
                assert holds.pop(place) == key
    assert not holds


@pytest.mark.parametrize("name", PLANS)
def test_copies_run_one_compute_tick_after_the_forward_and_one_before_the_backward(name):
    plan, program, specs = made(name)
    compute = [index for index, spec in enumerate(specs) if spec.kind != "H"]
    assert not any(specs[i].write or specs[i].fetch for i in range(len(specs)) if i not in compute)
    uses = any(stash.uses_host for stash in program.classes)
    assert uses == any(spec.write for spec in specs) == any(spec.fetch for spec in specs)
    host, num_read = {}, 0
    for number, (here, following) in enumerate(zip(compute, compute[1:], strict=False)):
        a, b = specs[here], specs[following]
        goes = a.stash if a.kind == "F" and a.stash.uses_host else None
        comes = b.stash if b.kind == "B" and b.stash.uses_host else None
        assert b.write == goes and a.fetch == comes
        for stage, unit in enumerate(plan.table().ticks[here].units):
            if goes and unit is not None:
                place = (stage, goes, int(program.rows["write_row"][following, stage]))
                assert place not in host and place[2] < program.host_rows[goes]
                host[place] = unit[1:], number
        for stage, unit in enumerate(plan.table().ticks[following].units):
            if comes and unit is not None:
                key, since = host.pop((stage, comes, int(program.rows["fetch_row"][here, stage])))
                assert key == unit[1:] and number + 1 - since >= 3
                num_read += 1
    assert not host and bool(num_read) == uses


@pytest.mark.parametrize("name", PLANS)
def test_rows_on_the_host_are_the_same_on_all_stages_where_ticks_share_diagonals(name):
    plan, program, _ = made(name)
    assert plan.table().ticks_share_diagonals == (name in SHARING)
    for field in HOST_ROWS if name in SHARING else ():
        np.testing.assert_array_equal(program.rows[field], program.rows[field][:, :1].repeat(plan.mesh.pipe, 1))


def test_shares_of_tokens_are_rounded_and_the_rest_goes_whole():
    plan = small_plan((18,) * 6, mesh=(1, 1, 2), places=("host", "keep", "host"), alpha=0.3)
    found = {(c.tokens, c.host_inputs, c.host_attention, c.host_rest) for c in lower(plan, SHAPE).classes}
    assert found == {(9, 3, 0, True), (9, 0, 0, False)}


@pytest.mark.parametrize("name", PLANS)
def test_evaluation_has_the_same_forward_and_nothing_of_the_backward(name):
    _, program, specs = made(name)
    _, forward, ticks = made(name, train=False)
    assert [t.kind for t in ticks] == [s.kind for s in specs if s.kind != "B"]
    assert not forward.classes and not any(t.stash or t.write or t.fetch for t in ticks)
    kept = np.array([s.kind != "B" for s in specs])
    for field in ("active", "sequence", "start", "length", "group", "sequence_slot"):
        np.testing.assert_array_equal(forward.rows[field], program.rows[field][kept])
    assert forward.num_kv_slots <= program.num_kv_slots


def test_keys_travel_while_the_prefix_is_short_and_queries_once_it_is_long():
    _, program, specs = made("ring")
    passes = [spec.passes.forward for spec in specs if spec.kind == "F"]
    assert passes[0] == "kv" and passes == sorted(passes)  # kv before q
    for index, spec in enumerate(specs):
        if "kv" in (spec.passes.forward, spec.passes.backward) and spec.kind != "H":
            ends = (program.rows["start"] + program.rows["length"])[index][program.rows["active"][index] == 1]
            assert spec.passes.bound * 4 >= ends.max()  # on each of four members: all of the longest prefix
    for asked in ("kv", "q"):
        plan = small_plan(**PLANS["ring"], ring_pass=asked)
        specs = unfold(lower(plan, SHAPE).items)
        assert {s.passes.forward for s in specs if s.kind == "F"} == {asked}
        assert {s.passes.backward for s in specs if s.kind == "B"} == {asked}
        # What a tick does not perform tells no two ticks apart.
        assert {s.passes.backward for s in specs if s.kind != "B"} == {"q"}
