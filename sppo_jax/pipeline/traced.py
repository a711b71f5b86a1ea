"""What keeps a step safe where a batch cannot be looked at: traced in a caller's jit, or on other hosts.

Letters: M sequences of this pipeline, S tokens of a sequence on one device.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

from sppo_jax.arrays.dtypes import accumulator
from sppo_jax.pipeline.params.layout import SEQ

_FAR = 2**31 - 1


def wrong_tokens(batch: Sequence[jax.Array], vocab_size: int, num_sequences: int) -> jax.Array:
    """Returns of each token whether its values break the batch contract, whatever the other tokens are.

    Args:
        batch: int32 arrays of one shape, in the order of `attention.validate.KEYS`, and packed rows if there are any.
        vocab_size: tokens and targets lie below it.
        num_sequences: packed rows lie below it.
    """
    tokens, targets, positions, documents, *packed_rows = batch
    outside = (tokens < 0) | (tokens >= vocab_size) | (targets >= vocab_size) | (positions < 0)
    for rows in packed_rows:
        outside |= (rows < 0) | (rows >= num_sequences)
    return outside | ((documents < 0) & (targets >= 0))


def second_documents(documents_MS: jax.Array) -> jax.Array:
    """Returns of each sequence whether it holds two documents or more: [M, 1...]. For use inside `shard_map`."""
    dims = tuple(range(1, documents_MS.ndim))
    lowest = jnp.where(documents_MS < 0, _FAR, documents_MS).min(dims, keepdims=True)
    bounds = lax.pmax(jnp.stack([-lowest, documents_MS.max(dims, keepdims=True)]), SEQ)
    return -bounds[0] < bounds[1]


def loss_scale(
    batch: Sequence[jax.Array],
    vocab_size: int,
    num_sequences: int,
    dtype: jnp.dtype,
    divisor: jax.Array | None = None,
    *,
    one_document: bool = False,
) -> jax.Array:
    """Returns 1 / number of targets in the global batch; NaN where a token is wrong. For use inside `shard_map`.

    So a batch that is wrong makes the loss and the gradients NaN, as a wrong target does in the dense model.

    Args:
        batch: of this device; see `wrong_tokens`.
        vocab_size: of the model.
        num_sequences: of the global batch.
        dtype: compute dtype.
        divisor: taken in place of the number of targets, where tokens have weights.
        one_document: whether a second document in a sequence is wrong.
    """
    wrong = wrong_tokens(batch, vocab_size, num_sequences)
    if one_document:
        wrong |= second_documents(batch[3])
    of_device = [jnp.sum(x, dtype=jnp.int32) for x in (batch[1] >= 0, wrong)]
    count, num_wrong = lax.psum(jnp.stack(of_device), ("data", *SEQ))
    is_wrong, divisor = num_wrong > 0, jnp.maximum(count, 1) if divisor is None else divisor
    return jnp.where(is_wrong, jnp.nan, 1 / divisor.astype(accumulator(dtype)))


def without_wrong(
    losses_MS: jax.Array, batch: Sequence[jax.Array], vocab_size: int, *, one_document: bool = False
) -> jax.Array:
    """Returns the losses of targets, NaN in sequences with a wrong token; arguments as `loss_scale`."""
    wrong = wrong_tokens(batch, vocab_size, 0)
    if one_document:
        wrong |= second_documents(batch[3])
    of_each = jnp.sum(wrong, tuple(range(1, losses_MS.ndim)), dtype=jnp.int32, keepdims=True)
    return jnp.where((lax.psum(of_each, SEQ) > 0) & (batch[1] >= 0), jnp.nan, losses_MS)


@custom_vmap
def unmapped(tree: Any) -> Any:
    """Returns arrays as they are, and refuses to be within `jax.vmap`: XLA compiles a mapped step without end."""
    return tree


@unmapped.def_vmap
def _refuse(axis_size: int, *_: Any) -> Any:
    raise ValueError(
        f"a plan's step must not be within jax.vmap, as it runs on every device of its mesh, got a mapped axis of "
        f"{axis_size}; call the function once for each of them"
    )
