"""Runs of equal chunks by dynamic programming over arrays, beside the same search run by run."""

import random

import numpy as np
import pytest

from sppo_jax.search.chunks import growing_counts
from sppo_jax.search.longest_runs import longest_runs


def one_by_one(num_chunks, most_tokens, max_runs):
    """The runs that get farthest; of runs that get equally far, those found first."""
    ends = {0: (0, [])}
    for _ in range(max_runs - 1):
        grown = dict(ends)
        for done, (end, runs) in ends.items():
            for count in growing_counts(num_chunks - done - 1):
                tokens = min([most_tokens(end, count)] + [last for _, last in runs[-1:]])
                far = end + count * tokens
                if tokens and (done + count not in grown or far > grown[done + count][0]):
                    grown[done + count] = far, [*runs, (count, tokens)]
        ends = grown
    farthest, best = 0, []
    for done, (end, runs) in ends.items():
        count = num_chunks - done
        tokens = min([most_tokens(end, count)] + [last for _, last in runs[-1:]])
        if tokens and end + count * tokens > farthest:
            farthest, best = end + count * tokens, [*runs, (count, tokens)]
    return best


@pytest.mark.parametrize("seed", range(40))
def test_arrays_find_the_runs_that_one_by_one_does(seed):
    draw = random.Random(seed)
    num_chunks, limit, slope = draw.randint(1, 60), draw.randint(1, 4000), draw.choice((0, 1, 7, 40))

    def most_tokens(starts, counts):
        # Coarse steps make many runs equally far.
        return np.maximum(0, limit - slope * (starts // 64) - counts) // 16

    found = longest_runs(num_chunks, growing_counts(num_chunks - 1), most_tokens, 4)
    assert found == [one_by_one(num_chunks, lambda *at: int(most_tokens(*at)), runs) for runs in (4, 3)]
    assert all(sum(count for count, _ in runs) in (0, num_chunks) for runs in found)


def test_no_run_where_chunks_have_no_tokens():
    assert longest_runs(5, growing_counts(4), lambda starts, counts: np.zeros_like(starts + counts), 4) == [[], []]
