"""A state's layers, from where they run to the order of checkpoints and back; one array is held twice at a time.

With v = 1 the two forms are one, and nothing moves. With v > 1 an array crosses the stages once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import TypeVar

import jax
from jax.sharding import Sharding

from sppo_jax.compat import in_device_memory, in_host_memory, is_host
from sppo_jax.pipeline.params.layout import arrange

Tree = TypeVar("Tree")


def rearrange(tree: Tree, shapes: Tree, beat: Callable[[], None] = lambda: None) -> Tree:
    """Brings a state from one form to the other; the arrays that move are given up.

    Args:
        tree: a state, or its parameters alone, with the layers in order or where they run.
        shapes: shapes and shardings of the same tree with the layers as they are wanted.
        beat: called before each array.
    """

    def move(x: jax.Array, like: jax.ShapeDtypeStruct) -> jax.Array:
        beat()
        if x.ndim == len(like.shape):
            return x
        moved = jax.block_until_ready(_moved(x, like))
        x.delete()
        if not is_host(like.sharding):
            return moved
        back = jax.block_until_ready(jax.device_put(moved, like.sharding))
        moved.delete()
        return back

    return jax.tree.map(move, tree, shapes)


def in_order(tree: Tree, shapes: Tree, beat: Callable[[], None] = lambda: None) -> Tree:
    """Returns a copy of a state to save; the arrays that move or wait on the host lie in host memory.

    Args:
        tree: a state with the layers where they run.
        shapes: shapes and shardings of the same tree with the layers in order.
        beat: called before each array.
    """

    def copy(x: jax.Array, like: jax.ShapeDtypeStruct) -> jax.Array:
        beat()
        if x.ndim == len(like.shape) and not is_host(x.sharding):
            return x
        moved = _moved(x, like)
        copied = jax.block_until_ready(jax.device_put(moved, in_host_memory(like.sharding)))
        moved.delete()
        return copied

    return jax.tree.map(copy, tree, shapes)


def _moved(x: jax.Array, like: jax.ShapeDtypeStruct) -> jax.Array:
    """Returns an array in another form, in device memory, wherever both of them are."""
    if is_host(x.sharding):
        x = jax.device_put(x, in_device_memory(x.sharding))
    return _mover(like.shape, in_device_memory(like.sharding))(x)


@lru_cache(maxsize=256)
def _mover(shape: tuple[int, ...], sharding: Sharding) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(partial(arrange, shape=shape), out_shardings=sharding)
