"""Saving and restoring: any mesh, retention, and checkpoints that are torn or corrupt."""

import json
import math
import shutil
import sys
from types import SimpleNamespace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sppo_jax.config import CheckpointConfig
from sppo_jax.train.checkpoints.fingerprint import fingerprints, leaf_name
from sppo_jax.train.checkpoints.read import (
    checkpoint_steps,
    find_checkpoint,
    load_params,
    other_folders,
    read_run,
    restore_newest,
)
from sppo_jax.train.checkpoints.save import Checkpoints, OneByOne
from sppo_jax.train.state import first_state, shardings_of, state_shapes, to_tree

OPTIMIZER = optax.adam(1e-2)
RUN = {"config": {}, "plan": {}, "data": {"sequence": 8}}


def make_params(seed=0):
    key = jax.random.key(seed)
    layers = {"up": nnx.Param(jax.random.normal(key, (4, 8, 16))), "scale": nnx.Param(jnp.ones((4, 8)))}
    return nnx.State({"embedding": nnx.Param(jax.random.normal(key, (24, 8))), "layers": layers})


def shapes_on(num_devices):
    mesh = Mesh(np.array(jax.devices()[:num_devices]), ("pipe",))

    def place(path, leaf):
        spec = PartitionSpec("pipe" if path[0].key == "layers" else None)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    return state_shapes(OPTIMIZER, jax.tree_util.tree_map_with_path(place, make_params()), mesh)


def make_state(num_devices=2, seed=0):
    params = make_params(seed)
    state = first_state(params, OPTIMIZER.init(params))._replace(step=jnp.int32(seed))
    return jax.device_put(state, shardings_of(shapes_on(num_devices)))


def save(directory, *steps, losses=None, **settings):
    checkpoints = Checkpoints(directory, CheckpointConfig(**settings), shapes_on(2))
    for step in steps:
        loss = (losses or {}).get(step)
        assert checkpoints.save(make_state(seed=step), RUN | {"step": step}, step=step, loss=loss)[1] is None
    assert checkpoints.close() is None


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Two checkpoints, of steps 3 and 5; not to be changed."""
    directory = tmp_path_factory.mktemp("saved") / "checkpoints"
    save(directory, 3, 5)
    return directory


@pytest.fixture
def copied(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "checkpoints")


@pytest.mark.parametrize("num_devices", [1, 2, 4])
def test_what_is_saved_comes_back_on_any_mesh(saved, num_devices):
    restored = restore_newest(saved, shapes_on(num_devices), pytest.fail)
    want = make_state(seed=5)
    chex.assert_trees_all_equal(restored.state, want)
    assert restored.run["step"] == 5 and restored.run["data"] == {"sequence": 8}
    up = restored.state.opt_state[0].mu["layers"]["up"].get_value()
    assert up.sharding.is_equivalent_to(shapes_on(num_devices).params["layers"]["up"].get_value().sharding, 3)
    assert len(up.sharding.device_set) == num_devices


def test_nothing_saved_is_nothing_restored(tmp_path):
    assert restore_newest(tmp_path / "checkpoints", shapes_on(1), pytest.fail) is None


@pytest.mark.parametrize(
    "settings, losses, kept",
    [
        (dict(keep_last=2), {}, [7, 8]),
        (dict(keep_last=1, keep_every=3), {}, [3, 6, 8]),
        (dict(keep_last=1, keep_best=2), {1: 2.0, 2: 1.0, 3: 5.0, 4: 1.5, 6: 3.0}, [2, 4, 8]),
        (dict(keep_last=1, keep_best=1), {1: math.nan, 2: 9.0, 3: -math.inf, 4: math.inf}, [2, 8]),
        (dict(keep_last=1, keep_best=2), {1: math.nan, 8: math.nan}, [8]),
    ],
)
def test_what_is_kept(tmp_path, settings, losses, kept):
    save(tmp_path, *range(1, 9), losses=losses, **settings)
    assert checkpoint_steps(tmp_path) == kept[::-1]


def test_the_best_of_an_older_version_stay_beside_those_of_one_pass(tmp_path):
    """Losses that were measured in whole batches do not compare; the lower one takes no other's place."""
    save(tmp_path, 1, 2, 3, losses={1: 0.5, 2: 0.1, 3: 0.7}, keep_last=9)
    for step in (1, 2, 3):
        written = tmp_path / str(step) / "metrics" / "metrics"
        assert json.loads(written.read_text()) == {
            "validation_loss": {1: 0.5, 2: 0.1, 3: 0.7}[step],
            "measured": "one pass",
        }
        written.write_text(json.dumps({"validation_loss": {1: 0.5, 2: 0.1, 3: 0.7}[step]}))
    save(tmp_path, 4, 5, 6, losses={4: 2.0, 5: 1.0, 6: 3.0}, keep_last=1, keep_best=1)
    assert checkpoint_steps(tmp_path) == [6, 5, 2]


def other_folder(directory, name, *inner):
    """Makes a folder that is no checkpoint, with something that must not be lost."""
    for part in inner or ("",):
        (directory / name / part).mkdir(parents=True, exist_ok=True)
    (directory / name / "mine.txt").write_text(name)


@pytest.mark.parametrize(
    ("name", "inner"),
    [("2024", ()), ("3", ()), ("0", ()), ("7", ("run",)), ("9", ("state",)), ("007", ("state", "run")), ("\u00b2", ())],
)
def test_folders_with_numbers_for_names_are_no_checkpoints(tmp_path, name, inner):
    other_folder(tmp_path, name, *inner)
    save(tmp_path, 5, 6, keep_last=2)
    save(tmp_path, 8, keep_last=2)
    assert checkpoint_steps(tmp_path) == [8, 6]
    assert (tmp_path / name / "mine.txt").read_text() == name
    assert find_checkpoint(tmp_path) == tmp_path / "8"
    assert restore_newest(tmp_path, shapes_on(1), pytest.fail).run["step"] == 8


def test_folders_with_names_of_steps_to_come_are_found(tmp_path):
    save(tmp_path, 5)
    for name in ("3", "7", "12", "13", "2024", "007", "12.broken-0"):
        other_folder(tmp_path, name)
    assert [path.name for path in other_folders(tmp_path, 12)] == ["12", "7"]
    assert other_folders(tmp_path / "absent", 12) == []


def test_what_a_killed_process_has_half_deleted_is_deleted(tmp_path):
    save(tmp_path, 5, 6, keep_last=2)
    shutil.rmtree(tmp_path / "5" / "run")
    save(tmp_path, 7, keep_last=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["6", "7"]


def test_what_is_best_is_known_after_a_restart(tmp_path):
    save(tmp_path, 1, 2, losses={1: 1.0, 2: 2.0}, keep_last=1, keep_best=1)
    save(tmp_path, 3, 4, losses={3: 3.0}, keep_last=1, keep_best=1)
    assert checkpoint_steps(tmp_path) == [4, 1]


def data_files(checkpoint):
    return [path for path in sorted(checkpoint.rglob("*")) if path.is_file()]


def harm_a_file(path, how):
    if how == "gone":
        path.unlink()
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "half":
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    else:
        raw = bytearray(path.read_bytes())
        raw[len(raw) // 2] ^= 0x10
        path.write_bytes(raw)


@pytest.mark.parametrize("how", ["gone", "empty", "half", "flipped"])
def test_no_harmed_file_goes_unnoticed(copied, saved, how):
    """Whatever happens to a file, either the checkpoint still gives every bit, or the one before is taken."""
    num_passed_over = 0
    for path in data_files(saved / "5"):
        shutil.rmtree(copied)
        shutil.copytree(saved, copied)
        harm_a_file(copied / "5" / path.relative_to(saved / "5"), how)
        notes = []
        restored = restore_newest(copied, shapes_on(2), notes.append)
        step = restored.run["step"]
        chex.assert_trees_all_equal(restored.state, make_state(seed=step))
        if step == 3:
            num_passed_over += 1
            assert len(notes) <= 1 and checkpoint_steps(copied) == [3]
            assert notes == [] or ("skipped the checkpoint" in notes[0] and (copied / "5.broken-0").is_dir())
    assert num_passed_over >= 3


def test_a_step_that_was_set_aside_can_be_saved_again(copied):
    harm_a_file(copied / "5" / "run" / "metadata", "half")
    restore_newest(copied, shapes_on(1), lambda note: None)
    save(copied, 5)
    assert restore_newest(copied, shapes_on(1), pytest.fail).run["step"] == 5


def test_numbers_that_are_not_those_saved_are_refused(copied):
    """As by a writer that copied an array while it changed: every file is whole, the numbers are not."""
    path = copied / "5" / "run" / "metadata"
    run = json.loads(path.read_text())
    run["fingerprints"]["params/embedding"] ^= 1
    path.write_text(json.dumps(run))
    notes = []
    assert restore_newest(copied, shapes_on(1), notes.append).run["step"] == 3
    assert "1 of" in notes[0] and "params/embedding" in notes[0]


def test_a_run_does_not_begin_anew_over_its_broken_checkpoints(copied):
    for step in (3, 5):
        harm_a_file(copied / str(step) / "run" / "metadata", "empty")
    with pytest.raises(ValueError, match="must be whole, got none of 2 .* move the checkpoints away to start over"):
        restore_newest(copied, shapes_on(1), pytest.fail)
    assert checkpoint_steps(copied) == [5, 3]


def test_a_blocking_save_copies_one_array_at_a_time_and_writes_the_same(saved, tmp_path, monkeypatch):
    events, shapes = [], shapes_on(2)
    for name in ("on_transfer_end", "on_write_end"):
        monkeypatch.setattr(OneByOne, name, lambda _, path, name=name: events.append((name, str(path))))
    checkpoints, state = Checkpoints(tmp_path, CheckpointConfig(), shapes, running=shapes), make_state(seed=5)
    state, problem = checkpoints.save(state, RUN | {"step": 5}, step=5)
    assert problem is None and checkpoint_steps(tmp_path) == [5]  # it is there, and nobody has waited
    kinds, paths = zip(*events, strict=True)
    assert kinds == ("on_transfer_end", "on_write_end") * len(jax.tree.leaves(state)) and paths[::2] == paths[1::2]
    assert checkpoints.close() is None
    restored, want = (restore_newest(path, shapes, pytest.fail) for path in (tmp_path, saved))
    for got in (state, restored.state):
        chex.assert_trees_all_equal(got, want.state)
    assert restored.run == want.run


def test_a_blocking_save_that_fails_gives_the_state_back(tmp_path, monkeypatch):
    shapes = shapes_on(2)
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(), shapes, running=shapes)

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(OneByOne, "on_transfer_end", full)
        state, problem = checkpoints.save(make_state(seed=2), RUN, step=2)
    assert "step 2 was not saved (No space left on device); the run continues" in problem
    chex.assert_trees_all_equal(state, make_state(seed=2))
    assert checkpoints.save(state, RUN, step=3)[1] is None and checkpoint_steps(tmp_path) == [3]
    assert checkpoints.close() is None


def test_a_save_that_fails_is_told_and_the_next_one_works(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(), shapes_on(2))
    assert checkpoints.save(make_state(seed=1), RUN, step=1)[1] is None
    assert checkpoints.finish() is None

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(type(checkpoints._manager), "save", full)
        assert "step 2 was not saved" in checkpoints.save(make_state(seed=2), RUN, step=2)[1]
    assert checkpoints.problem == "the checkpoint of step 2 was not saved (No space left on device)"
    assert checkpoints.save(make_state(seed=3), RUN | {"step": 3}, step=3)[1] is None
    assert checkpoints.close() is None and checkpoints.problem is None
    assert checkpoint_steps(tmp_path) == [3, 1]


def test_writes_of_a_failed_save_that_end_late_are_not_told(tmp_path, monkeypatch):
    """They report to a loop that is closed, each with a traceback; other errors are told as before."""
    told: list[str] = []
    monkeypatch.setattr(sys, "__unraisablehook__", lambda problem: told.append(str(problem.exc_value)))
    monkeypatch.setattr(sys, "unraisablehook", sys.__unraisablehook__)
    Checkpoints(tmp_path, CheckpointConfig(), shapes_on(2)).close()
    for text in ("Event loop is closed", "another fault"):
        sys.unraisablehook(SimpleNamespace(exc_value=RuntimeError(text)))
    assert told == ["another fault"]


def test_a_checkpoint_is_found_by_run_directory_or_path(saved):
    assert find_checkpoint(saved.parent) == find_checkpoint(saved) == find_checkpoint(saved / "5") == saved / "5"
    assert read_run(saved / "3")["step"] == 3
    with pytest.raises(ValueError, match="a run directory with a checkpoint, got .*nowhere; give another path"):
        find_checkpoint(saved / "nowhere")


def test_parameters_are_loaded_alone(saved):
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), make_params())
    chex.assert_trees_all_equal(load_params(saved / "5", shapes), make_params(5))
    other = nnx.State({"embedding": nnx.Param(jax.ShapeDtypeStruct((25, 8), jnp.float32))})
    with pytest.raises(ValueError, match="must hold the whole model"):
        load_params(saved / "5", other)


def test_the_tree_has_names_alone():
    tree = to_tree(make_state())
    assert set(tree) == {"step", "num_skipped", "num_skipped_in_row", "params", "opt_state"}
    assert set(tree["params"]["layers"]) == {"up", "scale"} and isinstance(tree["params"], dict)


def test_parameters_alone_are_checked_too(copied):
    """Every file is whole, a number is not what was saved."""
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), make_params())
    path = copied / "5" / "run" / "metadata"
    run = json.loads(path.read_text())
    run["fingerprints"]["params/layers/up"] ^= 1
    path.write_text(json.dumps(run))
    with pytest.raises(ValueError, match="must hold the whole model, .*e.g. params/layers/up"):
        load_params(copied / "5", shapes)


def test_fingerprints_of_the_first_version_are_read_too(copied):
    """They number the places of elements by the sizes of dims."""
    run_file = copied / "5" / "run" / "metadata"
    run = json.loads(run_file.read_text())
    tree = to_tree(make_state(seed=5))
    sizes = {leaf_name(path): leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
    first = fingerprints(tree, sizes)
    assert first["params/layers/up"] != run["fingerprints"]["params/layers/up"]
    del run["fingerprint_version"]
    run_file.write_text(json.dumps(run | {"fingerprints": first}))
    assert restore_newest(copied, shapes_on(1), pytest.fail).run["step"] == 5
    first["params/layers/up"] ^= 1
    run_file.write_text(json.dumps(run | {"fingerprints": first}))
    assert restore_newest(copied, shapes_on(1), lambda note: None).run["step"] == 3
