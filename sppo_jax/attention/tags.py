"""The parts of a mask: the position and the document of every token, and the blocks of keys that queries can see.

Letters: T query tokens, S key tokens, Q query blocks, J key blocks.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from sppo_jax.arrays import buffers

_FAR = 2**31 - 1


class Tags(NamedTuple):
    """Position within its document, and document number (-1 for padding), of each token; int32, same shape."""

    positions: jax.Array
    documents: jax.Array

    def take(self, index) -> "Tags":
        """Picks one row of stacked tags."""
        return Tags(*(buffers.pick(x, index) for x in self))


class BlockRange(NamedTuple):
    """For each query block the half-open range of key blocks that it may attend to; int32 [..., Q]."""

    first: jax.Array
    last: jax.Array

    def take(self, index) -> "BlockRange":
        """Picks one row of stacked ranges."""
        return BlockRange(*(buffers.pick(x, index) for x in self))


def visible(q_tags: Tags, kv_tags: Tags, window: int = 0) -> jax.Array:
    """Returns mask_TS: same document, no padding, not in the future, and among the last `window` positions (0: all)."""
    same = q_tags.documents[:, None] == kv_tags.documents[None, :]
    past = q_tags.positions[:, None] >= kv_tags.positions[None, :]
    if window:
        past = past & (q_tags.positions[:, None] - kv_tags.positions[None, :] < window)
    return same & past & (q_tags.documents >= 0)[:, None]


def _blocks(tags: Tags, size: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    pad = -tags.documents.shape[0] % size
    documents = jnp.pad(tags.documents, (0, pad), constant_values=-1).reshape(-1, size)
    positions = jnp.pad(tags.positions, (0, pad)).reshape(-1, size)
    return documents, positions, documents >= 0


def block_range(q_tags: Tags, kv_tags: Tags, block_q: int, block_k: int, window: int = 0) -> BlockRange:
    """Finds the key blocks that share a document with, and do not lie wholly after or too far before, each query block.

    Depends on the batch contract: documents do not decrease along a sequence and positions increase within a document.
    So (document, position) orders the tokens, and each query block needs one contiguous run of key blocks.

    Args:
        q_tags: tags of T queries, in sequence order.
        kv_tags: tags of S keys, in sequence order.
        block_q: queries in a block.
        block_k: keys in a block.
        window: how many positions a query sees, its own among them; 0: all before it.

    Returns:
        Ranges of shape [Q]; empty (0, 0) where a query block sees nothing.
    """
    q_doc, q_pos, q_ok = _blocks(q_tags, block_q)
    k_doc, k_pos, k_ok = _blocks(kv_tags, block_k)
    q_low, q_high = jnp.where(q_ok, q_doc, _FAR).min(1), q_doc.max(1)
    k_low, k_high = jnp.where(k_ok, k_doc, _FAR).min(1), k_doc.max(1)
    q_last = jnp.where(q_doc == q_high[:, None], q_pos, -1).max(1)
    k_first = jnp.where(k_doc == k_low[:, None], k_pos, _FAR).min(1)
    overlap = (k_low[None] <= q_high[:, None]) & (k_high[None] >= q_low[:, None])
    future = (k_low[None] == q_high[:, None]) & (k_first[None] > q_last[:, None])
    needed_QJ = overlap & ~future & (q_high >= 0)[:, None]
    if window:
        q_first = jnp.where(q_doc == q_low[:, None], q_pos, _FAR).min(1)
        k_last = jnp.where(k_doc == k_high[:, None], k_pos, -1).max(1)
        needed_QJ = needed_QJ & ~((k_high[None] == q_low[:, None]) & (q_first[:, None] - k_last[None] >= window))
    some = needed_QJ.any(1)
    first = jnp.where(some, jnp.argmax(needed_QJ, 1), 0)
    last = jnp.where(some, needed_QJ.shape[1] - jnp.argmax(needed_QJ[:, ::-1], 1), 0)
    return BlockRange(first.astype(jnp.int32), last.astype(jnp.int32))
