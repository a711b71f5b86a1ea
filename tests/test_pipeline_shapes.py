"""Programs whose ticks are rounded up to shapes have the dense model's loss and gradients, packed documents too."""

import pytest
from programs import HOST, NOTHING, Case, compare

CASES = {
    "ulysses-host": Case(
        dict(chunks=(20, 12, 10, 6), shapes=(12, 24), mesh=(1, 2, 2), places=HOST, alpha=(0.6, 1.0)),
        dict(num_layers=4),
    ),
    "interleaved-ring": Case(
        dict(chunks=(14, 10, 8, 6), shapes=(8, 16), mesh=(1, 2, 2), kind="ring", interleave=2),
        dict(num_layers=4, tied_embeddings=True),
    ),
    "hybrid-stream": Case(
        dict(
            chunks=(24, 12, 8),
            shapes=(16, 28),
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
def test_rounded_ticks_have_the_dense_loss_and_gradients(name, x64):
    compare(CASES[name], seed=0, count=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_more_rounded_ticks_have_the_dense_loss_and_gradients(name, x64):
    compare(SLOW[name], seed=1, count=3)
