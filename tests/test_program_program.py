"""The table of numbers that the executor follows: slots, places and copies, over many plans."""

from collections import Counter
from functools import lru_cache

import numpy as np
import pytest
from exactness import small_plan

from sppo_jax.program.fold import unfold
from sppo_jax.program.program import lower
from sppo_jax.program.ring import AttentionShape
from sppo_jax.program.tick_rows import FIELDS, HOST_ROWS

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
LATE = dict(schedule="breadth-first", interleave=3, places=HOST["places"], alpha=1.0, attention_from=3)
PLANS["late-attention"] = dict(chunks=(16,) * 5, mesh=(1, 2, 1), sequences=4, wave=2, **LATE)
PLANS["late-attention-rebuilt"] = dict(chunks=(12, 12, 16, 16, 12, 16), sequences=2, kv="rebuild", **LATE)
PLANS["last-attention"] = dict(chunks=(16,) * 4, sequences=2, kv="rebuild", **LATE)
# All units of a compute tick are of one wave and one diagonal.
SHARING = ("one-stage", "sppo", "unequal", "keep", "short", "ring", "breadth-first")
SHARING += ("late-attention", "late-attention-rebuilt", "last-attention")


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
    assert len(specs) == len(table.ticks) and [s.op for s in specs] == [t.op for t in table.ticks]
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
        count[tick.op, shape.has_ends] += rounds
    assert count == Counter((spec.op, spec.has_ends) for spec in specs)


@pytest.mark.parametrize("name", PLANS)
def test_slots_are_in_range_and_idle_stages_hit_trash_and_room_only(name):
    plan, program, specs = made(name)
    rows = program.rows
    assert program.num_sequence_slots == plan.kv_slots
    peaks = plan.table().prefix_peaks
    assert program.prefixes.num_slots == (peaks.kept if plan.stash.kv == "keep" else peaks.rebuilt)
    for index, spec in enumerate(specs):
        idle = rows["active"][index] == 0
        assert (rows["start"][index][idle] == plan.sequence_length).all() and not rows["length"][index][idle].any()
        assert not rows["first"][index][idle].any() and not rows["last"][index][idle].any()
        assert spec.tokens <= program.max_tokens  # so that the room behind the sequence takes a whole tick
        if spec.stash.own is not None:
            slots, trash = rows["stash.slot"][index], program.stash.classes[spec.stash.own]
            assert (slots[idle] == trash).all() and (slots[~idle] < trash).all() and (slots >= 0).all()
            assert spec.stash.own.tokens == spec.tokens
            assert max(spec.stash.own.host_inputs, spec.stash.own.host_attention) <= spec.tokens
    assert (rows["sequence_slot"] < program.num_sequence_slots).all()
    assert (rows["prefixes.slot"] < program.prefixes.num_slots).all()
    assert (rows["prefixes.grad_slot"] < program.prefixes.num_grad_slots).all()
    assert (rows["head_slot"] < program.num_head_slots).all()


@pytest.mark.parametrize("name", PLANS)
def test_a_stash_slot_is_never_overwritten_before_it_is_read(name):
    plan, program, specs = made(name)
    table, rows = plan.table(), program.rows
    holds = {}
    for index, (spec, tick) in enumerate(zip(specs, table.ticks, strict=True)):
        for stage, unit in enumerate(tick.units if spec.op != "H" else ()):
            if unit is None:
                continue
            place = (stage, spec.stash.own, int(rows["stash.slot"][index, stage]))
            key = (unit.sequence, unit.chunk, unit.virtual_stage)
            if spec.op == "F":
                assert place not in holds
                holds[place] = key
            else:
                assert holds.pop(place) == key
    assert not holds


@pytest.mark.parametrize("name", PLANS)
def test_copies_run_one_compute_tick_after_the_forward_and_one_before_the_backward(name):
    plan, program, specs = made(name)
    compute = [index for index, spec in enumerate(specs) if spec.op != "H"]
    assert not any(specs[i].stash.write or specs[i].stash.fetch for i in range(len(specs)) if i not in compute)
    uses = any(stash.uses_host for stash in program.stash.classes)
    assert uses == any(spec.stash.write for spec in specs) == any(spec.stash.fetch for spec in specs)
    host, num_read = {}, 0
    for number, (here, following) in enumerate(zip(compute, compute[1:], strict=False)):
        a, b = specs[here], specs[following]
        goes = a.stash.own if a.op == "F" and a.stash.own.uses_host else None
        comes = b.stash.own if b.op == "B" and b.stash.own.uses_host else None
        assert b.stash.write == goes and a.stash.fetch == comes
        for stage, unit in enumerate(plan.table().ticks[here].units):
            if goes and unit is not None:
                place = (stage, goes, int(program.rows["stash.write_row"][following, stage]))
                assert place not in host and place[2] < program.stash.num_rows[goes]
                host[place] = unit[1:], number
        for stage, unit in enumerate(plan.table().ticks[following].units):
            if comes and unit is not None:
                key, since = host.pop((stage, comes, int(program.rows["stash.fetch_row"][here, stage])))
                assert key == unit[1:] and number + 1 - since >= 3
                num_read += 1
    assert not host and bool(num_read) == uses


@pytest.mark.parametrize("name", ["late-attention", "late-attention-rebuilt", "last-attention"])
def test_short_rows_are_overwritten_only_where_nothing_reads_them(name):
    """Follows the buffers on the host: 2 lines of inputs a row, and 3 of attention outputs behind them."""
    plan, program, specs = made(name)
    rows, ticks, inputs, outs = program.rows, plan.table().ticks, 2, 3
    stash = program.stash
    sizes = {of: (inputs + outs) * count - outs * stash.num_short[of] for of, count in stash.num_rows.items()}
    lines = {of: [None] * size for of, size in sizes.items()}
    compute = [index for index, tick in enumerate(ticks) if tick.is_compute]
    behind, before = dict(zip(compute, compute[1:], strict=False)), dict(zip(compute[1:], compute, strict=False))
    num_rebuilt, counts = 0, Counter()

    def first(index, copy):
        row, short = (int(rows[f"{copy}_{what}"][index, 0]) for what in ("row", "short"))
        return row * (inputs + outs) - short * outs

    def units(index):
        return {unit[1:] for unit in ticks[index].units if unit is not None}

    for index, spec in enumerate(specs):
        if spec.stash.write:
            place = first(index, "stash.write")
            assert place >= 0 and place + inputs + outs <= sizes[spec.stash.write]
            lines[spec.stash.write][place : place + inputs + outs] = [units(before[index])] * (inputs + outs)
        if spec.stash.fetch:
            used, place = behind[index], first(index, "stash.fetch")
            again = int(rows["stash.attends_again"][used, 0])
            wanted = lines[spec.stash.fetch][place : place + inputs + (0 if again else outs)]
            assert all(owner == units(used) for owner in wanted)
            counts[again] += 1
            early = {chunk < plan.stash.attention_from for _, chunk, _ in units(used)}
            assert again == (False not in early)
        if spec.prefixes.refetch:
            used, place = index + 1, first(index, "prefixes.refetch")
            owners = {(s, chunk, group - 1) for s, chunk, group in units(used)}
            assert lines[spec.prefixes.refetch][place : place + inputs] == [owners] * inputs
            num_rebuilt += 1
    assert counts[0] and counts[1] and bool(num_rebuilt) == (plan.stash.kv == "rebuild")
    # Early chunks take no memory for attention outputs.
    waves = plan.sequences_per_pipeline // plan.schedule.wave
    early = [tick.op == "F" and all(u[2] < 3 for u in tick.units if u is not None) for tick in ticks]
    # The last chunk of the last group never goes to the host; if no other late one comes last, an early one is whole.
    assert sum(program.stash.num_short.values()) == sum(early) // waves - (name == "last-attention")


@pytest.mark.parametrize("name", PLANS)
def test_rows_on_the_host_are_the_same_on_all_stages_where_ticks_share_diagonals(name):
    plan, program, _ = made(name)
    assert plan.table().ticks_share_diagonals == (name in SHARING)
    for field in HOST_ROWS if name in SHARING else ():
        np.testing.assert_array_equal(program.rows[field], program.rows[field][:, :1].repeat(plan.mesh.pipe, 1))


def test_shares_of_tokens_are_rounded_and_the_rest_goes_whole():
    plan = small_plan((18,) * 6, mesh=(1, 1, 2), places=("host", "keep", "host"), alpha=0.3)
    found = {(c.tokens, c.host_inputs, c.host_attention, c.host_rest) for c in lower(plan, SHAPE).stash.classes}
    assert found == {(9, 3, 0, True), (9, 0, 0, False)}


@pytest.mark.parametrize("name", PLANS)
def test_evaluation_has_the_same_forward_and_nothing_of_the_backward(name):
    _, program, specs = made(name)
    _, forward, ticks = made(name, train=False)
    assert [t.op for t in ticks] == [s.op for s in specs if s.op != "B"]
    assert not forward.stash.classes and not any(any(t.stash) for t in ticks)
    kept = np.array([s.op != "B" for s in specs])
    for field in ("active", "sequence", "start", "length", "group", "sequence_slot"):
        np.testing.assert_array_equal(forward.rows[field], program.rows[field][kept])
    assert forward.prefixes.num_slots <= program.prefixes.num_slots


def test_keys_travel_while_the_prefix_is_short_and_queries_once_it_is_long():
    _, program, specs = made("ring")
    passes = [spec.passes.forward for spec in specs if spec.op == "F"]
    assert passes[0] == "kv" and passes == sorted(passes)  # kv before q
    for index, spec in enumerate(specs):
        if "kv" in (spec.passes.forward, spec.passes.backward) and spec.op != "H":
            ends = (program.rows["start"] + program.rows["length"])[index][program.rows["active"][index] == 1]
            assert spec.passes.bound * 4 >= ends.max()  # on each of four members: all of the longest prefix
    for asked in ("kv", "q"):
        plan = small_plan(**PLANS["ring"], ring_pass=asked)
        specs = unfold(lower(plan, SHAPE).items)
        assert {s.passes.forward for s in specs if s.op == "F"} == {asked}
        assert {s.passes.backward for s in specs if s.op == "B"} == {asked}
        # What a tick does not perform tells no two ticks apart.
        assert {s.passes.backward for s in specs if s.op != "B"} == {"q"}
