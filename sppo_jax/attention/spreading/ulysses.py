"""Heads for tokens and back: the all-to-all over the `ulysses` axis.

A member holds every U-th token of a chunk with all heads; after `scatter_heads` it holds all of the chunk's tokens, in
natural order, with its share of the heads. Where there are fewer key/value heads than members, heads are replicated.

Letters: U members, T tokens of a chunk on one member, N heads, K key/value heads, H head dim.
"""

import math

import jax
from jax import lax

AXIS = "ulysses"


def replicated_heads(num_kv_heads: int, num_members: int) -> int:
    """Returns how many key/value heads exist after replication: the least that is a multiple of both."""
    return math.lcm(num_kv_heads, num_members)


def replicate(x_TKH: jax.Array, num_members: int) -> jax.Array:
    """Repeats each key/value head so that every member gets whole heads; neighbours stay together."""
    times = replicated_heads(x_TKH.shape[1], num_members) // x_TKH.shape[1]
    return x_TKH.repeat(times, axis=1) if times > 1 else x_TKH


def sum_replicas(x_TNH: jax.Array, num_kv_heads: int) -> jax.Array:
    """Adds up the gradients of a head's replicas: the transpose of `replicate`."""
    num_tokens, num_heads, head_dim = x_TNH.shape
    if num_heads == num_kv_heads:
        return x_TNH
    return x_TNH.reshape(num_tokens, num_kv_heads, -1, head_dim).sum(2)


def scatter_heads(x_TNH: jax.Array, num_members: int) -> jax.Array:
    """[T, N, ...] of striped tokens -> [T*U, N/U, ...] of consecutive tokens."""
    if num_members == 1:
        return x_TNH
    num_tokens, num_heads, *rest = x_TNH.shape
    x = x_TNH.reshape(num_tokens, num_members, num_heads // num_members, *rest)
    return lax.all_to_all(x, AXIS, 1, 1).reshape(num_tokens * num_members, num_heads // num_members, *rest)


def gather_heads(x_TNH: jax.Array, num_members: int) -> jax.Array:
    """[T*U, N/U, ...] -> [T, N, ...]: the inverse, and the transpose, of `scatter_heads`."""
    if num_members == 1:
        return x_TNH
    num_tokens, num_heads, *rest = x_TNH.shape
    x = x_TNH.reshape(num_tokens // num_members, num_members, num_heads, *rest)
    return lax.all_to_all(x, AXIS, 1, 1).reshape(num_tokens // num_members, num_members * num_heads, *rest)
