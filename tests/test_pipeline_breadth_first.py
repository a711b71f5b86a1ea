"""Breadth-first programs have the dense loss and gradients: all chunks pass a group of layers, then the next one."""

from dataclasses import replace

import pytest
from combinations import draw_by_groups
from programs import HOST, NOTHING, Case, compare

from sppo_jax.program.fold import num_segments, unfold
from sppo_jax.program.program import lower
from sppo_jax.program.ring import AttentionShape

SHAPE = AttentionShape(num_heads=2, num_kv_heads=1, head_dim=6, itemsize=8)

BREADTH_FIRST = dict(schedule="breadth-first")
GATHERED = dict(weights="gathered")
INPUTS_ON_HOST = ("host", "recompute", "recompute")
CASES = {
    "one-layer-groups-rebuilt-from-host": Case(
        BREADTH_FIRST
        | dict(chunks=(8, 8, 8), mesh=(1, 1, 2), interleave=4, places=INPUTS_ON_HOST, alpha=1.0, kv="rebuild")
        | GATHERED,
        dict(num_layers=4),
    ),
    "two-stages-rebuilt": Case(
        BREADTH_FIRST | dict(chunks=(12, 8, 8, 4, 8), mesh=(1, 2, 1), sequences=2, interleave=2, kv="rebuild"),
        dict(num_layers=8, tied_embeddings=True),
    ),
    "wave-of-2": Case(
        BREADTH_FIRST
        | dict(
            chunks=(8, 8),
            mesh=(2, 2, 2),
            sequences=2,
            interleave=2,
            wave=2,
            places=HOST,
            alpha=(0.6, 1.0),
            kv="rebuild",
        )
        | GATHERED,
        dict(num_layers=4),
    ),
}
LATE = dict(attention_from=2)
CASES["keys-and-values-from-host"] = replace(
    CASES["one-layer-groups-rebuilt-from-host"],
    plan=CASES["one-layer-groups-rebuilt-from-host"].plan | dict(kv="host", chunks=(8, 8, 8, 16), interleave=2),
)
CASES["late-attention-from-host"] = replace(
    CASES["one-layer-groups-rebuilt-from-host"],
    plan=CASES["one-layer-groups-rebuilt-from-host"].plan
    | LATE
    | dict(chunks=(8, 8, 8, 16), interleave=2, places=HOST, alpha=1.0),
)
CASES["chunks-wait-on-the-host"] = replace(
    CASES["two-stages-rebuilt"], plan=CASES["two-stages-rebuilt"].plan | dict(waiting="host")
)
CASES["one-chunk-in-a-wave-of-2"] = Case(
    BREADTH_FIRST
    | dict(chunks=(32,), mesh=(1, 1, 2), sequences=4, wave=2, interleave=4, places=INPUTS_ON_HOST, alpha=1.0)
    | dict(kv="recompute")
    | GATHERED,
    dict(num_layers=4),
)
SLOW = {
    "one-layer-groups-of-unequal-chunks": replace(
        CASES["one-layer-groups-rebuilt-from-host"],
        plan=CASES["one-layer-groups-rebuilt-from-host"].plan | dict(chunks=(16, 8, 8)),
    ),
    "one-chunk-on-two-stages": Case(
        BREADTH_FIRST
        | dict(chunks=(24,), mesh=(1, 2, 2), kind="ring", sequences=2, interleave=2, kv="recompute")
        | dict(places=("host", "host", "keep"), alpha=1.0),
        dict(num_layers=8, qk_norm=True),
    ),
    "one-chunk-rounded-up": Case(
        BREADTH_FIRST
        | dict(chunks=(24,), shapes=(28,), mesh=(1, 1, 4), kind="hybrid", ulysses=2, interleave=2, kv="recompute")
        | dict(places=HOST, alpha=(0.6,))
        | GATHERED,
        dict(num_layers=6),
    ),
    "one-chunk-with-the-fused-kernel": Case(
        BREADTH_FIRST
        | dict(chunks=(64,), mesh=(2, 1, 2), interleave=2, kernel="cudnn", kv="recompute", kv_grad_dtype="bfloat16")
        | GATHERED,
        dict(num_layers=2, head_dim=8),
        optimised=True,
    ),
    "two-chunks-rebuilt-resident": Case(
        BREADTH_FIRST
        | dict(chunks=(16, 16), mesh=(1, 1, 2), interleave=3, places=INPUTS_ON_HOST, alpha=1.0, kv="rebuild"),
        dict(num_layers=3),
    ),
    "two-chunks-rebuilt-gathered": Case(
        BREADTH_FIRST
        | dict(chunks=(12, 20), mesh=(1, 1, 2), interleave=2, places=INPUTS_ON_HOST, alpha=1.0, kv="rebuild")
        | GATHERED,
        dict(num_layers=4),
    ),
    "one-stage-waits-on-the-host": replace(
        CASES["one-layer-groups-rebuilt-from-host"],
        plan=CASES["one-layer-groups-rebuilt-from-host"].plan | dict(waiting="host"),
    ),
    "a-wave-waits-on-the-host": replace(CASES["wave-of-2"], plan=CASES["wave-of-2"].plan | dict(waiting="host")),
    "keys-and-values-alone-on-the-host": Case(
        BREADTH_FIRST
        | dict(chunks=(16, 12, 8, 8), mesh=(1, 2, 2), kind="ring", interleave=2, kv="host", sequences=2)
        | GATHERED,
        dict(num_layers=8),
    ),
    "late-attention-on-two-stages-with-a-ring": Case(
        BREADTH_FIRST
        | dict(chunks=(16, 12, 8, 8), mesh=(1, 2, 2), kind="ring", interleave=2, kv="rebuild", sequences=2)
        | GATHERED
        | LATE,
        dict(num_layers=4),
    ),
    "late-attention-with-the-rest-kept": Case(
        dict(schedule="sppo", chunks=(8, 12, 8, 8), mesh=(1, 2, 2), places=("host", "host", "keep"), alpha=(1.0, 0.3))
        | LATE,
        dict(num_layers=4, qk_norm=True),
    ),
    "fewer-chunks-than-stages-kept": Case(
        BREADTH_FIRST | dict(chunks=(16, 12), mesh=(1, 3, 1), interleave=2),
        dict(num_layers=6, qk_norm=True),
    ),
    "layers-in-groups-of-two-from-host": Case(
        BREADTH_FIRST
        | dict(chunks=(8, 8, 8, 8), mesh=(1, 1, 4), kind="hybrid", ulysses=2, interleave=3, places=HOST, kv="rebuild")
        | dict(sequences=2, alpha=(0.4, 1.0))
        | GATHERED,
        dict(num_layers=6, qkv_bias=True),
    ),
    "bfloat16-four-stages": Case(
        BREADTH_FIRST
        | dict(chunks=(16, 8, 8, 8, 8, 8), mesh=(1, 4, 2), kind="ring", interleave=2, places=INPUTS_ON_HOST)
        | dict(alpha=1.0, kv="rebuild")
        | GATHERED,
        dict(num_layers=8),
        dtype="bfloat16",
    ),
    "fused": Case(
        BREADTH_FIRST
        | dict(chunks=(24, 16, 16), mesh=(1, 2, 2), interleave=2, kernel="cudnn", places=INPUTS_ON_HOST)
        | dict(alpha=1.0, kv="rebuild", kv_grad_dtype="bfloat16")
        | GATHERED,
        dict(num_layers=4, head_dim=8),
        optimised=True,
    ),
    "equal-chunks-rounded-up": Case(
        BREADTH_FIRST
        | dict(chunks=(12, 12, 12), mesh=(1, 2, 2), interleave=2, shapes=(20,), places=INPUTS_ON_HOST)
        | dict(alpha=1.0, kv="rebuild"),
        dict(num_layers=4),
    ),
    "two-pipelines-everything-kept": Case(
        BREADTH_FIRST
        | dict(chunks=(8, 12, 8), mesh=(2, 2, 1), interleave=2, places=("keep", "keep", "keep"))
        | GATHERED,
        dict(num_layers=4),
    ),
    "shares-with-two-cuts-and-zeros": Case(
        BREADTH_FIRST
        | dict(chunks=(12, 6, 12), mesh=(2, 1, 3), kind="ring", interleave=2, sequences=2, kv="rebuild")
        | GATHERED,
        dict(num_layers=4),
    ),
    "recomputed-kept-keys": Case(
        BREADTH_FIRST | dict(chunks=(8, 12, 8), mesh=(1, 2, 1), interleave=2, places=NOTHING),
        dict(num_layers=4),
    ),
}
# Of those above; others in CI have each of their features.
SLOW_OF_CASES = (
    "one-chunk-in-a-wave-of-2",
    "wave-of-2",
    "two-stages-rebuilt",
    "keys-and-values-from-host",
    "late-attention-from-host",
    "chunks-wait-on-the-host",
)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW_OF_CASES)) for n in CASES])
def test_breadth_first_has_the_dense_loss_and_gradients(name, x64):
    compare(CASES[name], seed=0, count=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_more_breadth_first_programs_have_the_dense_loss_and_gradients(name, x64):
    compare(SLOW[name], seed=1, count=2)


def test_the_planner_takes_every_drawn_program():
    plans = [draw_by_groups(seed).make_plan() for seed in range(700)]
    found = {(plan.stash.kv, plan.weights, plan.schedule.wave, plan.mesh.pipe) for plan in plans}
    alone = {combination[1:] for combination in found if combination[0] == "recompute"}
    assert len(found) - len(alone) == 3 * 2 * 2 * 4 and {plan.stash.waiting for plan in plans} == {"keep", "host"}
    # Few draws have one chunk: all weights with all waves, and all numbers of stages.
    assert len({combination[:2] for combination in alone}) == 2 * 2 and len({pipe for *_, pipe in alone}) == 4


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(24))
def test_drawn_breadth_first_programs_have_the_dense_loss_and_gradients(seed, request):
    compare(draw_by_groups(seed), seed=seed, count=2, request=request)


def test_late_chunks_alone_stash_attention_outputs():
    plan = CASES["late-attention-from-host"].make_plan()
    late, all_of_them = (
        lower(replace(plan, stash=replace(plan.stash, attention_from=first)), SHAPE) for first in (2, 0)
    )
    specs, every = unfold(late.items), unfold(all_of_them.items)
    # Of 4 chunks in each of 2 groups of layers the first 2 compute attention again; backward comes last chunk first.
    backward = [index for index, spec in enumerate(specs) if spec.op == "B"]
    assert late.rows["stash.attends_again"][backward, 0].tolist() == [0, 0, 1, 1] * 2
    assert not late.rows["stash.attends_again"][[spec.op != "B" for spec in specs]].any()
    assert any(spec.stash.attends for spec in specs) and not any(spec.stash.attends for spec in every)
    # In all else the ticks are those of a plan that stashes all attention outputs, but four rows are short.
    assert [replace(spec, stash=spec.stash._replace(attends=False)) for spec in specs] == every
    assert num_segments(late.items) == num_segments(all_of_them.items)
    assert late.stash.num_rows == all_of_them.stash.num_rows
    assert (sum(late.stash.num_short.values()), sum(all_of_them.stash.num_short.values())) == (4, 0)


def test_late_chunks_have_ticks_of_their_own_where_a_part_of_their_stash_stays():
    plan = CASES["late-attention-from-host"].make_plan()
    program = lower(replace(plan, stash=replace(plan.stash, alpha=(0.5,) * 7 + (0.0,))), SHAPE)
    again = [[spec.stash.own.recomputes for spec in unfold(program.items) if spec.op == kind] for kind in "FB"]
    assert again == [[True, True, False, False] * 2, [False, False, True, True] * 2]
    assert all(not name.host_attention for name in program.stash.classes if name.recomputes)
    assert not any(program.stash.num_short.values()) and not program.rows["stash.attends_again"].any()


def test_a_stage_holds_the_keys_and_values_of_two_groups_and_the_gradients_of_one():
    plan = CASES["two-stages-rebuilt"].make_plan()
    rebuilt, kept = (lower(replace(plan, stash=replace(plan.stash, kv=kv)), SHAPE) for kv in ("rebuild", "keep"))
    assert (rebuilt.prefixes.num_slots, rebuilt.prefixes.num_grad_slots, kept.prefixes.num_slots) == (2, 1, 2)
    plan = CASES["one-layer-groups-rebuilt-from-host"].make_plan()
    rebuilt, kept = (lower(replace(plan, stash=replace(plan.stash, kv=kv)), SHAPE) for kv in ("rebuild", "keep"))
    assert (rebuilt.prefixes.num_slots, rebuilt.prefixes.num_grad_slots, kept.prefixes.num_slots) == (2, 1, 4)
    assert lower(plan, SHAPE, train=False).prefixes.num_slots == 1
    # The inputs of a chunk come back twice, but for the last group of layers, whose keys and values are still there.
    specs = unfold(rebuilt.items)
    again = [spec for spec in specs if spec.prefixes.rebuild is not None]
    assert len(again) == 3 * 3 and {spec.op for spec in again} == {"B"}
    assert sum(spec.prefixes.refetch is not None for spec in specs) == len(again)


def test_an_only_chunk_makes_its_keys_and_values_in_its_own_backward():
    plan = CASES["one-chunk-in-a-wave-of-2"].make_plan()
    again, kept = (lower(replace(plan, stash=replace(plan.stash, kv=kv)), SHAPE) for kv in ("recompute", "keep"))
    assert (again.prefixes.num_slots, again.prefixes.num_grad_slots, kept.prefixes.num_slots) == (1, 1, 2 * 4)
    assert again.weights.num_slots == 1 and lower(plan, SHAPE, train=False).prefixes.num_slots == 1
    # Nothing comes back a second time, and no tick works for another one: only where keys and values lie differs.
    assert unfold(again.items) == unfold(kept.items)
    assert not any(spec.prefixes.rebuild or spec.prefixes.refetch for spec in unfold(again.items))


def test_what_waits_on_the_host_goes_there_and_comes_back_once():
    plan = CASES["chunks-wait-on-the-host"].make_plan()
    hosted, kept = (lower(replace(plan, stash=replace(plan.stash, waiting=place)), SHAPE) for place in ("host", "keep"))
    assert (hosted.waiting.num_slots, hosted.num_head_slots) == (0, 1) and hosted.waiting.num_rows == 4
    assert (kept.waiting.num_slots, kept.num_head_slots, kept.waiting.num_rows) == (4, 5, 0)
    specs = unfold(hosted.items)
    # Of 2 sequences 5 chunks wait once forward, once backward, and all but the last for their heads.
    counts = [sum(map(bool, of)) for of in zip(*((spec.waiting.put, spec.waiting.take) for spec in specs), strict=True)]
    assert counts == [2 * (5 + 4 + 5)] * 2
    assert [spec.waiting.put for spec in specs if spec.waiting.put and spec.op == "B"] == ["B"] * (2 * 5)
    taken = [after.waiting.waited for before, after in zip(specs, specs[1:], strict=False) if before.waiting.take]
    assert all(taken) and not any(spec.waiting.waited for spec in specs if spec.op == "F" and spec.stash.own is None)
    evaluated = lower(plan, SHAPE, train=False)
    assert evaluated.waiting.num_rows == 0 and evaluated.waiting.num_slots > 0


def test_keys_and_values_on_the_host_come_back_once():
    plan = CASES["keys-and-values-from-host"].make_plan()
    hosted, rebuilt = (lower(replace(plan, stash=replace(plan.stash, kv=kv)), SHAPE) for kv in ("host", "rebuild"))
    assert (hosted.prefixes.num_slots, hosted.prefixes.num_grad_slots, hosted.weights.num_slots) == (2, 1, 1)
    assert rebuilt.weights.num_slots == 2, "to compute them again, a backward needs the weights of the group before"
    specs = unfold(hosted.items)
    again = [spec for spec in specs if spec.prefixes.rebuild is not None]
    assert len(again) == 4 and sum(spec.prefixes.refetch is not None for spec in specs) == len(again)
    # On the host alone, nothing comes back for the backward of the same chunk. The last chunk's stash is read at once.
    alone = replace(plan.stash, inputs="keep", attention="keep", kv="host", alpha=(0.0,) * 8)
    specs = unfold(lower(replace(plan, stash=alone), SHAPE).items)
    copies = [(spec.stash.write, spec.stash.fetch, spec.prefixes.refetch) for spec in specs]
    assert [sum(one is not None for one in of) for of in zip(*copies, strict=True)] == [7, 0, 4]
