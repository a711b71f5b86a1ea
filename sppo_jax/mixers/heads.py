"""Heads for tokens over the whole `seq` axis: a member gets all tokens of a chunk for its share of the heads.

Token t of a chunk lies on ring member t mod R and Ulysses member (t // R) mod U. So an all-to-all over ("ulysses",
"ring"), in this order, gives the chunk in natural order, and nothing recurs between devices. All arrays of one dtype
travel as one message. An array whose heads do not divide by the members has its heads replicated.

Letters: M members of `seq`, T tokens of a chunk on one member, N heads of an array.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from sppo_jax.mixers.mixer import Operands

AXES = ("ulysses", "ring")


def scatter(heads: Any, num_members: int) -> Any:
    """Returns a tree of arrays [T, N, ...] of striped tokens as [T M, N / M, ...] of consecutive tokens."""
    if num_members == 1:
        return heads
    leaves, tree = jax.tree.flatten(heads)
    whole = [_replicated(x, 1, num_members) for x in leaves]
    sent = [x.reshape(x.shape[0], num_members, -1) for x in whole]
    came = _exchanged(sent)
    shapes = [(x.shape[0] * num_members, x.shape[1] // num_members, *x.shape[2:]) for x in whole]
    return jax.tree.unflatten(tree, [x.reshape(shape) for x, shape in zip(came, shapes, strict=True)])


def gather(heads: Any, like: Any, num_members: int) -> Any:
    """Returns a tree of arrays [T M, N / M, ...] as [T, N, ...]: the transpose, and without replicas the inverse.

    Args:
        heads: this member's share.
        like: a tree of arrays, or of shapes, [T, N, ...] of the results.
        num_members: members of `seq`.
    """
    if num_members == 1:
        return heads
    leaves, tree = jax.tree.flatten(heads)
    came = _exchanged([x.reshape(x.shape[0] // num_members, num_members, -1) for x in leaves])
    results = []
    for x, share, whole in zip(came, leaves, jax.tree.leaves(like), strict=True):
        shape = (whole.shape[0], whole.shape[1], -1, *share.shape[2:])
        results.append(_sum_of_replicas(x, shape))
    return jax.tree.unflatten(tree, results)


def own_constants(constants: Any, num_members: int) -> Any:
    """Returns this member's share of a tree of arrays [N, ...] that have heads and no tokens."""
    if num_members == 1:
        return constants

    def cut(x: jax.Array) -> jax.Array:
        whole = _replicated(x, 0, num_members)
        size = whole.shape[0] // num_members
        return lax.dynamic_slice_in_dim(whole, lax.axis_index(AXES) * size, size)

    return jax.tree.map(cut, constants)


def own_shapes(operands: Operands, num_members: int) -> Operands:
    """Returns the shapes of a member's share of operands; all tokens of the chunk."""

    def of_heads(x):
        size = math.lcm(x.shape[1], num_members) // num_members
        return jax.ShapeDtypeStruct((x.shape[0] * num_members, size, *x.shape[2:]), x.dtype)

    def of_constant(x):
        return jax.ShapeDtypeStruct((math.lcm(x.shape[0], num_members) // num_members, *x.shape[1:]), x.dtype)

    return Operands(jax.tree.map(of_heads, operands.heads), jax.tree.map(of_constant, operands.constants))


def _replicated(x: jax.Array, dim: int, num_members: int) -> jax.Array:
    """Repeats each head so that every member gets whole heads; neighbours stay together."""
    times = math.lcm(x.shape[dim], num_members) // x.shape[dim]
    return jnp.repeat(x, times, axis=dim) if times > 1 else x


def _sum_of_replicas(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Adds up the replicas of each head; `shape` is that of heads [T, N, replicas, ...]."""
    x = x.reshape(shape)
    return x.squeeze(2) if x.shape[2] == 1 else x.sum(2)


def _exchanged(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Sends [T, M, E] of each array: element m of M goes to member m, and there lies that of the sender."""
    of_dtype: dict[Any, list[int]] = {}
    for number, x in enumerate(arrays):
        of_dtype.setdefault(x.dtype, []).append(number)
    results: list[jax.Array] = list(arrays)
    for numbers in of_dtype.values():
        packed = [arrays[number] for number in numbers]
        sizes = [x.shape[2] for x in packed]
        came = lax.all_to_all(packed[0] if len(packed) == 1 else jnp.concatenate(packed, axis=2), AXES, 1, 1)
        parts = [came] if len(packed) == 1 else lax.split(came, sizes, axis=2)
        for number, part in zip(numbers, parts, strict=True):
            results[number] = part
    return results
