"""A whole run on simulated devices: files, learning, determinism, checkpoint."""

import json
import math

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx

from sppo_jax.config import config_from_dict, load_config
from sppo_jax.models import build_model, dense_value_and_grad
from sppo_jax.planner.make import make_plan
from sppo_jax.planner.plan import Plan
from sppo_jax.train.loop import step_metrics, train
from sppo_jax.train.run_dir import create_run_dir
from sppo_jax.train.setup import prepare
from sppo_jax.train.state import init_state

# One worker makes the run that all of these look at.
pytestmark = pytest.mark.xdist_group("train_loop")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Twenty documents that count upwards from different starts."""
    path = tmp_path_factory.mktemp("data") / "tokens.npy"
    documents = [np.append((start + np.arange(70)) % 23 + 1, 0) for start in range(20)]
    np.save(path, np.concatenate(documents).astype(np.uint16))
    return str(path)


def make_config(source, **groups):
    settings = {
        "model": {
            "vocab_size": 24,
            "hidden_size": 16,
            "num_layers": 4,
            "num_heads": 2,
            "mlp_size": 32,
            "init_scale": 0.2,
        },
        "data": {"source": source, "separator": 0, "validation_fraction": 0.2},
        "mesh": {"data": 2, "pipe": 2},
        "sequence": {"length": 64, "chunks": 4},
        "stash": {"inputs": "host", "attention": "host"},
        "optimizer": {"lr": 0.02, "warmup_steps": 2, "clip_norm": 0.5},
        "train": {"steps": 12, "devices": "cpu:4", "log_every": 4, "eval_every": 6, "eval_sequences": 3},
    }
    return config_from_dict({key: {**settings.get(key, {}), **groups.get(key, {})} for key in {**settings, **groups}})


@pytest.fixture(scope="module")
def run(source, tmp_path_factory):
    config = make_config(source)
    run_dir = tmp_path_factory.mktemp("run") / "first"
    experiment = prepare(config, make_plan(config))
    create_run_dir(run_dir, config, experiment.plan)
    return experiment, run_dir, train(experiment, run_dir)


def records(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_a_run_directory_is_complete(run):
    experiment, run_dir, validation = run
    assert load_config(run_dir / "config.yaml") == experiment.config
    assert Plan.from_json((run_dir / "plan.json").read_text()) == experiment.plan
    lines = records(run_dir)
    assert [line["step"] for line in lines] == [4, 6, 8, 12]
    for line in lines:
        assert {"loss", "tokens_per_s", "step_s", "mfu", "hbm_peak_bytes", "host_peak_bytes"} <= set(line)
        assert math.isfinite(line["loss"]) and line["tokens_per_s"] == pytest.approx(2 * 64 / line["step_s"])
    assert [line["step"] for line in lines if "validation_loss" in line] == [6, 12]
    assert lines[-1]["validation_loss"] == validation.loss


def test_the_loss_falls(run):
    _, run_dir, validation = run
    lines = records(run_dir)
    assert lines[-1]["loss"] < lines[0]["loss"] < 4
    assert validation.loss < 3


def test_steps_are_those_of_the_dense_model(run, source):
    """The logged losses are what plain AdamW on the dense model gives, step by step."""
    experiment, run_dir, validation = run
    config = experiment.config
    model = build_model(config)
    gradients = jax.jit(dense_value_and_grad(model))
    params = nnx.state(model, nnx.Param)
    opt_state = experiment.optimizer.init(params)
    loader = prepare(config, experiment.plan).loader
    losses = []
    for _ in range(config.train.steps):
        loss, grads = gradients(params, next(loader))
        with jax.numpy_dtype_promotion("standard"):
            updates, opt_state = experiment.optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        losses.append(float(loss))
    for line in records(run_dir):
        assert line["loss"] == pytest.approx(losses[line["step"] - 1], rel=2e-4)
    held_out = list(experiment.validation_batches())
    assert len(held_out) == 2
    counts = [(batch["targets"] >= 0).sum() for batch in held_out]
    expected = np.average([float(gradients(params, batch)[0]) for batch in held_out], weights=counts)
    assert validation.loss == pytest.approx(expected, rel=2e-4)


def test_the_checkpoint_holds_the_logical_state(run):
    experiment, run_dir, _ = run
    with ocp.CheckpointManager((run_dir / "checkpoints").resolve()) as manager:
        assert manager.latest_step() == 12
        args = ocp.args.Composite(state=ocp.args.StandardRestore(), run=ocp.args.JsonRestore())
        saved = manager.restore(12, args=args)
    shapes = nnx.to_pure_dict(nnx.state(build_model(experiment.config, abstract=True), nnx.Param))
    assert jax.tree.map(np.shape, saved.state["params"]) == jax.tree.map(np.shape, shapes)
    assert int(saved.state["step"]) == 12
    assert Plan.from_dict(saved.run["plan"]) == experiment.plan
    assert saved.run["loader"] == experiment.loader.state
    assert experiment.loader.state != prepare(experiment.config, experiment.plan).loader.state


def test_a_run_is_never_written_over(run):
    experiment, run_dir, _ = run
    before = {path.name: path.read_bytes() for path in run_dir.iterdir() if path.is_file()}
    with pytest.raises(ValueError, match="must hold no other run"):
        create_run_dir(run_dir, experiment.config, experiment.plan)
    assert {path.name: path.read_bytes() for path in run_dir.iterdir() if path.is_file()} == before


def test_state_is_made_where_it_belongs(run):
    experiment, _, _ = run
    state = init_state(experiment.config, experiment.optimizer, experiment.shardings)
    up = state.params["layers"]["up"].get_value()
    assert up.sharding.spec[0] == "pipe" and up.addressable_shards[0].data.shape[0] == 2
    eager = nnx.state(build_model(experiment.config), nnx.Param)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), state.params, eager)
    moments = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.shape == up.shape]
    assert len(moments) == 4 and all(leaf.sharding == up.sharding for leaf in moments)


@pytest.mark.parametrize("outputs", [{"loss": math.nan, "grad_norm": 1.0}, {"loss": 1.0, "grad_norm": math.inf}])
def test_numbers_that_are_not_finite_end_the_run(run, outputs):
    with pytest.raises(FloatingPointError, match="at step 3; lower optimizer.lr"):
        step_metrics(run[0], 3, outputs, 0.1)
