"""Programs of waves have the dense model's loss and gradients: k sequences of packed documents that run as one."""

import pytest
from programs import HOST, NOTHING, Case, compare

CASES = {
    "sppo-2-host": Case(
        dict(chunks=(16, 8), mesh=(1, 2, 1), sequences=4, schedule="sppo", wave=2, places=HOST, alpha=(0.6, 1.0)),
        dict(num_layers=4),
    ),
    "interleaved-2-fewer-chunks-than-stages": Case(
        dict(chunks=(16,), mesh=(1, 2, 1), sequences=4, schedule="interleaved-seq1f1b", interleave=2, wave=2),
        dict(num_layers=4, qk_norm=True),
    ),
}
SLOW = {
    "sppo-2-host-three-chunks": Case(
        dict(chunks=(16, 8, 8), mesh=(1, 2, 1), sequences=4, schedule="sppo", wave=2, places=HOST, alpha=(0.6, 1.0)),
        dict(num_layers=4),
    ),
    "seq1f1b-4": Case(
        dict(chunks=(16, 8), mesh=(1, 2, 2), sequences=8, schedule="seq1f1b", wave=4, ring_pass="q"),
        dict(num_layers=2, tied_embeddings=True),
    ),
    "gpipe-2": Case(dict(chunks=(12, 8), mesh=(2, 3, 1), sequences=4, schedule="gpipe", wave=2), dict(num_layers=3)),
    "sppo-2-of-2-groups": Case(
        dict(
            chunks=(12, 8, 8, 8),
            mesh=(1, 2, 2),
            sequences=2,
            interleave=2,
            wave=2,
            places=("host", "host", "host"),
            alpha=1.0,
        ),
        dict(num_layers=8),
    ),
    "sppo-4-recompute": Case(
        dict(chunks=(16, 8), mesh=(1, 4, 1), sequences=4, wave=4, places=NOTHING), dict(num_layers=4)
    ),
    "sppo-2-ring-host": Case(
        dict(chunks=(16, 8), mesh=(1, 2, 2), kind="ring", sequences=4, wave=2, places=HOST, alpha=(0.6, 1.0)),
        dict(num_layers=4),
    ),
    "sppo-4-one-stage-host": Case(
        dict(chunks=(16, 8), mesh=(1, 1, 4), kind="hybrid", ulysses=2, sequences=4, wave=4, places=HOST, alpha=1.0),
        dict(num_layers=2),
    ),
    "seq1f1b-2-fused": Case(
        dict(chunks=(24, 16), mesh=(1, 2, 2), sequences=4, schedule="seq1f1b", wave=2, kernel="cudnn"),
        dict(num_layers=2, head_dim=8),
        optimised=True,
    ),
    "interleaved-4-rounded": Case(
        dict(
            chunks=(8, 8),
            mesh=(1, 4, 2),
            sequences=8,
            schedule="interleaved-seq1f1b",
            interleave=2,
            wave=4,
            kv_grad_dtype="bfloat16",
        ),
        dict(num_layers=8),
    ),
}


@pytest.mark.parametrize(
    "name", ["sppo-2-host", pytest.param("interleaved-2-fewer-chunks-than-stages", marks=pytest.mark.slow)]
)
def test_a_wave_has_the_dense_loss_and_gradients(name, x64):
    compare(CASES[name], seed=0, count=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_more_waves_have_the_dense_loss_and_gradients(name, x64):
    compare(SLOW[name], seed=1, count=3)
