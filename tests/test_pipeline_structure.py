"""What the step's program looks like: collectives, host copies and size, read from its jaxpr and from its lowering."""

import math
from collections import Counter
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exactness import small_model, small_plan
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxprs import is_host, walk

from sppo_jax.attention import cudnn
from sppo_jax.attention.validate import KEYS
from sppo_jax.pipeline import api
from sppo_jax.pipeline.api import Step, value_and_grad
from sppo_jax.program.fold import Loop, num_segments, unfold

HOST = ("host", "host", "recompute")
NOTHING = ("recompute", "recompute", "recompute")
# Two pipeline stages of two members, two layers a stage.
BASE = dict(chunks=(16,) * 4, mesh=(1, 2, 2))
PROGRAMS = {
    "ulysses": BASE,
    "ring-kv": BASE | dict(kind="ring", ring_pass="kv"),
    "ring-q-recompute": BASE | dict(kind="ring", ring_pass="q", places=NOTHING),
    "hybrid-host": BASE | dict(mesh=(1, 2, 4), kind="hybrid", ulysses=2, places=HOST, alpha=0.5),
    "unequal-host": dict(chunks=(24, 16, 16, 16, 8), mesh=(2, 2, 2), places=("host",) * 3, alpha=1.0),
    "seq1f1b-host": BASE | dict(schedule="seq1f1b", sequences=3, places=HOST, alpha=0.5),
}


def arguments(plan, model):
    shape = (plan.mesh.data * plan.sequences_per_pipeline, plan.sequence_length)
    return nnx.state(model, nnx.Param), {key: jax.ShapeDtypeStruct(shape, jnp.int32) for key in KEYS}


def trace(num_layers=4, window=0, **changes):
    """Returns the plan, its program and all equations of its step, as written: CPUs add an order of collectives."""
    plan, model = small_plan(**changes), small_model(dtype="float32", num_layers=num_layers, sliding_window=window)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "keeps_order", lambda platform: True)
        jaxpr = jax.make_jaxpr(value_and_grad(plan, model))(*arguments(plan, model))
    return plan, api._made(plan, model, None, train=True)[0].program, list(walk(jaxpr.jaxpr))


@lru_cache
def named(name):
    """Traces one of PROGRAMS once for all tests."""
    return trace(**PROGRAMS[name])


def test_the_walk_sees_collectives_in_branches_and_counts_repetitions():
    mesh = jax.make_mesh((2,), ("pipe",), axis_types=(jax.sharding.AxisType.Auto,))

    def body(x):
        def branch(x):
            return jax.lax.psum(x, "pipe")

        step = lambda c, _: (jax.lax.cond(c[0] > 0, branch, lambda x: x, c), None)  # noqa: E731
        return jax.lax.scan(step, x, None, length=3)[0]

    whole = jax.shard_map(body, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    (found,) = [found for found in walk(jax.make_jaxpr(whole)(jnp.ones(2)).jaxpr) if found.is_collective]
    assert found.axes == ("pipe",) and found.times == 3 and "cond" in found.inside


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_device_does_every_collective_and_every_host_copy(name):
    _, program, found = named(name)
    collectives = [item for item in found if item.is_collective]
    assert {axis for item in collectives for axis in item.axes} >= {"data", "pipe", "ring", "ulysses"}
    # A branch, or a loop whose length is data, may be taken by some devices alone.
    assert not [item for item in collectives if {"cond", "while"} & set(item.inside)]
    host = [item for item in found if any(map(is_host, (*item.eqn.invars, *item.eqn.outvars)))]
    assert bool(host) == any(stash.uses_host for stash in program.stash.classes)
    assert not [item for item in host if {"cond", "while"} & set(item.inside)]
    assert not [item for item in host if item.name in ("cond", "while")]


@pytest.mark.parametrize("name", PROGRAMS)
def test_hops_are_one_a_tick_along_the_pipeline_and_as_many_a_layer_round_the_ring(name):
    plan, program, found = named(name)
    count = Counter()
    for item in found:
        if item.is_collective:
            count[item.name, item.axes] += item.times
    ticks = Counter(spec.op for spec in unfold(program.items))
    assert count["ppermute", ("pipe",)] == ticks["F"] + ticks["B"]

    hops = heads = 0
    again = plan.stash.attention == "recompute"  # a backward then starts with a forward
    for spec in unfold(program.items):
        layers = {"F": 2, "B": 2, "H": 0}[spec.op]
        forwards = {"F": 1, "B": int(again), "H": 0}[spec.op]
        more = plan.ring - 1
        # With "q", q, out and LSE go round and the last two come home.
        hops += layers * forwards * {"kv": 2 * more, "q": 3 * more + 2}[spec.passes.forward] * (more > 0)
        if spec.op == "B":
            # With "kv", so do dK and dV; with "q" the queries, three cotangents and dQ, of which dQ comes home.
            hops += layers * {"kv": 4 * more + 2, "q": 5 * more + 1}[spec.passes.backward] * (more > 0)
        # To heads go q, K, V, or q, dOut and the LSE; back come out and LSE, or dQ, dK and dV.
        heads += layers * ({"F": 5, "B": 6}.get(spec.op, 0) + 3 * (again and spec.op == "B"))
    assert count["ppermute", ("ring",)] == hops
    assert count["all_to_all", ("ulysses",)] == (heads if plan.ulysses > 1 else 0)


def bodies(items):
    """Yields the ticks that are written in a program, each once."""
    for item in items:
        yield from bodies(item.body) if isinstance(item, Loop) else [item]


@pytest.mark.parametrize(
    "schedule,sequences,groups",
    [
        ("sppo", 1, 1),
        ("interleaved-seq1f1b", 2, 2),
        *(pytest.param("sppo", 1, groups, marks=pytest.mark.slow) for groups in (2, 4)),
    ],
)
def test_the_vocabulary_is_met_in_ticks_with_ends_and_in_no_other(schedule, sequences, groups):
    _, program, found = trace(
        2 * groups, chunks=(16,) * 8, mesh=(1, 2, 2), schedule=schedule, sequences=sequences, interleave=groups
    )
    written, times = [[]], Counter()
    for item in found:
        kind = str(item.eqn.source_info.name_stack)
        if item.is_collective and item.axes == ("pipe",) and ("forward_tick" in kind or "backward_tick" in kind):
            written[-1].append(item.name)
            written += [[]] if item.name == "ppermute" else []  # the hop is a tick's last
            times[kind.split("_tick")[0], item.name] += item.times
    wanted = {"F": ["psum"], "B": ["all_gather", "psum"]}
    specs = [spec for spec in bodies(program.items) if spec.op != "H"]
    assert written[:-1] == [wanted[spec.op] * spec.has_ends + ["ppermute"] for spec in specs] and not written[-1]
    ticks = Counter((spec.op, spec.has_ends) for spec in unfold(program.items))
    assert times["forward", "psum"] == ticks["F", True]
    assert times["backward", "all_gather"] == times["backward", "psum"] == ticks["B", True]
    assert bool(ticks["F", False]) == bool(ticks["B", False]) == (groups > 1)


LOOPS_OF_ATTENTION = {
    "a past, documents": (2, dict(chunks=(8, 8))),
    "a past, documents, blocks of queries": (2, dict(chunks=(8, 8), backward_queries=4)),
    "documents": (1, dict(chunks=(16,))),
    "a past": (1, dict(chunks=(8, 8), sequence_documents="one")),
    "nothing": (0, dict(chunks=(16,), sequence_documents="one", mesh=(1, 2, 2), kind="ring", ring_pass="kv")),
    "documents with bands": (1, dict(chunks=(8, 8), window=4)),
    "nothing, with bands": (0, dict(chunks=(8, 8), sequence_documents="one", window=4)),
}


@pytest.mark.filterwarnings("ignore:the plan's kernel is cudnn")
@pytest.mark.parametrize(
    "name",
    [
        name
        if name in ("a past, documents, blocks of queries", "nothing")
        else pytest.param(name, marks=pytest.mark.slow)
        for name in LOOPS_OF_ATTENTION
    ],
)
def test_attention_loops_over_nothing_whose_count_the_plan_knows(name, monkeypatch):
    """Loops whose count is known are scans."""
    loops, changes = LOOPS_OF_ATTENTION[name]
    queries, backward = set(), cudnn.backward

    def record(operands, results, **how):
        queries.add(operands.q_NTH.shape[1])
        return backward(operands, results, **how)

    monkeypatch.setattr(cudnn, "backward", record)
    _, program, found = trace(**{"kernel": "cudnn", **changes})
    calls = sum(spec.is_compute for spec in bodies(program.items))
    ring = 2 if changes.get("kind") == "ring" else 1  # the last hop is behind its loop
    names = Counter(item.name for item in found)
    assert queries and max(queries) <= changes.get("backward_queries", 16)
    assert calls >= 2 and (names["while"], names["cond"]) == (loops * calls * ring, 0)


def carried_host(found):
    return [item for item in found if item.name == "scan" and any(map(is_host, item.eqn.invars))]


def test_the_stash_is_typed_as_host_memory_where_something_is_sent_there_and_nowhere_else():
    _, program, found = trace(**BASE | dict(chunks=(16,) * 8, places=HOST, alpha=0.5))
    (stash,) = [stash for stash in program.stash.classes if stash.uses_host]
    scans = carried_host(found)
    assert len(scans) >= 2  # forward and backward segments
    shapes = {var.aval.shape for item in scans for var in item.eqn.invars if is_host(var)}
    # A row for each diagonal but the last; lines of two layers, and 16-bit units of a line. Of half of a device's 8
    # tokens go the layer's input (24), the output of 4 heads of 6 and their LSE, all float32. The LSE, 32 units, is
    # the line.
    assert shapes == {(8, 2 * 13, 32)} and 13 * 32 == 4 * (24 + 4 * 6 + 4) * 2
    # What a scan writes it carries, so it comes out as it went in: on the host.
    come_out = [[var.aval.shape for var in item.eqn.outvars if is_host(var)] for item in scans]
    go_in = [[var.aval.shape for var in item.eqn.invars if is_host(var)] for item in scans]
    assert any(come_out) and all(out in ([], into) for out, into in zip(come_out, go_in, strict=True))
    for changes in (dict(alpha=0.0), dict(places=("keep", "keep", "keep"), alpha=0.5)):
        _, _, found = trace(**BASE | dict(chunks=(16,) * 8, places=HOST) | changes)
        assert not [item for item in found if any(map(is_host, (*item.eqn.invars, *item.eqn.outvars)))]


def test_host_memory_is_touched_by_slices_and_copies_only():
    _, program, found = named("seq1f1b-host")
    on_host = [item for item in found if any(map(is_host, (*item.eqn.invars, *item.eqn.outvars)))]
    names = Counter(item.name for item in on_host)
    # Only a tick that writes to the host ends with a barrier.
    assert names["optimization_barrier"] == sum(spec.stash.write is not None for spec in bodies(program.items)) > 0
    assert set(names) <= {"scan", "jit", "shard_map", "device_put", "dynamic_slice", "dynamic_update_slice"} | {
        "squeeze",  # a slot's leading dim of one
        "broadcast_in_dim",
        "optimization_barrier",  # a copy to the host ends in its tick
    }


def operations(block_owner, inside=()):
    """Yields every operation of an MLIR module with the names of the operations around it."""
    for region in block_owner.regions:
        for block in region.blocks:
            for op in block.operations:
                yield op, inside
                yield from operations(op.operation, (*inside, op.operation.name))


@pytest.mark.parametrize("name", ["seq1f1b-host", pytest.param("hybrid-host", marks=pytest.mark.slow)])
def test_lowered_for_a_gpu_the_copies_are_annotated_and_unconditional(name):
    plan, model = small_plan(**PROGRAMS[name]), small_model(dtype="float32")
    traced = jax.jit(value_and_grad(plan, model)).trace(*arguments(plan, model))
    lowered = traced.lower(lowering_platforms=("cuda",))
    text = lowered.as_text()
    assert "annotate_device_placement" in text and "pinned_host" in text
    places, called_in_branches = Counter(), set()
    for op, inside in operations(lowered.compiler_ir("stablehlo").operation):
        branch = {"stablehlo.case", "stablehlo.if"} & set(inside)
        if branch and op.operation.name == "func.call":
            called_in_branches.add(str(op.attributes["callee"]))
        if op.operation.name == "stablehlo.custom_call" and "annotate_device_placement" in str(op):
            assert not branch
            places["pinned_host" if "pinned_host" in str(op) else "device"] += 1
    assert not called_in_branches  # so that nothing hides in a function
    assert set(places) == {"pinned_host", "device"}  # there and back
    plain = small_plan(**PROGRAMS[name] | dict(alpha=0.0))
    text = jax.jit(value_and_grad(plain, model)).trace(*arguments(plain, model)).lower(lowering_platforms=("cuda",))
    assert "pinned_host" not in text.as_text()


def size(**changes):
    """Returns the number of equations and of segments."""
    _, program, found = trace(**changes)
    return len(found), num_segments(program.items)


def test_the_program_does_not_grow_with_layers():
    plan = BASE | dict(places=HOST, alpha=0.5)
    assert len({size(**plan, num_layers=layers) for layers in (4, 16)}) == 1


@pytest.mark.parametrize(
    "schedule,sequences,alpha",
    [
        ("sppo", 2, 0.5),
        pytest.param("seq1f1b", 2, 0.0, marks=pytest.mark.slow),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("sppo", 1, 0.5), ("seq1f1b", 2, 0.5), ("gpipe", 2, 0.5))
        ),
        *(pytest.param(*case, 0.0, marks=pytest.mark.slow) for case in (("sppo", 1), ("sppo", 2), ("gpipe", 2))),
    ],
)
def test_the_program_does_not_grow_with_equal_chunks(schedule, sequences, alpha):
    plan = dict(mesh=(1, 2, 2), schedule=schedule, sequences=sequences, places=HOST, alpha=alpha)
    assert size(**plan, chunks=(16,) * 8) == size(**plan, chunks=(16,) * 16)


@pytest.mark.parametrize(
    "schedule,least",
    [("sppo", 2), *(pytest.param(*case, marks=pytest.mark.slow) for case in (("gpipe", 2), ("seq1f1b", 3)))],
)
def test_the_program_does_not_grow_with_sequences(schedule, least):
    plan = BASE | dict(schedule=schedule, places=HOST, alpha=0.5)
    first = size(**plan, sequences=least)
    assert first == size(**plan, sequences=2 * least) == size(**plan, sequences=2 * least + 1)
    fewer = size(**plan, sequences=least - 1)  # too few for the pattern that is repeated from sequence to sequence
    assert fewer[1] <= first[1] and fewer[0] < first[0]


def test_the_program_grows_with_segments():
    sizes = [size(mesh=(1, 2, 2), chunks=chunks) for chunks in ((16,) * 8, (20,) * 4 + (12,) * 4, (28, 20, 12, 4))]
    equations, segments = np.array(sizes).T
    assert (np.diff(segments) > 0).all() and (np.diff(equations) > 0).all()
    per_segment = np.diff(equations) / np.diff(segments)
    assert (per_segment < equations[0] / segments[0] * 1.5).all()


def test_no_kept_buffer_is_copied_in_a_loop():
    plan = small_plan(**BASE | dict(schedule="seq1f1b", sequences=4, places=("keep",) * 3))
    model = small_model(dtype="float32")
    step = value_and_grad(plan, model)
    text = jax.jit(step).lower(*arguments(plan, model)).compile().as_text()
    slots = max(Step(plan, model, None, train=True).program.stash.classes.values()) + 1
    body, copied, written = "", [], []
    for line in text.splitlines():
        if line.endswith("{") and not line.startswith(" "):
            body = line
        if f" = f32[{slots},2," in line and not body.startswith("ENTRY"):
            copied += [line] if " copy(" in line else []
            written += [line] if "dynamic-update-slice" in line else []
    assert written and not copied


def whole_layers(equations, like, count):
    """Returns the shapes of arrays with so many layers' largest matrices or more, whole or flat."""
    inside = [one for one in equations if "shard_map" in one.inside]
    found = {tuple(x.aval.shape) for one in inside for x in one.eqn.outvars}
    own = max((x.shape[1:] for x in like), key=math.prod)
    ends = own, (math.prod(own),)
    return {
        shape
        for shape in found
        if any(shape[-len(end) :] == end and math.prod(shape[: -len(end)]) >= count for end in ends)
    }


def held_tables(equations):
    """Returns the loops over ticks that carry a whole embedding, head, or gradient of one."""
    hidden_size, vocab_size = small_model(dtype="float32").embedding[...].shape[::-1]
    table = -(-vocab_size // 2), hidden_size  # two stages
    loops = [one for one in equations if one.name == "scan" and "_tick" not in str(one.eqn.source_info.name_stack)]
    return [one for one in loops if any(tuple(x.aval.shape) == table for x in one.eqn.outvars)]


def times_inside(equations, name):
    """Returns how often a collective would run if all loops of at most one iteration had one."""
    rare = [one for one in equations if one.axes == ("data", "ring", "ulysses") and "while" in one.inside]
    return sum(one.times for one in rare if one.name == name)


def rare_flags(program):
    """Returns for each body of ticks that gathers, or scatters, in some iterations only: in how many of them."""
    found, place = {"all_gather": [], "reduce_scatter": []}, 0
    for item in program.items:
        iterations = item.count if isinstance(item, Loop) else 1
        length = len(unfold([item])) // iterations
        for name, flag in (("all_gather", "weights.gathers"), ("reduce_scatter", "weights.scatters")):
            flags = program.rows[flag][place : place + iterations * length, 0].reshape(iterations, length).sum(0)
            found[name] += [int(count) for count in flags if 0 < count < iterations]
        place += iterations * length
    return found


def test_weights_are_gathered_and_their_sums_scattered_once_a_group_and_pass():
    """And no device holds the weights or the sums of more than three of its four groups of layers."""
    like = jax.tree.leaves(nnx.state(small_model(dtype="float32", num_layers=8).layers, nnx.Param))
    groups = BASE | dict(schedule="breadth-first", interleave=4, kv="rebuild", places=HOST, alpha=1.0)
    plan, program, equations = trace(num_layers=8, **groups, weights="gathered")
    found, specs = Counter(), unfold(program.items)
    for one in equations:
        if one.axes == ("data", "ring", "ulysses"):
            found[one.name] += one.times
    # A tick with ends gathers the embedding, or scatters its gradient. A head does both with its own table.
    ends = Counter(spec.op for spec in specs if spec.embeds)
    assert ends["F"] == ends["B"] == ends["H"] == 4  # chunks
    assert (program.rows["weights.gathers"].sum(0) == 7).all() and (program.rows["weights.scatters"].sum(0) == 4).all()
    # Where not all iterations of a loop gather, the gather is in a loop of at most one iteration; the rows say in which
    # ticks.
    rare = Counter(one.name for one in equations if one.axes == ("data", "ring", "ulysses") and "while" in one.inside)
    in_loops = {name: sum(flags) for name, flags in rare_flags(program).items()}
    assert rare == {name: len(flags) * len(like) for name, flags in rare_flags(program).items()}
    always = {name: found[name] - times_inside(equations, name) for name in rare}
    assert always["all_gather"] == (7 - in_loops["all_gather"]) * len(like) + ends["F"] + ends["H"]
    assert always["reduce_scatter"] == (4 - in_loops["reduce_scatter"]) * len(like) + ends["B"] + ends["H"]
    assert (program.weights.num_slots, program.weights.num_sum_slots) == (3, 2)
    resident = trace(num_layers=8, **groups)[2]
    assert not whole_layers(equations, like, 4) and whole_layers(resident, like, 4)
    assert not held_tables(equations) and held_tables(resident)
