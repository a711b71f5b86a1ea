"""A validation: the exact mean over its sequences, its seconds, and what it says of losses that are not finite."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
from distributed_cases import finish, start_processes
from validation_cases import HeldOut, cases, exact, measured, program

from sppo_jax.data.positions import Bucket
from sppo_jax.evaluation import validate as module
from sppo_jax.evaluation.validate import Interrupted, Recall, Validation, validate

CASES = cases()
TWO_PROCESSES = """
from dataclasses import asdict
from validation_cases import cases, measured
join(2)
print(json.dumps([[found.loss, found.num_targets] for found in map(measured, cases()[-2:])]))
distributed.leave(0)
"""


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

    def prepare(self, params, batch, *_):
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


@pytest.mark.parametrize("number", range(10))
def test_a_validation_is_the_exact_mean_over_its_sequences(x64, number):
    case = CASES[number]
    found, (loss, num_targets) = measured(case), exact(case)
    assert found.loss == pytest.approx(loss, rel=1e-9) and found.num_targets == num_targets
    assert (found.num_sequences, found.num_held_out) == (min(case.held_out, case.wanted), case.held_out)
    assert f"over {num_targets} tokens in {found.num_sequences} of {case.held_out} sequences" in found.describe()


def test_all_numbers_of_sequences_share_one_program(x64):
    plan, mesh, scores, params = program((1, 1, 1), 2)
    before = scores._cache_size()
    for held_out, wanted in ((1, 8), (2, 8), (5, 3)):
        validate(scores, params, HeldOut(held_out), plan, mesh, num_wanted=wanted)
    assert scores._cache_size() == max(before, 1)


@pytest.mark.slow
def test_two_processes_measure_the_same_mean(x64):
    results = finish(start_processes(TWO_PROCESSES, 2, JAX_ENABLE_X64=1))
    for code, out, errors in results:
        assert code == 0, errors
        for (loss, num_targets), case in zip(json.loads(out.splitlines()[-1]), CASES[-2:], strict=True):
            want, count = exact(case)
            assert loss == pytest.approx(want, rel=1e-9) and num_targets == count


@pytest.mark.parametrize("num_asked", [0, 1, 3])
def test_a_validation_that_is_told_to_stop_ends_before_its_next_batch(x64, num_asked):
    plan, mesh, scores, params = program((1, 1, 1), 2)
    asked, measured_batches = [], []

    def told():
        asked.append(1)
        return len(asked) > num_asked

    def counted(params, batch):
        measured_batches.append(1)
        return scores(params, batch)

    with pytest.raises(Interrupted, match=f"^stopped after {2 * num_asked} of 9 sequences$"):
        validate(counted, params, HeldOut(9), plan, mesh, num_wanted=20, told=told)
    assert len(measured_batches) == num_asked


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["first", "last", "all"])
def test_a_loss_that_is_not_finite_is_said_in_words(bad, where):
    losses = {"first": (bad, 2.0), "last": (2.0, bad), "all": (bad, bad)}[where]
    buckets = tuple(
        Bucket(first=64 * number, last=64 * number + 63, num_targets=4, loss=loss) for number, loss in enumerate(losses)
    )
    found = Validation(
        loss=bad,
        num_targets=8,
        num_sequences=2,
        buckets=buckets,
        recall=(Recall(distance=4, num_targets=2, accuracy=0.5),),
    )
    assert not found.is_finite
    text = found.describe()
    assert "validation loss not finite nats per token over 8 tokens in 2 sequences" in text
    assert "nan" not in text and "inf " not in text
