"""Batches and steps over meshes that span real processes: the rows, loss and gradients of one process."""

import re
import subprocess
import sys
from functools import lru_cache

import numpy as np
import pytest
from distributed_cases import REPO, environment, finish, free_port
from distributed_step import check_rows, run_step

from sppo_jax.evaluation.placement import local_rows

# Gloo's greetings, of which several threads may have torn each other's.
GLOO = re.compile(r"\[Gloo\] Rank|is connected to|peer ranks\.|Expected number of connected peer ranks is :|\d+")


@lru_cache
def alone(name):
    return run_step(name)


def run_together(folder, num_processes, names):
    port = free_port()
    processes = [
        subprocess.Popen(
            [sys.executable, "tests/distributed_step.py", str(folder), *names],
            env=environment(
                SPPO_COORDINATOR=f"127.0.0.1:{port}", SPPO_NUM_PROCESSES=num_processes, SPPO_PROCESS_ID=process
            ),
            cwd=REPO,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for process in range(num_processes)
    ]
    for process, (status, out, errors) in enumerate(finish(processes, 300)):
        assert status == 0, errors
        own = ["done"] if process == 0 else []
        assert GLOO.sub("", out).split() == own, out
        assert out.count("\n") == out.count("[Gloo] Rank ") + len(own), out
    for name in names:
        with np.load(folder / f"{name}.npz") as saved:
            got = list(saved.values())
        want = alone(name)
        np.testing.assert_allclose(got[0], want[0], rtol=1e-6)
        for one, other in zip(got, want, strict=True):
            assert np.abs(one - other).max() <= 1e-5 * np.abs(other).max() + 1e-9


@pytest.mark.slow
def test_four_processes_step_like_one(tmp_path):
    run_together(tmp_path, 4, ["data-pipe"])


@pytest.mark.slow
@pytest.mark.parametrize("num_processes", [2, 4])
def test_every_case_steps_like_one_process(tmp_path, num_processes):
    run_together(tmp_path, num_processes, ["data-pipe", "pipe-ring", "data-pipe-sequences", "pipe-ulysses"])


def test_one_process_holds_all_rows():
    check_rows()


def test_a_process_without_devices_of_the_mesh_is_refused(monkeypatch):
    import jax

    class Elsewhere:
        process_index = 3

    mesh = jax.make_mesh((2, 1, 1), ("data", "pipe", "seq"), axis_types=(jax.sharding.AxisType.Auto,) * 3)
    devices = [*jax.devices(), Elsewhere()]
    monkeypatch.setattr(jax, "devices", lambda: devices)
    with pytest.raises(ValueError, match=r"data\*pipe\*seq = 2\*1\*1 = 2 of 9 devices, none of process 3; use all"):
        local_rows(mesh, 4)
