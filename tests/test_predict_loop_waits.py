"""Loops that wait for writes to the host: the rule, where it holds, and the ticks that are longer for it."""

import itertools
from dataclasses import replace

import pytest

from sppo_jax.config import config_from_dict
from sppo_jax.fit.hlo.copies import HostCopies, LoopWait
from sppo_jax.hardware import parse_cluster
from sppo_jax.models.counts import layer_costs
from sppo_jax.predict.seconds import copies as copies_module
from sppo_jax.predict.seconds.copies import loop_writes, tick_copies
from sppo_jax.predict.seconds.loop_waits import Write, flops_before_loops, has_unknown_loops, loop_wait_s
from sppo_jax.predict.seconds.simulate import simulate
from sppo_jax.predict.shape import MemoryShape
from sppo_jax.report.plan.occupancy import host_copies, unit_bytes, waiting_copies
from sppo_jax.schedule.generators import make_table
from sppo_jax.search.evaluate import costs_of, shape_of_plan, simulation_of
from sppo_jax.search.make import make_plan

ON_HOST = {"inputs": "host", "attention": "host", "rest": "recompute"}


def planned(length=2**17, cluster="h100:1x8", preset="llama3-8b", stash=ON_HOST, **groups):
    settings = {"model": {"preset": preset}, "sequence": {"length": length}, "train": {"steps": 1}, "stash": stash}
    config = config_from_dict(settings | groups | {"hardware": {"cluster": cluster}})
    return config, make_plan(config, parse_cluster(cluster))


def writes_of(config, plan, shape=None):
    return loop_writes(plan.outline(), shape or shape_of_plan(plan, config), plan.stash, costs_of(plan, config))


@pytest.mark.parametrize(
    ("copying_s", "before_s", "beside_s", "want_s"),
    [
        (32.0, 10.0, 40.0, 22.0),  # the loop waits for all that the products before it leave
        (32.0, 10.0, 30.0, 20.0),  # by 2 s the write outlasts the whole tick, loop or no loop
        (32.0, 40.0, 50.0, 0.0),  # the write has ended when the loop begins
        (32.0, 0.0, 0.0, 0.0),  # nothing is beside the write: it is exposed, and the loop is behind it
        (0.0, 0.0, 10.0, 0.0),
    ],
)
def test_a_loop_waits_for_what_the_compute_before_it_leaves_of_a_write(copying_s, before_s, beside_s, want_s):
    assert loop_wait_s(copying_s, before_s, beside_s) == pytest.approx(want_s)
    # A tick that waits has its compute behind what it waited for.
    assert Write(copying_s, before_s).tick_s(beside_s) == pytest.approx(max(copying_s, beside_s) + want_s)


def test_a_compiled_program_and_a_plan_are_judged_by_one_rule():
    of_text = LoopWait("F", 3.0, 320, 300, 100)
    none = dict(overlapped_bytes=0, exposed_bytes=0, kernel_bytes=None, loops_unknown=0, together=())
    copies = HostCopies(**none, loop_waits=(of_text,))
    for link, rate, attention_s in itertools.product((1.0, 10.0), (1.0, 10.0), (0.0, 7.0)):
        beside_s = 300 / rate + attention_s
        want_s = 3 * loop_wait_s(320 / link, 100 / rate, beside_s)
        assert copies.loops_s(link, rate, {"F": (attention_s,)}) == pytest.approx(want_s)
        several = (copies.loops_s(link, rate, {"F": (attention_s, 0.0)}), copies.loops_s(link, rate, {}))
        assert several[0] == pytest.approx((want_s + several[1]) / 2)


def test_only_the_fused_kernel_of_gpus_has_such_loops():
    found = {(platform, kernel) for platform in ("cpu", "gpu", "tpu") for kernel in ("blockwise", "cudnn", "pallas")}
    assert {one for one in found if has_unknown_loops(*one)} == {("gpu", "cudnn")}
    config, plan = planned()
    shape = shape_of_plan(plan, config)
    assert any(write.copying_s for write in writes_of(config, plan))
    assert writes_of(config, plan, replace(shape, kernel="blockwise")) == ()
    assert writes_of(config, plan, replace(shape, platform="tpu")) == ()
    config, kept = planned(stash={"inputs": "keep", "attention": "keep", "rest": "recompute"})
    assert writes_of(config, kept) == ()


def shape_with(layers, per_group):
    settings = {"model": {"preset": "qwen3.5-9b", "layers": layers}, "sequence": {"length": 2**17}}
    model = config_from_dict(settings | {"train": {"steps": 1}}).model
    return MemoryShape(model=model, layers=per_group, seq=1, ulysses=1, compute_bytes=2, length=2**17)


def test_layers_with_a_state_come_before_the_first_loop():
    mixed, alone = shape_with("8x(3xdelta,full)", 4), shape_with("32xfull", 4)
    ((kind, _),) = alone.model.counts(4)
    delta = layer_costs(next(one for one, _ in mixed.model.counts(4) if one.mixer == "delta"))
    heads = kind.num_heads * (1 + kind.output_gate) + 2 * kind.num_kv_heads
    assert flops_before_loops(alone, 1) == 2 * kind.hidden_size * heads * kind.head_dim
    assert flops_before_loops(mixed, 1) == 3 * (delta.linear_flops + delta.state_flops) + flops_before_loops(alone, 1)
    # Groups of other patterns are loops of at most one iteration themselves.
    assert flops_before_loops(shape_with("8x(3xdelta,full)", 1), 1) == 0


def test_no_loop_is_charged_where_the_plan_knows_its_count():
    """With one document a sequence nothing is looped over but the keys before a chunk, which bands have in them."""
    config, plan = planned(schedule={"name": "breadth-first"}, data={"pack": "none"})
    assert plan.sequence_documents == "one"
    table, shape = plan.outline(), shape_of_plan(plan, config)
    many = replace(shape, has_one_document=False)
    assert (table.num_chunks, shape.has_one_document) == (1, True)
    assert writes_of(config, plan) == () != writes_of(config, plan, many)
    assert simulation_of(plan, config).waits_s == 0
    assert flops_before_loops(shape, 1) is None and flops_before_loops(shape, 2) == flops_before_loops(many, 1)
    windowed = replace(shape, model=replace(shape.model, sliding_window=4096))
    assert flops_before_loops(windowed, 2) is None and flops_before_loops(replace(windowed, has_one_document=False), 2)


@pytest.mark.parametrize(
    "groups",
    [
        dict(schedule={"name": "breadth-first"}, sequence={"length": 2**17, "chunks": 2}),
        dict(schedule={"name": "sppo"}, mesh={"pipe": 4}, sequence={"length": 2**19, "chunks": 8}),
        dict(stash=ON_HOST | {"waiting": "host"}, sequence={"length": 2**19, "chunks": 8}),
    ],
    ids=["two chunks", "a pipeline", "chunks wait"],
)
def test_what_is_charged_is_what_leaves_the_device(groups, monkeypatch):
    """All bytes to the host, each once; a stash is charged in the forward that makes it, a tick early.

    But for those of the first forward, and those that a head runs beside.
    """
    monkeypatch.setattr(copies_module, "_heads_before", lambda table, costs: [0.0] * len(table.ticks))
    config, plan = planned(**groups)
    table, shape = plan.table(), shape_of_plan(plan, config)
    sizes = unit_bytes(table, shape, plan.stash, moved=True)
    copies = host_copies(table, sizes, {}, plan.stash.kv) + waiting_copies(table, shape, plan.stash)
    sent = sum(copy.size_bytes for copy in copies if copy.out and copy.stage == 0)
    costs = costs_of(plan, config)
    writes, link = loop_writes(table, shape, plan.stash, costs), costs.cluster.host_link_bytes_s
    # While a pipeline fills and drains, a stage that idles writes as the others do.
    idle = sum(
        write.copying_s * link
        for tick, write in zip(table.ticks, writes, strict=True)
        if tick.op == "F" and tick.units[0] is None
    )
    assert sum(write.copying_s for write in writes) * link - idle == pytest.approx(sent)


def test_the_first_forward_and_those_behind_heads_wait_for_less():
    """As compiled: of eight forwards of two groups of layers, the four between the first and the first head wait."""
    pins = dict(mesh={"pipe": 1}, schedule={"name": "breadth-first", "interleave": 2})
    config, plan = planned(**pins, sequence={"length": 2**16, "chunks": 4})
    table, writes, costs = plan.outline(), writes_of(config, plan), costs_of(plan, config)
    assert "".join(tick.op for tick in table.ticks[:12]) == "FFFFFHFHFHFH"
    whole = writes[1].copying_s
    head_s = costs.seconds("H", 0, 2**14, table.tick_shapes[5])
    want = [0, *[whole] * 4, 0, *[max(0.0, whole - head_s), 0] * 2]
    assert [write.copying_s for write in writes[:10]] == pytest.approx(want) and head_s > 0


def test_a_step_is_longer_by_what_its_loops_wait():
    config, plan = planned(schedule={"name": "breadth-first"})
    table, shape, costs = plan.outline(), shape_of_plan(plan, config), costs_of(plan, config)
    copies, writes = tick_copies(table, shape, plan.stash, costs)
    free = simulate(table, costs.of_chunks(table.chunk_lengths), copies)
    found = simulation_of(plan, config)
    want = [max(0.0, write.copying_s - write.before_s) for write in writes]
    assert free.waits_s == 0 and found.waits_s == pytest.approx(sum(want))
    assert found.step_s == pytest.approx(free.step_s + sum(want)) and found.busy_s == free.busy_s
    assert [a - b for a, b in zip(found.tick_s, free.tick_s, strict=True)] == pytest.approx(want)
    assert {tick.op for tick, wait in zip(table.ticks, want, strict=True) if wait} == {"F"}


def test_what_a_lone_tick_writes_is_copied_by_kernels():
    """Of one chunk on one stage the first and the last group are ticks outside of loops, as compiled."""
    for groups, charged in ((16, 14), (4, 2), (2, 1)):
        pins = dict(mesh={"pipe": 1}, schedule={"name": "breadth-first", "interleave": groups})
        config, plan = planned(**pins, sequence={"length": 2**17, "chunks": 1})
        writes = writes_of(config, plan)
        assert sum(write.copying_s > 0 for write in writes) == charged
        two = planned(**pins, sequence={"length": 2**17, "chunks": 2})
        assert sum(write.copying_s > 0 for write in writes_of(*two)) == 2 * groups - 2


def test_the_slowest_stage_decides_how_long_a_tick_waits():
    table = make_table("sppo", 2, 1, (8, 8))
    writes = [Write(4.0, 1.0) if tick.op == "F" else Write() for tick in table.ticks]

    def costs(unit, _):
        return {"F": 2.0 + 3.0 * unit.virtual_stage, "B": 1.0, "H": 1.0}[unit.op]

    free, found = simulate(table, costs), simulate(table, costs, None, writes)
    kinds = [tick.op for tick in table.ticks]
    lasts = {(2.0, "F"): 5.0, (5.0, "F"): 8.0}  # the write has 3 s left when the loop begins
    assert found.tick_s == tuple(lasts.get(one, one[0]) for one in zip(free.tick_s, kinds, strict=True))
    assert found.waits_s == 3.0 * kinds.count("F") and found.bubble_fraction > free.bubble_fraction


def test_gradient_sums_on_their_way_to_the_host_hold_up_backwards():
    config, plan = planned(cluster="h100:1x1", stash={"inputs": "keep", "attention": "keep", "rest": "recompute"})
    assert plan.optimizer == "host"
    writes = writes_of(config, plan)
    of_op = {
        kind: {w.copying_s > 0 for t, w in zip(plan.outline().ticks, writes, strict=True) if t.op == kind}
        for kind in "FBH"
    }
    assert of_op == {"F": {False}, "B": {True}, "H": {False}}
