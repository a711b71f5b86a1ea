"""`sppo train` as several processes: the losses of one, one voice, and one end for all."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import yaml
from distributed_cases import REPO, environment

SETTINGS = {
    "model": {"vocab_size": 257, "hidden_size": 16, "num_layers": 4, "num_heads": 2, "mlp_size": 32},
    "data": {"source": "tokens.npy", "validation_fraction": 0.0},
    "mesh": {"data": 2, "pipe": 2, "seq": 1},
    "sequence": {"length": 64, "chunks": 2},
    "train": {"steps": 4, "devices": "cpu:4"},
    "checkpoint": {"final": False},
}


@pytest.fixture
def folder(tmp_path):
    np.save(tmp_path / "tokens.npy", (np.arange(20000) * 7 % 251).astype(np.uint16))
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(SETTINGS))
    (tmp_path / "sppo").write_text(f'#!/bin/sh\nexec {sys.executable} -m sppo_jax.cli "$@"\n')
    (tmp_path / "sppo").chmod(0o755)
    return tmp_path


def train(folder, num_processes, run_dir, *words, **environ):
    """Starts a run of so many processes; one needs no launcher."""
    launcher = [str(REPO / "launch" / "local.sh"), str(num_processes)]
    command = launcher if num_processes > 1 else [str(folder / "sppo"), "train"]
    return subprocess.Popen(
        [*command, "tiny.yaml", "--run-dir", run_dir, *words],
        cwd=folder,
        env=environment(SPPO=folder / "sppo", **environ),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def done(process):
    out, errors = process.communicate(timeout=400)
    assert process.returncode == 0, out + errors
    return out


def losses(run_dir):
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: (row["loss"], row["grad_norm"]) for row in rows}


def plan_lines(folder, *words):
    """Returns what `sppo plan` prints."""
    command = [str(folder / "sppo"), "plan", "tiny.yaml", *words]
    planned = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=400)
    assert planned.returncode == 0, planned.stderr
    return planned.stdout.splitlines()


def check_begins(out, lines):
    """Checks that process 0 alone prints these lines, first of all."""
    printed = out.splitlines()[: len(lines)]
    assert printed == [f"[0] {line}" for line in lines] and len(lines) > 10


def test_two_processes_train_like_one_and_one_speaks(folder):
    done(train(folder, 1, "one"))
    out = done(train(folder, 2, "two", "checkpoint.final=true"))
    lines = plan_lines(folder)
    check_begins(out, lines)
    # The run goes on with its plan, and has no step left.
    again = done(train(folder, 2, "two", "checkpoint.final=true"))
    assert "all 4 steps were done" in again
    check_begins(again, lines)
    want, got = losses(folder / "one"), losses(folder / "two")
    assert list(got) == [1, 2, 3, 4] == list(want)
    np.testing.assert_allclose(list(got.values()), list(want.values()), rtol=1e-6)
    assert all(line.startswith("[0] ") for line in out.splitlines()), out
    assert out.count("step 4/4") == 1


def test_processes_of_different_runs_are_refused(folder):
    """The second process has another setting: all end with exit code 2 before anything is compiled or written."""
    script = 'words="tiny.yaml --run-dir wrong train.steps=$((4 + SPPO_PROCESS_ID))"; exec ./sppo train $words'
    process = subprocess.Popen(
        [REPO / "launch" / "local.sh", "2", "--", "bash", "-c", script],
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    out, _ = process.communicate(timeout=100)
    assert process.returncode == 2 and not (folder / "wrong").exists()
    assert "[0] all processes must have the same train.steps, got 4 in process 0 and 5 in process 1 on " in out


@pytest.mark.slow
def test_two_processes_gather_one_group_of_layers_at_a_time(folder):
    """Each stage has a device of each process; one process takes the chunks through all layers one by one."""
    done(train(folder, 1, "one"))
    done(train(folder, 2, "two", "schedule.name=breadth-first", "schedule.interleave=2"))
    plan = json.loads((folder / "two" / "plan.json").read_text())
    assert (plan["weights"], plan["stash"]["kv"]) == ("gathered", "rebuild")
    want, got = losses(folder / "one"), losses(folder / "two")
    assert list(got) == [1, 2, 3, 4]
    np.testing.assert_allclose(list(got.values()), list(want.values()), rtol=1e-6)


@pytest.mark.slow
def test_four_processes_train_like_one(folder):
    done(train(folder, 1, "one", "mesh.data=1", "mesh.seq=2"))
    done(train(folder, 4, "four", "mesh.data=1", "mesh.seq=2"))
    want, got = losses(folder / "one"), losses(folder / "four")
    np.testing.assert_allclose(list(got.values()), list(want.values()), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_process_ends_the_run_and_the_same_command_goes_on(folder, victim):
    words = ["train.steps=40", "checkpoint.every_steps=5", "checkpoint.final=true"]
    done(train(folder, 1, "one", *words))
    process = train(folder, 2, "two", *words)
    lines = []
    while not any("step 12/40" in line for line in lines):
        lines.append(process.stdout.readline())
        assert lines[-1], lines
    os.kill(_pid_of(victim, folder), signal.SIGKILL)
    start = time.monotonic()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 137 and time.monotonic() - start < 30
    assert f"local.sh: process {victim} ended with exit code 137; ending the other processes" in errors
    out = done(train(folder, 2, "two", *words))
    assert "step 40/40" in out and "step 3/40" not in out
    np.testing.assert_allclose(list(losses(folder / "two").values()), list(losses(folder / "one").values()), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("saves", ["async", "blocking"])
def test_layers_that_processes_run_in_groups_are_saved_in_order(folder, saves):
    """Each process is a stage of two groups of layers; one process without groups goes on."""
    words = [
        "mesh.data=1",
        "mesh.seq=2",
        "checkpoint.final=true",
        "optimizer.min_lr_ratio=1",
        "optimizer.warmup_steps=0",
    ]
    groups = ["schedule.interleave=2", "stash.inputs=keep", "stash.attention=keep"]
    groups += ["hardware.host_bytes=1"] if saves == "blocking" else []
    done(train(folder, 1, "one", *words, "schedule.interleave=1"))
    done(train(folder, 2, "two", *words, *groups, "train.steps=2"))
    assert json.loads((folder / "two" / "plan.json").read_text())["saves"] == saves
    out = done(train(folder, 1, "two", *words, "schedule.interleave=1"))
    assert "resumes from" in out and list(losses(folder / "two")) == [1, 2, 3, 4]
    np.testing.assert_allclose(list(losses(folder / "two").values()), list(losses(folder / "one").values()), rtol=1e-6)


def _pid_of(process_id, folder):
    """Returns the process of a number among those that train in the folder."""
    for entry in filter(str.isdecimal, os.listdir("/proc")):
        try:
            if os.readlink(f"/proc/{entry}/cwd") != str(folder):
                continue
            with open(f"/proc/{entry}/environ", "rb") as environ, open(f"/proc/{entry}/cmdline", "rb") as command:
                ours = f"SPPO_PROCESS_ID={process_id}".encode() in environ.read().split(b"\0")
                if ours and b"sppo_jax.cli" in command.read():
                    return int(entry)
        except OSError:
            continue
    raise AssertionError(f"process {process_id} is not there")


def test_hosts_with_other_documents_are_refused(folder):
    """Both hosts have a file of the same name and size, with other tokens."""
    tokens = np.load(folder / "tokens.npy")
    for number in range(2):
        (folder / f"host{number}").mkdir()
        np.save(folder / f"host{number}/tokens.npy", tokens + np.uint16(number))
    script = "cd host$SPPO_PROCESS_ID; exec ../sppo train ../tiny.yaml --run-dir ../wrong"
    process = subprocess.Popen(
        [REPO / "launch" / "local.sh", "2", "--", "bash", "-c", script],
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    out, _ = process.communicate(timeout=200)
    assert process.returncode == 2 and "all processes must read the same documents" in out, out
    assert not (folder / "wrong/metrics.jsonl").exists()
