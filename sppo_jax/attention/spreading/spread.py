"""Attention alone: whole sequences, their tokens spread over a mesh axis by ring, Ulysses or both, differentiable.

`spread_attention` is for the caller's own `shard_map`, whose mesh has the axes `ring` and `ulysses`. `make_attention`
wraps it for arrays in natural order and any mesh. Both return what `dense_attention` returns.

Letters: B sequences, S tokens, R members, T = S / R tokens on one device, N query heads, K key/value heads, H head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from sppo_jax.arrays.dtypes import accumulator
from sppo_jax.attention.spreading import ring, sequence, ulysses
from sppo_jax.attention.spreading.sequence import Cache, Chunk, Split
from sppo_jax.attention.tags import Tags


def make_attention(
    mesh: Mesh, *, axis: str = "seq", kind: str = "ring", batch_axis: str | None = None
) -> Callable[..., jax.Array]:
    """Makes `f(q_BSNH, k_BSKH, v_BSKH, positions_BS, document_ids_BS) -> out_BSNH` over one axis of a mesh.

    Args:
        mesh: the devices; attention uses none of the other axes.
        axis: over which the tokens of a sequence are spread; its size R divides S.
        kind: "ring" (keys and values travel) or "ulysses" (heads are scattered; R divides N).
        batch_axis: over which the sequences are spread; None for no axis.

    Returns:
        A function of arrays in natural order, with the conditions and the result of `dense_attention`; call it inside
        or outside of jit, and differentiate it with respect to q, k and v.

    Raises:
        ValueError: the mesh has no such axis, or the kind is not one of the two. The returned function raises it if
            shapes do not match.
    """
    for name in (axis, *([] if batch_axis is None else [batch_axis])):
        if name not in mesh.shape:
            raise ValueError(f"the mesh must have the axis {name}, got {', '.join(mesh.axis_names)}; name one of these")
    if kind not in (ring.AXIS, ulysses.AXIS):
        raise ValueError(f"kind must be ring or ulysses, got {kind}; choose one of the two")
    num_members = mesh.shape[axis]
    inner = _with_inner_axes(mesh, axis, num_members if kind == ring.AXIS else 1)
    spread = P(batch_axis, None, ("ulysses", "ring"))
    on_device = jax.shard_map(
        lambda q, k, v, positions, documents: spread_attention(
            q.squeeze(2), k.squeeze(2), v.squeeze(2), positions, documents
        )[:, :, None],
        mesh=inner,
        in_specs=(spread, spread, spread, P(batch_axis), P(batch_axis)),
        out_specs=spread,
        check_vma=False,  # the backward is written out, collectives and all
    )

    def attention(q_BSNH, k_BSKH, v_BSKH, positions_BS, document_ids_BS):
        _check_shapes(q_BSNH, k_BSKH, v_BSKH, positions_BS, document_ids_BS, num_members)
        # Token t belongs to member t mod R, so that every member has the same share of every causal mask.
        striped = [x.reshape(x.shape[0], -1, num_members, *x.shape[2:]) for x in (q_BSNH, k_BSKH, v_BSKH)]
        return on_device(*striped, positions_BS, document_ids_BS).reshape(q_BSNH.shape)

    return attention


def spread_attention(
    q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, positions_BS: jax.Array, document_ids_BS: jax.Array
) -> jax.Array:
    """Attends from this device's tokens to those of all members; call it inside `shard_map`.

    The mesh has the axes `ring` and `ulysses`; either may have size 1. Token t of a sequence lies on ring
    member t mod ring, and there on ulysses member (t // ring) mod ulysses.

    Args:
        q_BTNH: queries of this device's tokens; `ulysses` divides N, and N is a multiple of K.
        k_BTKH: keys.
        v_BTKH: values.
        positions_BS: of ALL tokens, in natural order: int32, increasing within a document.
        document_ids_BS: of all tokens: int32, not decreasing along a sequence; -1 is padding.

    Returns:
        out_BTNH in the dtype of q; zeros for padding.

    Raises:
        ValueError: an axis is missing, or shapes do not match.
    """
    sizes = {name: _axis_size(name) for name in (ring.AXIS, ulysses.AXIS)}
    split = Split(sizes[ulysses.AXIS], sizes[ring.AXIS], "kv")
    num_members = split.ring * split.ulysses
    if positions_BS.shape != (q_BTNH.shape[0], q_BTNH.shape[1] * num_members):
        raise ValueError(
            f"positions must be those of the tokens of all {num_members} members, "
            f"[{q_BTNH.shape[0]}, {q_BTNH.shape[1] * num_members}], got {list(positions_BS.shape)}; do not shard "
            "positions"
        )
    if q_BTNH.shape[2] % split.ulysses:
        raise ValueError(
            f"the number of attention heads must be a multiple of ulysses = {split.ulysses}, got {q_BTNH.shape[2]}; "
            "use a ring instead"
        )
    return _attend(split, q_BTNH, k_BTKH, v_BTKH, positions_BS, document_ids_BS)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(split: Split, q_BTNH, k_BTKH, v_BTKH, positions_BS, document_ids_BS):
    return _forward(split, q_BTNH, k_BTKH, v_BTKH, positions_BS, document_ids_BS)[0]


def _forward(split: Split, q_BTNH, k_BTKH, v_BTKH, positions_BS, document_ids_BS):
    def one(args):
        q, k, v, positions, documents = args
        chunk, cache = _whole(split, k, v, positions, documents)
        return sequence.forward(q, cache, chunk, 0, split)

    args = (q_BTNH, k_BTKH, v_BTKH, positions_BS, document_ids_BS)
    out, lse = lax.map(one, args)
    return out, (*args, out, lse)


def _backward(split: Split, saved, dout_BTNH):
    def one(args):
        q, k, v, positions, documents, out, lse, dout = args
        chunk, cache = _whole(split, k, v, positions, documents)
        sums = jax.tree.map(lambda x: jnp.zeros(x.shape, accumulator(x.dtype)), cache)
        dq, sums = sequence.backward(sequence.Attended(q, out, lse, dout), cache, sums, chunk, 0, split)
        dk, dv, _ = sequence.take_gradient(sums, chunk, 0, k, split)
        return dq, dk, dv

    return (*lax.map(one, (*saved, dout_BTNH)), None, None)


_attend.defvjp(_forward, _backward)


def _whole(split: Split, k_TKH, v_TKH, positions_S, documents_S) -> tuple[Chunk, Cache]:
    """Makes one chunk of a sequence, and writes the sequence's keys and values into a new cache."""
    num_tokens, num_kv_heads, head_dim = k_TKH.shape
    size = num_tokens * split.ulysses
    tags: Tags = sequence.member_tags(positions_S, documents_S, split, 0)
    chunk = Chunk(
        jnp.int32(0), jnp.int32(0), jnp.int32(size), sequence.chunk_tags(tags, 0, size, size, split, bound=None)
    )
    shape = (1, 1, sequence.cache_heads(num_kv_heads, split.ulysses), size, head_dim)
    empty = Cache(jnp.zeros(shape, k_TKH.dtype), jnp.zeros(shape, v_TKH.dtype))
    return chunk, sequence.write_prefix(empty, k_TKH, v_TKH, chunk, 0, split)


def _axis_size(name: str) -> int:
    try:
        return lax.axis_size(name)
    except NameError:
        raise ValueError(
            f"spread_attention must be called inside shard_map over a mesh with the axes ring and ulysses, got no "
            f"axis {name}; add the axis with size 1, or use make_attention"
        ) from None


def _with_inner_axes(mesh: Mesh, axis: str, ring_size: int) -> Mesh:
    """Divides an axis into `ring` and `ulysses`; devices keep their order."""
    place, shape = mesh.axis_names.index(axis), mesh.devices.shape
    shape = (*shape[:place], ring_size, shape[place] // ring_size, *shape[place + 1 :])
    names = (*mesh.axis_names[:place], ring.AXIS, ulysses.AXIS, *mesh.axis_names[place + 1 :])
    return Mesh(np.asarray(mesh.devices).reshape(shape), names, axis_types=(AxisType.Auto,) * len(names))


def _check_shapes(q_BSNH, k_BSKH, v_BSKH, positions_BS, document_ids_BS, num_members: int) -> None:
    if q_BSNH.ndim != 4 or q_BSNH.shape[1] % num_members:
        raise ValueError(
            f"queries must be [sequences, tokens, heads, size], tokens a multiple of {num_members} (the mesh axis), "
            f"got {list(q_BSNH.shape)}; pad the sequences"
        )
    batch, tokens, heads, size = q_BSNH.shape
    if k_BSKH.shape != v_BSKH.shape or k_BSKH.ndim != 4 or k_BSKH.shape[:2] + k_BSKH.shape[3:] != (batch, tokens, size):
        raise ValueError(
            f"keys and values must be [{batch}, {tokens}, heads, {size}] like the queries, got {list(k_BSKH.shape)} "
            f"and {list(v_BSKH.shape)}; give every token a key and a value"
        )
    if heads % k_BSKH.shape[2]:
        raise ValueError(
            f"query heads must be a multiple of key/value heads, got {heads} and {k_BSKH.shape[2]}; change one of "
            "the two"
        )
    for name, x in (("positions", positions_BS), ("document_ids", document_ids_BS)):
        if x.shape != (batch, tokens):
            raise ValueError(
                f"{name} must be [{batch}, {tokens}] like the queries, got {list(x.shape)}; give every token a value"
            )
