"""Layers lie where they run between steps, and in order in checkpoints."""

import math
import re
from collections import defaultdict

import jax
import numpy as np
import pytest
from exactness import quick_options, relative_errors
from flax import nnx
from tiny_runs import losses_of, make_config, quickly, run, write_documents

from sppo_jax.config import config_from_dict
from sppo_jax.fit.lowering import train_program
from sppo_jax.models import build_model
from sppo_jax.pipeline.params import storage
from sppo_jax.pipeline.params.layout import make_mesh
from sppo_jax.search.make import make_plan
from sppo_jax.train.checkpoints.fingerprint import stamp
from sppo_jax.train.checkpoints.layer_order import in_order, rearrange
from sppo_jax.train.checkpoints.read import load_params
from sppo_jax.train.evaluate_saved import evaluate_saved

COLLECTIVES = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
pytestmark = pytest.mark.xdist_group("train_layer_order")

SETTINGS = {
    "model": {
        "vocab_size": 40,
        "hidden_size": 24,
        "num_layers": 8,
        "num_heads": 2,
        "num_kv_heads": 2,
        "head_dim": 12,
        "mlp_size": 56,
        "compute_dtype": "float32",
    },
    "mesh": {"data": 2, "pipe": 2, "seq": 1},
    "schedule": {"interleave": 2},
    "sequence": {"length": 32, "chunks": 4, "per_step": 2},
    "stash": {"inputs": "keep", "attention": "keep"},
    "train": {"steps": 1, "devices": "cpu:4"},
}


def forms(dtype=np.float32):
    """Returns parameters with their layers in order, and their shapes in order and where they run."""
    config = config_from_dict(SETTINGS)
    plan, model = make_plan(config), build_model(config)
    mesh, params = make_mesh(plan), nnx.state(model, nnx.Param)
    params = jax.tree.map(lambda x: x.astype(dtype), params)
    saved, stored = (storage.stored_shapes(plan, params, mesh, in_order=ordered) for ordered in (True, False))
    return jax.device_put(storage.store(params, saved), jax.tree.map(lambda x: x.sharding, saved)), saved, stored


def test_layers_come_back_in_order_and_lie_where_they_run_between(x64):
    params, saved, stored = forms(np.float64)
    want = jax.tree.map(np.asarray, params)
    running = rearrange(params, stored)
    up, before = running["layers"]["up"].get_value(), want["layers"]["up"].get_value()
    assert up.shape == (2, 2, 2, 24, 56)
    for shard in up.addressable_shards:  # stage s has layers 2 s, 2 s + 1, 4 + 2 s and 5 + 2 s
        stage = shard.index[1].start
        rows = [2 * stage, 2 * stage + 1, 4 + 2 * stage, 5 + 2 * stage]
        np.testing.assert_array_equal(shard.data.reshape(4, *shard.data.shape[3:]), before[(rows, *shard.index[3:])])
    back = in_order(running, saved)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, back), want)
    assert back["layers"]["up"].get_value().sharding.memory_kind == "pinned_host"
    assert stamp(running, back) == stamp(want, want)
    swapped = jax.tree.map(lambda x: x[::-1] if x.ndim > 2 else x, want)
    assert stamp(swapped, swapped) != stamp(want, want)


def collective_shapes(text):
    """Returns the shapes of the results of all collectives in compiled HLO."""
    results = re.findall(rf"= (.*?) (?:{COLLECTIVES})(?:-start)?\(", text)
    return [tuple(map(int, dims.split(","))) for result in results for dims in re.findall(r"\[([\d,]+)\]", result)]


def compiled_text(config, plan, ordered, monkeypatch):
    with monkeypatch.context() as patched:
        if ordered:
            shapes = storage.stored_shapes
            patched.setattr(storage, "stored_shapes", lambda *args, **_: shapes(*args, in_order=True))
        program = train_program(config, plan, jax.devices()[:2], "cpu")
        return program.lower().compile(compiler_options=quick_options()).as_text()


@pytest.fixture(scope="module")
def two_groups():
    """A config and a plan with two groups of layers a stage, and the HLO of its step as it runs."""
    own = {"mesh": {"data": 1, "pipe": 2, "seq": 1}, "sequence": {"length": 32, "chunks": 2}}
    config = config_from_dict(SETTINGS | own | {"train": {"steps": 1, "devices": "cpu:2"}})
    plan = make_plan(config)
    assert plan.schedule.interleave == 2
    with pytest.MonkeyPatch.context() as unchanged:
        return config, plan, compiled_text(config, plan, False, unchanged)


def test_no_parameter_crosses_stages_in_a_step(two_groups, monkeypatch):
    """With one device a stage every collective is one between stages."""
    config, plan, running = two_groups

    def weights(shapes):
        return [dims for dims in shapes if {24, 56} <= set(dims) or {2, 12, 24} <= set(dims)]

    assert collective_shapes(running) and not weights(collective_shapes(running))
    assert weights(collective_shapes(compiled_text(config, plan, True, monkeypatch)))


def test_matrices_stay_where_they_lie_until_they_are_cast():
    """Otherwise XLA:GPU gathers [v, P, layers, ...] in float32 and casts then. XLA:CPU always gathers in float32."""
    config = config_from_dict(SETTINGS | {"model": SETTINGS["model"] | {"compute_dtype": "bfloat16"}})
    text = train_program(config, make_plan(config), jax.devices()[:4], "cpu").lower().as_text()
    held = re.findall(r"sdy.sharding_constraint %\d+ <@\w+, (.*?)> : tensor<([\dx]+)xbf16>", text)
    cut = {(dims, where.count('"pipe"'), where.count('"data"')) for where, dims in held}
    layers = ["24x56", "56x24", "24x2x12", "2x12x24"]
    assert cut == {(f"2x2x2x{dims}", 1, 1) for dims in layers} | {("40x24", 1, 1), ("24x40", 1, 1)}
    assert len(held) == 9


def test_compiled_ticks_without_ends_meet_the_vocabulary_nowhere(two_groups):
    found = defaultdict(set)
    for line in two_groups[2].splitlines():
        collective = re.search(rf" ({COLLECTIVES})(?:-start)?\(", line)
        if collective:
            # XLA may make one sum of several; it then names them all.
            for tick in re.findall(r"\b(forward_tick|backward_tick)(_without_ends)?/", line):
                found["".join(tick)].add(collective[1])
    assert found["forward_tick_without_ends"] == found["backward_tick_without_ends"] == {"collective-permute"}
    assert found["forward_tick"] == {"collective-permute", "all-reduce"}
    assert found["backward_tick"] == {"collective-permute", "all-reduce", "all-gather"}


PLACES = [
    {"mesh": {"data": 1, "pipe": 2, "seq": 2}, "schedule": {"name": "sppo", "interleave": 4, "wave": 2}},
    {"mesh": {"data": 1, "pipe": 1, "seq": 2}, "schedule": {"name": "breadth-first", "interleave": 4}},
    {
        "mesh": {"data": 1, "pipe": 1, "seq": 2},
        "schedule": {"name": "breadth-first", "interleave": 2},
        "optimizer": {"place": "host"},
    },
    {"mesh": {"data": 2, "pipe": 2, "seq": 1}, "schedule": {"interleave": 2}, "train": {"eval_sequences": 2}},
]


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_once")
def test_a_run_goes_on_with_other_groups_of_layers_and_waves(x64, tmp_path):
    """From depth-first to breadth-first, to the optimizer on the host, and back."""
    source = write_documents(tmp_path / "tokens.npy")

    def config_of(steps, mesh, schedule=None, train=None, optimizer=None):
        devices = f"cpu:{math.prod(mesh.values())}"
        return make_config(
            source,
            model={"compute_dtype": "float64", "num_layers": 8},
            mesh=mesh,
            schedule=schedule or {},
            sequence={"chunks": 4, "per_step": 2},
            stash={"inputs": "keep", "attention": "keep"},
            # The same however many steps there are.
            optimizer={"warmup_steps": 0, "min_lr_ratio": 1.0} | (optimizer or {}),
            train={"steps": steps, "log_every": 1, "eval_every": 0, "eval_sequences": 0, "devices": devices}
            | (train or {}),
        )

    alone = config_of(8, {"data": 1, "pipe": 1, "seq": 1})
    run(alone, tmp_path / "alone", quickly)
    for number, groups in enumerate(PLACES):
        there, result = run(config_of(2 * number + 2, **groups), tmp_path / "there", quickly)
    want, got = losses_of(tmp_path / "alone"), losses_of(tmp_path / "there")
    assert list(got) == list(want) == [*range(1, 9)]
    np.testing.assert_allclose(list(got.values()), list(want.values()), rtol=1e-9)
    shapes = nnx.state(build_model(alone, abstract=True), nnx.Param)
    first, second = (load_params(tmp_path / name / "checkpoints" / "8", shapes) for name in ("alone", "there"))
    assert max(relative_errors(second, first).values()) < 1e-6
    # The same checkpoint, read and validated where its layers run in groups.
    held_out = evaluate_saved(tmp_path / "there" / "checkpoints" / "8", there.config, there.plan)
    np.testing.assert_allclose(held_out.loss, result.validation.loss, rtol=1e-12)
