"""Attention over the `ring` axis: keys and values travel, or queries do; forward and hand-written backward.

Tokens are striped over the ring (token t to member t mod ring), so every member has the same share of every causal
mask. Pass-KV moves the prefix, pass-Q moves the chunk with its partial output and LSE; which is cheaper depends on the
prefix alone and is decided before compilation. Every hop is unconditional: all members of all stages do the same ones.

What a kernel has found can leave only after the kernel. On TPUs it leaves one hop late: it travels beside the next
kernel, and what that kernel finds is added when both are there. So no hop stands between two kernels.

Letters: R ring members, T queries of a chunk on one member, S keys of one member's buffer, N, K heads, H head dim.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sppo_jax.arrays import buffers
from sppo_jax.arrays.dtypes import accumulator
from sppo_jax.attention import kernels
from sppo_jax.attention.blockwise import find_blocks, merge
from sppo_jax.attention.intervals import Meets, from_spans, within_window
from sppo_jax.attention.operands import Cotangent, Gradients, Mask, Prefix
from sppo_jax.attention.pallas_blocks import Target
from sppo_jax.attention.spans import NOTHING_KNOWN, Known, Spans, find_spans
from sppo_jax.attention.tags import BlockRange, Tags
from sppo_jax.attention.tpu.pallas import find_meets
from sppo_jax.program.ring import HOP, travelling_keys

AXIS = "ring"


class RingTags(NamedTuple):
    """Tags of every member's queries [R, T] and keys [R, S], and where they meet at each hop.

    `meets` and `window`: see `Mask`; the type of `meets` selects the kernel. `begin`: where keys travel, the first of a
    member's buffer that does, if not 0.
    """

    queries: Tags
    keys: Tags
    meets: BlockRange | Spans | Meets
    window: int = 0
    begin: jax.Array | int = 0

    @property
    def num_members(self) -> int:
        return self.queries.documents.shape[0]


def ring_tags(
    queries: Tags,
    keys: Tags,
    start,
    *,
    kernel: str,
    passes: str,
    bound: int | None,
    window: int = 0,
    given: Target | Known | None = None,
) -> RingTags:
    """Prepares the masks of a tick once for all layers.

    Args:
        queries: tags of the chunk on every member, [R, T].
        keys: tags of the prefix buffer on every member, [R, S].
        start: where the chunk starts in a member's tokens.
        kernel: "blockwise", "cudnn" or "pallas".
        passes: "kv" or "q".
        bound: with "kv", the number of keys of each member that travel; None for all.
        window: see `Mask`.
        given: of the kernel "pallas" what it is compiled for; of "cudnn" what it need not loop over, None for nothing.

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
    known = given if isinstance(given, Known) else NOTHING_KNOWN
    if kernel == "cudnn" and window:
        window //= num_members
    if kernel != "blockwise" and window:
        start -= begin

    def pair(other):
        own_q, own_k = (me, other) if passes == "kv" else (other, me)
        if kernel == "cudnn":
            return find_spans(queries.documents[own_q], keys.documents[own_k], start, own_k > own_q, window, known)
        if kernel == "pallas":
            spans = find_spans(queries.documents[own_q], keys.documents[own_k], start, own_k > own_q)
            found = from_spans(spans, queries.documents.shape[1])
            if window:
                found = within_window(found, start, window, (own_q, own_k), num_members)
            return find_meets(found, keys.documents.shape[1], given)
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


def kernel_of(tags) -> kernels.Kernel:
    """Returns the kernel that reads these tags or this mask."""
    return kernels.kernel_of(tags.meets)


def _send(tree, num_members: int):
    perm = [(i, (i + 1) % num_members) for i in range(num_members)]
    with jax.named_scope(HOP):
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
    kernel = kernel_of(tags)
    q = kernel.queries(q_TNH, prefix)
    if tags.num_members == 1:
        mask = Mask(tags.queries.take(0), tags.keys.take(0), tags.meets.take(0), tags.window)
        return kernel.result(kernel.attend(q, prefix, mask))
    hop = _forward_pass_kv if passes == "kv" else _forward_pass_q
    return kernel.result(hop(kernel, q, prefix, tags))


def _travelling_keys(prefix: Prefix, tags: RingTags):
    """Returns the keys and values that a member sends: of every head, as many as have tags."""
    num_heads, _, head_dim = prefix.k.shape[-3:]
    shape = (num_heads, tags.keys.documents.shape[1], head_dim)
    return tuple(buffers.read(x, (*prefix.index, *_place(tags)), shape) for x in (prefix.k, prefix.v))


def _place(tags: RingTags) -> tuple:
    """Returns the index of the keys that travel, behind the dims of sequence and layer: none where the first does."""
    return (0, tags.begin) if isinstance(tags.begin, jax.Array) else ()


def _lagging(num_members: int, travellers, compute: Callable, join: Callable, nothing, kept=None):
    """Sends travellers around the ring, and what is computed with them one hop later; the last hop brings that home.

    What one kernel found is added ahead of the next one. Behind the kernel, XLA would start a hop beside the addition
    instead of beside the kernel.

    Args:
        num_members: R.
        travellers: what visits every member.
        compute: from the hop, travellers and `kept`, returns what it found for them, and the next `kept`.
        join: adds what was found to what travels on.
        nothing: what travels on where nothing was found.
        kept: what stays on this member.

    Returns:
        The sum of what was computed with this member's own travellers, and `kept`.
    """
    found, kept = compute(0, travellers, kept)

    def step(carry, hop):
        travellers, late, found, kept = carry
        late = join(late, found)
        found, kept = compute(hop, travellers, kept)
        return (_send(travellers, num_members), _send(late, num_members), found, kept), None

    hops = jnp.arange(1, num_members - 1, dtype=jnp.int32)
    start = (_send(travellers, num_members), nothing, found, kept)
    (travellers, late, found, kept), _ = lax.scan(step, start, hops)
    late = _send(join(late, found), num_members)
    found, kept = compute(num_members - 1, travellers, kept)
    return _send(join(late, found), num_members), kept


def _forward_pass_kv(kernel: kernels.Kernel, q, prefix: Prefix, tags: RingTags):
    num_members, own = tags.num_members, tags.queries.take(lax.axis_index(AXIS))

    def attend(hop, kv, state):
        mask = Mask(own, tags.keys.take(_member(hop, num_members)), tags.meets.take(hop), tags.window)
        return kernel.attend(q, Prefix(*kv, ()), mask, state)

    def step(carry, hop):
        kv, state = carry
        return (_send(kv, num_members), attend(hop, kv, state)), None

    kv = _travelling_keys(prefix, tags)
    hops = jnp.arange(num_members - 1, dtype=jnp.int32)
    (kv, state), _ = lax.scan(step, (kv, kernel.nothing(q)), hops)
    return attend(num_members - 1, kv, state)


def _forward_pass_q(kernel: kernels.Kernel, q, prefix: Prefix, tags: RingTags):
    num_members, own = tags.num_members, tags.keys.take(lax.axis_index(AXIS))

    def attend(hop, q, state):
        mask = Mask(tags.queries.take(_member(hop, num_members)), own, tags.meets.take(hop), tags.window)
        return kernel.attend(q, prefix, mask, state)

    if kernel.lags:
        nothing = kernel.nothing(q)
        return _lagging(num_members, q, lambda hop, q, _: (attend(hop, q, None), None), _merge, nothing)[0]

    def step(carry, hop):
        q, state = carry
        return _send((q, attend(hop, q, state)), num_members), None

    hops = jnp.arange(num_members - 1, dtype=jnp.int32)
    (q, state), _ = lax.scan(step, (q, kernel.nothing(q)), hops)
    return _send(attend(num_members - 1, q, state), num_members)  # the last hop brings the result home


def _merge(one, other):
    return type(one)(*merge(*one, *other))


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
    kernel = kernel_of(tags)
    q = kernel.queries(q_TNH, prefix)
    rows = kernel.rows(cotangent, q)
    if tags.num_members == 1:
        mask = Mask(keys=tags.keys.take(0), queries=tags.queries.take(0), meets=tags.meets.take(0), window=tags.window)
        dq, gradients = kernel.differentiate(q, prefix, mask, rows, gradients)
        return kernel.gradient(dq), gradients
    hop = _backward_pass_kv if passes == "kv" else _backward_pass_q
    return hop(kernel, q, prefix, tags, rows, gradients)


def _backward_pass_kv(kernel: kernels.Kernel, q, prefix: Prefix, tags: RingTags, rows, gradients: Gradients):
    num_members, own = tags.num_members, tags.queries.take(lax.axis_index(AXIS))

    def differentiate(hop, kv, dkv, dq):
        mask = Mask(own, tags.keys.take(_member(hop, num_members)), tags.meets.take(hop), tags.window)
        dq, dkv = kernel.differentiate(q, Prefix(*kv, ()), mask, rows, dkv, dq)
        return dkv, dq

    def step(carry, hop):
        kv, dkv, dq = carry
        dkv, dq = differentiate(hop, kv, dkv, dq)
        return (_send(kv, num_members), _send(dkv, num_members), dq), None

    kv = _travelling_keys(prefix, tags)
    acc = accumulator(q.dtype)

    def nothing():
        return Gradients(*(jnp.zeros(x.shape, acc) for x in kv))

    def compute(hop, kv, dq):
        return differentiate(hop, kv, nothing(), dq)

    if kernel.lags:
        no_gradient = kernel.no_gradient(q, tags.meets)
        dkv, dq = _lagging(num_members, kv, compute, _add, nothing(), no_gradient)
    else:
        start = (kv, nothing(), kernel.no_gradient(q, tags.meets))
        (kv, dkv, dq), _ = lax.scan(step, start, jnp.arange(num_members - 1, dtype=jnp.int32))
        dkv, dq = differentiate(num_members - 1, kv, dkv, dq)
        dkv = _send(dkv, num_members)  # home
    where = (*prefix.grads_at, *(_place(tags) or (0, 0)))
    added = Gradients(*(buffers.add(buffer, where, x) for buffer, x in zip(gradients, dkv, strict=True)))
    return kernel.gradient(dq), added


def _add(one, other):
    return jax.tree.map(jnp.add, one, other)


def _backward_pass_q(kernel: kernels.Kernel, q, prefix: Prefix, tags: RingTags, rows, gradients: Gradients):
    num_members, own = tags.num_members, tags.keys.take(lax.axis_index(AXIS))

    def differentiate(hop, traveller, dq, gradients):
        q, seen = traveller
        mask = Mask(tags.queries.take(_member(hop, num_members)), own, tags.meets.take(hop), tags.window)
        return kernel.differentiate(q, prefix, mask, seen, gradients, dq)

    def compute(hop, traveller, gradients):
        return differentiate(hop, traveller, None, gradients)

    def join(late, dq):
        return late + kernel.gradient(dq)

    if kernel.lags:
        like = jax.eval_shape(lambda: kernel.gradient(kernel.no_gradient(q, tags.meets)))
        nothing = jnp.zeros(like.shape, like.dtype)
        return _lagging(num_members, (q, rows), compute, join, nothing, gradients)

    def step(carry, hop):
        traveller, dq, gradients = carry
        dq, gradients = differentiate(hop, traveller, dq, gradients)
        traveller, dq = _send((traveller, dq), num_members)
        return (traveller, dq, gradients), None

    start = ((q, rows), kernel.no_gradient(q, tags.meets), gradients)
    (traveller, dq, gradients), _ = lax.scan(step, start, jnp.arange(num_members - 1, dtype=jnp.int32))
    dq, gradients = differentiate(num_members - 1, traveller, dq, gradients)
    return _send(dq, num_members), gradients
