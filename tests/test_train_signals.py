"""What a process wants done: go on, save, stop."""

import os
import signal
from dataclasses import replace

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from tiny_runs import lines_of, make_config, one_layer, quickly, run, write_documents

from sppo_jax.processes.stopping import ENDS, SAVES, Stopping, in_force
from sppo_jax.train.checkpoints.read import checkpoint_steps, read_run
from sppo_jax.train.watch.signals import GO, SAVE, STOP, Signals

MESH = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "pipe"))


def test_wishes_are_an_element_a_device_made_once():
    signals = Signals(MESH)
    assert signals.array().shape == (4,) and len(signals.array().sharding.device_set) == 4
    assert signals.array() is signals.array()
    assert (np.asarray(signals.array()) == GO).all() and (np.asarray(signals.array(save=True)) == SAVE).all()


def test_sigterm_is_a_wish_to_stop():
    before = signal.getsignal(signal.SIGTERM)
    with Signals(MESH) as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.stop_reason == "SIGTERM"
        assert (np.asarray(signals.array(save=True)) == STOP).all()
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_command_that_takes_signals_keeps_them():
    """Before the first step they are the command's, from then on requests."""
    with Stopping() as stopping:
        with Signals(MESH) as signals:
            assert in_force() is stopping and stopping.mode == ENDS
            signals.begin()
            assert stopping.mode == SAVES
            os.kill(os.getpid(), signal.SIGHUP)
            assert signals.stop_reason == "SIGHUP"
        assert in_force() is stopping


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_documents(tmp_path_factory.mktemp("data") / "tokens.npy")


def stopping_run(source, run_dir, change, **train):
    """Returns how a run of ten steps ended, and the texts of its events; each step is logged."""
    config = make_config(source, **one_layer(train=train))
    _, result = run(config, run_dir, lambda experiment: quickly(change(experiment)))
    return result, [line["text"] for line in lines_of(run_dir, "events")]


def told_in_validation(number, sent):
    """Returns a `change` for `run`: the signal comes while a batch of the first validation is measured."""

    def change(experiment):
        calls = []

        def scores(params, batch):
            calls.append(1)
            if len(calls) == number:
                os.kill(os.getpid(), sent)
            elif len(calls) > number:
                raise AssertionError("a batch was measured after the signal")
            return experiment.token_scores(params, batch)

        return replace(experiment, token_scores=scores)

    return change


@pytest.mark.usefixtures("compiled_once")
@pytest.mark.parametrize("sent", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_in_a_validation_is_obeyed_at_its_next_batch(source, tmp_path, sent):
    """No further batch is measured, no further step is trained, and the state is saved."""
    change = told_in_validation(2, sent)
    result, texts = stopping_run(source, tmp_path, change, eval_every=3, eval_sequences=8)
    assert (result.step, result.stopped_by, result.validation) == (3, sent.name, None)
    assert checkpoint_steps(tmp_path / "checkpoints") == [3] and not (tmp_path / "finished").exists()
    assert read_run(tmp_path / "checkpoints" / "3")["data"]["sequence"] == 6
    assert "step 3: the validation stopped after 4 of 8 sequences; what it measured is dropped" in texts
    lines = lines_of(tmp_path)
    assert [line["step"] for line in lines] == [1, 2, 3] and "validation_loss" not in lines[-1]


@pytest.mark.usefixtures("compiled_once")
def test_a_signal_in_the_last_validation_leaves_a_finished_run(source, tmp_path):
    change = told_in_validation(1, signal.SIGTERM)
    result, texts = stopping_run(source, tmp_path, change, steps=2, eval_every=0, eval_sequences=8)
    assert (result.step, result.stopped_by) == (2, None) and (tmp_path / "finished").exists()
    assert checkpoint_steps(tmp_path / "checkpoints") == [2]
    dropped = "step 2: the validation stopped after 2 of 8 sequences; what it measured is dropped"
    assert f"{dropped}; sppo eval {tmp_path} measures it" in texts


@pytest.mark.usefixtures("compiled_once")
def test_a_signal_in_a_save_ends_the_run_with_that_save(source, tmp_path, monkeypatch):
    from sppo_jax.train.checkpoints.save import Checkpoints

    save = Checkpoints.save

    def told(self, *given, **settings):
        os.kill(os.getpid(), signal.SIGTERM)
        return save(self, *given, **settings)

    monkeypatch.setattr(Checkpoints, "save", told)
    config = make_config(
        source, **one_layer(train={"eval_sequences": 0, "eval_every": 0}, checkpoint={"every_steps": 5})
    )
    _, result = run(config, tmp_path, quickly)
    assert (result.step, result.stopped_by) == (5, "SIGTERM")
    assert checkpoint_steps(tmp_path / "checkpoints") == [5]


def test_all_processes_hear_of_a_request_where_no_step_runs():
    with Signals(MESH) as signals:
        assert signals.agreed() == signals.alone == GO
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.agreed() == signals.alone == STOP


def test_with_others_a_process_asks_the_devices(monkeypatch):
    monkeypatch.setattr("sppo_jax.processes.distributed.num_processes", lambda: 2)
    with Signals(MESH) as signals:
        assert signals.agreed() == GO
        os.kill(os.getpid(), signal.SIGTERM)
        assert (signals.alone, signals.agreed()) == (GO, STOP)
