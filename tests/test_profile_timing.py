"""The timer's loops: counts that the compiler knows, and a turn as the difference of two loops."""

import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from sppo_jax.profile import timing
from sppo_jax.profile.timing import Timer

START_S, TURN_S = 5.0, 0.25


@pytest.fixture
def loops(monkeypatch):
    """Stands in for compiled loops and for the clock; returns the counts of the loops that were compiled."""
    counts = []

    def turns(self, turn, count):
        counts.append(count)
        return SimpleNamespace(lower=lambda start: SimpleNamespace(compile=lambda: count))

    monkeypatch.setattr(Timer, "_turns", turns)
    monkeypatch.setattr(timing, "seconds_of", lambda count, start: [START_S + TURN_S * count])
    return counts


def make():
    return jnp.ones((4, 4))


def timer(run_s):
    return Timer(devices=tuple(jax.devices()[:1]), run_s=run_s, runs=3)


def test_the_compiler_knows_how_many_turns_a_loop_has():
    one = timer(0.001)
    _, arguments = one.program(make, jnp.tanh)
    for count in (timing._FEW_TURNS, 7):
        text = one._turns(jnp.tanh, count).lower(*arguments).compile().as_text()
        # A loop of an unknown count makes a GPU wait for the host after each turn.
        assert len(re.findall(r" while\(", text)) == 1
        assert re.findall(r'known_trip_count":\{"n":"(\d+)"', text) == [str(count)]


def test_the_program_that_is_compiled_is_the_short_loop_that_is_timed():
    step, arguments = timer(0.001).program(make, lambda x: x + 1)
    assert step(*(jnp.zeros(x.shape, x.dtype) for x in arguments)).tolist() == [[[2.0] * 4] * 4]


@pytest.mark.parametrize("run_s, more", [(100.0, 36), (0.1, 2), (1e9, 10_000)])
def test_a_turn_is_the_difference_of_two_loops(loops, run_s, more):
    assert timer(run_s).seconds(make, jnp.tanh) == pytest.approx(TURN_S)
    assert loops == [2, 2 + more]  # 5.5 s for the two turns of the short loop


def test_loops_that_noise_turns_round_still_give_a_time(loops, monkeypatch):
    monkeypatch.setattr(timing, "seconds_of", lambda count, start: [8.0 / count])
    assert timer(0.1).seconds(make, jnp.tanh) == pytest.approx(2.0 / 4)
