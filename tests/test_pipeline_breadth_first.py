"""Breadth-first programs have the dense loss and gradients: all chunks pass a group of layers, then the next one."""

import pytest
from programs import HOST, Case, compare

BREADTH_FIRST = dict(schedule="breadth-first")
INPUTS_ON_HOST = ("host", "recompute", "recompute")
CASES = {
    "one-layer-groups-rebuilt-from-host": Case(
        BREADTH_FIRST
        | dict(chunks=(16, 8, 8), mesh=(1, 1, 2), interleave=4, places=INPUTS_ON_HOST, alpha=1.0, kv="rebuild"),
        dict(num_layers=4),
    ),
    "two-stages-rebuilt": Case(
        BREADTH_FIRST | dict(chunks=(12, 8, 8, 4, 8), mesh=(1, 2, 1), sequences=2, interleave=2, kv="rebuild"),
        dict(num_layers=8, tied_embeddings=True),
    ),
    "fewer-chunks-than-stages-kept": Case(
        BREADTH_FIRST | dict(chunks=(16, 12), mesh=(1, 3, 1), interleave=2),
        dict(num_layers=6, qk_norm=True),
    ),
    "wave-of-2": Case(
        BREADTH_FIRST
        | dict(
            chunks=(8, 8),
            mesh=(2, 2, 2),
            sequences=2,
            interleave=2,
            wave=2,
            places=HOST,
            alpha=(0.6, 1.0),
            kv="rebuild",
        ),
        dict(num_layers=4),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_breadth_first_has_the_dense_loss_and_gradients(name, x64):
    compare(CASES[name], seed=0, count=2)
