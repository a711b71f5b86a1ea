"""Attention within a hop that computes nothing: what is around it stays as it is."""

from types import SimpleNamespace

import jax.numpy as jnp

from sppo_jax.arrays.dtypes import accumulator
from sppo_jax.attention.kernels import MergedKernel
from sppo_jax.attention.spreading import ring
from sppo_jax.attention.tags import Tags


def replace_attention(monkeypatch):
    """Gives every kernel and every mask of ring attention one that has no matrix products."""

    def attend(q_TNH, *_):
        return q_TNH.astype(accumulator(q_TNH.dtype)), jnp.zeros(q_TNH.shape[:2], accumulator(q_TNH.dtype))

    def differentiate(q_TNH, prefix, mask, cotangent, gradients):
        return q_TNH.astype(accumulator(q_TNH.dtype)), gradients

    kernel = MergedKernel(SimpleNamespace(forward=attend, backward=differentiate))
    monkeypatch.setattr(ring, "kernel_of", lambda _: kernel)
    for masks in ("find_spans", "find_blocks"):
        monkeypatch.setattr(ring, masks, lambda *_: Tags(jnp.zeros(1), jnp.zeros(1)))
