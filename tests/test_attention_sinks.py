"""Sinks, with and without a window: attention of gpt-oss in transformers, output and every gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

from sppo_jax.attention.dense import dense_attention
from sppo_jax.attention.sinks import sinks_gradient, with_sinks


@pytest.mark.parametrize("window", [0, 7])
def test_output_and_gradients_are_those_of_gpt_oss(x64, window):
    rng, (length, heads, kv_heads, size) = np.random.default_rng(window), (48, 4, 2, 8)
    q, k, v, dout = (rng.normal(size=(length, n, size)) for n in (heads, kv_heads, kv_heads, heads))
    sinks = rng.normal(size=heads)
    theirs = [torch.tensor(x, requires_grad=True) for x in (q, k, v, sinks)]

    class Layer:
        num_key_value_groups, sinks, training = heads // kv_heads, theirs[3], False

    far = np.arange(length)[:, None] - np.arange(length)
    mask = torch.tensor(np.where((far >= 0) & (far < (window or length)), 0, -np.inf))[None, None]
    want, _ = eager_attention_forward(Layer, *(x.transpose(0, 1)[None] for x in theirs[:3]), mask, size**-0.5)
    want[0].backward(torch.tensor(dout))

    rows = jnp.arange(length, dtype=jnp.int32)[None], jnp.zeros((1, length), jnp.int32)
    out, vjp = jax.vjp(
        lambda q, k, v, sinks: dense_attention(q[None], k[None], v[None], *rows, window=window, sinks_N=sinks)[0],
        *map(jnp.asarray, (q, k, v, sinks)),
    )
    for got, right in zip((out, *vjp(dout)), (want[0].detach(), *(x.grad for x in theirs)), strict=True):
        np.testing.assert_allclose(got, right.numpy(), rtol=1e-12, atol=1e-13)


def test_padding_has_no_sink():
    out, lse = jnp.zeros((2, 3, 4)), jnp.full((2, 3), -jnp.inf)
    sunk, total = with_sinks(out, lse, jnp.ones(3))
    assert not np.asarray(sunk).any() and np.isneginf(total).all()
    assert not np.asarray(sinks_gradient(jnp.ones(3), sunk, total, jnp.ones((2, 3, 4)))).any()
