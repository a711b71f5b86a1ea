"""Sinks: a learnt score of each query head that takes its share of the softmax and gives nothing.

A sink is applied once, to the results over all keys. The kernels' backward is right as it is if it gets the output and
the LSE with the sink: its sums run over keys alone, and the sink's value is zero.

Letters: T tokens, N query heads, H head dim.
"""

import jax
import jax.numpy as jnp

from sppo_jax.arrays.dtypes import accumulator
from sppo_jax.attention.blockwise import delta


def with_sinks(out_TNH: jax.Array, lse_TN: jax.Array, sinks_N: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Gives the sinks their share of attention.

    Args:
        out_TNH: attention over all keys.
        lse_TN: its LSE, at least float32; -inf for padding, which has no sink either.
        sinks_N: the scores of the sinks.

    Returns:
        out_TNH and lse_TN in their dtypes.
    """
    is_real_TN = lse_TN > -jnp.inf
    sunk_TN = jnp.where(is_real_TN, jnp.logaddexp(lse_TN, sinks_N.astype(lse_TN.dtype)), -jnp.inf)
    left_TN = jnp.where(is_real_TN, jnp.exp(lse_TN - sunk_TN), 0)
    out = out_TNH.astype(accumulator(out_TNH.dtype)) * left_TN[..., None]
    return out.astype(out_TNH.dtype), sunk_TN


def sinks_gradient(sinks_N: jax.Array, out_TNH: jax.Array, lse_TN: jax.Array, dout_TNH: jax.Array) -> jax.Array:
    """Returns dsinks_N in the dtype of the sinks, from what `with_sinks` returned and the output's cotangent."""
    is_real_TN = lse_TN > -jnp.inf
    share_TN = jnp.where(is_real_TN, jnp.exp(sinks_N.astype(lse_TN.dtype) - lse_TN), 0)
    return -(share_TN * delta(out_TNH, dout_TNH)).sum(0).astype(sinks_N.dtype)
