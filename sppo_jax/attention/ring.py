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
from sppo_jax.attention.blockwise import find_blocks, merge
from sppo_jax.attention.operands import Cotangent, Gradients, Mask, Prefix
from sppo_jax.attention.spans import Spans, find_spans
from sppo_jax.attention.tags import BlockRange, Tags
from sppo_jax.dtypes import accumulator
from sppo_jax.program.ring import travelling_keys

AXIS = "ring"


class RingTags(NamedTuple):
    """Tags of every member's queries [R, T] and keys [R, S], and where they meet at each hop.

    `meets` is a range of key blocks for the blockwise kernel or spans for the fused kernel. Its type selects the
    kernel. `window`: see `Mask`. `begin`: where keys travel, the first of a member's buffer that does, if not 0.
    """

    queries: Tags
    keys: Tags
    meets: BlockRange | Spans
    window: int = 0
    begin: jax.Array | int = 0

    @property
    def num_members(self) -> int:
        return self.queries.documents.shape[0]


def ring_tags(
    queries: Tags, keys: Tags, start, *, kernel: str, passes: str, bound: int | None, window: int = 0
) -> RingTags:
    """Prepares the masks of a tick once for all layers.

    Args:
        queries: tags of the chunk on every member, [R, T].
        keys: tags of the prefix buffer on every member, [R, S].
        start: where the chunk starts in a member's tokens.
        kernel: "blockwise" or "cudnn".
        passes: "kv" or "q".
        bound: with "kv", the number of keys of each member that travel; None for all.
        window: see `Mask`.

    Returns:
        The tags and where they meet. At hop j these are own queries and the keys of member me - j with "kv", and own
        keys and the queries of member me - j with "q".
    """
    num_members = queries.documents.shape[0]
    if passes == "kv" and bound is not None:
        keys = jax.tree.map(lambda x: x[:, :bound], keys)
    me = lax.axis_index(AXIS) if num_members > 1 else 0
    begin = 0
    if window and passes == "kv" and num_members > 1:
        reach = window // num_members  # of one member's keys
        keys, begin = _within(keys, start, travelling_keys(reach, queries.documents.shape[1]), reach)
    if kernel == "cudnn" and window:
        window //= num_members
        start -= begin

    def pair(other):
        own_q, own_k = (me, other) if passes == "kv" else (other, me)
        if kernel == "cudnn":
            return find_spans(queries.documents[own_q], keys.documents[own_k], start, own_k > own_q, window)
        return find_blocks(queries.take(own_q), keys.take(own_k), window)

    others = (me - jnp.arange(num_members, dtype=jnp.int32)) % num_members
    return RingTags(queries, keys, jax.vmap(pair)(others), window, begin)


def _within(keys: Tags, start, size: int, window: int) -> tuple[Tags, jax.Array]:
    """Cuts out the keys that the windows of a chunk reach, and returns the first one's place.

    A document has no padding within, see `validate_batch`: so many positions are no more tokens.
    """
    num_members, num_keys = keys.documents.shape
    size = min(size, num_keys)
    begin = jnp.clip(jnp.asarray(start, jnp.int32) - window, 0, num_keys - size)
    return Tags(*(buffers.read(x, (0, begin), (num_members, size)) for x in keys)), begin


def kernel_of(mask: Mask):
    """Returns the module whose `forward` and `backward` read this mask."""
    return flash if isinstance(mask.meets, Spans) else blockwise


def _send(tree, num_members: int):
    perm = [(i, (i + 1) % num_members) for i in range(num_members)]
    return jax.tree.map(lambda x: lax.ppermute(x, AXIS, perm), tree)


def _member(hop, num_members: int):
    return (lax.axis_index(AXIS) - hop) % num_members if num_members > 1 else 0


def forward(q_TNH: jax.Array, prefix: Prefix, tags: RingTags, *, passes: str) -> tuple[jax.Array, jax.Array]:
    """Attends over the whole ring.

    Args:
        q_TNH: this member's queries.
        prefix: this member's keys and values.
        tags: from `ring_tags` with the same `passes`.
        passes: "kv" or "q".

    Returns:
        out_TNH and lse_TN over all keys of all members, at least float32.
    """
    if tags.num_members == 1:
        mask = Mask(tags.queries.take(0), tags.keys.take(0), tags.meets.take(0), tags.window)
        return kernel_of(mask).forward(q_TNH, prefix, mask)
    hop = _forward_pass_kv if passes == "kv" else _forward_pass_q
    return hop(q_TNH, prefix, tags)


def _travelling_keys(prefix: Prefix, tags: RingTags):
    """Returns the keys and values that a member sends: of every head, as many as have tags."""
    num_heads, _, head_dim = prefix.k.shape[-3:]
    shape = (num_heads, tags.keys.documents.shape[1], head_dim)
    return tuple(buffers.read(x, (*prefix.index, *_place(tags)), shape) for x in (prefix.k, prefix.v))


def _place(tags: RingTags) -> tuple:
    """Returns the index of the keys that travel, behind the dims of sequence and layer: none where the first does."""
    return (0, tags.begin) if isinstance(tags.begin, jax.Array) else ()


def _empty(q_TNH):
    acc = accumulator(q_TNH.dtype)
    return jnp.zeros(q_TNH.shape, acc), jnp.full(q_TNH.shape[:2], -jnp.inf, acc)


def _forward_pass_kv(q_TNH, prefix: Prefix, tags: RingTags):
    num_members, own = tags.num_members, tags.queries.take(lax.axis_index(AXIS))

    def attend(hop, kv, state):
        mask = Mask(own, tags.keys.take(_member(hop, num_members)), tags.meets.take(hop), tags.window)
        return merge(*state, *kernel_of(mask).forward(q_TNH, Prefix(*kv, ()), mask))

    def step(carry, hop):
        kv, state = carry
        return (_send(kv, num_members), attend(hop, kv, state)), None

    kv = _travelling_keys(prefix, tags)
    hops = jnp.arange(num_members - 1, dtype=jnp.int32)
    (kv, state), _ = lax.scan(step, (kv, _empty(q_TNH)), hops)
    return attend(num_members - 1, kv, state)


def _forward_pass_q(q_TNH, prefix: Prefix, tags: RingTags):
    num_members, own = tags.num_members, tags.keys.take(lax.axis_index(AXIS))

    def attend(hop, q, state):
        mask = Mask(tags.queries.take(_member(hop, num_members)), own, tags.meets.take(hop), tags.window)
        return merge(*state, *kernel_of(mask).forward(q, prefix, mask))

    def step(carry, hop):
        q, state = carry
        return _send((q, attend(hop, q, state)), num_members), None

    hops = jnp.arange(num_members - 1, dtype=jnp.int32)
    (q, state), _ = lax.scan(step, (q_TNH, _empty(q_TNH)), hops)
    return _send(attend(num_members - 1, q, state), num_members)  # the last hop brings the result home


def backward(
    q_TNH: jax.Array, prefix: Prefix, tags: RingTags, cotangent: Cotangent, gradients: Gradients, *, passes: str
) -> tuple[jax.Array, Gradients]:
    """Differentiates `forward` and adds to this member's dK and dV buffers.

    Args:
        q_TNH, prefix, tags, passes: as given to `forward` (`tags` made for this `passes`).
        cotangent: of this member's queries.
        gradients: the buffers of this member.

    Returns:
        dq_TNH (at least float32) and the two buffers.
    """
    if tags.num_members == 1:
        mask = Mask(keys=tags.keys.take(0), queries=tags.queries.take(0), meets=tags.meets.take(0), window=tags.window)
        return kernel_of(mask).backward(q_TNH, prefix, mask, cotangent, gradients)
    hop = _backward_pass_kv if passes == "kv" else _backward_pass_q
    return hop(q_TNH, prefix, tags, cotangent, gradients)


def _backward_pass_kv(q_TNH, prefix: Prefix, tags: RingTags, cotangent: Cotangent, gradients: Gradients):
    num_members, own = tags.num_members, tags.queries.take(lax.axis_index(AXIS))

    def differentiate(hop, kv, dkv, dq):
        mask = Mask(own, tags.keys.take(_member(hop, num_members)), tags.meets.take(hop), tags.window)
        more, dkv = kernel_of(mask).backward(q_TNH, Prefix(*kv, ()), mask, cotangent, dkv)
        return dkv, dq + more

    def step(carry, hop):
        kv, dkv, dq = carry
        dkv, dq = differentiate(hop, kv, dkv, dq)
        return (_send(kv, num_members), _send(dkv, num_members), dq), None

    kv = _travelling_keys(prefix, tags)
    acc = accumulator(q_TNH.dtype)
    start = (kv, Gradients(*(jnp.zeros(x.shape, acc) for x in kv)), jnp.zeros(q_TNH.shape, acc))
    (kv, dkv, dq), _ = lax.scan(step, start, jnp.arange(num_members - 1, dtype=jnp.int32))
    dkv, dq = differentiate(num_members - 1, kv, dkv, dq)
    dkv = _send(dkv, num_members)  # home
    where = (*prefix.grads_at, *(_place(tags) or (0, 0)))
    return dq, Gradients(*(buffers.add(buffer, where, x) for buffer, x in zip(gradients, dkv, strict=True)))


def _backward_pass_q(q_TNH, prefix: Prefix, tags: RingTags, cotangent: Cotangent, gradients: Gradients):
    num_members, own = tags.num_members, tags.keys.take(lax.axis_index(AXIS))

    def differentiate(hop, traveller, dq, gradients):
        q, seen = traveller
        mask = Mask(tags.queries.take(_member(hop, num_members)), own, tags.meets.take(hop), tags.window)
        more, gradients = kernel_of(mask).backward(q, prefix, mask, seen, gradients)
        return dq + more, gradients

    def step(carry, hop):
        traveller, dq, gradients = carry
        dq, gradients = differentiate(hop, traveller, dq, gradients)
        traveller, dq = _send((traveller, dq), num_members)
        return (traveller, dq, gradients), None

    start = ((q_TNH, cotangent), jnp.zeros(q_TNH.shape, accumulator(q_TNH.dtype)), gradients)
    (traveller, dq, gradients), _ = lax.scan(step, start, jnp.arange(num_members - 1, dtype=jnp.int32))
    dq, gradients = differentiate(num_members - 1, traveller, dq, gradients)
    return _send(dq, num_members), gradients
