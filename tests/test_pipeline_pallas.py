"""The kernel for TPUs in the pipeline, interpreted: loss and every gradient in float32 against the dense model."""

import pytest
from programs import HOST, Case, compare

MODEL = dict(num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8)
BREADTH_FIRST = dict(schedule="breadth-first", interleave=2, places=("keep", "recompute", "recompute"), kv="rebuild")
CASES = {
    "ulysses": Case(dict(chunks=(256, 512), mesh=(1, 1, 2)), MODEL, "float32"),
    "ring-kv": Case(dict(chunks=(512, 256), mesh=(1, 1, 2), kind="ring", ring_pass="kv"), MODEL, "float32"),
    "hybrid": Case(
        dict(chunks=(512, 512), mesh=(1, 1, 4), kind="hybrid", ulysses=2, ring_pass="q", places=HOST, alpha=0.5),
        MODEL,
        "float32",
    ),
    "breadth-first": Case(dict(chunks=(128, 256, 128), **BREADTH_FIRST), MODEL, "float32"),
}


@pytest.mark.parametrize("name", CASES)
def test_every_gradient_is_the_dense_one(name):
    case = CASES[name]
    compare(Case({**case.plan, "kernel": "pallas"}, case.model, case.dtype), seed=0, count=2)
