"""The command line: exit codes, one-line errors, nothing half-written, jax only where it is needed."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import yaml

from sppo_jax.cli import main
from sppo_jax.planner.plan import Plan

SETTINGS = {
    "model": {"vocab_size": 24, "hidden_size": 16, "num_layers": 4, "num_heads": 2, "mlp_size": 32},
    "data": {"source": "tokens.npy", "validation_fraction": 0.2},
    "mesh": {"pipe": 2},
    "sequence": {"length": 64, "chunks": 4},
    "train": {"steps": 2, "devices": "cpu:2"},
}


@pytest.fixture
def config(tmp_path, monkeypatch):
    """A config beside its data, in an empty working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAX_PLATFORMS", os.environ["JAX_PLATFORMS"])
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"])
    np.save("tokens.npy", (np.arange(1000) % 23).astype(np.uint16))
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(SETTINGS))
    return "tiny.yaml"


def test_plan_prints_text_or_json(config, capsys):
    assert main(["plan", config]) == 0
    text = capsys.readouterr().out
    assert "F0.0" in text and "mesh" in text
    assert main(["plan", config, "--json", "sequence.chunks=8"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["chunk_lengths"] == [8] * 8 and plan["mesh"] == {"data": 1, "pipe": 2, "seq": 1}
    assert {"sequence_kind", "schedule", "stash", "predicted", "reasons"} <= set(plan)


def test_plan_imports_no_jax(config):
    code = f"import sys; from sppo_jax.cli import main; sys.exit(main(['plan', '{config}']) or 'jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode == 0


WRONG = {
    "no command": ([], "sppo: the following arguments are required: command; see sppo --help"),
    "unknown command": (["trian"], "sppo: argument command: invalid choice: 'trian'"),
    "no config": (["train"], "sppo train: the following arguments are required: CONFIG.yaml"),
    "unknown option": (["plan", "tiny.yaml", "--jsn"], "sppo plan: unrecognized arguments: --jsn"),
    "no such file": (["train", "none.yaml"], "a config must be a readable YAML file, got none.yaml"),
    "unknown key": (["train", "tiny.yaml", "train.step=3"], "train.step is no setting; the nearest is train.steps"),
    "wrong value": (["plan", "tiny.yaml", "mesh.seq=two"], "mesh.seq must be auto, or a whole number, got 'two'"),
    "indivisible layers": (["plan", "tiny.yaml", "model.num_layers=5"], ""),
    "too few devices": (["train", "tiny.yaml", "train.devices=auto", "mesh.data=64"], "mesh data*pipe*seq"),
    "no data": (["train", "tiny.yaml", "data.source=none.txt"], "data.source must be readable, got none.txt"),
    "small vocabulary": (["train", "tiny.yaml", "model.vocab_size=9"], "data.source must hold tokens in 0..8"),
    "no plan": (["train", "tiny.yaml", "--plan", "none.json"], "--plan must be a readable plan.json, got none.json"),
    "no JSON": (["train", "tiny.yaml", "--plan", "tiny.yaml"], "a plan is JSON text"),
    "run directory is a file": (["train", "tiny.yaml", "--run-dir", "tiny.yaml"], "the run directory must be a"),
}


@pytest.mark.parametrize(("words", "message"), WRONG.values(), ids=WRONG)
def test_wrong_input_is_one_line_and_writes_nothing(config, tmp_path, capsys, words, message):
    before = sorted(tmp_path.rglob("*"))
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(message) and captured.err.count("\n") == 1
    assert captured.out == ""
    assert sorted(tmp_path.rglob("*")) == before


def test_a_run_that_is_there_is_refused(config, tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").touch()
    assert main(["train", config, "--run-dir", "run"]) == 2
    assert "must hold no other run" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["metrics.jsonl"]


def test_a_fault_of_ours_is_no_wrong_input(config, monkeypatch):
    """A ValueError from within training keeps its traceback."""

    def broken(experiment, run_dir):
        raise ValueError("shapes do not match")

    monkeypatch.setattr("sppo_jax.train.loop.train", broken)
    with pytest.raises(RuntimeError, match="passed all checks"):
        main(["train", config, "--run-dir", "run"])


def test_a_plan_of_another_shape_is_refused(config, tmp_path, capsys):
    main(["plan", config, "--json"])
    (tmp_path / "plan.json").write_text(capsys.readouterr().out)
    assert main(["train", config, "--plan", "plan.json", "sequence.length=128"]) == 2
    assert "--plan plan.json: the plan must agree with sequence.length = 128, got 64" in capsys.readouterr().err


def test_train_follows_a_given_plan_on_devices_of_its_own(config, tmp_path, capsys):
    """In a process without any of the test's settings, as a user would start it."""
    main(["plan", config, "--json", "sequence.chunks=2"])
    (tmp_path / "plan.json").write_text(capsys.readouterr().out)
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("JAX_", "XLA_"))}
    words = ["train", config, "--run-dir", "run", "train.log_every=1", "--plan", "plan.json"]
    done = subprocess.run(
        [sys.executable, "-m", "sppo_jax.cli", *words], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "step 2/2" in done.stdout and "validation loss" in done.stdout
    plan = Plan.from_json((tmp_path / "run" / "plan.json").read_text())
    assert plan.chunk_lengths == (32, 32)
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2
