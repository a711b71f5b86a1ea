"""The tiled, checkpointed dense loss against the loss computed from whole logits."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from sppo_jax.config import ModelConfig
from sppo_jax.models import Decoder, dense_loss, dense_value_and_grad
from sppo_jax.models.dense import tiled_loss_sum

VOCABULARY = 53


def make_model(**fields):
    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "mlp_size": 24,
        "init_scale": 0.3,
        "compute_dtype": "float32",
    }
    return Decoder(ModelConfig(**(shape | fields)), rngs=nnx.Rngs(params=0))


def make_batch():
    """Two sequences: two documents; and one document followed by padding."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, VOCABULARY, (2, 13)).astype(np.int32)
    documents = np.array([[0] * 5 + [1] * 8, [0] * 9 + [-1] * 4], np.int32)
    positions = np.array([[*range(5), *range(8)], [*range(9), *range(4)]], np.int32)
    ends = np.concatenate([documents[:, 1:] != documents[:, :-1], np.ones((2, 1), bool)], 1)
    targets = np.where(ends | (documents < 0), -1, np.roll(tokens, -1, 1)).astype(np.int32)
    batch = {"tokens": tokens, "targets": targets, "positions": positions, "document_ids": documents}
    return {name: jnp.asarray(value) for name, value in batch.items()}


def naive_loss(model, params, batch):
    graphdef, _ = nnx.split(model)
    logits = nnx.merge(graphdef, params)(batch["tokens"], batch["positions"], batch["document_ids"])
    log_p = jax.nn.log_softmax(logits, -1)
    weights = (batch["targets"] >= 0).astype(log_p.dtype)
    picked = jnp.sum(jax.nn.one_hot(batch["targets"], VOCABULARY, dtype=log_p.dtype) * log_p, -1)
    return -jnp.sum(picked * weights) / jnp.sum(weights)


@pytest.mark.parametrize("tied", [False, True])
def test_loss_and_gradients_equal_the_naive_ones(tied, x64):
    model = make_model(compute_dtype="float64", tied_embeddings=tied)
    params, batch = nnx.state(model, nnx.Param), make_batch()
    loss, grads = jax.jit(dense_value_and_grad(model))(params, batch)
    expected, expected_grads = jax.jit(jax.value_and_grad(lambda params: naive_loss(model, params, batch)))(params)
    assert loss.dtype == jnp.float64
    np.testing.assert_allclose(loss, expected, rtol=1e-12)
    assert jax.tree.structure(grads) == jax.tree.structure(params)
    chex.assert_trees_all_close(grads, expected_grads, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("tile_tokens", [4, 26, 100])
def test_tiles_of_any_size_give_the_same_sum(tile_tokens):
    model = make_model()
    x = jnp.asarray(np.random.default_rng(1).normal(size=(2, 13, 16)), jnp.float32)
    targets = make_batch()["targets"]

    def tiled(x):
        return tiled_loss_sum(model, x, targets, tile_tokens=tile_tokens)

    def whole(x):
        log_p = jax.nn.log_softmax(model.logits(x), -1)
        picked = jnp.take_along_axis(log_p, jnp.maximum(targets, 0)[..., None], -1)[..., 0]
        return -jnp.sum(jnp.where(targets >= 0, picked, 0.0))

    for got, expected in zip(jax.value_and_grad(tiled)(x), jax.value_and_grad(whole)(x), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_logits_never_exist_whole():
    model = make_model()
    x, targets = jnp.zeros((2, 16, 16), jnp.float32), jnp.zeros((2, 16), jnp.int32)
    jaxpr = str(jax.make_jaxpr(jax.grad(lambda x: tiled_loss_sum(model, x, targets, tile_tokens=8)))(x))
    assert f"[8,{VOCABULARY}]" in jaxpr
    assert all(f"[{shape},{VOCABULARY}]" not in jaxpr for shape in ("32", "2,16", "4,8"))


def test_a_batch_without_targets_has_no_loss():
    model = make_model()
    batch = make_batch()
    batch["targets"] = jnp.full_like(batch["targets"], -1)
    loss, grads = jax.jit(dense_value_and_grad(model))(nnx.state(model, nnx.Param), batch)
    assert loss == 0.0
    assert all((leaf == 0).all() for leaf in jax.tree.leaves(grads))


def test_bfloat16_keeps_float32_loss_and_gradients():
    model, exact = make_model(compute_dtype="bfloat16"), make_model()
    params, batch = nnx.state(model, nnx.Param), make_batch()
    loss, grads = jax.jit(dense_value_and_grad(model))(params, batch)
    assert loss.dtype == jnp.float32
    assert {leaf.dtype for leaf in jax.tree.leaves(grads)} == {jnp.dtype(jnp.float32)}
    np.testing.assert_allclose(loss, dense_loss(exact, params, batch), rtol=2e-2)


def test_an_abstract_model_gives_the_structure():
    model = make_model()
    abstract = nnx.eval_shape(make_model)
    params, batch = nnx.state(model, nnx.Param), make_batch()
    np.testing.assert_array_equal(dense_loss(abstract, params, batch), dense_loss(model, params, batch))
