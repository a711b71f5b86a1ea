"""Chunk lengths: sums, multiples, balance and errors; runs of equal chunks, beside the same search run by run."""

import random
import warnings

import numpy as np
import pytest

from sppo_jax.search.space.chunks import (
    MENU_SIZE,
    equal_lengths,
    flops_balanced_lengths,
    given_lengths,
    growing_counts,
    is_menu,
    longest_runs,
)


def chunk_costs(lengths, pair, token):
    start, costs = 0, []
    for tokens in lengths:
        costs.append(pair * (tokens * start + tokens * tokens / 2) + token * tokens)
        start += tokens
    return costs


def test_equal_lengths_differ_by_one_multiple_at_most():
    for multiple in (1, 4, 6):
        for units in range(1, 20):
            for chunks in range(1, units + 1):
                lengths = equal_lengths(units * multiple, chunks, multiple)
                assert sum(lengths) == units * multiple and len(lengths) == chunks
                assert all(length % multiple == 0 for length in lengths)
                assert lengths[0] - lengths[-1] in (0, multiple) and is_menu(lengths)


def test_balanced_lengths_are_a_menu_and_never_worse_than_equal_ones():
    rng = random.Random(3)
    for _ in range(80):
        multiple = rng.choice((1, 2, 16, 96))
        chunks = rng.randint(1, 24)
        length = multiple * rng.randint(chunks, 40 * chunks)
        pair, token = rng.choice(((1.0, 0.0), (1.0, 100.0), (0.0, 1.0), (4.0, 1000.0)))
        lengths = flops_balanced_lengths(length, chunks, multiple, pair_flops=pair, token_flops=token)
        assert sum(lengths) == length and len(lengths) == chunks and min(lengths) >= multiple
        assert all(value % multiple == 0 for value in lengths)
        assert is_menu(lengths)
        equal = equal_lengths(length, chunks, multiple)
        assert max(chunk_costs(lengths, pair, token)) <= max(chunk_costs(equal, pair, token))


@pytest.mark.parametrize(("chunks", "limit"), [(2, 1.001), (4, 1.002), (8, 1.09), (16, 1.2), (64, 1.3)])
def test_balanced_lengths_are_close_to_the_ideal(chunks, limit):
    pair, token = 57344.0, 1.7e9
    length = 2**20
    lengths = flops_balanced_lengths(length, chunks, 128, pair_flops=pair, token_flops=token)
    ideal = sum(chunk_costs(lengths, pair, token)) / chunks
    assert max(chunk_costs(lengths, pair, token)) <= limit * ideal
    equal = max(chunk_costs(equal_lengths(length, chunks, 128), pair, token))
    assert equal > 1.3 * ideal


def test_few_chunks_have_the_closed_form():
    # Attention alone: the i-th of N cuts of equal work lies at sqrt(i / N) of the sequence.
    lengths = flops_balanced_lengths(10000, 4, 1, pair_flops=1.0, token_flops=0.0)
    assert lengths == (5000, 2071, 1589, 1340)
    # No attention: equal.
    assert flops_balanced_lengths(10000, 4, 1, pair_flops=0.0, token_flops=1.0) == (2500,) * 4


def test_given_menu_is_taken_without_a_word():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert given_lengths(40, [16, 8, 8, 8], 4) == (16, 8, 8, 8)


@pytest.mark.parametrize("lengths", [(8, 16, 8), (20, 16, 12, 8, 4)])
def test_other_lists_warn_once_of_their_cost(lengths):
    with pytest.warns(UserWarning) as record:
        assert given_lengths(sum(lengths), lengths, 4) == lengths
    assert len(record) == 1
    words = f"{len(set(lengths))} distinct chunk lengths in {len(lengths)} runs"
    assert words in str(record[0].message)
    assert MENU_SIZE == 4


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: equal_lengths(1000, 2, 128), "must divide sequence.length=1000, got mesh.seq=1; use 896 or 1024"),
        (lambda: equal_lengths(5, 1, 8), "use 8 tokens"),
        (lambda: equal_lengths(64, 9, 8), "each of sequence.chunks=9 chunks must have at least mesh.seq * 8"),
        (lambda: equal_lengths(60, 2, 8), "sequence.length=60, got mesh.seq=1; use 56 or 64"),
        (
            lambda: flops_balanced_lengths(64, 0, 8, pair_flops=1.0, token_flops=1.0),
            "sequence.length=64; use 1 to 8 chunks",
        ),
        (lambda: given_lengths(24, (8, 10, 6), 4), "got 10 in chunk 1 with mesh.seq=4; use 8 or 12"),
        (lambda: given_lengths(24, (12, 8), 4), "add up to sequence.length=24, got 20; change a chunk by +4"),
    ],
)
def test_errors_name_the_nearest_choice(call, words):
    with pytest.raises(ValueError) as error:
        call()
    assert words in str(error.value)


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
