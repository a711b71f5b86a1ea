"""The watchdog: real processes, one of which is stopped, stuck, killed or fails; the others name it and end."""

import dataclasses
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import jax
import numpy as np
import pytest
from distributed_cases import REPO, environment, finish, start_processes
from test_train_checkpoint import RUN, make_state, shapes_on
from tiny_runs import lines_of, make_config, quickly, run, write_documents

from sppo_jax.config import CheckpointConfig
from sppo_jax.evaluation.validate import _until_told, evaluate
from sppo_jax.pipeline.api import TokenScores
from sppo_jax.plan import stall_limit
from sppo_jax.train import loop, setup
from sppo_jax.train.checkpoints.save import Checkpoints, OneByOne
from sppo_jax.train.metrics.meter import Meter
from sppo_jax.train.watch.watchdog import Watchdog

LOOP = """
    import signal
    join({num_processes})
    from sppo_jax.train.watch.watchdog import Watchdog
    me = distributed.process_id()
    with Watchdog({stall_s}) as watchdog:
        for step in range(1, 5):
            watchdog.beat(step, "data")
            if me == {culprit} and step == 3:
                distributed.exchange("")
                time.sleep(1.2)
                {fate}
            if step == 3:
                distributed.exchange("")
                watchdog.beat(step, "step")
                time.sleep(100)
            watchdog.beat(step, "step")
    distributed.agree(None)
"""


def fates(culprit, fate, *, num_processes=2, stall_s=3.0, **environ):
    """Runs processes of which one meets its fate; returns the results of the others, and its own."""
    code = LOOP.format(culprit=culprit, fate=fate, num_processes=num_processes, stall_s=stall_s)
    processes, start = start_processes(code, num_processes, **environ), time.monotonic()
    others = finish([process for k, process in enumerate(processes) if k != culprit], 60)
    seconds = time.monotonic() - start
    processes[culprit].kill()
    return others, finish([processes[culprit]])[0], seconds


HOST = re.escape(socket.gethostname())


@pytest.mark.parametrize("culprit, num_processes", [(1, 3), (0, 2)])
def test_a_stopped_process_is_named_by_the_others(culprit, num_processes):
    others, _, seconds = fates(culprit, "os.kill(os.getpid(), signal.SIGSTOP)", num_processes=num_processes)
    assert seconds < 30
    for status, _, errors in others:
        line = errors.splitlines()[0]
        assert status == 1, errors
        pattern = f"no progress for .* 3 s: process {culprit} on {HOST} stopped answering [1-9] s ago at step 3 "
        assert re.match(pattern + r"\(data\), the others wait at step 3 \(step\); ", line), line
        assert "Thread 0x" in errors and "time.sleep(100)" not in line


def test_a_process_stuck_in_a_phase_is_named_by_all():
    others, own, _ = fates(1, "time.sleep(100)", num_processes=2)
    for _, _, errors in (*others, own):
        assert f"process 1 on {HOST} at step 3 (data) answers but is behind the others" in errors.splitlines()[0]
    assert others[0][0] == 1


def test_a_process_that_fails_ends_the_others_with_its_reason():
    others, own, seconds = fates(1, "raise OSError('disk full')", stall_s=60.0, SPPO_HEARTBEAT_S=5)
    assert seconds < 40
    for status, _, errors in others:
        assert status == 1
        assert (
            errors.splitlines()[0] == f"process 1 on {socket.gethostname()} failed at step 3 (data): OSError: disk full"
        )


def test_a_killed_process_is_named_after_the_heartbeat():
    others, _, seconds = fates(1, "os.kill(os.getpid(), signal.SIGKILL)", stall_s=60.0, SPPO_HEARTBEAT_S=2)
    for status, _, errors in others:
        assert status == 1
        line = errors.splitlines()[0]
        assert "Thread 0x" not in errors, "nothing is stuck here"
        assert re.match(
            f"process 1 on {HOST} stopped answering [2-9] s ago at step 3 .data., longer than SPPO_HEAR", line
        )


def test_one_process_that_stands_still_is_ended_with_its_stacks():
    code = """
from sppo_jax.train.watch.watchdog import Watchdog
import time
def stuck():
    time.sleep(60)
with Watchdog(1.0) as watchdog:
    watchdog.beat(7, "save")
    stuck()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), cwd=REPO, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert lines[0].startswith("no progress for train.stall_s = 1 s, got stuck at step 7 (save); ")
    assert any("in stuck" in line for line in lines)


def test_beats_keep_it_quiet_and_so_does_nought():
    stalls = []
    with Watchdog(0.4, on_stall=stalls.append) as watchdog, Watchdog(0, on_stall=stalls.append):
        for step in range(8):
            watchdog.beat(step, "step")
            time.sleep(0.1)
    assert stalls == []
    with Watchdog(0.2, on_stall=stalls.append):
        time.sleep(0.5)
    assert len(stalls) == 1


def test_a_pause_is_not_a_stall():
    """A process that was stopped (a laptop asleep, Ctrl-Z) and goes on is left alone."""
    code = """
import sys, time
from sppo_jax.train.watch.watchdog import Watchdog
with Watchdog(2.0) as watchdog:
    print("ready", flush=True)
    time.sleep(1.0)
    watchdog.beat(1, "step")
    time.sleep(1.0)
print("done", flush=True)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code], env=environment(), cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout.readline() == b"ready\n"
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(3.0)
    os.kill(process.pid, signal.SIGCONT)
    out, errors = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, b"done\n"), errors


def test_a_beat_costs_nothing():
    with Watchdog(60) as watchdog:
        start = time.perf_counter()
        for step in range(10_000):
            watchdog.beat(step, "step")
        assert (time.perf_counter() - start) / 10_000 < 50e-6


@pytest.mark.parametrize("beats", [True, False])
def test_a_validation_may_take_longer_than_the_limit_if_no_batch_does(beats):
    stalls, batch = [], {"targets": np.ones((1, 8), int), "positions": np.arange(8)[None]}

    def slow(params, batch):
        time.sleep(0.3)
        return TokenScores(np.ones((1, 8)), None)

    with Watchdog(1.0, on_stall=stalls.append) as watchdog:
        watchdog.beat(1, "evaluate")
        batches = _until_told([batch] * 7, watchdog.beat_again, range(7)) if beats else [batch] * 7
        assert evaluate(slow, None, batches, lambda batch: batch).num_targets == 56
    assert [line.split(";")[0] for line in stalls] == (1 - beats) * [
        "no progress for train.stall_s = 1 s, got stuck at step 1 (evaluate)"
    ]


@pytest.mark.parametrize("beats", [True, False])
def test_a_blocking_save_may_take_longer_than_the_limit_if_no_array_does(beats, tmp_path, monkeypatch):
    stalls, shapes, end = [], shapes_on(2), OneByOne.on_write_end

    def slow(self, path):
        time.sleep(0.4)
        end(self, path)

    monkeypatch.setattr(OneByOne, "on_write_end", slow)
    with Watchdog(2.0, on_stall=stalls.append) as watchdog:
        watchdog.beat(3, "save")
        beat = {"beat": watchdog.beat_again} if beats else {}
        checkpoints = Checkpoints(tmp_path, CheckpointConfig(), shapes, running=shapes, **beat)
        assert checkpoints.save(make_state(), RUN, step=3)[1] is None
    assert len(stalls) == 1 - beats, stalls
    assert checkpoints.close() is None


@pytest.mark.usefixtures("compiled_once")
@pytest.mark.parametrize("given", ["auto", 1.0])
def test_a_step_longer_than_the_least_limit_is_no_stall(given, tmp_path, monkeypatch):
    """The least limit is a second here, a step takes longer, and the plan has predicted that."""
    stalls, wait, beats = [], Meter.wait, []

    def slow(self):
        time.sleep(1.4)
        return wait(self)

    class Noted(Watchdog):
        def __init__(self, stall_s):
            super().__init__(stall_s, on_stall=stalls.append)

        def beat(self, step, phase):
            beats.append(phase)
            super().beat(step, phase)

    def slower(experiment):
        predicted = dataclasses.replace(experiment.plan.predicted, step_s=30.0)
        plan = dataclasses.replace(experiment.plan, predicted=predicted, saves="blocking")
        return dataclasses.replace(quickly(experiment), plan=plan)

    monkeypatch.setattr(stall_limit, "_LEAST_S", 1.0)
    monkeypatch.setattr(Meter, "wait", slow)
    monkeypatch.setattr(loop, "Watchdog", Noted)
    opened, watched = setup.prepare_data, []

    def prepare_data(config):
        watched.append(any(thread.name == "watchdog" for thread in threading.enumerate()))
        return opened(config)

    monkeypatch.setattr(setup, "prepare_data", prepare_data)
    train = {"steps": 1, "stall_s": given, "eval_sequences": 3, "devices": "cpu:1"}
    small = {
        "optimizer": {"warmup_steps": 0},
        "model": {"num_layers": 1},
        "mesh": {"data": 1, "pipe": 1},
        "sequence": {"chunks": 2, "per_step": 2},
    }
    config = make_config(write_documents(tmp_path / "tokens.npy"), train=train, **small)
    experiment, result = run(config, tmp_path / "run", slower)
    warned = [line["text"] for line in lines_of(tmp_path / "run", "events") if line["kind"] == "warning"]
    assert result.step == 1 and watched == [False]  # tokenizing and copying are no stall, however long they take
    if given == "auto":
        assert stalls == [] == warned
    else:
        assert "got stuck at step 1 (step)" in stalls[0] and "must be above the predicted step of 30 s" in warned[0]
    # Three sequences are two batches; a blocking save beats at each array, when it is fetched and when it is written.
    num_arrays = len(jax.tree.leaves(experiment.shapes))
    assert beats.count("evaluate") == 1 + 2 and beats.count("save") >= 1 + 2 * num_arrays
