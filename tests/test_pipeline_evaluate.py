"""Each token's loss from the pipeline, against the dense model's logits."""

import jax
import jax.numpy as jnp
import numpy as np
from exactness import random_batch, small_model, small_plan
from flax import nnx

from sppo_jax.pipeline.api import evaluate


def test_token_losses_are_those_of_the_dense_model(x64):
    plan = small_plan((16, 8, 8), mesh=(1, 2, 2), schedule="seq1f1b", sequences=2)
    model = small_model(vocab_size=51)
    batch = random_batch(np.random.default_rng(0), 2, 32, 51, padding=3)
    got = evaluate(plan, model)(nnx.state(model, nnx.Param), batch)
    arrays = {key: jnp.asarray(value) for key, value in batch.items()}
    logits = jax.jit(lambda b: model(b["tokens"], b["positions"], b["document_ids"]))(arrays)
    log_p = np.asarray(jax.nn.log_softmax(logits))
    targets = batch["targets"]
    want = -np.take_along_axis(log_p, np.maximum(targets, 0)[..., None], -1)[..., 0] * (targets >= 0)
    assert (targets >= 0).any() and (targets < 0).any()
    np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-12)
