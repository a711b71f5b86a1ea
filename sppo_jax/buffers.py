"""Reading and writing parts of preallocated buffers with dynamic (update) slices.

Never `.at[].set`: on a host buffer it lowers to a scatter, which XLA does not place. Slices that run over the end are
shifted silently, so buffers are allocated one longest chunk longer than what is written.
"""

import jax
import jax.numpy as jnp
from jax import lax


def _offsets(buffer: jax.Array, index: tuple) -> list[jax.Array]:
    full = (*index, *(0 for _ in range(buffer.ndim - len(index))))
    return [jnp.asarray(i, jnp.int32) for i in full]


def read(buffer: jax.Array, index: tuple, shape: tuple[int, ...]) -> jax.Array:
    """Return the block of `shape` that starts at `index` (missing trailing indices are 0).

    Args:
        buffer: array of at least len(shape) dims.
        index: ints or int scalars, leading dims first.
        shape: of the result; the buffer's leading dims beyond it are taken one deep and dropped.
    """
    sizes = (1,) * (buffer.ndim - len(shape)) + tuple(shape)
    return lax.dynamic_slice(buffer, _offsets(buffer, index), sizes).reshape(shape)


def write(buffer: jax.Array, index: tuple, value: jax.Array) -> jax.Array:
    """Return the buffer with `value` written at `index`, in place where the compiler can."""
    value = value.astype(buffer.dtype).reshape((1,) * (buffer.ndim - value.ndim) + value.shape)
    return lax.dynamic_update_slice(buffer, value, _offsets(buffer, index))


def add(buffer: jax.Array, index: tuple, value: jax.Array) -> jax.Array:
    """Return the buffer with `value` added at `index`; the sum is made in the dtype of `value`."""
    old = read(buffer, index, value.shape)
    return write(buffer, index, old.astype(value.dtype) + value)


def read_slot(buffer: jax.Array, slot: jax.Array) -> jax.Array:
    """Return `buffer[slot]`; safe on a host buffer."""
    return lax.dynamic_index_in_dim(buffer, jnp.asarray(slot, jnp.int32), 0, keepdims=False)


def write_slot(buffer: jax.Array, slot: jax.Array, value: jax.Array) -> jax.Array:
    """Return the buffer with `buffer[slot] = value`; safe on a host buffer."""
    return lax.dynamic_update_index_in_dim(buffer, value, jnp.asarray(slot, jnp.int32), 0)


def after(x: jax.Array) -> jax.Array:
    """Return the number 0, which is known only once `x` is: added to an index, it orders a write after `x`.

    Compilers that reorder reads and writes of one buffer have to copy it. This they cannot see through: it is 1 where
    the first element of `x` is no number, when nothing matters any more.
    """
    return jnp.isnan(x[(0,) * x.ndim]).astype(jnp.int32)
