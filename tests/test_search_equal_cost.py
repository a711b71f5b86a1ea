"""Chunks of equal cost: their seconds are those of the cost model, equal to a multiple's seconds, up to the limit."""

import random
from itertools import accumulate

import pytest

from sppo_jax.config import ModelConfig
from sppo_jax.hardware import parse_cluster
from sppo_jax.plan.parts import MeshShape
from sppo_jax.predict.seconds.costs import cost_model
from sppo_jax.predict.seconds.stage_shape import Recompute, StageShape
from sppo_jax.search.space.equal_cost import ChunkSeconds, chunk_seconds, equal_cost_lengths

LENGTH, MULTIPLE = 2**19, 128
MODEL = ModelConfig(vocab_size=32000, hidden_size=4096, num_layers=32, num_heads=32, mlp_size=11008)
SMOOTH = ChunkSeconds(pair=1e-9, token=2e-5, prefix=3e-8, fixed=4e-3)


def costs(pipe=8, ring=1, kernel="cudnn"):
    return cost_model(
        MODEL,
        parse_cluster("a100-80g:8x8"),
        StageShape(
            mesh=MeshShape(data=1, pipe=pipe, seq=8),
            ulysses=8 // ring,
            ring=ring,
            layers=4,
            compute_bytes=2,
            kernel=kernel,
            length=LENGTH,
        ),
        Recompute(),
    )


def seconds_of(lengths, seconds):
    return [seconds.of(end, tokens) for end, tokens in zip(accumulate(lengths), lengths, strict=True)]


@pytest.mark.parametrize(("start", "tokens"), [(0, 4096), (4096, 8192), (2**18, 8192), (2**19 - 5000, 5000)])
def test_the_seconds_are_those_of_the_cost_model(start, tokens):
    for kernel in ("cudnn", "blockwise"):
        model = costs(kernel=kernel)
        found, wave = chunk_seconds(model, LENGTH, 32), model.wave_tokens(model.attention[0])
        assert bool(wave) == (kernel == "cudnn") == bool(found.forward)
        want = sum(model.seconds(kind, start, tokens) for kind in "FB")
        assert found.of(start + tokens, tokens) == pytest.approx(want, rel=1e-9)


def test_a_ring_sends_as_much_at_the_ends_of_a_sequence_as_by_the_cost_model():
    model = costs(ring=8)
    for end, tokens in ((16384, 16384), (LENGTH, 16384)):
        want = sum(model.seconds(kind, end - tokens, tokens) for kind in "FB")
        assert chunk_seconds(model, LENGTH, 32).of(end, tokens) == pytest.approx(want, rel=1e-9)


def test_tokens_before_take_the_seconds_or_end_with_a_wave():
    rng = random.Random(2)
    waves = ChunkSeconds(pair=1e-9, token=2e-5, prefix=3e-8, fixed=4e-3, forward=0.3e-9, wave=1728.0)
    for _ in range(200):
        end, value = rng.uniform(5e4, 5e5), rng.uniform(0.2, 1.0)
        tokens = SMOOTH.tokens_before(end, value)
        if tokens < end:
            assert SMOOTH.of(end, tokens) == pytest.approx(value, rel=1e-9)
        tokens = waves.tokens_before(end, value)
        whole = abs(tokens / waves.wave - round(tokens / waves.wave)) < 1e-9
        if tokens < end:
            assert waves.of(end, tokens * (1 - 1e-12)) <= value * (1 + 1e-9)
            assert whole or waves.of(end, tokens) == pytest.approx(value, rel=1e-9)
            assert waves.of(end, tokens + 1) > value
    assert SMOOTH.tokens_before(1e5, 1e-3) == 0.0


@pytest.mark.parametrize("num_chunks", [2, 3, 8, 48, 120])
def test_without_a_limit_all_chunks_take_as_long_to_a_multiple(num_chunks):
    lengths = equal_cost_lengths(LENGTH, num_chunks, MULTIPLE, SMOOTH, longest=num_chunks)
    assert sum(lengths) == LENGTH and len(lengths) == num_chunks
    assert list(lengths) == sorted(lengths, reverse=True) and all(tokens % MULTIPLE == 0 for tokens in lengths)
    taken = seconds_of(lengths, SMOOTH)
    of_multiple = SMOOTH.of(LENGTH, 2 * MULTIPLE) - SMOOTH.of(LENGTH, MULTIPLE)
    # Each is as long as it may be, but for the first, which has what is left.
    assert max(taken) - min(taken[1:]) <= 1.01 * of_multiple
    assert max(taken) - taken[0] <= 2 * of_multiple


@pytest.mark.parametrize("longest", [1.0, 1.25, 1.5, 2.0, 3.0])
@pytest.mark.parametrize("num_chunks", [12, 40, 96])
def test_what_the_limit_takes_goes_to_the_others_which_are_equal_again(longest, num_chunks):
    lengths = equal_cost_lengths(LENGTH, num_chunks, MULTIPLE, SMOOTH, longest=longest)
    limit = -(-int(longest * LENGTH / num_chunks) // MULTIPLE) * MULTIPLE
    assert sum(lengths) == LENGTH and max(lengths) <= limit + MULTIPLE
    taken, of_multiple = seconds_of(lengths, SMOOTH), SMOOTH.of(LENGTH, 2 * MULTIPLE) - SMOOTH.of(LENGTH, MULTIPLE)
    capped = [number for number, tokens in enumerate(lengths[1:], 1) if tokens >= limit]
    free = [value for number, value in enumerate(taken[1:], 1) if number not in capped]
    assert not capped or capped == list(range(1, len(capped) + 1))
    if longest > 1:
        assert free and max(free) - min(free) <= 1.01 * of_multiple
        # No capped chunk takes longer than the others.
        assert max(taken) <= max(free) + of_multiple


def test_the_chunks_of_a_run_take_as_long_as_each_other():
    lengths = equal_cost_lengths(LENGTH, 48, MULTIPLE, SMOOTH, longest=1.5, run=8)
    flat = equal_cost_lengths(LENGTH, 48, MULTIPLE, SMOOTH, longest=1.5)
    assert sum(lengths) == LENGTH and len(lengths) == 48 and max(lengths) <= 1.5 * LENGTH / 48 + 2 * MULTIPLE
    taken = seconds_of(lengths, SMOOTH)
    for start in range(16, 48, 8):
        of_run = taken[start : start + 8]
        assert max(of_run) <= 1.02 * min(of_run)
    # Runs take longer from first to last, so that they are more alike in length than with one cost for all.
    assert max(taken[40:]) > 1.1 * max(taken[16:24])
    assert lengths[-1] > 1.1 * flat[-1] and sum(lengths[:8]) < sum(flat[:8])


def test_every_chunk_has_a_multiple_even_of_short_sequences():
    for units in range(1, 24):
        for chunks in range(1, units + 1):
            for run in (1, 2, 4):
                lengths = equal_cost_lengths(units * 8, chunks, 8, SMOOTH, longest=1.5, run=run)
                assert sum(lengths) == units * 8 and len(lengths) == chunks and min(lengths) >= 8
                assert all(tokens % 8 == 0 for tokens in lengths)


def test_errors():
    with pytest.raises(ValueError, match="at least 1, the mean chunk, got 0.5; raise it"):
        equal_cost_lengths(64, 2, 8, SMOOTH, longest=0.5)
    with pytest.raises(ValueError, match="each of sequence.chunks=9 chunks must have at least"):
        equal_cost_lengths(64, 9, 8, SMOOTH, longest=2)
