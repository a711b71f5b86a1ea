"""The blaster: microbatches of similar lengths whose largest number of tokens is least."""

import itertools
import random

import numpy as np
import pytest

from sppo_jax.flex.flexsp.blaster import blast, microbatch_counts


@pytest.mark.parametrize("seed", range(12))
def test_the_largest_microbatch_is_as_small_as_possible(seed):
    numbers = random.Random(seed)
    lengths = np.array([1 + int(50 * numbers.random() ** 2) for _ in range(3 + seed % 7)])
    order = sorted(lengths.tolist(), reverse=True)
    found = blast(lengths, range(1, len(lengths) + 1))
    for count, microbatches in enumerate(found, 1):
        best = min(
            max(sum(order[a:b]) for a, b in zip((0, *cuts), (*cuts, len(order)), strict=True))
            for cuts in itertools.combinations(range(1, len(order)), count - 1)
        )
        assert len(microbatches) == count and all(len(own) for own in microbatches)
        assert max(lengths[own].sum() for own in microbatches) == best
        joined = np.concatenate(microbatches)
        assert lengths[joined].tolist() == order and sorted(joined.tolist()) == list(range(len(lengths)))


def test_five_numbers_are_tried_from_the_least_that_fits():
    lengths = np.full(20, 100)
    assert list(microbatch_counts(lengths, 700)) == [3, 4, 5, 6, 7]
    assert list(microbatch_counts(lengths, 2000)) == [1, 2, 3, 4, 5]
    assert list(microbatch_counts(lengths[:2], 2000)) == [1, 2]
