"""Spikes are losses far out of their recent range, and nothing else."""

import numpy as np

from sppo_jax.train.meter import LossSpikes


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
