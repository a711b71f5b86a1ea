"""The gain by context: cuts against a plain loop, losses against rows cut beforehand, and windows that gain 0."""

import numpy as np
import pytest
from exactness import small_model, small_plan
from flax import nnx

from sppo_jax.data.positions import ContextGain
from sppo_jax.evaluation.context import context_size_of_run, context_sizes, cut, plan_for_cuts
from sppo_jax.evaluation.validate import evaluate
from sppo_jax.pipeline import api

LENGTH, VOCAB, SIZE = 64, 53, 16
PLANS = {
    "pipe 2 x seq 2": dict(chunks=(24, 24, 16), mesh=(1, 2, 2), sequences=2),
    "one document": dict(chunks=(32, 32), mesh=(2, 1, 1), sequence_documents="one"),
}


def rows_of(documents_of_rows):
    """Returns a batch of rows, each of documents' lengths; what is left is padding."""
    rng = np.random.default_rng(0)
    shape = len(documents_of_rows), LENGTH
    batch = {name: np.zeros(shape, np.int32) for name in ("tokens", "positions")}
    batch |= {name: np.full(shape, -1, np.int32) for name in ("targets", "document_ids")}
    for row, lengths in enumerate(documents_of_rows):
        at = 0
        for number, length in enumerate(lengths):
            tokens = rng.integers(0, VOCAB, length + 1)
            place = row, slice(at, at + length)
            batch["tokens"][place], batch["targets"][place] = tokens[:-1], tokens[1:]
            batch["positions"][place], batch["document_ids"][place] = np.arange(length), number
            at += length
    return batch


PACKED = [[64], [40, 21]]
ALONE = [[64], [61]]


def cut_by_hand(batch, size, offset):
    """Returns the batch with other documents, token by token; and which targets have at least half a piece before."""
    found, chosen = {name: array.copy() for name, array in batch.items()}, np.zeros(batch["tokens"].shape, bool)
    for row in range(len(batch["tokens"])):
        number, position = -1, 0
        for token in range(LENGTH):
            document, place = batch["document_ids"][row, token], batch["positions"][row, token]
            if document < 0:
                continue
            if place == 0 or (place >= offset and (place - offset) % size == 0):
                number, position = number + 1, 0
            found["document_ids"][row, token], found["positions"][row, token] = number, position
            chosen[row, token] = place >= size and position >= size // 2 and batch["targets"][row, token] >= 0
            position += 1
    return found, chosen


@pytest.mark.parametrize("size", [4, 16, 30, 62])
def test_a_cut_is_that_of_a_plain_loop_and_every_far_target_is_counted_once(size):
    batch, times = rows_of(PACKED), 0
    far = (batch["targets"] >= 0) & (batch["positions"] >= size)
    for offset in (0, size // 2):
        by_hand, chosen = cut_by_hand(batch, size, offset)
        got = cut(batch, size, offset)
        for name, array in by_hand.items():
            np.testing.assert_array_equal(got[name], array, err_msg=name)
        times = times + chosen
    np.testing.assert_array_equal(times, far)
    assert far.any() or size == 62


def scores_of(plan, model):
    """Returns what scores a batch, and the number of programs that were traced."""
    traced = []

    class Counted(api.Step):
        def __call__(self, *args):
            traced.append(self)
            return super().__call__(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "Step", Counted)
        return api.evaluate(plan_for_cuts(plan), model), traced


@pytest.mark.parametrize("name", PLANS)
def test_the_gain_is_the_difference_of_two_plain_evaluations_by_one_program(x64, name):
    plan, model = small_plan(**PLANS[name]), small_model(seed=3, vocab_size=VOCAB)
    batch, params = rows_of(ALONE if name == "one document" else PACKED), nnx.state(model, nnx.Param)
    scores, traced = scores_of(plan, model)
    found = evaluate(scores, params, [batch], lambda batch: batch, contexts=(32, SIZE))
    assert len(traced) == 1, "one compiled program a length"
    assert [gain.beyond for gain in found.gains] == [32, SIZE]

    far = (batch["targets"] >= 0) & (batch["positions"] >= SIZE)
    whole = plain(params, {**batch, "targets": np.where(far, batch["targets"], -1)}, model)
    files = [cut_by_hand(batch, SIZE, offset) for offset in (0, SIZE // 2)]
    of_cuts = [
        plain(params, {**one, "targets": np.where(chosen, batch["targets"], -1)}, model) for one, chosen in files
    ]
    assert sum(count for _, count in of_cuts) == whole[1] == found.gains[-1].num_targets == far.sum()
    want = sum(total for total, _ in of_cuts) / far.sum() - whole[0] / far.sum()
    assert found.gains[-1].gain == pytest.approx(want, abs=1e-12)
    assert abs(want) > 1e-4


def plain(params, batch, model):
    """Returns the sum of the losses and their number, by a plan of one device."""
    found = evaluate(api.evaluate(small_plan((64,), sequences=2), model), params, [batch], lambda batch: batch)
    return found.loss * found.num_targets, found.num_targets


@pytest.mark.parametrize(("window", "gains"), [(2, False), (8, True)])
def test_layers_that_reach_less_than_half_a_piece_gain_nothing(x64, window, gains):
    """Four layers with a window of 2 tokens reach 4 back, of 8 they reach 28: half a piece is 8."""
    plan = small_plan(chunks=(32, 32), mesh=(2, 1, 1))
    model = small_model(seed=3, vocab_size=VOCAB, sliding_window=window)
    scores, _ = scores_of(plan, model)
    batch = rows_of(PACKED)
    found = evaluate(scores, nnx.state(model, nnx.Param), [batch], lambda batch: batch, contexts=(SIZE,))
    (gain,) = found.gains
    assert gain.num_targets > 50
    assert abs(gain.gain) > 1e-6 if gains else abs(gain.gain) <= 1e-9


def test_a_plan_that_takes_cuts_stays_as_it_is():
    plan = small_plan(**PLANS["pipe 2 x seq 2"])
    assert plan_for_cuts(plan) is plan
    assert plan_for_cuts(small_plan(**PLANS["one document"])).sequence_documents == "many"
    flexible = small_plan(chunks=(32, 32), mesh=(1, 1, 2), groups="flex")
    assert plan_for_cuts(flexible).groups == "static"


def test_sizes_fall_to_64_and_are_even():
    assert context_sizes(1024) == (512, 256, 128, 64)
    assert context_sizes(300) == (150, 74)
    assert context_size_of_run(262144) == 32768 and context_size_of_run(9) == 2
    with pytest.raises(ValueError, match="sequence.length of at least 128, got 127; raise sequence.length"):
        context_sizes(127)


def test_what_is_not_finite_is_said_in_words():
    assert ContextGain(beyond=8, num_targets=3, whole=2.0, cut=1.5).text == (
        "context beyond 8 tokens COSTS 0.5000 nats (3 targets)"
    )
    assert "not finite" in ContextGain(beyond=8, num_targets=3, whole=2.0, cut=float("nan")).text
