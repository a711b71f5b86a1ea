"""Forward of a chunk's attention to its prefix, as one Pallas kernel for TPUs.

The kernel reads blocks of keys where they lie in the buffers [X..., K, S, E] and visits only the steps of `find_steps`.
The result over other keys goes in and comes out with these keys added, so that nothing but the kernel stands between
two hops of a ring. Each core has its own blocks of queries. Where a chunk has fewer of these than the device has cores,
each core has its own heads, or one core does all if the heads cannot be dealt evenly.

Letters: T queries, K key-value heads, G query heads of each, H head dim, E elements of a head in a buffer, of which the
kernel uses the first H, S keys; R = G * queries of a block, the rows of a step; C keys of a block; P cores; X leading
dims of a buffer (slot, layer); L = 128 lanes.
"""

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from sppo_jax.attention.intervals import EDGE, FULL, Intervals, Meets, Steps, find_steps, read_field
from sppo_jax.attention.pallas_blocks import LANES, Blocks

LOG2E = math.log2(math.e)
# Number of a masked score. It is finite, so that a row without any key makes no inf - inf.
_MASKED = -1e30
_UNROLL = 2


class Partial(NamedTuple):
    """Attention over some keys: out_KGTH and lse_KGT in float32; zeros and -inf for a query that saw none."""

    out: jax.Array
    lse: jax.Array


def forward_steps(intervals: Intervals, num_keys: int, blocks: Blocks) -> Steps:
    """Lists the steps of a forward; one list for all cores where there is less than a block of queries for each."""
    is_enough = intervals.lo.shape[0] // blocks.queries >= blocks.cores
    num_lists = blocks.cores if is_enough else 1
    return find_steps(intervals, num_keys, (blocks.queries, blocks.keys), num_lists=num_lists, by="query")


def forward(
    q_KGTH: jax.Array,
    keys: tuple[jax.Array, jax.Array, tuple],
    meets: Meets,
    state: Partial | None = None,
    *,
    interpret=False,
) -> Partial:
    """Attends to a prefix.

    Args:
        q_KGTH: queries.
        keys: buffers of keys and of values [X..., K, S, E], and the sequence's index in X.
        meets: where they meet; the blocks divide T and S.
        state: the result over other keys, which these are added to, in place; None for no other keys.
        interpret: whether to interpret the kernel, and how; see `pallas_call`.
    """
    k, v, index = keys
    steps, blocks = meets.forward, meets.blocks
    num_kv_heads, num_groups, _, head_dim = q_KGTH.shape
    num_x, (cores, heads) = len(index), _deal(steps, blocks, num_kv_heads)
    where = jnp.stack([jnp.asarray(x, jnp.int32) for x in (*index, 0)])

    def place(core, head, n, table):
        if cores > table.shape[0]:
            return core * heads + head, table[0, n]
        return head, table[core, n]

    def query_at(core, head, n, where, table):
        head, word = place(core, head, n, table)
        return head, 0, read_field(word, "query"), 0

    def row_at(core, head, n, where, table):
        return query_at(core, head, n, where, table)[:3]

    def token_at(core, head, n, where, table):
        return 0, read_field(place(core, head, n, table)[1], "query")

    def key_at(core, head, n, where, table):
        head, word = place(core, head, n, table)
        return (*(where[x] for x in range(num_x)), head, read_field(word, "key"), 0)

    key_spec = pl.BlockSpec((*(None,) * (num_x + 1), blocks.keys, k.shape[-1]), key_at)
    query_spec = pl.BlockSpec((None, num_groups, blocks.queries, head_dim), query_at)
    token_spec = pl.BlockSpec((1, blocks.queries), token_at)
    row_spec = pl.BlockSpec((None, num_groups, blocks.queries), row_at)
    rows, given = num_groups * blocks.queries, () if state is None else tuple(state)
    out, lse = pl.pallas_call(
        partial(_kernel, blocks=blocks, shares_heads=cores > steps.table.shape[0]),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(cores, heads, steps.count),
            in_specs=[query_spec, key_spec, key_spec, token_spec, token_spec, *(query_spec, row_spec)[: len(given)]],
            out_specs=[query_spec, row_spec],
            scratch_shapes=[
                pltpu.VMEM((rows, LANES), jnp.float32),
                pltpu.VMEM((rows, LANES), jnp.float32),
                pltpu.VMEM((rows, head_dim), jnp.float32),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct(q_KGTH.shape, jnp.float32),
            jax.ShapeDtypeStruct(q_KGTH.shape[:3], jnp.float32),
        ],
        input_output_aliases={7: 0, 8: 1} if given else {},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=blocks.vmem_bytes
        ),
        cost_estimate=estimate_cost(q_KGTH, k, blocks, num_products=2, num_moves=2),
        name="prefix_attention_forward",
        interpret=interpret,
    )(where, steps.table, q_KGTH, k, v, *(x[None] for x in meets.intervals), *given)
    return Partial(out, lse)


def estimate_cost(q_KGTH, k, blocks: Blocks, *, num_products: int, num_moves: int) -> pl.CostEstimate:
    """Returns what the compiler takes a call to cost, so that it puts a hop of the ring beside it.

    Args:
        q_KGTH, k: queries, and a buffer of keys.
        blocks: sizes.
        num_products: of matrices in a step.
        num_moves: times a block of keys, in bytes, that a step reads and writes.
    """
    num_kv_heads, num_groups, num_tokens, head_dim = q_KGTH.shape
    num_keys = num_kv_heads * k.shape[-2]
    num_pairs = num_keys * num_groups * num_tokens // 2  # on average over the chunks of a sequence
    return pl.CostEstimate(
        flops=2 * num_products * num_pairs * head_dim,
        transcendentals=num_pairs,
        bytes_accessed=num_moves * num_keys * k.shape[-1] * k.dtype.itemsize * (num_tokens // blocks.queries),
    )


def _deal(steps: Steps, blocks: Blocks, num_kv_heads: int) -> tuple[int, int]:
    """Returns how many cores work, and how many heads each of them visits."""
    num_lists = steps.table.shape[0]
    if num_lists < blocks.cores and num_kv_heads % blocks.cores == 0:
        return blocks.cores, num_kv_heads // blocks.cores
    return num_lists, num_kv_heads


def _kernel(_, table, *refs, blocks: Blocks, shares_heads: bool):
    q_ref, k_ref, v_ref, lo_ref, hi_ref, *before_refs, out_ref, lse_ref, top, total, acc = refs
    word = table[0 if shares_heads else pl.program_id(0), pl.program_id(2)]
    kind = read_field(word, "kind")
    num_groups, num_queries, head_dim = q_ref.shape
    num_keys, size = k_ref.shape[0], blocks.rows
    parts = num_queries // size

    @pl.when(read_field(word, "first") == 1)
    def _():
        if before_refs:
            _resume(*before_refs, top, total, acc)
        else:
            top[...] = jnp.full_like(top, _MASKED)
            total[...] = jnp.zeros_like(total)
            acc[...] = jnp.zeros_like(acc)

    def add(part, is_masked):
        group, start = lax.div(part, parts), pl.multiple_of(lax.rem(part, parts) * size, size)
        of_head, at = pl.ds(start, size), pl.ds(pl.multiple_of(part * size, size), size)
        s = dot(q_ref[group, of_head, :], k_ref[:, :head_dim], NT) * (head_dim**-0.5 * LOG2E)
        if is_masked:
            lo, hi = (_wide(_columns(x[:, of_head]), num_keys) for x in (lo_ref, hi_ref))
            index = read_field(word, "key") * num_keys + lax.broadcasted_iota(jnp.int32, s.shape, 1)
            s = jnp.where((index >= lo) & (index < hi), s, _MASKED)
        before = top[at]
        now = jnp.maximum(before, jnp.max(s, axis=1, keepdims=True))
        p = jnp.exp2(s - _wide(now, num_keys))
        shrink = jnp.exp2(before - now)
        top[at] = now
        total[at] = total[at] * shrink + jnp.sum(p, axis=1, keepdims=True)
        acc[at] = acc[at] * _wide(shrink, head_dim) + dot(p.astype(v_ref.dtype), v_ref[:, :head_dim], NN)

    def add_all(is_masked):
        count = num_groups * parts
        lax.fori_loop(0, count, lambda part, _: add(part, is_masked), None, unroll=min(_UNROLL, count))

    pl.when(kind == FULL)(partial(add_all, False))
    pl.when(kind == EDGE)(partial(add_all, True))
    pl.when(read_field(word, "last") == 1)(lambda: _finish(out_ref, lse_ref, top, total, acc))


def _resume(out_ref, lse_ref, top, total, acc):
    """Starts from a result: as if one key with this LSE as its score and this output as its value had been seen."""
    num_groups, num_queries, _ = out_ref.shape
    for group in range(num_groups):
        at = pl.ds(group * num_queries, num_queries)
        lse = _columns(lse_ref[pl.ds(group, 1), :])
        has_seen = lse > _MASKED
        top[at], total[at] = jnp.where(has_seen, lse * LOG2E, _MASKED), jnp.where(has_seen, 1.0, 0.0)
        acc[at] = out_ref[group]


def _finish(out_ref, lse_ref, top, total, acc):
    num_groups, num_queries, head_dim = out_ref.shape
    # A row whose every score is masked has added exp2(0) for each.
    has_seen = top[...] > _MASKED / 2
    share = jnp.where(has_seen, total[...], 1.0)
    out = jnp.where(_wide(has_seen, head_dim), acc[...] / _wide(share, head_dim), 0.0)
    out_ref[...] = out.reshape(out_ref.shape)
    lse = jnp.where(has_seen, top[...] * (1 / LOG2E) + jnp.log(share), -jnp.inf)
    for group in range(num_groups):
        lse_ref[pl.ds(group, 1), :] = lse[group * num_queries : (group + 1) * num_queries].T[:1]


# Dims that a product sums over: a b^T, a b, a^T b.
NT, NN, TN = (((1,), (1,)), ((), ())), (((1,), (0,)), ((), ())), (((0,), (0,)), ((), ()))


def dot(a, b, dims):
    """Returns a product whose sums are float32."""
    return lax.dot_general(a, b, dims, preferred_element_type=jnp.float32)


def _columns(row_1T):
    """[1, T] -> [T, L]: a value a row, the same in all lanes."""
    return jnp.broadcast_to(row_1T, (LANES, row_1T.shape[-1])).T


def _wide(x_RL, size: int):
    """Repeats lanes, which are all the same, up to `size`."""
    return jnp.concatenate([x_RL] * -(-size // LANES), axis=1)[:, :size]
