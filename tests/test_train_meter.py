"""Lines of metrics; spikes are losses far out of their recent range, and nothing else."""

import time
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from tiny_runs import make_config

from sppo_jax.train.meter import LossSpikes, Meter, clock_at_end


def found(losses):
    spikes = LossSpikes()
    return [step for step, loss in enumerate(losses) if spikes.check(loss)]


def noisy(num_steps, seed=0):
    return 3 * np.exp(-np.arange(num_steps) / 300) + 0.05 * np.random.default_rng(seed).normal(size=num_steps) + 1


def test_noise_is_no_spike():
    assert sum(len(found(noisy(1000, seed))) for seed in range(10)) <= 2


def test_a_jump_is_one():
    losses = noisy(200)
    losses[120] += 1.5
    losses[160:163] += 2
    assert set(found(losses)) == {120, 160, 161, 162}


def test_the_first_steps_and_a_plain_fall_are_none():
    assert found([10.0] * 5 + [99.0] + [10.0] * 10) == []
    assert found(list(np.linspace(10, 1, 200))) == []
    assert found([2.0] * 100 + [2.01]) == []


def test_it_says_by_how_much():
    spikes = LossSpikes()
    for _ in range(30):
        spikes.check(2.0)
    assert spikes.check(5.0) == "loss spike: 5.0000, where the last 30 had a median of 2.0000"


@pytest.mark.parametrize(
    ("loss", "has_targets", "logged"),
    [(2.5, True, 2.5), (0.0, True, 0.0), (0.0, False, None), (30.0, False, None)],
)
def test_a_step_without_a_target_has_no_loss(loss, has_targets, logged):
    lines, events = [], []
    record = SimpleNamespace(metrics=lines.append, event=lambda *words: events.append(words))
    mesh = SimpleNamespace(devices=np.array([SimpleNamespace(platform="cpu")]), size=1)
    config = make_config("a.npy", train={"log_every": 1, "steps": 50})
    meter = Meter(SimpleNamespace(config=config, schedule=lambda step: step, mesh=mesh), record, first=0)
    outputs = {"grad_norm": 0.0, "num_skipped": 0, "num_skipped_in_row": 0, "signal": 0}
    for step in range(1, 42):  # enough before the last one for its loss to stand out
        last = {"loss": loss, "has_targets": has_targets} if step == 41 else {"loss": 9.0, "has_targets": True}
        meter.expect(step, {name: np.array(value) for name, value in (outputs | last).items()})
        meter.wait()
        meter.write()
    assert lines[-1]["step"] == 41 and lines[-1]["loss"] == logged and not lines[-1]["spike"] and not events


def test_a_step_ends_when_its_output_is_ready_not_when_it_is_read():
    """On a GPU the call of the next step may return only when that step is done."""
    begin_s = time.perf_counter()
    end_s = clock_at_end(jnp.zeros(()))
    time.sleep(0.5)
    assert end_s() - begin_s < 0.4


def test_an_output_that_fails_still_has_an_end():
    class Failed:
        def block_until_ready(self):
            raise RuntimeError("lost device")

    assert clock_at_end(Failed())() > 0
