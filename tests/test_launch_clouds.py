"""The launch files of SkyPilot and xpk: as data, and run through stand-ins of the tools; no cloud is asked."""

import os
import re
import shlex
import shutil
import subprocess

import pytest
import yaml
from distributed_cases import REPO, environment

LAUNCH = REPO / "launch"
SCRIPT = LAUNCH / "xpk.sh"
# What SkyPilot takes in a task, of all that the file uses.
TASK_KEYS = {"name", "num_nodes", "workdir", "resources", "envs", "volumes", "setup", "run"}
RESOURCE_KEYS = {"infra", "accelerators", "disk_size", "use_spot", "job_recovery"}
JOB = [
    "pod",
    "first",
    "v5p-64",
    "registry/sppo:tpu",
    "quickstart.yaml",
    "--run-dir",
    "/shared/a b",
    "data.source=*.txt",
]


@pytest.fixture(scope="module")
def task():
    return yaml.safe_load((LAUNCH / "skypilot.yaml").read_text(encoding="ascii"))


def test_the_task_has_the_keys_that_skypilot_takes(task):
    assert set(task) == TASK_KEYS and set(task["resources"]) == RESOURCE_KEYS
    assert task["resources"]["job_recovery"] == {"max_restarts_on_errors": 5}
    assert (REPO / task["envs"]["CONFIG"]).is_file() and (LAUNCH / "local.sh").is_file()
    (mount,) = task["volumes"]
    assert task["envs"]["RUN_DIR"].startswith(f"{mount}/"), "the run directory is on the folder that all nodes share"
    extras = re.search(r"\.\[([a-z,]+)\]", task["setup"])[1].split(",")
    assert "cuda" in extras and "constraints-py312.txt" in task["setup"]


@pytest.mark.parametrize("part", ["setup", "run"])
def test_the_parts_of_the_task_parse(task, part):
    subprocess.run(["bash", "-n", "-c", task[part]], check=True)


def test_every_node_of_the_task_gets_its_place(task, tmp_path):
    sppo = tmp_path / "sppo_env" / "bin" / "sppo"
    sppo.parent.mkdir(parents=True)
    sppo.write_text("#!/bin/sh\n")
    sppo.chmod(0o755)
    env = environment(HOME=tmp_path, DRY_RUN=1, SKYPILOT_NUM_NODES=2, SKYPILOT_NODE_RANK=1, **task["envs"])
    env |= {"SKYPILOT_NODE_IPS": "10.0.0.7\n10.0.0.8", "SKYPILOT_NUM_GPUS_PER_NODE": "8", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(["bash", "-c", task["run"]], cwd=REPO, env=env, capture_output=True, text=True, timeout=60)
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and len(lines) == 8, done.stderr
    for number, line in enumerate(lines, start=8):
        assert f"SPPO_COORDINATOR=10.0.0.7:8476 SPPO_NUM_PROCESSES=16 SPPO_PROCESS_ID={number} " in line
        words = shlex.split(line)
        assert words[words.index("train") + 1 :] == [
            task["envs"]["CONFIG"],
            *task["envs"]["OVERRIDES"].split(),
            "--run-dir",
            task["envs"]["RUN_DIR"],
        ]


def xpk(*words, folder=None, **environ):
    env = environment(**environ)
    if folder:
        (folder / "xpk").write_text('#!/usr/bin/env bash\nprintf "%s\\n" "$@"\nexit 7\n')
        (folder / "xpk").chmod(0o755)
        env["PATH"] = f"{folder}:{env['PATH']}"
    return subprocess.run([SCRIPT, *words], env=env, capture_output=True, text=True, timeout=60)


def test_the_script_parses():
    subprocess.run(["bash", "-n", SCRIPT], check=True)
    assert os.access(SCRIPT, os.X_OK)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", SCRIPT], check=True)


def test_the_workload_is_what_is_asked_for(tmp_path):
    done = xpk(*JOB, folder=tmp_path, XPK_FLAGS="--project=p --zone=z", MAX_RESTARTS=2)
    words = done.stdout.splitlines()
    assert done.returncode == 7, "the exit code is xpk's"
    assert words[:2] == ["workload", "create"] and words[-2:] == ["--project=p", "--zone=z"]
    given = dict(word.removeprefix("--").split("=", 1) for word in words[2:])
    command = shlex.split(given.pop("command"))
    assert command == ["exec", "env", "PYTHONUNBUFFERED=1", "sppo", "train", *JOB[4:]]
    assert given == {
        "cluster": "pod",
        "workload": "first",
        "tpu-type": "v5p-64",
        "docker-image": "registry/sppo:tpu",
        "num-slices": "1",
        "max-restarts": "2",
        "restart-on-exit-codes": "1",
        "termination-grace-period-seconds": "600",
        "project": "p",
        "zone": "z",
    }


def test_a_dry_run_prints_the_same_command_and_runs_nothing(tmp_path):
    dry, real = xpk(*JOB, folder=tmp_path, DRY_RUN=1), xpk(*JOB, folder=tmp_path)
    assert dry.returncode == 0 and shlex.split(dry.stdout)[1:] == real.stdout.splitlines()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (JOB[:4], "launch/xpk.sh CLUSTER"),
        ([*JOB[:5], "train.steps=1"], "add --run-dir DIR"),
        ([*JOB[:5], "--run-dir"], "add --run"),
    ],
)
def test_a_wrong_command_line_is_refused(words, said):
    done = xpk(*words)
    assert done.returncode == 2 and said in done.stderr and done.stdout == ""
