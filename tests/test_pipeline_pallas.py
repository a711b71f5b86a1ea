"""The kernel for TPUs in the pipeline, interpreted: loss and every gradient in float32 against the dense model."""

import re

import jax
import numpy as np
import pytest
import team_cases
from exactness import random_batch, small_model, small_plan
from flax import nnx
from programs import HOST, Case, compare

from sppo_jax.attention.pallas_blocks import target_of
from sppo_jax.pipeline.api import value_and_grad

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
FLEXIBLE = Case(
    dict(chunks=(512, 1024), mesh=(1, 1, 4), kind="hybrid", ulysses=2, groups="flex", kernel="pallas"), MODEL, "float32"
)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n != "hybrid")) for n in CASES])
def test_every_gradient_is_the_dense_one(name):
    case = CASES[name]
    compare(Case({**case.plan, "kernel": "pallas"}, case.model, case.dtype), seed=0, count=2)


@pytest.mark.slow
def test_teams_have_the_dense_gradients():
    compare(FLEXIBLE, seed=0, count=4, batches=team_cases.batches)


def test_a_forward_writes_to_the_caches_behind_the_one_before():
    """XLA:TPU would else copy the caches, see `executor`."""
    plan, model = small_plan((128, 256), kernel="pallas"), small_model(dtype="float32", **MODEL)
    with pytest.warns(UserWarning, match="which interpret it"):
        step = value_and_grad(plan, model)
    batch = random_batch(np.random.default_rng(0), 1, 384, model.config.vocab_size, documents=1)
    text = jax.jit(lambda params, batch: step(params, batch)).lower(nnx.state(model, nnx.Param), batch).as_text()
    cache = "tensor<1x2x2x640x128xf32>"
    found = re.findall(rf"optimization_barrier [^:]* : tensor<(\d+)x\d+xf32>, {cache}, {cache}\n", text)
    assert found == ["128", "256"], "a barrier of output and caches for each chunk"


def test_a_cpu_says_that_it_interprets_the_kernel():
    with pytest.warns(UserWarning, match="the plan's kernel is pallas, got cpu devices, which interpret it"):
        value_and_grad(small_plan((128,), kernel="pallas"), small_model(dtype="float32", **MODEL))


def test_float64_and_gpus_are_refused(x64):
    with pytest.raises(
        ValueError, match="must have model.compute_dtype bfloat16 or float32, got 8 bytes an element; use"
    ):
        value_and_grad(small_plan((128,), kernel="pallas"), small_model(dtype="float64", **MODEL))
    with pytest.raises(ValueError, match="model.kernel=pallas must run on .*, got NVIDIA H100; use model.kernel=block"):
        target_of("NVIDIA H100", 1, 2)


def test_padding_within_a_document_is_refused():
    plan, model = small_plan((128,), kernel="pallas"), small_model(dtype="float32", **MODEL)
    batch = random_batch(np.random.default_rng(0), 1, 128, model.config.vocab_size, documents=1)
    batch["document_ids"][0, 5] = batch["targets"][0, 5] = -1
    with (
        pytest.warns(UserWarning),
        pytest.raises(
            ValueError,
            match="a document must be contiguous .* within .*; .* or use model.kernel=blockwise",
        ),
    ):
        value_and_grad(plan, model)(nnx.state(model, nnx.Param), batch)
