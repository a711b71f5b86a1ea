"""Programs whose ticks are rounded up to shapes have the dense model's loss and gradients, packed documents too."""

from itertools import pairwise

import pytest
from programs import HOST, NOTHING, Case, compare

from sppo_jax.schedule.shapes import rounded_up, tick_shapes
from sppo_jax.search.space.equal_cost import ChunkSeconds, equal_cost_lengths

SECONDS = ChunkSeconds(pair=1.0, token=6.0, prefix=0.5, fixed=3.0)


def equal_cost(length, count, multiple, longest=1.5, run=1):
    """Returns chunks as the planner cuts them, in ticks of two shapes, so that some are padded."""
    chunks = equal_cost_lengths(length, count, multiple, SECONDS, longest=longest, run=run)
    return dict(chunks=chunks, shapes=tick_shapes(chunks, multiple, most=2))


CASES = {
    "ulysses-host": Case(
        dict(**equal_cost(48, 4, 2), mesh=(1, 2, 2), places=HOST, alpha=(0.6, 1.0)),
        dict(num_layers=4),
    ),
    "interleaved-ring": Case(
        dict(**equal_cost(40, 4, 2, longest=2, run=2), mesh=(1, 2, 2), kind="ring", interleave=2),
        dict(num_layers=4, tied_embeddings=True),
    ),
    "hybrid-stream": Case(
        dict(
            **equal_cost(44, 3, 4),
            mesh=(1, 1, 4),
            kind="hybrid",
            ulysses=2,
            sequences=2,
            schedule="seq1f1b",
            places=("keep", "keep", "keep"),
        ),
        dict(num_layers=2, qk_norm=True),
    ),
}
SLOW = {
    "fused-recompute": Case(
        dict(chunks=(24, 12, 12), shapes=(16, 32), mesh=(1, 2, 2), kernel="cudnn", places=NOTHING),
        dict(num_layers=2, head_dim=8),
        optimised=True,
    ),
    "all-on-host-ring-q": Case(
        dict(
            chunks=(20, 12, 8, 8),
            shapes=(10, 22),
            mesh=(2, 2, 2),
            kind="ring",
            ring_pass="q",
            places=("host",) * 3,
            alpha=1.0,
        ),
        dict(num_layers=4),
    ),
    "waves-of-three-shapes": Case(
        dict(chunks=(16, 9, 5), shapes=(6, 10, 17), mesh=(1, 3, 1), sequences=4, wave=2), dict(num_layers=3)
    ),
    "interleaved-stream": Case(
        dict(
            chunks=(12, 10, 8, 6),
            shapes=(8, 14),
            mesh=(1, 4, 1),
            sequences=2,
            schedule="interleaved-seq1f1b",
            interleave=2,
        ),
        dict(num_layers=8, qkv_bias=True),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_chunks_of_equal_cost_differ_and_are_rounded_up(name):
    chunks, shapes = (CASES[name].plan[key] for key in ("chunks", "shapes"))
    assert all(left >= right for left, right in pairwise(chunks)) and len(set(chunks)) > 2
    assert any(rounded_up(tokens, shapes) > tokens for tokens in chunks)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in ("interleaved-ring", "hybrid-stream") else ())
        for name in CASES
    ],
)
def test_rounded_ticks_have_the_dense_loss_and_gradients(name, x64):
    compare(CASES[name], seed=0, count=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_more_rounded_ticks_have_the_dense_loss_and_gradients(name, x64):
    compare(SLOW[name], seed=1, count=3)
