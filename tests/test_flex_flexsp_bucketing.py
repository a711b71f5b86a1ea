"""Buckets: the program's optimum, and the tokens that 16 buckets add."""

import itertools
import math
import random

import numpy as np
import pytest

from sppo_jax.flex.flexsp.blaster import blast
from sppo_jax.flex.flexsp.bucketing import MOST_TOKEN_ERROR, bucket, bucketed
from sppo_jax.flex.flexsp.costs import MODELS, flexsp_costs
from sppo_jax.flex.flexsp.solver import plan_batch
from sppo_jax.flex.flexsp.team_plan import problem
from studies.flexsp_cells import released_batches, sample_batches


def least_added(lengths, num_buckets):
    """Tries every division of the sorted documents into runs."""
    order, best = sorted(lengths), None
    for number in range(min(num_buckets, len(order))):
        for cuts in itertools.combinations(range(1, len(order)), number):
            runs = [order[a:b] for a, b in zip((0, *cuts), (*cuts, len(order)), strict=True)]
            added = sum(max(run) * len(run) - sum(run) for run in runs)
            best = added if best is None else min(best, added)
    return best


@pytest.mark.parametrize("seed", range(12))
def test_buckets_add_the_fewest_tokens(seed):
    numbers = random.Random(seed)
    lengths = np.array([1 + int(40 * numbers.random() ** 3) for _ in range(1 + seed % 9)])
    found = bucket(lengths, 1 + seed % 4)
    assert found.token_error * lengths.sum() == pytest.approx(least_added(lengths.tolist(), 1 + seed % 4))
    assert sum(found.counts) == len(lengths) and list(found.lengths) == sorted(set(found.lengths))
    upper = np.repeat(found.lengths, found.counts)
    assert (upper >= np.sort(lengths)).all()
    assert upper.sum() - lengths.sum() == pytest.approx(found.token_error * lengths.sum())


def test_each_document_is_as_long_as_its_bucket():
    assert bucketed(np.array([5, 100, 3, 98, 6]), 2).tolist() == [6, 100, 6, 100, 6]


def test_as_many_buckets_as_lengths_add_nothing():
    found = bucket(np.array([5, 3, 5, 9]), 16)
    assert (found.lengths, found.counts, found.token_error) == ((3, 5, 9), (1, 2, 1), 0)


@pytest.mark.parametrize("corpus, numbers", [("wikipedia", (9, 15)), ("github-assumed", (9, 16)), (None, (6, 23, 32))])
def test_16_buckets_add_at_most_what_the_paper_states_to_each_microbatch(corpus, numbers):
    """The batches whose buckets add more without the bound: of 20 of a corpus, or of 40 released ones."""
    costs = flexsp_costs(MODELS["7b"])
    batches = sample_batches(corpus, 192, 20) if corpus else released_batches(192)
    for lengths in (batches[number] for number in numbers):
        for most, keeps in ((MOST_TOKEN_ERROR, True), (math.inf, False)):
            microbatches, plans = plan_batch(lengths, costs, num_buckets=16, most_token_error=most)
            assert (max(bucket(lengths[own], 16).token_error for own in microbatches) <= 0.023) == keeps
            assert all(problem(plan, lengths[own], costs) == "" for own, plan in zip(microbatches, plans, strict=True))


def test_numbers_of_microbatches_whose_buckets_add_too_much_are_passed_over():
    """Two buckets: with one microbatch of lengths 1 to 4 times 12,800 they add a fifth, with two nothing."""
    costs = flexsp_costs(MODELS["7b"])
    lengths = np.repeat([12_800, 25_600, 38_400, 51_200], 2)
    found = {}
    for most in (math.inf, 0.2, 0.023):
        microbatches, _ = plan_batch(lengths, costs, num_buckets=2, most_token_error=most)
        found[most] = (len(microbatches), max(bucket(lengths[own], 2).token_error for own in microbatches))
    assert found[math.inf][0] == found[0.2][0] == 1 and 0.023 < found[math.inf][1] <= 0.2
    assert found[0.023][0] > 1 and found[0.023][1] <= 0.023


def test_where_no_number_keeps_the_bound_the_one_that_adds_least_is_taken():
    lengths = 128 * np.arange(1, 13)
    costs = flexsp_costs(MODELS["7b"])
    errors = [
        max(bucket(lengths[own], 1).token_error for own in microbatches) for microbatches in blast(lengths, range(1, 6))
    ]
    microbatches, _ = plan_batch(lengths, costs, num_buckets=1, most_token_error=0.0)
    assert max(bucket(lengths[own], 1).token_error for own in microbatches) == min(errors) < errors[0]
