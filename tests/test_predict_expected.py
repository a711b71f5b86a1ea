"""Steps of drawn documents: in the mean, tick by tick, and the slowest of several pipelines."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from bench.documents import alike, drawn
from sppo_jax.config import config_from_dict
from sppo_jax.hardware import DEVICES, make_cluster
from sppo_jax.predict.seconds.copies import copy_seconds
from sppo_jax.predict.seconds.documents import NUM_ROWS
from sppo_jax.predict.seconds.expected import expected_seconds, row_of
from sppo_jax.predict.seconds.simulate import simulate
from sppo_jax.search.evaluate import costs_of, shape_of_plan
from sppo_jax.search.make import make_plan

TINY = dict(vocab_size=256, hidden_size=32, num_layers=8, num_heads=4, mlp_size=64)
# Attention takes most of the time.
SLOW = make_cluster(replace(DEVICES["cpu"], smallest_chunk=512, overhead_s=0.0, attention_block=0), 4)


def planned(data=1, pipe=2, seq=1, sequences=1, schedule="sppo", chunks=8, interleave=1):
    """Returns table, costs, shape and stash of a small plan."""
    config = config_from_dict(
        {
            "model": TINY,
            "mesh": {"data": data, "pipe": pipe, "seq": seq},
            "sequence": {"length": 4096, "per_step": data * sequences, "chunks": chunks, "balance": "equal"},
            "schedule": {"name": schedule, "interleave": interleave},
            "train": {"steps": 1},
        }
    )
    cluster = make_cluster(SLOW.device, data * pipe * seq)
    plan = make_plan(config, cluster)
    found = plan.outline(), costs_of(plan, config, cluster), shape_of_plan(plan, config, cluster), plan.stash
    return config.model, found


def step_of(found, row):
    """Returns the seconds of the ticks of a step whose sequences are all alike."""
    table, costs, shape, stash = found
    costs = replace(costs, attended=row)
    return simulate(table, costs.of_chunks(table.chunk_lengths), copy_seconds(table, shape, stash, costs)).step_s


@pytest.mark.parametrize("places", [{}, {"sequences": 3, "schedule": "seq1f1b"}, {"data": 2}])
def test_sequences_that_are_alike_take_what_one_takes(places):
    model, found = planned(**places)
    documents = alike(model, 4096, 300)
    assert expected_seconds(*found, documents) == pytest.approx(step_of(found, documents.mean), rel=1e-12)
    whole = alike(model, 4096, 4096)
    assert expected_seconds(*found, whole) == pytest.approx(step_of(found, None), rel=1e-9)


def test_of_one_sequence_the_mean_counts():
    model, found = planned()
    documents = drawn(model, 4096, 500)
    each = [step_of(found, row) for row in documents.rows]
    assert expected_seconds(*found, documents) == pytest.approx(np.mean(each)) and max(each) > 1.1 * min(each)
    assert np.mean(each) >= step_of(found, documents.mean) * (1 - 1e-12)


def test_a_tick_waits_for_the_slowest_of_the_sequences_in_it():
    model, found = planned(sequences=8, schedule="1f1b", chunks=1, pipe=4)
    documents = drawn(model, 4096, 500)
    each = [step_of(found, row) for row in documents.rows]
    assert expected_seconds(*found, documents) > 1.05 * np.mean(each)


@pytest.mark.parametrize(("data", "sequences"), [(2, 1), (4, 1), (4, 16), (16, 64)])
def test_of_several_pipelines_the_slowest_counts(data, sequences):
    documents = drawn(planned()[0], 4096, 500)
    each = np.array([row.pairs(0, 4096) for row in documents.rows])
    rng = np.random.default_rng(0)
    drawn_pairs = each[rng.integers(0, NUM_ROWS, (4000, data, sequences))].mean(-1).max(1).mean()
    slowest = documents.of_slowest(data, sequences)
    got = slowest.mean.pairs(0, 4096)
    assert got - each.mean() == pytest.approx(drawn_pairs - each.mean(), rel=0.01 if sequences == 1 else 0.25)
    whole = [row.pairs(0, 4096) for row in slowest.rows]
    assert whole == sorted(whole) and slowest.of_slowest(1, sequences) is slowest


def test_several_pipelines_take_longer_than_one_of_them():
    model, found = planned(data=4)
    documents = drawn(model, 4096, 500)
    rising = sorted(step_of(found, row) for row in documents.rows)
    chances = np.diff((np.arange(NUM_ROWS + 1) / NUM_ROWS) ** 4)
    got = expected_seconds(*found, documents.of_slowest(4, 1))
    assert got == pytest.approx(np.dot(chances, rising), rel=0.01) and got > 1.05 * np.mean(rising)


def test_a_sequence_has_each_group_once():
    for sequence in range(40):
        assert Counter(row_of(step, sequence) for step in range(NUM_ROWS)) == Counter(range(NUM_ROWS))
    assert [row_of(step, 0) for step in range(NUM_ROWS)] == list(range(NUM_ROWS))
    assert len({tuple(row_of(step, sequence) for step in range(NUM_ROWS)) for sequence in range(8)}) == 8
