"""The seconds of a validation: those of its batches, without compiling."""

from types import SimpleNamespace

import numpy as np
import pytest

from sppo_jax.train import evaluate as module


class Clock:
    """A clock that stands still between the things that take time."""

    def __init__(self):
        self.now_s = 0.0

    def perf_counter(self):
        return self.now_s


class Scores:
    """Scores that take 2 s a batch, and 100 s to compile the first time."""

    def __init__(self, clock):
        self.clock, self.compiled = clock, False

    def prepare(self, params, batch):
        self.clock.now_s += 0.0 if self.compiled else 100.0
        self.compiled = True

    def __call__(self, params, batch):
        self.prepare(params, batch)
        self.clock.now_s += 2.0
        return SimpleNamespace(losses_BS=np.ones((1, 4)), hits_BS=np.zeros((1, 4), bool))


@pytest.mark.parametrize("num_batches", [1, 3])
def test_compiling_is_no_part_of_a_validation(monkeypatch, num_batches):
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    scores = Scores(clock)
    batch = {
        name: np.zeros((1, 4), np.int32) + np.arange(4, dtype=np.int32) * (name == "positions")
        for name in ("tokens", "targets", "positions", "document_ids")
    }
    for compile_s in (100.0, 0.0):  # the second one finds everything compiled
        found = module.evaluate(scores, None, [batch] * num_batches, lambda placed: placed)
        assert (found.seconds, found.compile_s) == (2.0 * num_batches, compile_s)
        assert found.metrics()["validation_s"] == 2.0 * num_batches and found.num_targets == 4 * num_batches
