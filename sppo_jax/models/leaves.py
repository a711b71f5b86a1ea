"""The types of arrays in `nnx.state(model, nnx.Param)`: matrices and vectors of layers, tables, the final norm.

An array of layers has all layers behind one another, [L, ...]. A step stacks them by groups and stages too.
"""

from typing import Any

import jax.numpy as jnp

TABLES = ("embedding", "head")


def part_of(path: tuple) -> str:
    """Returns the part of the tree that an array belongs to: layers, embedding, head or final_norm."""
    return path[0].key


def num_stacked_dims(part: str) -> int:
    """Returns how many dims of an array of a part are not its own: the one that stacks layers."""
    return int(part == "layers")


def is_matrix(path: tuple, like: Any) -> bool:
    """Returns whether an array is a matrix: it decays, and waits on the host where the optimizer does.

    Args:
        path: of the array in the tree.
        like: the array in its own shape, or the shape. A bias of several heads has two dims and is no matrix, and the
            taps of a convolution have three.
    """
    is_other = any(str(getattr(key, "key", "")).endswith(("bias", "taps")) for key in path)
    return not is_other and len(like.shape) - num_stacked_dims(part_of(path)) >= 2


def is_cast(x: Any, num_stacked: int) -> bool:
    """Returns whether a step casts an array to the compute dtype: all but vectors, such as norm scales.

    Args:
        x: the array or its shape, and its dtype.
        num_stacked: dims that stack layers.
    """
    return len(x.shape) - num_stacked >= 2 and jnp.issubdtype(x.dtype, jnp.floating)
