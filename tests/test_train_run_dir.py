"""The directory of a run: one run at a time, continued only by its own config, whole at every moment."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_runs import make_config

from sppo_jax.train.checkpoints.run_dir import changes_since, claimed, forget_after, write_run

ENV = {**os.environ, "PYTHONPATH": ":".join(sys.path)}


class NoPlan:
    def to_json(self):
        return "{}"


def test_a_directory_has_one_run_at_a_time(tmp_path):
    with claimed(tmp_path / "run"):
        script = (
            "import sys; from pathlib import Path; from sppo_jax.train.checkpoints.run_dir import claimed\n"
            "with claimed(Path(sys.argv[1])): print('claimed')"
        )
        words = [sys.executable, "-c", script, str(tmp_path / "run")]
        other = subprocess.run(words, capture_output=True, text=True, env=ENV)
        assert f"held by process {os.getpid()} on" in other.stderr and other.returncode == 1
    with claimed(tmp_path / "run"):
        pass


@pytest.mark.parametrize(
    ("number", "held"),
    [
        (errno.EAGAIN, True),
        (errno.EACCES, True),
        (errno.ENOSYS, False),
        (errno.ENOLCK, False),
        (errno.EOPNOTSUPP, False),
    ],
)
def test_only_some_answers_say_that_a_directory_is_held(tmp_path, monkeypatch, number, held):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("sppo_jax.files.locks.fcntl.flock", refuse)
    if held:
        with pytest.raises(ValueError, match="must have one run at a time"), claimed(tmp_path / "run"):
            pass
    else:
        with (
            pytest.warns(UserWarning, match="with locks, got .* on [a-z0-9.]+ without"),
            claimed(tmp_path / "run"),
        ):
            assert str(os.getpid()) in (tmp_path / "run" / "lock").read_text()


def test_a_dead_process_holds_nothing(tmp_path):
    script = (
        "import os, sys; from pathlib import Path; from sppo_jax.train.checkpoints.run_dir import claimed\n"
        "with claimed(Path(sys.argv[1])): os.kill(os.getpid(), 9)"
    )
    words = [sys.executable, "-c", script, str(tmp_path)]
    assert subprocess.run(words, env=ENV).returncode == -9
    with claimed(tmp_path):
        pass


def test_a_directory_that_cannot_be_one_is_refused(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="must be a directory, got the file"), claimed(tmp_path / "file"):
        pass
    with pytest.raises(ValueError, match="must be writable, got .*Not a directory"), claimed(tmp_path / "file" / "run"):
        pass

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_bytes", full)
    with pytest.raises(ValueError, match="No space left on device"), claimed(tmp_path / "run"):
        pass


@pytest.mark.parametrize("broken", ["append", "silent append", "rename"])
def test_a_file_system_without_appends_or_renames_is_refused(tmp_path, monkeypatch, broken):
    """As a bucket that is mounted answers; nothing stays of the attempt."""

    def refuse(*_):
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    real = Path.open

    def opened(path, mode="r", *rest, **kwargs):
        if mode == "ab":
            return real(path, "wb") if broken == "silent append" else refuse()
        return real(path, mode, *rest, **kwargs)

    if broken == "rename":
        monkeypatch.setattr("pathlib.Path.replace", refuse)
    else:
        monkeypatch.setattr("pathlib.Path.open", opened)
    monkeypatch.setattr("sppo_jax.train.checkpoints.run_dir.file_system_of", lambda path: "fuse.s3fs")
    with (
        pytest.raises(ValueError, match=r"appends and renames, got .*run on fuse.s3fs \(.*\); choose another --run"),
        claimed(tmp_path / "run"),
    ):
        pass
    assert list((tmp_path / "run").iterdir()) == []


@pytest.mark.parametrize(
    "groups, answer",
    [
        ({}, []),
        ({"mesh": {"data": 1, "pipe": 4}}, ["mesh.data: 2 -> 1", "mesh.pipe: 2 -> 4"]),
        ({"sequence": {"length": 64, "chunks": 8}}, ["sequence.chunks: 4 -> 8"]),
        ({"optimizer": {"lr": 0.01}}, ["optimizer.lr: 0.02 -> 0.01"]),
        ({"model": {"kernel": "blockwise"}}, ["model.kernel: auto -> blockwise"]),
        (
            {"model": {"mlp_size": 64}},
            "model.mlp_size must stay 32, the value in .*config.yaml, got 64; set model.mlp_size=32",
        ),
        ({"model": {"rope": {"theta": 5e5}}}, "model.rope.theta must stay"),
        ({"data": {"seed": 1}}, "data.seed must stay"),
        ({"sequence": {"length": 128, "chunks": 4}}, "sequence.length must stay"),
        # The fingerprint says whether the data is the same.
        (
            {"data": {"ignore_keys": ["loss"], "format": "tokens"}},
            ["data.format: auto -> tokens", "data.ignore_keys: () -> ('loss',)"],
        ),
    ],
)
def test_only_the_same_model_and_data_go_on(tmp_path, groups, answer):
    write_run(tmp_path, make_config("tokens.npy"), NoPlan())
    if isinstance(answer, str):
        with pytest.raises(ValueError, match=answer):
            changes_since(tmp_path, make_config("tokens.npy", **groups))
    else:
        assert changes_since(tmp_path, make_config("tokens.npy", **groups)) == answer


def test_a_directory_of_someone_else_is_refused(tmp_path):
    assert changes_since(tmp_path / "new", make_config("tokens.npy")) == []
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(ValueError, match="must hold no other run"):
        changes_since(tmp_path, make_config("tokens.npy"))


def test_lines_of_steps_to_come_and_torn_lines_are_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert forget_after(path, 3) == 0
    lines = [json.dumps({"step": step, "loss": step / 2}) for step in range(1, 6)]
    path.write_text("\n".join(lines) + '\n{"step": 3, "lo')
    assert forget_after(path, 3) == 3
    assert path.read_text().splitlines() == lines[:3]
    assert forget_after(path, 3) == 0
