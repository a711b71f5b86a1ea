"""Fingerprints of arrays: a number that does not depend on the mesh, and changes with any bit of any element."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

# Knuth's multiplicative hash (2^32 divided by the golden ratio) spreads indices; made odd, it loses no bit.
_SPREAD = 2654435761


def fingerprints(tree: Any) -> dict[str, int]:
    """Return 32 bits for each array: the sum of its words, each multiplied by a hash of its place.

    Sums of integers have no order, so every mesh gives the same; an element that moved, changed or is missing shows.

    Args:
        tree: of arrays, placed anywhere.

    Returns:
        Fingerprints by the leaves' paths, the same in every process.
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    sums = jax.device_get(_sums([leaf for _, leaf in leaves]))
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]
    return {name: int(total) for name, total in zip(names, sums, strict=True)}


@jax.jit
def _sums(leaves: list[jax.Array]) -> list[jax.Array]:
    return [_sum(leaf) for leaf in leaves]


def _sum(x: jax.Array) -> jax.Array:
    if x.dtype.itemsize < 4:
        words = lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}")).astype(jnp.uint32)
    else:
        words = lax.bitcast_convert_type(x, jnp.uint32)  # two words, in a last dim, where an element has 8 bytes
    place = jnp.zeros((), jnp.uint32)
    for dim, size in enumerate(words.shape):
        place = place * jnp.uint32(size) + lax.broadcasted_iota(jnp.uint32, words.shape, dim)
    return jnp.sum(words * (place * jnp.uint32(_SPREAD) | jnp.uint32(1)), dtype=jnp.uint32)
