"""Lines of metrics; spikes are losses far out of their recent range, and nothing else."""

import time
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from tiny_runs import make_config

from sppo_jax.train.metrics.meter import LossSpikes, Meter, clock_at_end


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


def metered(steps, **train):
    """Returns the lines and events of steps with some outputs."""
    lines, events = [], []
    record = SimpleNamespace(metrics=lines.append, event=lambda *words: events.append(words))
    mesh = SimpleNamespace(devices=np.array([SimpleNamespace(platform="cpu")]), size=1)
    config = make_config("a.npy", train={"steps": 50, **train}, metrics={"peak_flops": 1e12})
    meter = Meter(SimpleNamespace(config=config, schedule=lambda step: step, mesh=mesh), record, first=0)
    outputs = {"grad_norm": 0.0, "num_skipped": 0, "num_skipped_in_row": 0, "signal": 0}
    for step, given in enumerate(steps, 1):
        meter.expect(step, {name: np.array(value) for name, value in (outputs | given).items()})
        meter.wait()
        meter.write()
    return lines, events


@pytest.mark.parametrize("log_every", [1, 3])
def test_tokens_are_those_that_are_trained_and_places_are_all(log_every):
    """Padding and tokens that are not learned have no targets, in whichever of the steps of a line they are."""
    counts = [64, 0, 128, 1, 90, 17]
    lines, _ = metered([{"loss": 2.0, "num_targets": count} for count in counts], log_every=log_every)
    assert [line["step"] for line in lines] == [step for step in range(1, 7) if step % log_every == 0]
    for line in lines:
        inside = counts[line["step"] - log_every : line["step"]]
        assert line["places_per_s"] * line["step_s"] == pytest.approx(2 * 64)
        assert line["tokens_per_s"] * line["step_s"] * log_every == pytest.approx(sum(inside))
        assert line["mfu"] / line["places_per_s"] == pytest.approx(lines[0]["mfu"] / lines[0]["places_per_s"])


@pytest.mark.parametrize(
    ("loss", "num_targets", "logged"),
    [(2.5, 5, 2.5), (0.0, 1, 0.0), (0.0, 0, None), (30.0, 0, None)],
)
def test_a_step_without_a_target_has_no_loss(loss, num_targets, logged):
    # Enough steps before the last one for its loss to stand out.
    steps = [{"loss": 9.0, "num_targets": 5}] * 40 + [{"loss": loss, "num_targets": num_targets}]
    lines, events = metered(steps, log_every=1)
    assert lines[-1]["step"] == 41 and lines[-1]["loss"] == logged and not lines[-1]["spike"] and not events


def test_accuracy_is_the_share_of_the_targets():
    steps = [{"loss": 2.0, "num_targets": 7, "num_hits": 3, "entropy": 1.5}, {"loss": 0.0, "num_targets": 0}]
    lines, _ = metered([steps[0], steps[1] | {"num_hits": 0, "entropy": 0.0}, steps[1]], log_every=1)
    assert (lines[0]["token_accuracy"], lines[0]["entropy"]) == (3 / 7, 1.5)
    assert (lines[1]["token_accuracy"], lines[1]["entropy"]) == (None, None) and "num_hits" not in lines[0]
    assert "token_accuracy" not in lines[2]  # gradients of another making


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
