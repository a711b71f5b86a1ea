"""Fingerprints of arrays: each is a number that does not depend on the mesh and changes with any bit of any element.

Zeros add nothing at any place, so the zeros that a mesh puts behind a parameter do not matter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from sppo_jax.compat import in_device_memory, is_host
from sppo_jax.train.finite import are_finite

# Knuth's multiplicative hash (2^32 divided by the golden ratio) spreads indices; made odd, it loses no bit.
_SPREAD = 2654435761
# A place is a number in this base whose digits are the indices, first dim first, so no two near places are equal.
_BASE = 2246822519
_VERSION = 2


def stamp(tree: Any, saved: Any, beat: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Returns the fingerprints of a checkpoint's arrays and the version of the fingerprints.

    Args:
        tree: of arrays, placed anywhere; layers in order, [L, ...], or where they run, [v, P, layers, ...].
        saved: the same tree as the checkpoint has it, with the layers in order.
        beat: called before each array that is copied to the devices.
    """
    bases = {}
    for (path, leaf), like in zip(jax.tree_util.tree_leaves_with_path(tree), jax.tree.leaves(saved), strict=True):
        # The first three indices make up the index of a layer.
        stacked = leaf.shape[:3] if leaf.ndim > like.ndim else ()
        bases[leaf_name(path)] = (*stacked, *[_BASE] * (leaf.ndim + 1 - len(stacked)))
    return {"fingerprint_version": _VERSION, "fingerprints": fingerprints(tree, bases, beat)}


def fingerprints(
    tree: Any, bases: Mapping[str, tuple[int, ...]] | None = None, beat: Callable[[], None] = lambda: None
) -> dict[str, int]:
    """Returns 32 bits for each array: the sum of its words, each multiplied by a hash of its place.

    Sums of integers do not depend on the order, so they are the same for every mesh. An element that moved, changed or
    is missing changes the sum.

    Args:
        tree: of arrays, placed anywhere.
        bases: by the leaves' paths, what the index of each dim is a digit in, such as the sizes of dims by which the
            first version of fingerprints numbered places; None: one base, as `stamp` has for layers in order.
        beat: called before each array that is copied to the devices.

    Returns:
        Fingerprints by the leaves' paths, the same in every process.
    """
    leaves = {leaf_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
    digits = {name: None if bases is None else bases[name] for name in leaves}
    here = [name for name, leaf in leaves.items() if not _is_on_host(leaf)]
    sums = dict(zip(here, _sums([leaves[name] for name in here], tuple(digits[name] for name in here)), strict=True))
    # One at a time, as the devices may not have space for all; in the tree's order, which all processes share.
    for name in [name for name in leaves if name not in sums]:
        beat()
        leaf = jax.device_put(leaves[name], in_device_memory(leaves[name].sharding))
        sums[name] = jax.block_until_ready(_sums([leaf], (digits[name],))[0])
        leaf.delete()
    sums = jax.device_get(sums)
    return {name: int(sums[name]) for name in leaves}


def first_not_finite(tree: Any) -> str:
    """Returns the name of an array with a value that is not finite, the same in every process; "" if there is none."""
    leaves = {leaf_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
    here = [name for name, leaf in leaves.items() if not _is_on_host(leaf)]
    found = dict(zip(here, _each_finite([leaves[name] for name in here]), strict=True))
    for name in [name for name in leaves if name not in found]:  # one at a time, as in `fingerprints`
        leaf = jax.device_put(leaves[name], in_device_memory(leaves[name].sharding))
        found[name] = jax.block_until_ready(_each_finite([leaf])[0])
        leaf.delete()
    found = jax.device_get(found)
    return next((name for name in leaves if not found[name]), "")


@jax.jit
def _each_finite(leaves: list[jax.Array]) -> list[jax.Array]:
    return [are_finite(leaf) for leaf in leaves]


def _is_on_host(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and is_host(leaf.sharding)


def leaf_name(path: tuple[Any, ...]) -> str:
    """Returns the name of a leaf: its path within the tree."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


@partial(jax.jit, static_argnums=1)
def _sums(leaves: list[jax.Array], bases: tuple[tuple[int, ...] | None, ...]) -> list[jax.Array]:
    return [_sum(leaf, digits) for leaf, digits in zip(leaves, bases, strict=True)]


def _sum(x: jax.Array, bases: tuple[int, ...] | None) -> jax.Array:
    if x.dtype.itemsize < 4:
        words = lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}")).astype(jnp.uint32)
    else:
        words = lax.bitcast_convert_type(x, jnp.uint32)  # two words, in a last dim, where an element has 8 bytes
    place = jnp.zeros((), jnp.uint32)
    digits = (_BASE,) * words.ndim if bases is None else (*bases, *words.shape[len(bases) :])
    for dim, base in enumerate(digits[: words.ndim]):
        place = place * jnp.uint32(base) + lax.broadcasted_iota(jnp.uint32, words.shape, dim)
    return jnp.sum(words * (place * jnp.uint32(_SPREAD) | jnp.uint32(1)), dtype=jnp.uint32)
