"""Bad run directories, checkpoints and Hugging Face folders: refused in one line, or survived with a warning."""

import errno
import fcntl
import os
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from bad_inputs import both, check_refused, copy, cut, edit_json, folder, link, run, text, write_place
from hf_folders import write_folder

from sppo_jax.files.whole import file_system_of

GO_ON = "train c.yaml --run-dir run"
METADATA = "run/checkpoints/{}/run/metadata"


pytestmark = pytest.mark.xdist_group("bad_runs")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A directory with a config, documents, a run of two steps with a checkpoint of each, and a model's folder."""
    from sppo_jax.cli import main

    place = tmp_path_factory.mktemp("trained")
    jax.devices()  # before the commands ask for fewer
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        for name in ("JAX_PLATFORMS", "XLA_FLAGS"):
            patch.setenv(name, os.environ[name])
        write_place(place)
        write_folder(place / "hf")
        assert main(["train", "c.yaml", "--run-dir", "run", "checkpoint.every_steps=1"]) == 0
    return place


@pytest.fixture
def place(trained, tmp_path, monkeypatch):
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    for name in ("JAX_PLATFORMS", "XLA_FLAGS"):
        monkeypatch.setenv(name, os.environ[name])
    return tmp_path


def tear(step):
    """Returns a function that empties the array files of a checkpoint."""

    def write():
        for path in Path(f"run/checkpoints/{step}/state").rglob("*"):
            if path.is_file():
                path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])

    return write


def unlink(name):
    return lambda: Path(name).unlink()


REFUSED = {
    "a run dir that is a file": ("train c.yaml --run-dir c.yaml", "got the file c.yaml; choose another", None),
    "a run dir under a file": ("train c.yaml --run-dir c.yaml/x", "must be writable, got c.yaml/x", None),
    "a run dir that cannot be made": ("train c.yaml --run-dir /proc/x", "must be writable, got /proc/x", None),
    "another model": (
        f"{GO_ON} model.mlp_size=64",
        "model.mlp_size must stay 32, the value in run/config.yaml, got 64",
        None,
    ),
    "another length": (
        f"{GO_ON} sequence.length=32",
        "sequence.length must stay 64, the value in run/config.yaml",
        None,
    ),
    "other data": (f"{GO_ON} data.seed=1", "data.seed must stay 0, the value in run/config.yaml", None),
    "the config of a newer version": (
        GO_ON,
        "speculation is not a setting",
        text("run/config.yaml", "speculation: 3\n"),
    ),
    "a torn config.yaml": (GO_ON, "config.yaml", text("run/config.yaml", "model: {")),
    "a config for a run dir": (
        "train own/config.yaml --run-dir own",
        "must hold no file that the run replaces, got own",
        both(folder("own"), copy("c.yaml", "own/config.yaml")),
    ),
    "a config beside a run dir": (
        "train c.yaml --run-dir own",
        "with a config.yaml and no run",
        both(folder("own"), copy("c.yaml", "own/config.yaml")),
    ),
    "a converted model's config": (
        "train own/config.yaml --run-dir own",
        "with a config.yaml and no run",
        both(copy("run/checkpoints", "own"), copy("c.yaml", "own/config.yaml")),
    ),
    "a year among the checkpoints": (
        f"{GO_ON} train.steps=3000",
        "must leave the names of steps free, got run/checkpoints/2024",
        folder("run/checkpoints/2024/mine"),
    ),
    "a report over the run's config": ("report run --out run/config.yaml", "reads or writes it otherwise", None),
    "a report over the run's plan": ("report run --out ./run/../run/plan.json", "reads or writes it otherwise", None),
    "a report over the run's books": ("report run --out run/metrics.jsonl", "reads or writes it otherwise", None),
    "a report over a link to it": ("report run --out x.html", "otherwise", link("run/config.yaml", "x.html")),
    "a report over another file": ("report run --out c.yaml", "it holds something else, which would be lost", None),
    "a run of another kind": (GO_ON, "metrics.jsonl and no config.yaml", unlink("run/config.yaml")),
    "every checkpoint torn": (GO_ON, "must be whole, got none of 2", both(tear(1), tear(2))),
    "an evaluation of no config": ("eval run", "must hold the config", edit_json(METADATA.format(2), config=None)),
    "an evaluation of torn JSON": ("eval run", "must say which run wrote", cut(METADATA.format(2), 30)),
    "an evaluation of a torn state": ("eval run", "must hold the whole model", tear(2)),
    "an evaluation of another model": ("eval run model.mlp_size=64", "model.mlp_size must be that of", None),
    "a report in no directory": ("report run --out a/b.html", "--out must name a file that can be written", None),
    "no config.json": ("convert from-hf hf out", "with config.json", unlink("hf/config.json")),
    "a torn config.json": ("convert from-hf hf out", "must be JSON", text("hf/config.json", "{")),
    "another architecture": ("convert from-hf hf out", "got 'gemma'", edit_json("hf/config.json", model_type="gemma")),
    "a missing size": (
        "convert from-hf hf out",
        "must have the key hidden_size",
        edit_json("hf/config.json", hidden_size=None),
    ),
    "a size of another type": ("convert from-hf hf out", "hidden_size", edit_json("hf/config.json", hidden_size="x")),
    "truncated weights": ("convert from-hf hf out", "must be whole safetensors", cut("hf/model.safetensors", 50)),
    "no weights": ("convert from-hf hf out", "must have model.safetensors", unlink("hf/model.safetensors")),
    "a torn tokenizer": ("convert from-hf hf out", "must be a readable tokenizer", text("hf/tokenizer.json", "{}")),
    "from nothing": ("convert from-hf absent out", "must be a local folder", None),
    "a folder that is not empty": ("convert from-hf hf run", "must be new or empty, got run", None),
    "an export of nothing": ("convert to-hf absent out", "a checkpoint or a run directory", None),
    "an export into a folder": ("convert to-hf run hf", "must be new or empty, got hf", None),
    "an export of torn arrays": ("convert to-hf run out", "must hold the whole model", tear(2)),
    "an export like nothing": ("convert to-hf run out --like absent", "must be a local folder", None),
}


@pytest.mark.parametrize(("words", "expected", "prepare"), REFUSED.values(), ids=REFUSED)
def test_refused(place, capfd, words, expected, prepare):
    if prepare:
        prepare()
    check_refused(words, expected, place, capfd)


MOVED = {
    "a file": (lambda: os.renames("tokens.npy", "data/tokens.npy"), "data/tokens.npy"),
    "by a link": (lambda: os.symlink("tokens.npy", "linked.npy"), "linked.npy"),
    "a whole path": (lambda: None, "{place}/tokens.npy"),
}


@pytest.mark.parametrize("kind", MOVED)
def test_data_that_moved_are_known_by_their_fingerprint(place, capfd, kind):
    move, source = MOVED[kind]
    move()
    code, out, _, lines = run(f"{GO_ON} data.source={source.format(place=place)}", capfd)
    assert (code, lines) == (0, [])
    assert "all 2 steps were done" in out and "changed since the run began: data.source" in out
    assert f"source: {source.format(place=place)}" in Path("run/config.yaml").read_text()


def test_a_run_that_died_after_its_last_save_is_marked_as_finished(place, capfd):
    Path("run/finished").unlink(missing_ok=True)
    assert run(GO_ON, capfd)[0] == 0
    assert Path("run/finished").read_text() == "2 steps; saved run/checkpoints/2\n"


def test_other_data_under_another_name_are_refused(place, capfd):
    np.save("other.npy", (np.arange(1000) % 22).astype(np.uint16))
    check_refused(f"{GO_ON} data.source=other.npy", "got other documents (fingerprint", place, capfd)


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
@pytest.mark.parametrize("words", [GO_ON, "report run"])
def test_a_file_system_without_locks_is_told_of(place, capfd, monkeypatch, number, words):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("sppo_jax.files.locks.fcntl.flock", refuse)
    code, _, warned, lines = run(words, capfd)
    assert code == 0 and not lines
    where = f"got run on {file_system_of(Path('run'))} without"
    told = f"a file system with locks, {where}; start no second run with"
    assert sum(told in line for line in warned) == (words == GO_ON)


def test_a_run_that_another_holds(place, capfd):
    with Path("run/lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        check_refused(GO_ON, "must have one run at a time", place, capfd)


# What is begun is done, so that a run that goes on has nothing to compile.
SURVIVED = {
    "torn metrics": (GO_ON, "all 2 steps were done", cut("run/metrics.jsonl", 9)),
    "no plan": (GO_ON, "all 2 steps were done", unlink("run/plan.json")),
    "a plan of a newer version": (GO_ON, "all 2 steps were done", text("run/plan.json", '{"schema_version": 99}')),
    "a report of a plan of a newer version": (
        "report run",
        "report.html",
        text("run/plan.json", '{"schema_version": 99}'),
    ),
    "a report of torn metrics": ("report run", "report.html", cut("run/metrics.jsonl", 9)),
    "a report of no plan": ("report run", "report.html", text("run/plan.json", "{")),
}


@pytest.mark.parametrize(("words", "expected", "prepare"), SURVIVED.values(), ids=SURVIVED)
def test_survived(place, capfd, words, expected, prepare):
    prepare()
    code, out, _, lines = run(words, capfd)
    assert code == 0 and expected in out and not lines
