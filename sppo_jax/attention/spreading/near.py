"""Attention within teams of members: keys arrive by doubling exchanges, gradients go home by halving.

A chunk that holds whole documents alone, each on an aligned team of 1, 2, 4, ... members, needs neither a prefix nor
the whole axis. With level n each member needs the keys of its 2^n - 1 neighbours. Exchange l swaps all that members i
and i XOR 2^l have, so n exchanges bring them: slot j then holds the keys of member me XOR j. The level is known only
when the batch is. So each exchange is a loop of 0 or 1 trips, whose trip count must be the same on ALL devices.

FlexSP (arXiv 2412.01523) makes a process group for each degree and sends by all-to-all. Here the degrees are data: one
program serves every batch.

Letters: R members, W = R / 2 slots, T tokens of a chunk on one member, N query heads, K key/value heads, H head dim,
U ulysses members, M = T * U.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sppo_jax.arrays import buffers
from sppo_jax.arrays.dtypes import accumulator
from sppo_jax.attention.blockwise import find_blocks
from sppo_jax.attention.intervals import Meets, from_spans
from sppo_jax.attention.operands import Cotangent, Gradients, Mask, Prefix
from sppo_jax.attention.pallas_blocks import Target
from sppo_jax.attention.spans import Spans, find_team_spans
from sppo_jax.attention.spreading import ring, ulysses
from sppo_jax.attention.tags import BlockRange, Tags
from sppo_jax.attention.tpu.pallas import find_meets

# Members are numbered as the devices lie: member r * U + u.
AXES = (ring.AXIS, ulysses.AXIS)


class NearTags(NamedTuple):
    """Tags of this member's queries [T] and of the keys in each slot [W, T], and where they meet.

    `meets` and `window`: see `Mask`; a row of `meets` for each slot.
    """

    queries: Tags
    keys: Tags
    meets: BlockRange | Spans | Meets
    window: int = 0

    def mask(self, slot) -> Mask:
        """Returns the mask of this member's queries and the keys in a slot."""
        return Mask(self.queries, self.keys.take(slot), self.meets.take(slot), self.window)


def near_tags(
    chunk: Tags, length, num_ulysses: int, kernel: str, window: int = 0, target: Target | None = None
) -> NearTags:
    """Prepares the masks of a chunk once for all layers.

    Args:
        chunk: the chunk's tags on every ring member, [ring, M].
        length: tokens of the chunk on one member, at most T; the others become padding.
        num_ulysses: U.
        kernel: "blockwise", "cudnn" or "pallas".
        window: see `Mask`; 0 for the kernel "pallas".
        target: what the kernel "pallas" is compiled for.
    """
    num_ring, size = chunk.documents.shape
    num_members, num_tokens = num_ring * num_ulysses, size // num_ulysses
    rows = Tags(*(x.reshape(num_ring, -1, num_ulysses).swapaxes(1, 2).reshape(num_members, -1) for x in chunk))
    real = jnp.arange(num_tokens, dtype=jnp.int32) < length
    rows = rows._replace(documents=jnp.where(real, rows.documents, -1))
    me = lax.axis_index(AXES)
    queries = rows.take(me)
    keys = rows.take(me ^ jnp.arange(num_members // 2, dtype=jnp.int32))

    def find(keys):
        if kernel == "blockwise":
            return find_blocks(queries, keys, window)
        spans = find_team_spans(queries, keys)
        return spans if kernel == "cudnn" else find_meets(from_spans(spans, num_tokens), num_tokens, target)

    return NearTags(queries, keys, jax.vmap(find)(keys), window)


def _swap(x: jax.Array, level: int) -> jax.Array:
    """Exchanges an array with member me XOR 2^level."""
    num_members = lax.axis_size(AXES)
    return lax.ppermute(x, AXES, [(i, i ^ (1 << level)) for i in range(num_members)])


def _slots(x_KTH: jax.Array, num_slots: int) -> jax.Array:
    """Makes [W, K, T, H] with this member's own keys in slot 0."""
    return buffers.write(jnp.zeros((num_slots, *x_KTH.shape), x_KTH.dtype), (0,), x_KTH)


def _visit(kv, level: jax.Array, attend: Callable, state):
    """Calls `attend(slot, kv, state)` for each slot of a team; an exchange runs beside the slots that are there.

    Args:
        kv: keys and values [W, K, T, H] with slot 0 filled.
        level: exchanges to do.
        attend: returns the next state.
        state: the first state.
    """

    def attend_some(begin, end, kv, state):
        return lax.fori_loop(begin, end, lambda slot, state: attend(slot, kv, state), state)

    for number in range(kv[0].shape[0].bit_length() - 1):
        have = 1 << number

        def exchange(_, carry, number=number, have=have):
            kv, state = carry
            got = _swap(jnp.stack([x[:have] for x in kv]), number)  # one message for both
            state = attend_some(have >> 1, have, kv, state)
            # Without the barrier the compiler writes `got` first, and so waits for the exchange before attending.
            got, state = lax.optimization_barrier((got, state))
            return tuple(buffers.write(x, (have,), new) for x, new in zip(kv, got, strict=True)), state

        kv, state = lax.fori_loop(0, (level > number).astype(jnp.int32), exchange, (kv, state))
    end = jnp.left_shift(jnp.int32(1), level)
    return attend_some(end >> 1, end, kv, state)


def forward(q_TNH: jax.Array, k_KTH: jax.Array, v_KTH: jax.Array, tags: NearTags, level) -> tuple[jax.Array, jax.Array]:
    """Attends from this member's tokens to the documents of its team.

    Args:
        q_TNH: this member's queries, all heads.
        k_KTH, v_KTH: this member's keys and values, all heads.
        tags: from `near_tags`.
        level: 2^level members of a team have each other's keys; int32, at most log2 W, the same on ALL devices.

    Returns:
        out_TNH and lse_TN, at least float32.
    """
    kernel, num_slots = ring.kernel_of(tags), tags.keys.documents.shape[0]
    q = kernel.queries(q_TNH, Prefix(k_KTH, v_KTH, ()))

    def attend(slot, kv, state):
        return kernel.attend(q, Prefix(*kv, (slot,)), tags.mask(slot), state)

    nothing = kernel.nothing(q)
    return kernel.result(_visit(tuple(_slots(x, num_slots) for x in (k_KTH, v_KTH)), level, attend, nothing))


def backward(
    q_TNH: jax.Array, k_KTH: jax.Array, v_KTH: jax.Array, tags: NearTags, level, cotangent: Cotangent
) -> tuple[jax.Array, Gradients]:
    """Differentiates `forward`.

    Args:
        q_TNH, k_KTH, v_KTH, tags, level: as given to `forward`.
        cotangent: of this member's queries.

    Returns:
        dq_TNH, and dK and dV [K, T, H] of this member's own keys; at least float32.
    """
    acc, num_slots = accumulator(q_TNH.dtype), tags.keys.documents.shape[0]
    kernel = ring.kernel_of(tags)
    q = kernel.queries(q_TNH, Prefix(k_KTH, v_KTH, ()))
    rows = kernel.rows(cotangent, q)

    def attend(slot, kv, state):
        dq, gradients = state
        return kernel.differentiate(q, Prefix(*kv, (slot,)), tags.mask(slot), rows, gradients, dq)

    zeros = Gradients(*(jnp.zeros((num_slots, *k_KTH.shape), acc) for _ in range(2)))
    kv = tuple(_slots(x, num_slots) for x in (k_KTH, v_KTH))
    dq, gradients = _visit(kv, level, attend, (kernel.no_gradient(q, tags.meets), zeros))
    for number in reversed(range(num_slots.bit_length() - 1)):
        have = 1 << number

        def give_back(_, gradients, number=number, have=have):
            got = _swap(jnp.stack([x[have : 2 * have] for x in gradients]), number)
            return Gradients(*(buffers.write(x, (0,), x[:have] + more) for x, more in zip(gradients, got, strict=True)))

        gradients = lax.fori_loop(0, (level > number).astype(jnp.int32), give_back, gradients)
    return kernel.gradient(dq), Gradients(*(x[0] for x in gradients))
