"""Runs that are stopped and go on: bit for bit on the same mesh, the same run on any other."""

import json
import os
import shutil
import signal
import time
from dataclasses import replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny_runs import at_batch, lines_of, losses_of, make_config, quickly, run, write_documents

from sppo_jax.cli import main
from sppo_jax.config import CheckpointConfig
from sppo_jax.models import build_model
from sppo_jax.search.make import make_plan
from sppo_jax.train import setup
from sppo_jax.train.checkpoints.read import checkpoint_steps, load_params, read_run
from sppo_jax.train.checkpoints.save import Checkpoints
from sppo_jax.train.loop import RunFailed, to_save
from sppo_jax.train.setup import begin, check_room, prepare

pytestmark = [pytest.mark.xdist_group("train_resume"), pytest.mark.usefixtures("compiled_once")]

OVER = ("sequence", "batch")
EVERY_STEP = {"train": {"steps": 10, "log_every": 1, "eval_every": 5}}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_documents(tmp_path_factory.mktemp("data") / "tokens.npy")


@pytest.fixture(scope="module")
def undisturbed(source, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("run") / "undisturbed"
    run(make_config(source, **EVERY_STEP), run_dir)
    return losses_of(run_dir)


def saving(experiment, saves):
    return replace(experiment, plan=replace(experiment.plan, saves=saves))


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)


def test_a_stopped_run_goes_on_bit_for_bit(source, undisturbed, tmp_path):
    config = make_config(source, **EVERY_STEP)
    _, result = run(config, tmp_path, at_batch(4, terminate))
    assert (result.stopped_by, result.step) == ("SIGTERM", 4)  # the step that was about to run
    assert checkpoint_steps(tmp_path / "checkpoints") == [result.step] and not (tmp_path / "finished").exists()
    assert list(losses_of(tmp_path)) == list(range(1, result.step + 1))

    _, again = run(config, tmp_path)
    assert again.step == 10 and again.stopped_by is None and (tmp_path / "finished").exists()
    assert losses_of(tmp_path) == undisturbed
    assert [line["kind"] for line in lines_of(tmp_path, "events")] == [
        "start",
        "save",
        "stop",
        "resume",
        "save",
        "stop",
    ]
    assert read_run(tmp_path / "checkpoints" / "10")["data"]["sequence"] == 20

    # All is done: the same command changes nothing.
    metrics = (tmp_path / "metrics.jsonl").read_bytes()
    _, third = run(config, tmp_path)
    assert third.step == 10 and (tmp_path / "metrics.jsonl").read_bytes() == metrics


@pytest.mark.slow
def test_a_stopped_run_with_layers_that_have_a_state_goes_on_bit_for_bit(source, tmp_path):
    config = make_config(source, **EVERY_STEP | {"model": {"layers": "2x(delta,full)"}})
    run(config, tmp_path / "whole")
    _, result = run(config, tmp_path / "stopped", at_batch(4, terminate))
    assert result.stopped_by == "SIGTERM" and result.step < 7
    run(config, tmp_path / "stopped")
    assert losses_of(tmp_path / "stopped") == losses_of(tmp_path / "whole")


@pytest.mark.parametrize("saves", [pytest.param("async", marks=pytest.mark.slow), "blocking"])
def test_steps_behind_the_last_checkpoint_are_done_again(source, undisturbed, tmp_path, saves):
    """As after a kill: metrics of steps 5 to 7 are there, and a torn line; the newest checkpoint is of step 4."""

    class Killed(BaseException):
        pass

    def kill():
        deadline = time.monotonic() + 60
        while not checkpoint_steps(tmp_path / "checkpoints") and time.monotonic() < deadline:
            time.sleep(0.1)  # a save beside the training
        raise Killed

    config = make_config(source, **EVERY_STEP, checkpoint={"every_steps": 4})
    with pytest.raises(Killed):
        run(config, tmp_path, lambda experiment: at_batch(8, kill)(saving(experiment, saves)))
    assert checkpoint_steps(tmp_path / "checkpoints")[0] == 4 and max(losses_of(tmp_path)) >= 6
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "lo')
    run(config, tmp_path)
    assert losses_of(tmp_path) == undisturbed
    assert [line["step"] for line in lines_of(tmp_path)] == list(range(1, 11))


OTHERS = [
    {"mesh": {"data": 1, "pipe": 2, "seq": 2}, "sequence": {"chunks": 8, "balance": "cost", "per_pipeline": 2}},
    {
        "mesh": {"data": 2, "pipe": 1, "seq": 2},
        "sequence": {"chunks": [32, 16, 16], "shapes": [18, 36], "split": "ring"},
    },
]


@pytest.mark.slow
@pytest.mark.parametrize("groups", OTHERS, ids=["pipe", "ring"])
def test_a_run_goes_on_on_another_mesh(x64, source, tmp_path, groups):
    wide = {**EVERY_STEP, "model": {"compute_dtype": "float64"}}
    wide["train"] = {"steps": 6, "log_every": 1, "eval_every": 0, "eval_sequences": 0}
    config = make_config(source, **wide)
    run(make_config(source, **wide, checkpoint={"every_steps": 3, "keep_last": 9}), tmp_path / "one", quickly)
    want = losses_of(tmp_path / "one")
    other = make_config(source, **{**wide, **groups})
    run_dir = shutil.copytree(tmp_path / "one", tmp_path / "other")
    shutil.rmtree(run_dir / "checkpoints" / "6")
    lines = (run_dir / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run_dir / "metrics.jsonl").write_text("".join(lines[:3]))  # what follows comes from this run
    run(other, run_dir, quickly)
    got = losses_of(run_dir)
    assert list(got) == list(want)
    np.testing.assert_allclose(list(got.values()), list(want.values()), rtol=1e-9)
    resumed = next(line for line in lines_of(run_dir, "events") if line["kind"] == "resume")
    assert resumed["step"] == 3 and "the plan's mesh, chunk_lengths" in resumed["text"]
    assert config.mesh != other.mesh


# Devices that divide neither each other's nor the model's sizes: parameters are stored with other zeros on each.
ODD = [
    {"mesh": {"data": 3, "pipe": 1, "seq": 1}, "train": {"devices": "cpu:3"}},
    {"mesh": {"data": 1, "pipe": 1, "seq": 5}, "sequence": {"split": "ring"}, "train": {"devices": "cpu:5"}},
    {"mesh": {"data": 3, "pipe": 1, "seq": 2}, "train": {"devices": "cpu:6"}},
]


@pytest.mark.slow
def test_a_run_goes_on_from_three_devices_to_five_to_six(x64, source, tmp_path):
    def config_of(steps, mesh, sequence=None, train=None):
        return make_config(
            source,
            model={"compute_dtype": "float64", "num_layers": 1},
            mesh=mesh,
            sequence={"length": 60, "chunks": 2, "per_step": 3, **(sequence or {})},
            stash={"inputs": "keep", "attention": "keep"},
            optimizer={"warmup_steps": 0, "min_lr_ratio": 1.0},  # the same however many steps there are
            train={"steps": steps, "log_every": 1, "eval_every": 0, "eval_sequences": 0, **(train or {})},
        )

    run(config_of(6, {"data": 1, "pipe": 1, "seq": 1}, train={"devices": "cpu:1"}), tmp_path / "alone", quickly)
    stored = set()
    for number, groups in enumerate(ODD):
        experiment, _ = run(config_of(2 * number + 2, **groups), tmp_path / "odd", quickly)
        stored.add(experiment.shapes.params["layers"]["up"].get_value().shape)
    assert len(stored) == 2
    want, got = losses_of(tmp_path / "alone"), losses_of(tmp_path / "odd")
    assert list(got) == list(want) == [1, 2, 3, 4, 5, 6]
    np.testing.assert_allclose(list(got.values()), list(want.values()), rtol=1e-9)
    shapes = nnx.state(build_model(experiment.config, abstract=True), nnx.Param)
    saved = [load_params(tmp_path / name / "checkpoints" / "6", shapes) for name in ("odd", "alone")]
    chex.assert_trees_all_close(*saved, rtol=1e-6, atol=1e-9)


@pytest.mark.slow
def test_a_run_stops_after_too_many_steps_that_are_not_finite(source, tmp_path):
    groups = {**EVERY_STEP, "optimizer": {"lr": 1e30, "warmup_steps": 0, "clip_norm": 1e30}}
    groups["train"] = {"steps": 30, "log_every": 1, "max_nonfinite": 3}
    with pytest.raises(RunFailed, match=r"of 3 such steps in a row \(train.max_nonfinite\); lower .*saved"):
        run(make_config(source, **groups), tmp_path, quickly)
    lines = lines_of(tmp_path)
    assert [line["grad_norm"] for line in lines[-3:]] == [None] * 3 and lines[-1]["skipped"] >= 3
    events = [line["kind"] for line in lines_of(tmp_path, "events")]
    assert events.count("skip") >= 3 and events[-1] == "stop"
    newest = checkpoint_steps(tmp_path / "checkpoints")[0]
    assert "must stay finite" in read_run(tmp_path / "checkpoints" / str(newest))["failure"]
    assert newest < 10


@pytest.fixture
def saved(source, tmp_path):
    """A run with a checkpoint of step 5, that had skipped steps, and never compiled one."""
    path = tmp_path / "tokens.npy"
    shutil.copy(source, path)
    config = make_config(str(path))
    experiment = prepare(config, make_plan(config))
    state = begin(experiment, tmp_path).state
    state = state._replace(num_skipped=jnp.int32(5), num_skipped_in_row=jnp.int32(3))
    checkpoints = Checkpoints(tmp_path / "checkpoints", config.checkpoint, experiment.saved_shapes)
    checkpoints.save(state, to_save(experiment, 5, None), step=5)
    checkpoints.close()
    return experiment, path


def test_what_goes_on_forgets_the_steps_skipped_in_a_row(saved, tmp_path):
    start = begin(saved[0], tmp_path)
    assert (start.step, int(start.state.num_skipped), int(start.state.num_skipped_in_row)) == (5, 5, 0)


def test_a_checkpoint_with_a_value_that_is_not_finite_is_passed_over(saved, tmp_path):
    """Versions that did not look at updates saved such."""
    experiment, _ = saved
    state = begin(experiment, tmp_path / "other").state
    params = nnx.from_flat_state(nnx.to_flat_state(state.params))
    params["final_norm"] = jax.tree.map(lambda x: x.at[0].set(jnp.nan), params["final_norm"])
    checkpoints = Checkpoints(tmp_path / "checkpoints", experiment.config.checkpoint, experiment.saved_shapes)
    checkpoints.save(state._replace(params=params), to_save(experiment, 6, None), step=6)
    checkpoints.close()
    start = begin(experiment, tmp_path)
    assert start.step == 5 and checkpoint_steps(tmp_path / "checkpoints") == [5]
    assert read_run(tmp_path / "checkpoints" / "5")["sequence_weights"] == "tokens"  # or each resume would say it
    kind, text = start.events[0]
    assert kind == "corrupt" and "final_norm/scale has a value that is not finite; renamed to 6.broken-0" in text


def test_a_run_whose_sequences_weighed_alike_says_that_they_no_longer_do():
    experts = {"count": 4, "chosen": 2, "size": 8}
    over = {over: make_config("a.npy", model={"experts": {**experts, "balance_over": over}}) for over in OVER}
    ((kind, text),) = setup.new_weights(over["sequence"], {"step": 5})
    assert kind == "warning" and "now weighs each packed sequence by its tokens without padding" in text
    for config, saved in (("sequence", {"sequence_weights": "tokens"}), ("batch", {"step": 5})):
        assert setup.new_weights(over[config], saved) == ()
    assert setup.new_weights(make_config("a.npy"), {"step": 5}) == ()


def test_a_run_whose_best_were_chosen_by_the_older_rule_says_so_once(saved, tmp_path):
    experiment, metadata = saved[0], tmp_path / "checkpoints" / "5" / "run" / "metadata"
    keeps = replace(experiment, config=replace(experiment.config, checkpoint=CheckpointConfig(keep_best=2)))
    assert [kind for kind, _ in begin(keeps, tmp_path).events] == ["resume"]
    metadata.write_text(
        json.dumps({key: value for key, value in read_run(metadata.parent.parent).items() if key != "validation"})
    )
    assert [kind for kind, _ in begin(experiment, tmp_path).events] == ["resume"]  # it keeps no best ones
    (_, (kind, text)) = begin(keeps, tmp_path).events
    assert kind == "warning" and "\n" not in text
    assert "chosen by one pass over the held-out sequences" in text and "checkpoint.keep_best=2 kept" in text


def test_a_checkpoint_of_the_other_placement_goes_on_and_says_so(source, tmp_path):
    order = {"mesh": {"data": 1, "pipe": 2, "seq": 2}, "schedule": {"name": "breadth-first", "interleave": 2}}
    runs = {}
    for place in ("device", "host"):
        config = make_config(source, **order, optimizer={"place": place})
        runs[place] = prepare(config, make_plan(config))
    for before, after in (("host", "device"), ("device", "host")):
        run_dir = tmp_path / before
        state = begin(runs[before], run_dir).state
        checkpoints = Checkpoints(run_dir / "checkpoints", runs[before].config.checkpoint, runs[before].saved_shapes)
        checkpoints.save(state, to_save(runs[before], 5, None), step=5)
        checkpoints.close()
        again = begin(runs[after], run_dir)
        assert f"; optimizer state moved from {before} to {after} memory" in again.events[-1][1]
        up = again.state.params["layers"]["up"].get_value()
        assert up.sharding.memory_kind == {"host": "pinned_host", "device": "device"}[after]
        chex.assert_trees_all_equal(*(jax.device_get(one.params) for one in (state, again.state)))
    # What is exported does not depend on where the optimizer waited.
    weights = []
    for place in runs:
        assert main(["convert", "to-hf", str(tmp_path / place), str(tmp_path / f"{place}_hf")]) == 0
        weights.append((tmp_path / f"{place}_hf" / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]


def test_other_documents_under_the_same_name_are_refused(saved, tmp_path):
    experiment, path = saved
    np.save(path, np.load(path)[::-1])
    changed = prepare(experiment.config, experiment.plan)
    with pytest.raises(ValueError, match="must be those with which the run started"):
        begin(changed, tmp_path)


def test_no_room_for_a_checkpoint_is_refused(saved, tmp_path, monkeypatch):
    check_room(saved[0], tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000})())
    with pytest.raises(ValueError, match="must have space for two checkpoints, .* set checkpoint.dir"):
        check_room(saved[0], tmp_path)
