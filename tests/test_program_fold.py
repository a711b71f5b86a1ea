"""Folding ticks into loops: nothing lost, and few bodies where ticks repeat."""

from dataclasses import replace

import numpy as np
import pytest
from exactness import small_plan

from sppo_jax.program.fold import Loop, fold, num_segments, unfold
from sppo_jax.program.program import lower
from sppo_jax.program.ring import AttentionShape

SHAPE = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=6, itemsize=4)


@pytest.mark.parametrize("seed", range(20))
def test_unfolding_gives_back_what_was_folded(seed):
    rng = np.random.default_rng(seed)
    for _ in range(20):
        flat = list(rng.integers(0, rng.integers(1, 5), rng.integers(0, 40)))
        repeated = flat[: len(flat) // 3] * 3 + flat
        assert unfold(fold(flat)) == flat and unfold(fold(repeated)) == repeated
        assert num_segments(fold(repeated)) <= len(repeated)


@pytest.mark.parametrize(
    "text,items",
    [
        ("", ()),
        ("a", ("a",)),
        ("aaaa", (Loop(4, ("a",)),)),
        ("abab", (Loop(2, ("a", "b")),)),
        ("xababy", ("x", Loop(2, ("a", "b")), "y")),
        ("aabaabaab", (Loop(3, (Loop(2, ("a",)), "b")),)),
    ],
)
def test_repetitions_become_loops_and_loops_nest(text, items):
    assert fold(text) == items


def segments(**changes):
    return num_segments(lower(small_plan(**changes), SHAPE).items)


@pytest.mark.parametrize("pipe", [1, 2, 4])
@pytest.mark.parametrize("sequences", [1, 2, 5])
def test_equal_chunks_one_sequence_at_a_time_take_a_handful_of_segments(pipe, sequences):
    counts = {segments(chunks=(8,) * n, mesh=(1, pipe, 1), sequences=sequences) for n in (8, 16, 64)}
    assert len(counts) == 1 and counts.pop() <= 5  # F, then F with H, then B; a pipeline's first ticks have no H


@pytest.mark.parametrize("schedule", ["gpipe", "seq1f1b"])
def test_segments_do_not_grow_with_chunks_or_sequences(schedule):
    def count(chunks, sequences):
        return segments(chunks=(8,) * chunks, mesh=(1, 4, 1), sequences=sequences, schedule=schedule)

    assert len({count(n, 4) for n in (8, 16, 32)}) == 1
    assert len({count(8, m) for m in (3, 4, 8, 16)}) == 1


@pytest.mark.parametrize("groups", [2, 4, 5])
@pytest.mark.parametrize("sequences,wave", [(1, 1), (4, 1), (4, 4)])
@pytest.mark.parametrize("lengths", [(8,), (12, 8, 6)])
def test_ticks_without_ends_cost_at_most_as_many_segments_again(groups, sequences, wave, lengths):
    chunks = tuple(length for length in lengths for _ in range(24 // len(lengths)))
    plan = small_plan(
        chunks=chunks,
        mesh=(1, 4, 1),
        schedule="interleaved-seq1f1b",
        interleave=groups,
        sequences=sequences,
        wave=wave,
        places=("host", "host", "recompute"),
        alpha=0.5,
    )
    items = lower(plan, SHAPE).items
    plain = num_segments(fold([replace(spec, embeds=True, has_ends=True) for spec in unfold(items)]))
    assert plain < num_segments(items) <= 2 * plain


def test_each_length_and_each_share_on_the_host_costs_segments():
    plan = dict(mesh=(1, 2, 1), places=("host", "host", "recompute"))
    plain = segments(**plan, chunks=(8,) * 12)
    assert segments(**plan, chunks=(12,) * 4 + (8,) * 4 + (6,) * 4) > plain
    once = segments(**plan, chunks=(8,) * 12, alpha=0.5)
    # Diagonals that take turns between two shares leave hardly two neighbours alike.
    assert plain < once < segments(**plan, chunks=(8,) * 12, alpha=(0.5, 1.0, 1.0, 0.5))
