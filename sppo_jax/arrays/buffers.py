"""Reading and writing parts of preallocated buffers with dynamic (update) slices.

Never `.at[].set`: on a host buffer it lowers to a scatter, which XLA does not place. JAX silently shifts
slices that run over the end, so buffers are allocated one longest chunk longer than their contents.

No index is negative. JAX would else compare each with 0, which was a third of all operations of a step.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint


def _offsets(buffer: jax.Array, index: tuple) -> list[jax.Array]:
    full = (*index, *(0 for _ in range(buffer.ndim - len(index))))
    return [jnp.asarray(i, jnp.int32) for i in full]


def read(buffer: jax.Array, index: tuple, shape: tuple[int, ...]) -> jax.Array:
    """Returns the block of `shape` that starts at `index` (missing trailing indices are 0).

    Args:
        buffer: array of at least len(shape) dims.
        index: ints or int scalars, leading dims first.
        shape: of the result; the buffer's leading dims beyond it are taken one deep and dropped.
    """
    sizes = (1,) * (buffer.ndim - len(shape)) + tuple(shape)
    offsets = _offsets(buffer, index)
    return lax.dynamic_slice(buffer, offsets, sizes, allow_negative_indices=False).reshape(shape)


def write(buffer: jax.Array, index: tuple, value: jax.Array) -> jax.Array:
    """Returns the buffer with `value` written at `index`; the compiler writes in place if it can."""
    value = value.astype(buffer.dtype).reshape((1,) * (buffer.ndim - value.ndim) + value.shape)
    return lax.dynamic_update_slice(buffer, value, _offsets(buffer, index), allow_negative_indices=False)


def add(buffer: jax.Array, index: tuple, value: jax.Array) -> jax.Array:
    """Returns the buffer with `value` added at `index`; the sum is made in the dtype of `value`."""
    old = read(buffer, index, value.shape)
    return write(buffer, index, old.astype(value.dtype) + value)


def row_major(x: jax.Array) -> jax.Array:
    """Returns an array whose last dim is innermost in memory, whatever order a compiler would choose."""
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


def read_slot(buffer: jax.Array, slot: jax.Array) -> jax.Array:
    """Returns `buffer[slot]`; safe on a host buffer."""
    index = jnp.asarray(slot, jnp.int32)
    return lax.dynamic_index_in_dim(buffer, index, 0, keepdims=False, allow_negative_indices=False)


def pick(x: jax.Array, index) -> jax.Array:
    """Returns `x[index]`, where no index is negative.

    Args:
        x: an array.
        index: a whole number, known or not, or an array of several.
    """
    return x[index] if isinstance(index, int) or index.ndim else read_slot(x, index)


def quotient(x: jax.Array, by: int) -> jax.Array:
    """Returns `x // by` of whole numbers that are not negative; `//` itself is ten operations."""
    return x if by == 1 else lax.div(x, jnp.asarray(by, x.dtype))


def write_slot(buffer: jax.Array, slot: jax.Array, value: jax.Array) -> jax.Array:
    """Returns the buffer with `buffer[slot] = value`; safe on a host buffer."""
    index = jnp.asarray(slot, jnp.int32)
    return lax.dynamic_update_index_in_dim(buffer, value, index, 0, allow_negative_indices=False)


def after(x: jax.Array) -> jax.Array:
    """Returns 0, but only after `x` is computed: adding this 0 to an index orders a write after `x`.

    Compilers that reorder reads and writes of one buffer have to copy the buffer. They cannot remove this dependence,
    because the result is 1 if the first element of `x` is NaN. The step has then failed anyway.
    """
    return jnp.isnan(x[(0,) * x.ndim]).astype(jnp.int32)


def once(x: jax.Array) -> jax.Array:
    """Returns an array that the compiler computes once, and not again in each operation that uses it.

    XLA:TPU else reads a block of a buffer again in a later product. The buffer would have been written by then, so XLA
    copies the whole buffer before the write.
    """
    return lax.optimization_barrier(x)


def hold(x: jax.Array, number: jax.Array, held) -> tuple:
    """Holds prefetched copies until the end of a loop, so that the whole loop can overlap them.

    Two barriers with a step between: the compiler's scheduler works from the end, and must meet the ends of the copies
    before the end of the loop.

    Args:
        x: a result of the loop.
        number: a number for which what comes behind the loop has a use.
        held: tree of arrays whose copies are under way.

    Returns:
        The same three.
    """
    x, number = lax.optimization_barrier((x, number - 1))
    return lax.optimization_barrier((x, number + 1, held))
