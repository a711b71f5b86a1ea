"""The step in bfloat16, which is what a GPU runs, against the dense step in bfloat16 and in float32."""

import numpy as np
import pytest
from exactness import quick_jit, random_batch, relative_errors
from flax import nnx
from programs import HOST, Case, compare
from state_cases import packed_batches

from sppo_jax.pipeline.api import value_and_grad

CASES = {
    "hybrid-fused-rest-on-host": Case(
        dict(
            chunks=(24, 16),
            mesh=(1, 2, 4),
            kind="hybrid",
            ulysses=2,
            kernel="cudnn",
            places=("host",) * 3,
            alpha=1.0,
        ),
        dict(head_dim=8),
        dtype="bfloat16",
    ),
    "ulysses-seq1f1b-host": Case(
        dict(chunks=(16,) * 4, mesh=(1, 2, 2), schedule="seq1f1b", sequences=3, places=HOST, alpha=0.5),
        dict(tied_embeddings=True, embedding_scale=24**0.5, norms="both", mlp="geglu", logit_cap=3.0, query_scale=0.3),
        dtype="bfloat16",
    ),
}


# Draws in bfloat16 are in test_pipeline_combinations.py, with every other feature there.
@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_bfloat16_loses_no_more_than_in_the_dense_step(name):
    compare(CASES[name], seed=0, count=2)


@pytest.mark.slow
def test_bfloat16_of_layers_with_a_state_loses_no_more_than_in_the_dense_step():
    plan = dict(
        chunks=(16, 8), mesh=(1, 1, 2), schedule="breadth-first", interleave=2, weights="gathered", kv="rebuild"
    )
    plan |= dict(places=("host", "recompute", "recompute"), alpha=1.0)
    # Of 24 rates of decay, so that no leaf has fewer numbers than those that the bounds are for.
    model = dict(num_layers=4, layers="2x(delta,full)", unit_norm=True, delta={"value_heads": 12, "key_heads": 4})
    case = Case(plan, model, dtype="bfloat16")
    compare(case, seed=0, count=2, batches=packed_batches)


def test_sums_over_sequences_and_pipelines_are_float32():
    """Of 8 equal sequences, all with targets and one with targets give the same gradients."""
    case = Case(
        dict(chunks=(8, 8), mesh=(2, 2, 2), schedule="seq1f1b", sequences=4, places=HOST, alpha=1.0), dtype="bfloat16"
    )
    plan, model = case.make_plan(), case.make_model()
    one = random_batch(np.random.default_rng(0), 1, 16, model.config.vocab_size, documents=2)
    all_of_them = {key: np.repeat(value, 8, 0) for key, value in one.items()}
    first = all_of_them | {"targets": np.where(np.arange(8)[:, None] == 0, one["targets"], -1).astype(np.int32)}
    step, params = quick_jit(value_and_grad(plan, model)), nnx.state(model, nnx.Param)
    (loss, grads), (want_loss, want) = step(params, all_of_them), step(params, first)
    # An eighth of a bfloat16 number is a bfloat16 number, so both batches round a sequence's part alike. Each of the 8
    # sums in float32 is off by at most 2^-24, all together by 5e-7. One sum in bfloat16 is off by up to 2^-9.
    np.testing.assert_allclose(loss, want_loss, rtol=1e-6)
    errors = relative_errors(grads, want)
    assert max(errors.values()) < 1e-6, errors
