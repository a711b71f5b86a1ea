"""A whole run on simulated devices: files, learning, determinism, checkpoint."""

import math
import time
from contextlib import nullcontext
from itertools import islice
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from tiny_runs import lines_of, make_config, one_layer, quickly, run, write_documents

from sppo_jax.config import config_from_dict, load_config
from sppo_jax.data.loader import Loader
from sppo_jax.models import build_model, dense_value_and_grad
from sppo_jax.plan.plan import Plan
from sppo_jax.train import loop
from sppo_jax.train.checkpoints.read import find_checkpoint, load_params, read_run
from sppo_jax.train.loop import RunFailed
from sppo_jax.train.metrics.record import Record
from sppo_jax.train.setup import prepare
from sppo_jax.train.state import init_state

# One worker makes the run that all of these look at.
pytestmark = [pytest.mark.xdist_group("train_loop"), pytest.mark.usefixtures("compiled_once")]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_documents(tmp_path_factory.mktemp("data") / "tokens.npy")


@pytest.fixture(scope="module")
def finished(source, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("run") / "first"
    experiment, result = run(make_config(source), run_dir)
    return experiment, run_dir, result.validation


def test_a_run_directory_is_complete(finished):
    experiment, run_dir, validation = finished
    assert load_config(run_dir / "config.yaml") == experiment.config
    assert Plan.from_json((run_dir / "plan.json").read_text()) == experiment.plan
    lines = lines_of(run_dir)
    assert [line["step"] for line in lines] == [4, 6, 8, 12]
    for line in lines:
        assert {"loss", "tokens_per_s", "places_per_s", "step_s", "mfu", "hbm_peak_bytes", "host_peak_bytes"} <= set(
            line
        )
        assert math.isfinite(line["loss"]) and line["places_per_s"] == pytest.approx(2 * 64 / line["step_s"])
    loader, counts = prepare(experiment.config, experiment.plan).loader, []
    for _ in range(12):
        counts.append(int((next(loader)["targets"] >= 0).sum()))
    for line, before in zip(lines, [0, *(line["step"] for line in lines)], strict=False):
        trained = sum(counts[before : line["step"]]) / (line["step"] - before)
        assert line["tokens_per_s"] == pytest.approx(trained / line["step_s"])
    assert sum(counts) < 12 * 2 * 64
    assert [line["step"] for line in lines if "validation_loss" in line] == [6, 12]
    assert lines[-1]["validation_loss"] == validation.loss


def test_the_last_validation_measures_the_gain_by_context(source, tmp_path):
    config = make_config(source, **one_layer(train={"steps": 4, "eval_every": 2, "eval_context": True}))
    _, result = run(config, tmp_path / "run", quickly)
    lines = {line["step"]: line for line in lines_of(tmp_path / "run") if "validation_loss" in line}
    assert "gain_by_context" not in lines[2]
    (gain,) = lines[4]["gain_by_context"]
    assert gain["beyond"] == 64 // 8 and 0 < gain["num_targets"] < result.validation.num_targets
    assert gain["gain"] == gain["cut"] - gain["whole"] == result.validation.gains[0].gain


def test_the_loss_falls(finished):
    _, run_dir, validation = finished
    lines = lines_of(run_dir)
    assert lines[-1]["loss"] < lines[0]["loss"] < 4
    assert validation.loss < 3


def test_steps_are_those_of_the_dense_model(finished, source):
    """The logged losses are what plain AdamW on the dense model gives, step by step."""
    experiment, run_dir, validation = finished
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
    for line in lines_of(run_dir):
        assert line["loss"] == pytest.approx(losses[line["step"] - 1], rel=2e-4)
    # Three sequences are asked for, in batches of two.
    held_out = list(islice(Loader(experiment.validation, num_sequences=1, local_rows=range(1)), 3))
    held_out = [{name: np.repeat(value, 2, 0) for name, value in batch.items()} for batch in held_out]
    counts = [(batch["targets"] >= 0).sum() // 2 for batch in held_out]
    expected = np.average([float(gradients(params, batch)[0]) for batch in held_out], weights=counts)
    assert validation.loss == pytest.approx(expected, rel=2e-4)
    assert (validation.num_targets, validation.num_sequences) == (sum(counts), 3)


def test_the_checkpoint_holds_the_logical_state(finished):
    experiment, run_dir, _ = finished
    checkpoint = find_checkpoint(run_dir)
    assert checkpoint == run_dir / "checkpoints" / "12"
    saved = read_run(checkpoint)
    assert config_from_dict(saved["config"]) == experiment.config
    assert Plan.from_dict(saved["plan"]) == experiment.plan
    assert saved["step"] == 12 and saved["data"]["sequence"] == 24 and saved["failure"] is None
    shapes = nnx.state(build_model(experiment.config, abstract=True), nnx.Param)
    params = load_params(checkpoint, shapes)
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(lambda leaf: leaf.shape, shapes)


def test_the_run_says_how_it_went(finished):
    _, run_dir, _ = finished
    assert [line["kind"] for line in lines_of(run_dir, "events")] == ["start", "save", "stop"]
    assert (run_dir / "finished").read_text().startswith("12 steps")


def test_a_validation_that_is_not_finite_is_said_and_never_best(source, tmp_path):
    """The parameters stay finite and the steps are skipped: the run ends by its own rule, with its own advice."""
    groups = {
        "train": {"eval_every": 2, "max_nonfinite": 5},
        "optimizer": {"lr": 6e17, "warmup_steps": 0},
        "checkpoint": {"keep_best": 1, "keep_last": 1},
    }
    config = make_config(source, **one_layer(**groups))
    with pytest.raises(RunFailed, match=r"train.max_nonfinite\); lower optimizer.lr"):
        run(config, tmp_path, quickly)
    lines, events = lines_of(tmp_path), lines_of(tmp_path, "events")
    assert [line["step"] for line in lines if "validation_loss" in line] == [2, 4, 6]
    assert all(line["validation_loss"] is None for line in lines if "validation_loss" in line)
    said = [line["text"] for line in events if line["kind"] == "warning"]
    assert said[0].startswith("step 2: the validation loss is not finite; lower optimizer.lr")
    assert events[-1]["kind"] == "stop" and "the last of 5 such steps" in events[-1]["text"]
    assert [path.name for path in (tmp_path / "checkpoints").glob("*/metrics")] == []


class Saved:
    """Checkpoints of which the newest save failed or not, at the last step or as the run closes."""

    directory, steps = Path("checkpoints"), [2]

    def __init__(self, problem, at_close):
        self.problem, self._at_close = problem, at_close

    def close(self):
        return self.problem if self._at_close else None


@pytest.mark.parametrize("at_close", [False, True])
@pytest.mark.parametrize("stopped_by", [None, "SIGTERM"])
@pytest.mark.parametrize("problem", [None, "the checkpoint of step 4 was not saved (No space left on device)"])
def test_a_run_is_finished_only_if_its_last_save_succeeded(source, tmp_path, problem, stopped_by, at_close):
    record = Record(tmp_path, make_config(source), step=0)
    with pytest.raises(RunFailed, match="No space left") if problem else nullcontext():
        loop._end(record, Saved(problem, at_close), 4, None, stopped_by)
    record.close()
    assert (tmp_path / "finished").exists() == (problem is None and stopped_by is None)
    text = lines_of(tmp_path, "events")[-1]["text"]
    assert (f"rerun the same command with --run-dir {tmp_path} to resume" in text) == bool(problem or stopped_by)


@pytest.mark.slow
def test_each_step_is_charged_its_own_time(source, tmp_path, monkeypatch):
    """Also the last one and those before a save, which nothing follows that would wait for them."""
    ready = jax.block_until_ready
    monkeypatch.setattr(jax, "block_until_ready", lambda x: (time.sleep(0.05), ready(x))[1])
    groups = {"train": {"steps": 5, "log_every": 1, "eval_sequences": 0}, "checkpoint": {"every_steps": 2}}
    run(make_config(source, **groups), tmp_path)
    assert [line["step"] for line in lines_of(tmp_path) if line["step_s"] >= 0.05] == [1, 2, 3, 4, 5]


def test_state_is_made_where_it_belongs(finished):
    experiment, _, _ = finished
    state = init_state(experiment.config, experiment.optimizer, experiment.shapes)
    up = state.params["layers"]["up"].get_value()
    assert up.sharding.spec[0] == "pipe" and up.addressable_shards[0].data.shape[0] == 2
    eager = nnx.state(build_model(experiment.config), nnx.Param)
    chex.assert_trees_all_close(state.params, eager, rtol=1e-6)
    moments = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.shape == up.shape]
    assert len(moments) == 4 and all(leaf.sharding == up.sharding for leaf in moments)
