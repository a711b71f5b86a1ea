"""Scores by forward passes: a hit is what greedy decoding writes; choices are compared by their losses."""

from types import SimpleNamespace

import numpy as np
import pytest
from flax import nnx

from sppo_jax.config import config_from_dict
from sppo_jax.data.tasks.prompts import Continuation
from sppo_jax.evaluation.samples import TaskSample, lay_out_answers
from sppo_jax.evaluation.score import score
from sppo_jax.models import build_model
from sppo_jax.pipeline import api
from sppo_jax.pipeline.params import layout
from sppo_jax.search.make import make_plan

LENGTH = 64


def sample(prompt, *answers, **others):
    ways = tuple(Continuation(tokens=tuple(answer), joins=True) for answer in answers)
    return TaskSample(prompt=np.array(prompt), answers=ways, **others)


@pytest.fixture(scope="module")
def small():
    """Returns a plan of 2 stages x 2 members, the program, and what greedy decoding of the dense model writes."""
    config = config_from_dict(
        {
            "model": {"vocab_size": 64, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2,
                      "mlp_size": 64, "init_scale": 0.3},
            "sequence": {"length": LENGTH, "chunks": 2},
            "mesh": {"data": 1, "pipe": 2, "seq": 2},
            "train": {"steps": 1, "devices": "cpu:4"},
        }
    )  # fmt: skip
    plan = make_plan(config)
    mesh, model = layout.make_mesh(plan), build_model(config)
    params, passes = nnx.state(model, nnx.Param), []

    def scores_of(plan):
        scores = api.evaluate(plan, model, mesh)

        def counted(params, batch):
            passes.append(batch)
            return scores(params, batch)

        return counted, params, mesh

    dense = nnx.jit(lambda model, tokens: model(tokens))

    def logits(tokens):
        row = np.zeros((1, LENGTH), np.int32)
        row[0, : len(tokens)] = tokens
        return np.asarray(dense(model, row))[0, : len(tokens)].astype(np.float64)

    def greedy(prompt, count):
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(logits(tokens)[-1].argmax()))
        return tokens[len(prompt) :]

    return SimpleNamespace(plan=plan, scores_of=scores_of, greedy=greedy, logits=logits, passes=passes)


def nats_of(small, prompt, answer):
    rows = small.logits([*prompt, *answer])[len(prompt) - 1 : -1]
    lse = np.log(np.exp(rows).sum(-1))
    return float((lse - rows[np.arange(len(answer)), answer]).sum())


def test_a_hit_is_what_greedy_decoding_writes(small):
    rng = np.random.default_rng(0)
    samples, wanted = [], []
    for number in range(16):
        prompt, count = rng.integers(0, 64, rng.integers(5, 40)).tolist(), int(rng.integers(1, 8))
        written = small.greedy(prompt, count)
        answer = list(written)
        if number % 2:
            answer[int(rng.integers(count))] = int(rng.integers(64))
        samples.append(sample(prompt, answer, depth=number / 16))
        wanted.append(answer == written)
    found = score(samples, small.plan, small.scores_of)
    assert found.hits.tolist() == wanted and 0 < sum(wanted) < 16
    for one, answered in zip(samples, found.best, strict=True):
        assert answered.nats == pytest.approx(nats_of(small, one.prompt, one.answers[0].tokens), rel=1e-4)
        assert answered.count == len(one.answers[0].tokens)
    assert found.depths == tuple(number / 16 for number in range(16)) and found.hits_by_byte is None


def test_another_way_of_writing_is_tried_where_the_first_is_no_hit(small):
    prompt = [5, 9, 33, 2, 8]
    right = small.greedy(prompt, 3)
    wrong = [*right[:2], (right[2] + 1) % 64]
    one = small.plan
    small.passes.clear()
    found = score([sample(prompt, wrong, right), sample(prompt, right, wrong)], one, small.scores_of)
    assert found.hits.all() and [best.is_hit for best in found.best] == [True, True]
    # Both samples share a row in the first round; the first alone is in the second.
    assert len(small.passes) == 2
    lost = score([sample(prompt, wrong, [*wrong, 1])], one, small.scores_of)
    each = [nats_of(small, prompt, answer) / len(answer) for answer in (wrong, [*wrong, 1])]
    assert not lost.hits.any() and lost.best[0].nats / lost.best[0].count == pytest.approx(min(each), rel=1e-4)


def test_choices_are_compared_by_nats_and_by_nats_a_byte(small):
    prompt, choices = [7, 1, 20, 50], ([3], [9, 4, 11, 30], [40, 2])
    nats = np.array([nats_of(small, prompt, choice) for choice in choices])
    sizes = np.array([1, 80, 2])
    right, by_byte = int(nats.argmin()), int((nats / sizes).argmin())
    assert right != by_byte == 1
    found = score(
        [sample(prompt, *choices, right=at, sizes=tuple(sizes.tolist())) for at in (right, by_byte)],
        small.plan,
        small.scores_of,
    )
    assert found.hits.tolist() == [True, False] and found.hits_by_byte.tolist() == [False, True]
    assert [one.nats for one in found.best] == pytest.approx([nats[right], nats[by_byte]], rel=1e-4)


def test_short_samples_share_a_row_in_their_order():
    samples = [sample([1, 2, 3], [4]), sample([5], [6, 7]), sample([8] * 5, [9, 9])]
    wanted = [(0, 0), (1, 0), (2, 0)]
    rows = lay_out_answers(samples, wanted, 8, shared=True)
    assert [(one.row, one.first, one.count) for one in rows.asked] == [(0, 2, 1), (0, 4, 2), (1, 4, 2)]
    assert not rows.has_one_document
    alone = lay_out_answers(samples, wanted, 8, shared=False)
    assert [one.row for one in alone.asked] == [0, 1, 2] and alone.has_one_document
    ((batch, first), (last, second)) = [*alone.batches(2)]
    assert batch["tokens"].tolist() == [[1, 2, 3, 4, 0, 0, 0, 0], [5, 6, 7, 0, 0, 0, 0, 0]]
    assert last["document_ids"].tolist() == [[0] * 7 + [-1], [-1] * 8]
    assert len(first) == 2 and len(second) == 1 and second[0].row == 2


def test_documents_of_one_row_do_not_see_each_other(small):
    samples = [sample([5, 9, 33], [2, 8]), sample([44, 13, 60, 1], [7])]
    together = score(samples, small.plan, small.scores_of)
    for one, best in zip(samples, together.best, strict=True):
        alone = score([one], small.plan, small.scores_of).best[0]
        assert (best.is_hit, best.count) == (alone.is_hit, alone.count)
        assert best.nats == pytest.approx(alone.nats, rel=1e-5)
