"""What the planner charges is what the program performs: ring bytes, stash bytes by class, slots and ticks, exactly."""

import math
import random
from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import chain

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxprs import walk
from no_attention import replace_attention

from sppo_jax.arrays.dtypes import accumulator
from sppo_jax.attention.operands import Cotangent, Gradients, Prefix
from sppo_jax.attention.pallas_blocks import Target
from sppo_jax.attention.spreading import ring, sequence
from sppo_jax.attention.tags import Tags
from sppo_jax.config import ModelConfig, config_from_dict
from sppo_jax.hardware import DEVICES, make_cluster
from sppo_jax.hardware.tpu_chips import TPU_CHIPS
from sppo_jax.mixers.delta import GatedDelta, Heads, Taps
from sppo_jax.mixers.mixer import Operands, TokenRun
from sppo_jax.models import build_model
from sppo_jax.models.leaves import is_cast
from sppo_jax.pipeline.api import Step
from sppo_jax.pipeline.block import Weights
from sppo_jax.pipeline.layers.stage import Stage
from sppo_jax.pipeline.pasts import states as mixing
from sppo_jax.plan.parts import MeshShape, cache_head_dim
from sppo_jax.predict.group_layers import are_unlike
from sppo_jax.predict.seconds.costs import cost_model
from sppo_jax.predict.seconds.stage_shape import Recompute, StageShape
from sppo_jax.predict.stash_bytes import refetch_bytes, token_bytes
from sppo_jax.predict.states import state_work
from sppo_jax.program.fold import unfold
from sppo_jax.program.ring import AttentionShape, Ring
from sppo_jax.program.stash import slot_bytes, stash_classes
from sppo_jax.schedule.waiting import waiting_room
from sppo_jax.search.evaluate import costs_of, memory_of, shape_of_plan
from sppo_jax.search.make import make_plan

IN_CI, IN_ALL = 84, 216  # plans; a pattern of 10, 7, 9, 11 and 4 makes them unlike
PLACES = [
    ("keep", "keep", "keep"),
    ("keep", "keep", "recompute"),
    ("keep", "recompute", "recompute"),
    ("recompute", "recompute", "recompute"),
    ("host", "host", "recompute"),
    ("host", "recompute", "recompute"),
    ("host", "host", "host"),
    ("host", "keep", "keep"),
]
EXPERTS = [
    {},
    {},
    {"count": 4, "chosen": 2, "size": 16},
    {"count": 6, "chosen": 3, "size": 8, "bias": True, "balance_over": "batch"},
    {"count": 4, "chosen": 2, "size": 16, "shared_size": 24, "shared_gate": True, "choice_bias": True},
]
MESHES = [(1, 1, 4), (1, 2, 4), (2, 1, 4), (1, 1, 8), (1, 2, 2), (1, 4, 2), (1, 4, 1), (2, 2, 2), (1, 1, 6)]


def draw(generator: random.Random):
    """Draws a config; some of them are refused."""
    pick = generator.choice
    data, pipe, seq = pick(MESHES)
    dtype = pick(["float32", "bfloat16", "float64"])
    fused = dtype == "bfloat16" and generator.random() < 0.7
    heads = pick([4, 6])
    inputs, attention, rest = pick(PLACES)
    kind = pick(["auto", "ring", "hybrid", "ulysses"])
    per_pipeline = pick([1, 1, 2, 3, 9])
    chunks = pick([1, 2, 3, 4, 6, 7, 8, 12])
    unit = seq * pick([1, 2]) * (16 if fused else 1)
    if generator.random() < 0.4:
        lengths = [unit * pick([1, 2, 4]) for _ in range(chunks)]
        chunks, length = (lengths if per_pipeline < 9 else len(lengths)), sum(lengths)
    else:
        length = unit * chunks * pick([1, 3, 4])
    return config_from_dict(
        {
            "model": {
                "vocab_size": 40,
                "hidden_size": 8 * heads,
                "num_layers": pipe * pick([2, 4]),
                "num_heads": heads,
                "num_kv_heads": pick([count for count in (1, 2, 4, heads) if heads % count == 0]),
                "mlp_size": 48,
                "mlp": pick(["swiglu", "gelu"]),
                "experts": pick(EXPERTS),
                "qk_norm": pick([False, True]),
                "qkv_bias": pick([False, True]),
                "compute_dtype": dtype,
                "kernel": "cudnn" if fused else "blockwise",
            },
            "mesh": {"data": data, "pipe": pipe, "seq": seq},
            "sequence": {
                "length": length,
                "chunks": chunks,
                "split": kind,
                "per_pipeline": per_pipeline,
                "ring_pass": pick(["auto", "auto", "kv", "q"]),
            },
            "schedule": {"name": pick(["auto", "sppo", "seq1f1b", "gpipe"]), "interleave": pick([1, 1, 2])},
            "stash": {
                "inputs": inputs,
                "attention": attention,
                "rest": rest,
                "alpha": pick(["auto", 0.25, 0.4, 1.0]),
            },
            "hardware": {"cluster": f"{'a100-80g' if fused else 'cpu'}:1x{data * pipe * seq}"},
            "train": {"steps": 1},
        }
    )


def with_kv_on_host(config):
    """Returns the config of a breadth-first plan whose keys and values are on the host."""
    schedule = replace(config.schedule, name="breadth-first", interleave=2)
    return replace(config, schedule=schedule, stash=replace(config.stash, kv="host"))


def with_one_chunk_made_again(config):
    """Returns the config of a breadth-first plan whose only chunk makes its keys and values again."""
    schedule = replace(config.schedule, name="breadth-first", interleave=2)
    sequence = replace(config.sequence, chunks=1, shapes="auto")
    return replace(config, schedule=schedule, sequence=sequence, stash=replace(config.stash, kv="rebuild"))


def with_kinds(config):
    """Returns the config of a model whose layers are of two kinds, of other heads, norms, MLPs or experts.

    On one stage groups are unlike: they have one layer, and the first layer rotates otherwise, or has other shapes.
    """
    groups = config.mesh.pipe * config.schedule.interleave
    local = {"head_dim": 2 * config.model.head_dim, "mlp_size": 40, "experts": {"count": 0}}
    local |= {"norms": "both", "mlp": "geglu", "query_scale": 0.3}
    if config.mesh.pipe == 1 < groups:
        near = {"rope": {"theta": 50.0}} if config.model.qk_norm else local
        model = dict(num_layers=groups, layers=f"near,{groups - 1}xfull", layer_types={"near": near})
        return replace(config, model=replace(config.model, **model))
    model = dict(
        norms="behind",
        qk_norm_over_heads=config.model.qk_norm,
        num_layers=3 * groups,
        layers=f"{groups}x(2xlocal,full)",
        layer_types={"local": local},
    )
    return replace(config, model=replace(config.model, **model))


def with_states(config):
    """Returns the config of a model of which two layers in three, or all, have the gated delta rule."""
    groups, seq = config.mesh.pipe * config.schedule.interleave, config.mesh.seq
    heads = {"value_heads": 2 * seq, "key_heads": 2, "key_size": 4, "value_size": 6, "taps": 3}
    layers = f"{groups}x(2xdelta,full)" if config.model.qk_norm or config.stash.kv != "auto" else f"{2 * groups}xdelta"
    model = dict(
        num_layers=(3 if "full" in layers else 2) * groups, layers=layers, layer_types={"delta": {"delta": heads}}
    )
    return replace(config, model=replace(config.model, **model))


def with_period(config, *, lone):
    """Returns the config of a model of two kinds, one with a window, whose groups run again from their first input.

    Groups of one stage have one layer if `lone`, else three.
    """
    pipe = config.mesh.pipe
    schedule = replace(config.schedule, name="breadth-first", interleave=6 if lone and pipe == 1 else 2)
    local = {"sliding_window": config.mesh.seq, "head_dim": 2 * config.model.head_dim, "mlp_size": 40}
    pattern = f"{2 * pipe}x(2xlocal,full)"
    if pipe == 1:
        local, pattern = {"sliding_window": config.mesh.seq, "rope": {"theta": 50.0}}, "3xlocal,2xfull,local"
    stash = replace(config.stash, inputs="period", rest="recompute", kv="auto")
    model = replace(config.model, num_layers=6 * pipe, layers=pattern, layer_types={"local": local})
    return replace(config, model=model, schedule=schedule, stash=stash)


def with_tails(config, kv):
    """Returns the config of a model of two kinds, one with a window, whose keys and values come again without a period.

    Groups of one stage have three layers, and one of two groups has more layers with a window where they are unlike.
    """
    pipe = config.mesh.pipe
    schedule = replace(config.schedule, name="breadth-first", interleave=2)
    local = {"sliding_window": config.mesh.seq, "rope": {"theta": 50.0}}
    unlike = pipe == 1 and config.model.qk_norm
    pattern = "2xlocal,3xfull,local" if unlike else f"{2 * pipe}x(2xlocal,full)"
    model = replace(config.model, num_layers=6 * pipe, layers=pattern, layer_types={"local": local})
    return replace(config, model=model, schedule=schedule, stash=replace(config.stash, inputs="auto", kv=kv))


def with_late_attention(plan):
    """Returns a plan that stashes the attention outputs of late chunks alone, if it has some and the rules allow it."""
    first = len(plan.chunk_lengths) // 2
    try:
        return replace(plan, stash=replace(plan.stash, attention_from=first))
    except ValueError:
        return plan


def with_shapes(config, plan):
    """Returns the config of a plan with two tick shapes, of which no chunk has the longer one."""
    multiple = plan.mesh.seq * 16
    low, high = (-(-pick(plan.chunk_lengths) // multiple) * multiple for pick in (min, max))
    return replace(config, sequence=replace(config.sequence, shapes=(low, high + multiple)))


pytestmark = [
    pytest.mark.filterwarnings("ignore:.* distinct chunk lengths"),
    pytest.mark.xdist_group("contract"),  # the plans take long to make
]


@pytest.fixture(scope="module", params=[IN_CI, pytest.param(IN_ALL, marks=pytest.mark.slow)])
def plans(request):
    """Many plans with what they were made of."""
    generator, found = random.Random(0), []
    with jax.enable_x64(True):
        while len(found) < request.param:
            try:
                config = draw(generator)
                if len(found) % 10 == 9:
                    config = with_kv_on_host(config)
                elif len(found) % 10 == 5:
                    config = with_one_chunk_made_again(config)
                if len(found) % 7 == 6:
                    config = with_kinds(config)
                elif len(found) % 7 == 4:
                    config = with_states(config)
                if len(found) % 9 == 8:
                    config = with_period(config, lone=len(found) % 2 == 0)
                if len(found) % 11 == 7 and len(found) % 10 != 5:
                    config = with_tails(config, ("rebuild", "host")[len(found) % 2])
                plan = make_plan(config)
                if len(found) % 4 == 3:
                    config = with_shapes(config, plan)
                    plan = make_plan(config)
                elif len(found) % 4 == 2 and plan.stash.inputs != "period" and len(found) % 11 != 7:
                    # In a period, and in the other plans left out, early and late chunks share rows.
                    plan = with_late_attention(plan)
                step = Step(plan, build_model(config, abstract=True), None, train=True)
            except ValueError:
                continue  # a draw that the rules do not allow
            found.append((config, plan, step))
        yield found


def enough(plans, of_all: int) -> int:
    """Returns how many plans of a sort all of them must exceed; of those of CI, half of their share."""
    return of_all if len(plans) == IN_ALL else of_all * len(plans) // (2 * IN_ALL)


def layouts(step: Step):
    """Yields each stash class of a program with the buffers that the executor makes for it."""
    program, places = step.program, step.plan.stash

    def on_stage(x):  # [groups, layers, ...]; vectors stay in their own dtype
        dtype = jnp.dtype(step.model.dtype) if is_cast(x, 1) else x.dtype
        return jax.ShapeDtypeStruct((1, *x.shape), dtype)

    weights = Weights(jax.tree.map(on_stage, step.params["layers"]), step.others)
    stage = Stage(step.layers, weights, places)
    hidden = step.params["embedding"].get_value().shape[1]
    for name, slots in program.stash.classes.items():
        x_TD = jax.ShapeDtypeStruct((name.tokens, hidden), jnp.dtype(step.model.dtype))
        yield name, stage.layout(name, slots, x_TD, jax.ShapeDtypeStruct((name.tokens,), jnp.int32))


def nbytes(tree) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


@cache
def sent_bytes(
    kind: str, passes: str, members: int, tokens: int, bound: int, heads, kv_heads, dim, dtype, kernel, window=0
):
    """Returns the bytes that one layer's attention sends on the ring, read from its jaxpr."""
    room = max(bound, tokens)
    q, k = jnp.zeros((tokens, heads, dim), dtype), jnp.zeros((kv_heads, room, cache_head_dim(kernel, dim)), dtype)
    lse = jnp.zeros((tokens, heads), accumulator(dtype))
    tags = [Tags(*(jnp.zeros((members, size), jnp.int32),) * 2) for size in (tokens, room)]

    def run(q, k, lse):
        target = Target(TPU_CHIPS["cpu"], heads // kv_heads, np.dtype(dtype).itemsize)
        how = dict(kernel=kernel, passes=passes, window=window, given=target if kernel == "pallas" else None)
        masks = ring.ring_tags(*tags, jnp.int32(0), bound=bound or None, **how)
        if kind == "F":
            return ring.forward(q, Prefix(k, k, ()), masks, passes=passes)
        cotangent = Cotangent(q, lse, q if kernel == "cudnn" else lse)
        sums = k.astype(accumulator(dtype))
        return ring.backward(q, Prefix(k, k, ()), masks, cotangent, Gradients(sums, sums), passes=passes)

    found = walk(jax.make_jaxpr(run, axis_env=[("ring", members)])(q, k, lse).jaxpr)
    sends = [item for item in found if item.name == "ppermute"]
    return sum(item.times * nbytes([var.aval for var in item.eqn.invars]) for item in sends)


def test_slots_and_ticks_are_those_charged(plans):
    for _, plan, step in plans:
        outline, program = plan.outline(), step.program
        rounds = Counter()
        for tick, count in zip(outline.ticks, outline.tick_rounds, strict=True):
            rounds[tick.op] += count
        assert rounds == Counter(spec.op for spec in unfold(program.items))
        peaks, on_host = outline.prefix_peaks, plan.stash.waiting == "host"
        waits, rows = (0, waiting_room(outline).num_rows) if on_host else (outline.waiting_peak, 0)
        assert rows == program.waiting.num_rows
        assert outline.kv_peak == program.num_sequence_slots and outline.head_peak == program.num_head_slots
        kv_slots = peaks.kept if plan.stash.kv == "keep" else peaks.rebuilt
        assert (kv_slots, peaks.grads, waits) == (
            program.prefixes.num_slots,
            program.prefixes.num_grad_slots,
            program.waiting.num_slots,
        )
    assert {plan.stash.kv for _, plan, _ in plans} == {"keep", "recompute", "rebuild", "host"}


def test_stash_bytes_are_those_charged_class_by_class(plans):
    seen = Counter()
    for config, plan, step in plans:
        outline, shape = plan.outline(), shape_of_plan(plan, config)
        names = stash_classes(outline, plan.stash, plan.mesh.seq)
        classes = dict(zip(names.distinct, outline.stash_peaks(names.of_bundle), strict=True))
        rows = dict(zip(names.distinct, outline.host_rows(names.of_bundle), strict=True))
        assert classes == step.program.stash.classes and rows == step.program.stash.num_rows
        token = token_bytes(shape, plan.stash)
        for name, layout in layouts(step):
            kept = nbytes(jax.eval_shape(layout.kept_buffers))
            host = rows[name] * nbytes(jax.eval_shape(layout.host_part)) if name.uses_host else 0
            of_device, of_host = slot_bytes(name, token)
            charged = [of_device * (classes[name] + 1), of_host * rows[name]]
            if are_unlike(config.model, shape.layers) and plan.stash.rest != "recompute":
                # Layers of two shapes have some products of one shape, which share an array.
                assert kept + host <= sum(charged) <= 1.5 * (kept + host), (plan.stash, name)
                continue
            assert charged == [kept, host], (plan.stash, name)
            seen[bool(kept), bool(host)] += 1
            seen["unlike"] += are_unlike(config.model, shape.layers)
    assert min(seen[True, True], seen[True, False], seen[False, True]) > enough(plans, 10) and seen["unlike"]
    assert sum(plan.stash.attention_from > 0 for _, plan, _ in plans) > enough(plans, 10)
    assert sum(bool(name.host_kv) for _, _, step in plans for name in step.program.stash.classes) > enough(plans, 10)
    assert sum(bool(step.layers.states) for _, _, step in plans) > enough(plans, 10)
    assert any(not step.layers.kv for _, _, step in plans)
    of_period = [plan.stash for _, plan, _ in plans if plan.stash.inputs == "period"]
    assert len(of_period) > enough(plans, 15) and {stash.kv for stash in of_period} > {"keep", "host"}
    assert {stash.attention for stash in of_period} == {"keep", "host", "recompute"}
    lone = [plan.stash for _, plan, _ in plans if plan.stash.inputs == "period" and plan.schedule.interleave == 6]
    assert len(lone) > enough(plans, 4) and {stash.attention for stash in lone} >= {"keep", "host"}


def test_what_comes_back_for_keys_and_values_is_what_is_charged(plans):
    """Of layers with a window nothing does, but in groups that have other numbers of them."""
    seen = Counter()
    for config, plan, step in plans:
        shape = shape_of_plan(plan, config)
        for name, layout in layouts(step):
            if not name.uses_host or plan.stash.kv in ("keep", "recompute"):
                continue
            (row,) = jax.eval_shape(layout.host_part)
            came = layout.again_lines * row.shape[1] * row.dtype.itemsize
            assert came == refetch_bytes(name, shape, plan.stash), (plan.stash, name)
            seen[plan.stash.kv, bool(step.layers.tails), came > 0] += 1
    assert min(seen["rebuild", True, True], seen["host", True, True], seen["host", False, True]) > enough(plans, 5), (
        seen
    )


def test_keys_and_values_of_layers_with_tails_are_those_charged(plans):
    """A layer with a window has those of its window and a chunk."""
    seen = Counter()
    for config, plan, step in plans:
        if plan.stash.inputs != "period" and not step.layers.tails:
            continue
        itemsize, slots = jnp.dtype(step.model.dtype).itemsize, step.program.prefixes.num_slots
        of_slot = sum(map(math.prod, step._cache_shapes()))
        holders = memory_of(plan, config).holders
        assert sum(one.size_bytes for one in holders if one.name == "kv") == 2 * itemsize * slots * of_slot
        seen[plan.stash.inputs == "period"] += len(step.layers.kv) > 1
    assert min(seen[True], seen[False]) > enough(plans, 10)


@pytest.mark.parametrize("head_dim,in_cache", [(64, 128), (128, 128), (192, 256)])
def test_caches_of_the_kernel_for_tpus_have_whole_lanes_and_are_charged(head_dim, in_cache):
    sizes = dict(vocab_size=64, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, mlp_size=48)
    config = config_from_dict(
        {
            "model": {**sizes, "head_dim": head_dim, "kernel": "pallas", "compute_dtype": "float32"},
            "sequence": {"length": 1024, "chunks": 2, "split": "ring", "ring_pass": "kv"},
            "mesh": {"data": 1, "pipe": 1, "seq": 2},
            "train": {"steps": 1},
        }
    )
    plan = make_plan(config, make_cluster(DEVICES["cpu"], 2))
    step = Step(plan, build_model(config, abstract=True), None, train=True)
    (shape,) = step._cache_shapes()
    assert shape == (2, 2, 512 + 256, in_cache)
    kept = {one.name: one.size_bytes for one in memory_of(plan, config).holders if one.name in ("kv", "kv_grad")}
    prefixes = step.program.prefixes
    slots = {"kv": prefixes.num_slots, "kv_grad": prefixes.num_grad_slots}
    assert kept == {name: 2 * 4 * count * math.prod(shape) for name, count in slots.items()}
    assert costs_of(plan, config).cache_share == in_cache / head_dim


@pytest.fixture
def cheap_attention(monkeypatch):
    """The hops are what counts, and tracing kernels takes minutes."""
    replace_attention(monkeypatch)


def test_ring_bytes_are_those_charged(plans, cheap_attention):
    seen = Counter()
    for config, plan, step in plans:
        costs, outline, kinds = costs_of(plan, config), plan.outline(), list(chain(*step.layers.groups))
        charged = 0
        for tick, of_tick, count in zip(outline.ticks, outline.tick_shapes, outline.tick_rounds, strict=True):
            if tick.is_compute and plan.ring > 1:
                charged += count * costs.ring_bytes(tick.op, of_tick.tokens // plan.mesh.seq, of_tick.reach)
        sent = 0
        for spec in unfold(step.program.items):
            if spec.op == "H" or plan.ring == 1:
                continue
            again = spec.op == "F" or (spec.stash.own is not None and spec.stash.own.recomputes)
            for name, shape in step.head_shapes.items():
                # A layer has no keys but its tail. If it runs again, for the layers behind it, it attends again.
                tail = step.layers.tails.get(name)
                runs_again = tail and plan.stash.inputs == "period" and len(step.layers.groups[0]) > 1
                passes = [("F", spec.passes.forward)] if again or runs_again else []
                passes += [("B", spec.passes.backward)] if spec.op == "B" else []
                for kind, which in passes:
                    heads = shape.num_heads, shape.num_kv_heads, shape.head_dim, np.dtype(step.model.dtype)
                    tokens = spec.tokens * plan.ulysses
                    bound = tail[1] + tokens if tail else spec.passes.bound
                    of_layer = sent_bytes(kind, which, plan.ring, tokens, bound, *heads, plan.kernel)
                    sent += kinds.count(name) / len(kinds) * of_layer
                    seen[kind, which, plan.kernel] += 1
        # A mean of two kinds is rounded; of one kind the bytes are whole.
        assert charged == (sent if len(step.blocks) == 1 else pytest.approx(sent, rel=1e-12)), plan.describe()
    assert len(seen) == 8 and min(seen.values()) > enough(plans, 50)


@pytest.mark.parametrize("kernel", ["cudnn", "blockwise"])
@pytest.mark.parametrize("kind", ["F", "B"])
def test_ring_bytes_grow_with_the_window_and_not_with_the_prefix(cheap_attention, kind, kernel):
    """Of a member 8 queries and the keys that their windows reach travel, 8 + window / 4, or all of a short prefix."""
    heads = dict(num_heads=4, num_kv_heads=2, head_dim=8, itemsize=2)
    found = {}
    for window in (32, 128, 8192):
        shape = AttentionShape(**heads, window=window // 4)
        planned = Ring(members=4, ulysses=1, length=4096, asked="kv", kernel=kernel, shape=shape)
        charged = planned.forward_bytes if kind == "F" else planned.backward_bytes
        for reach in (64, 1024, 4096):
            bound = planned.bound(reach)
            sent = sent_bytes(kind, "kv", 4, 8, bound, 4, 2, 8, np.dtype(jnp.bfloat16), kernel, window)
            assert charged("kv", 8, bound) == sent
            found[window, reach] = sent
    assert found[32, 64] == found[32, 1024] == found[32, 4096]
    assert found[128, 1024] == found[128, 4096] and found[128, 4096] * 16 == found[32, 4096] * 40
    assert found[8192, 4096] == 4 * found[8192, 1024] == 64 * found[8192, 64]


@pytest.mark.parametrize("passes", ["kv", "q"])
@pytest.mark.parametrize("kind", ["F", "B"])
def test_the_kernel_for_tpus_sends_a_hop_late_and_no_more(kind, passes):
    shape = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=8, itemsize=2)
    planned = Ring(members=4, ulysses=1, length=4096, asked="kv", kernel="pallas", shape=shape)
    charged = planned.forward_bytes if kind == "F" else planned.backward_bytes
    assert planned.bound(100) == planned.bound(512) == 128, "a bound is whole tiles"
    sent = sent_bytes(kind, passes, 4, 128, 256, 4, 2, 8, np.dtype(jnp.bfloat16), "pallas")
    assert charged(passes, 128, 256) == sent


def exchanged_bytes(kind: str, members: int, recompute: bool, dtype, kernel: str) -> float:
    """Returns the bytes that a device's four tokens send in one layer's all-to-alls, read from the jaxpr."""
    split = sequence.Split(ulysses=members, ring=1, passes="q", kernel=kernel)
    heads, kv_heads, dim, tokens = 8, 2, 16, 4
    q, k = jnp.zeros((tokens, heads, dim), dtype), jnp.zeros((tokens, kv_heads, dim), dtype)
    lse = jnp.zeros((tokens, heads), accumulator(dtype))
    resident = sequence.cache_heads(kv_heads, members), tokens * members, dim
    cache = sequence.Cache(*(jnp.zeros((1, 1, *resident), dtype),) * 2)
    sums = sequence.Cache(*(x.astype(accumulator(dtype)) for x in cache))
    tags = Tags(*(jnp.zeros((1, tokens * members), jnp.int32),) * 2)

    def run(q, k, lse):
        masks = ring.ring_tags(tags, tags, jnp.int32(0), kernel=kernel, passes="q", bound=None)
        chunk = sequence.Chunk(jnp.int32(0), jnp.int32(0), jnp.int32(tokens), masks)
        found = [sequence.forward(q, cache, chunk, 0, split)] if kind == "F" or recompute else []
        if kind == "F":
            return found, sequence.write_prefix(cache, k, k, chunk, 0, split)
        found.append(sequence.backward(sequence.Attended(q, q, lse, q), cache, sums, chunk, 0, split))
        return found, sequence.take_gradient(sums, chunk, 0, k, split)

    found = walk(jax.make_jaxpr(run, axis_env=[("ulysses", members), ("ring", 1)])(q, k, lse).jaxpr)
    sent = [nbytes([var.aval for var in item.eqn.invars]) for item in found if item.name == "all_to_all"]
    return sum(sent) * (members - 1) / members


@pytest.mark.parametrize(
    ("kernel", "dtype"), [("cudnn", "bfloat16"), ("blockwise", "bfloat16"), ("blockwise", "float64")]
)
@pytest.mark.parametrize("members", [2, 4])
@pytest.mark.parametrize("recompute", [False, True])
def test_exchanged_bytes_are_those_charged(cheap_attention, kernel, dtype, members, recompute):
    device = replace(DEVICES["cpu"], link_bytes_s=1.0)
    model = ModelConfig(vocab_size=40, hidden_size=128, num_layers=2, num_heads=8, num_kv_heads=2, mlp_size=8)
    with jax.enable_x64(True):
        costs = cost_model(
            model,
            make_cluster(device, members),
            StageShape(
                mesh=MeshShape(data=1, pipe=1, seq=members),
                ulysses=members,
                ring=1,
                layers=1,
                compute_bytes=jnp.dtype(dtype).itemsize,
                kernel=kernel,
                length=64,
            ),
            Recompute(attention=recompute),
        )
        for kind in "FB":
            sent = exchanged_bytes(kind, members, recompute, jnp.dtype(dtype), kernel)
            assert costs.transfer_s(kind, 0, 4 * members) == pytest.approx(sent, rel=1e-12)


def exchanged_states_bytes(kind: str, members: int, dtype) -> float:
    """Returns the bytes that a device's four tokens send to and from the mixer of a layer with the gated delta rule."""
    rng, tokens = np.random.default_rng(0), 4

    def array(*shape):
        return jnp.asarray(rng.normal(size=shape), dtype)

    wide = accumulator(dtype)
    heads = Heads(array(tokens, 2, 4), array(tokens, 2, 4), array(tokens, 8, 6), *(array(tokens, 8),) * 2)
    heads = heads._replace(g=heads.g.astype(wide), b=heads.b.astype(wide))
    operands, mixer = Operands(heads, Taps(array(2, 4, 3), array(2, 4, 3), array(8, 6, 3))), GatedDelta(reach=2)
    size = tokens * members
    place = TokenRun(jnp.zeros(size, jnp.int32), jnp.zeros(2, jnp.int32), jnp.int32(size))

    def run(operands):
        state = mixing.empty_state(mixer, operands, members)
        if kind == "F":
            return mixing.forward(mixer, operands, state, place, members)
        out, back = mixing.vjp(mixer, operands, state, place, members)
        return back(out, state)

    axes = [("ulysses", members), ("ring", 1)]
    found = walk(jax.make_jaxpr(run, axis_env=axes)(operands).jaxpr)
    sent = [nbytes([var.aval for var in item.eqn.invars]) for item in found if item.name == "all_to_all"]
    assert len(sent) == {"F": 3, "B": 6}[kind] - (wide == dtype) * {"F": 1, "B": 2}[kind]
    return sum(sent) * (members - 1) / members


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
@pytest.mark.parametrize("members", [2, 4])
def test_bytes_of_states_exchanged_are_those_charged(dtype, members):
    """Two key heads of four members are replicated; operands travel in a message for each dtype."""
    delta = dict(value_heads=8, key_heads=2, key_size=4, value_size=6, taps=3)
    model = ModelConfig(
        vocab_size=40, hidden_size=128, num_layers=2, num_heads=8, mlp_size=8, mixer="delta", delta=delta
    )
    with jax.enable_x64(True):
        dtype = jnp.dtype(dtype)
        work = state_work(model, members)
        for kind in "FB":
            charged = 4 * work.sent_bytes(kind, members, dtype.itemsize, jnp.dtype(accumulator(dtype)).itemsize)
            assert charged == pytest.approx(exchanged_states_bytes(kind, members, dtype), rel=1e-12)
