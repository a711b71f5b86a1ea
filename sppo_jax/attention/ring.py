"""Attention over the `ring` axis: keys and values travel, or queries do; forward and hand-written backward.

Tokens are striped over the ring (token t to member t mod ring), so every member has the same share of every causal
mask. Pass-KV moves the prefix, pass-Q moves the chunk with its partial output and LSE; which is cheaper depends on the
prefix alone and is decided before compilation. Every hop is unconditional: all members of all stages do the same ones.

Letters: R ring members, T queries of a chunk on one member, S keys of one member's buffer, N, K heads, H head dim.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sppo_jax import buffers
from sppo_jax.attention import blockwise, flash
from sppo_jax.attention.blockwise import Prefix, block_sizes, merge
from sppo_jax.attention.spans import Spans, find_spans
from sppo_jax.attention.tags import BlockRange, Tags, block_range
from sppo_jax.dtypes import accumulator

AXIS = "ring"


class RingTags(NamedTuple):
    """Tags of every member's queries [R, T] and keys [R, S], and for each hop what meets.

    What meets is a range of key blocks for the blockwise kernel, or spans for the fused one; its type says which runs.
    """

    queries: Tags
    keys: Tags
    meets: BlockRange | Spans


def ring_tags(queries: Tags, keys: Tags, start, *, kernel: str, passes: str, bound: int | None) -> RingTags:
    """Prepare the masks of a tick once for all layers.

    Args:
        queries: tags of the chunk on every member, [R, T].
        keys: tags of the prefix buffer on every member, [R, S].
        start: where the chunk starts in a member's tokens.
        kernel: "blockwise" or "cudnn".
        passes: "kv" or "q".
        bound: with "kv", how many keys of each member travel; None for all.

    Returns:
        tags and, for hop j, what meets of (own queries, keys of member me - j) or (queries of me - j, own keys).
    """
    num_members = queries.documents.shape[0]
    if passes == "kv" and bound is not None:
        keys = jax.tree.map(lambda x: x[:, :bound], keys)
    me = lax.axis_index(AXIS) if num_members > 1 else 0
    sizes = block_sizes(queries.documents.shape[1], keys.documents.shape[1])

    def pair(other):
        own_q, own_k = (me, other) if passes == "kv" else (other, me)
        if kernel == "cudnn":
            return find_spans(queries.documents[own_q], keys.documents[own_k], start, own_k > own_q)
        return block_range(queries.take(own_q), keys.take(own_k), *sizes)

    others = (me - jnp.arange(num_members, dtype=jnp.int32)) % num_members
    return RingTags(queries, keys, jax.vmap(pair)(others))


def _attend(q_TNH, q_tags: Tags, prefix: Prefix, meets: BlockRange | Spans):
    if isinstance(meets, Spans):
        return flash.forward(q_TNH, prefix, meets)
    return blockwise.forward(q_TNH, q_tags, prefix, meets)


def _differentiate(q_TNH, q_tags: Tags, prefix: Prefix, meets: BlockRange | Spans, cotangent, dk, dv, index):
    dout_TNH, lse_TN, summary = cotangent
    if isinstance(meets, Spans):
        return flash.backward(q_TNH, prefix, meets, summary, lse_TN, dout_TNH, dk, dv, index)
    return blockwise.backward(q_TNH, q_tags, prefix, meets, dout_TNH, lse_TN, summary, dk, dv, index)


def _send(tree, num_members: int):
    perm = [(i, (i + 1) % num_members) for i in range(num_members)]
    return jax.tree.map(lambda x: lax.ppermute(x, AXIS, perm), tree)


def _member(hop, num_members: int):
    return (lax.axis_index(AXIS) - hop) % num_members if num_members > 1 else 0


def forward(q_TNH: jax.Array, k: jax.Array, v: jax.Array, index: tuple, tags: RingTags, *, passes: str):
    """Attend over the whole ring.

    Args:
        q_TNH: this member's queries.
        k, v: this member's buffers [X..., K, S, H]; `index` says where in X.
        tags: from `ring_tags` with the same `passes`.
        passes: "kv" or "q".

    Returns:
        out_TNH and lse_TN over all keys of all members, at least float32.
    """
    num_members = tags.queries.documents.shape[0]
    if num_members == 1:
        return _attend(q_TNH, tags.queries.take(0), Prefix(k, v, index, tags.keys.take(0)), tags.meets.take(0))
    hop = _forward_pass_kv if passes == "kv" else _forward_pass_q
    return hop(q_TNH, k, v, index, tags, num_members)


def _travelling_keys(k, index, tags: RingTags):
    num_heads, _, head_dim = k.shape[-3:]
    return buffers.read(k, index, (num_heads, tags.keys.documents.shape[1], head_dim))


def _empty(q_TNH):
    acc = accumulator(q_TNH.dtype)
    return jnp.zeros(q_TNH.shape, acc), jnp.full(q_TNH.shape[:2], -jnp.inf, acc)


def _forward_pass_kv(q_TNH, k, v, index, tags, num_members):
    own = tags.queries.take(lax.axis_index(AXIS))

    def attend(hop, kv, state):
        prefix = Prefix(*kv, (), tags.keys.take(_member(hop, num_members)))
        return merge(*state, *_attend(q_TNH, own, prefix, tags.meets.take(hop)))

    def step(carry, hop):
        kv, state = carry
        return (_send(kv, num_members), attend(hop, kv, state)), None

    kv = tuple(_travelling_keys(x, index, tags) for x in (k, v))
    hops = jnp.arange(num_members - 1, dtype=jnp.int32)
    (kv, state), _ = lax.scan(step, (kv, _empty(q_TNH)), hops)
    return attend(num_members - 1, kv, state)


def _forward_pass_q(q_TNH, k, v, index, tags, num_members):
    prefix = Prefix(k, v, index, tags.keys.take(lax.axis_index(AXIS)))

    def attend(hop, q, state):
        owner = tags.queries.take(_member(hop, num_members))
        return merge(*state, *_attend(q, owner, prefix, tags.meets.take(hop)))

    def step(carry, hop):
        q, state = carry
        return _send((q, attend(hop, q, state)), num_members), None

    hops = jnp.arange(num_members - 1, dtype=jnp.int32)
    (q, state), _ = lax.scan(step, (q_TNH, _empty(q_TNH)), hops)
    return _send(attend(num_members - 1, q, state), num_members)  # the last hop brings the result home


class Cotangent(NamedTuple):
    """What the backward of a chunk's queries needs: the output's cotangent, the GLOBAL LSE, and the output's summary.

    The blockwise kernel asks of the global output no more than delta_TN = sum(out * dout), the fused one all of it.
    """

    dout_TNH: jax.Array
    lse_TN: jax.Array
    summary: jax.Array


def backward(q_TNH, cotangent: Cotangent, k, v, index, dk, dv, dindex, tags: RingTags, *, passes: str):
    """Differentiate `forward`, adding into this member's dK and dV buffers.

    Args:
        q_TNH, k, v, index, tags, passes: as given to `forward` (`tags` made for this `passes`).
        cotangent: of this member's queries.
        dk, dv: accumulators [X..., K, S, H]; `dindex` says where in X.

    Returns:
        dq_TNH (at least float32) and the two buffers.
    """
    num_members = tags.queries.documents.shape[0]
    if num_members == 1:
        prefix = Prefix(k, v, index, tags.keys.take(0))
        return _differentiate(q_TNH, tags.queries.take(0), prefix, tags.meets.take(0), cotangent, dk, dv, dindex)
    hop = _backward_pass_kv if passes == "kv" else _backward_pass_q
    return hop(q_TNH, cotangent, k, v, index, dk, dv, dindex, tags, num_members)


def _backward_pass_kv(q_TNH, cotangent, k, v, index, dk, dv, dindex, tags, num_members):
    own = tags.queries.take(lax.axis_index(AXIS))

    def differentiate(hop, kv, dkv, dq):
        prefix = Prefix(*kv, (), tags.keys.take(_member(hop, num_members)))
        more, *dkv = _differentiate(q_TNH, own, prefix, tags.meets.take(hop), cotangent, *dkv, ())
        return tuple(dkv), dq + more

    def step(carry, hop):
        kv, dkv, dq = carry
        dkv, dq = differentiate(hop, kv, dkv, dq)
        return (_send(kv, num_members), _send(dkv, num_members), dq), None

    kv = tuple(_travelling_keys(x, index, tags) for x in (k, v))
    acc = accumulator(q_TNH.dtype)
    start = (kv, tuple(jnp.zeros(x.shape, acc) for x in kv), jnp.zeros(q_TNH.shape, acc))
    (kv, dkv, dq), _ = lax.scan(step, start, jnp.arange(num_members - 1, dtype=jnp.int32))
    dkv, dq = differentiate(num_members - 1, kv, dkv, dq)
    dkv = _send(dkv, num_members)  # home
    return dq, buffers.add(dk, (*dindex, 0, 0), dkv[0]), buffers.add(dv, (*dindex, 0, 0), dkv[1])


def _backward_pass_q(q_TNH, cotangent, k, v, index, dk, dv, dindex, tags, num_members):
    prefix = Prefix(k, v, index, tags.keys.take(lax.axis_index(AXIS)))

    def differentiate(hop, traveller, dq, dk, dv):
        q, seen = traveller
        owner = tags.queries.take(_member(hop, num_members))
        more, dk, dv = _differentiate(q, owner, prefix, tags.meets.take(hop), seen, dk, dv, dindex)
        return dq + more, dk, dv

    def step(carry, hop):
        traveller, dq, dk, dv = carry
        dq, dk, dv = differentiate(hop, traveller, dq, dk, dv)
        traveller, dq = _send((traveller, dq), num_members)
        return (traveller, dq, dk, dv), None

    start = ((q_TNH, cotangent), jnp.zeros(q_TNH.shape, accumulator(q_TNH.dtype)), dk, dv)
    (traveller, dq, dk, dv), _ = lax.scan(step, start, jnp.arange(num_members - 1, dtype=jnp.int32))
    dq, dk, dv = differentiate(num_members - 1, traveller, dq, dk, dv)
    return _send(dq, num_members), dk, dv
