"""Backward of a chunk's attention to its prefix, as one Pallas kernel for TPUs: five products a step.

Scores are [keys, queries], so that LSE and delta are rows. dQ of a block of queries stays in VMEM while its blocks of
keys pass. dK and dV of a block of keys are fetched from the buffers [X..., K, S, E], added to and written back, two
blocks in turn. Each core has its own blocks of keys, so that no two add to one gradient; dQ has a part for each core.

Letters: as in `pallas_forward`.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from sppo_jax.attention.intervals import EDGE, FULL, NONE, Intervals, Meets, Steps, find_steps, read_field
from sppo_jax.attention.pallas_blocks import Blocks
from sppo_jax.attention.tpu.forward import LOG2E, NN, NT, TN, dot, estimate_cost

_UNROLL = 2


class QueryRows(NamedTuple):
    """What a backward needs of each query: dout in the dtype of q, the GLOBAL LSE and delta in float32."""

    dout_KGTH: jax.Array
    lse_KGT: jax.Array
    delta_KGT: jax.Array


def backward_steps(intervals: Intervals, num_keys: int, blocks: Blocks) -> Steps:
    """Lists the steps of a backward."""
    return find_steps(intervals, num_keys, (blocks.queries, blocks.keys), num_lists=blocks.cores, by="key")


def backward(
    q_KGTH: jax.Array,
    keys: tuple[jax.Array, jax.Array, tuple],
    meets: Meets,
    rows: QueryRows,
    sums: tuple[jax.Array, jax.Array, jax.Array],
    grads_at: tuple,
    *,
    interpret=False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Differentiates `forward` with the global LSE and delta, and adds to dQ, dK and dV in place.

    Args:
        q_KGTH, keys, meets, interpret: as given to `forward`.
        rows: of the queries.
        sums: dQ of other keys [P, K, G, T, H] in float32, whose sum over P times H^-0.5 is the gradient; buffers of dK
            and of dV [X..., K, S, E], in float32 or a lower dtype.
        grads_at: the sequence's index in X of the buffers of dK and dV.

    Returns:
        dQ, dK and dV with these added.
    """
    k, v, index = keys
    dq, dk, dv = sums
    steps, blocks = meets.backward, meets.blocks
    num_kv_heads, num_groups, _, head_dim = q_KGTH.shape
    num_x, num_grads = len(index), len(grads_at)
    where = jnp.stack([jnp.asarray(x, jnp.int32) for x in (*grads_at, *index, 0)])
    # A query that sees nothing has p = exp2(-inf) = 0.
    lse2 = jnp.where(rows.lse_KGT == -jnp.inf, jnp.inf, rows.lse_KGT * LOG2E)

    def query_at(core, head, n, where, active, table):
        return head, 0, read_field(table[core, n], "query"), 0

    def row_at(*place):
        return query_at(*place)[:3]

    def sum_at(core, *place):
        return core, *query_at(core, *place)

    def token_at(core, head, n, where, active, table):
        return 0, read_field(table[core, n], "query")

    def key_at(core, head, n, where, active, table):
        return (*(where[num_grads + x] for x in range(num_x)), head, read_field(table[core, n], "key"), 0)

    key_spec = pl.BlockSpec((*(None,) * (num_x + 1), blocks.keys, k.shape[-1]), key_at)
    query_spec = pl.BlockSpec((None, num_groups, blocks.queries, head_dim), query_at)
    row_spec = pl.BlockSpec((None, num_groups, blocks.queries), row_at)
    token_spec = pl.BlockSpec((1, blocks.queries), token_at)
    sum_spec = pl.BlockSpec((None, None, num_groups, blocks.queries, head_dim), sum_at)
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        partial(_kernel, blocks=blocks, num_grads=num_grads),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(blocks.cores, num_kv_heads, steps.count),
            in_specs=[
                *(query_spec, query_spec, row_spec, row_spec, token_spec, token_spec, key_spec, key_spec),
                *(sum_spec, anywhere, anywhere),
            ],
            out_specs=[sum_spec, anywhere, anywhere],
            scratch_shapes=[
                pltpu.VMEM((2, 2, blocks.keys, dk.shape[-1]), dk.dtype),
                pltpu.VMEM((2, blocks.keys, head_dim), jnp.float32),
                pltpu.SMEM((2,), jnp.int32),
                pltpu.SemaphoreType.DMA((2, 2)),
                pltpu.SemaphoreType.DMA((2, 2)),
            ],
        ),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in sums],
        input_output_aliases={11: 0, 12: 1, 13: 2},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=blocks.vmem_bytes
        ),
        # Keys and values in bfloat16, and float32 sums of both read and written.
        cost_estimate=estimate_cost(q_KGTH, k, blocks, num_products=5, num_moves=10),
        name="prefix_attention_backward",
        interpret=interpret,
    )(
        *(where, steps.active, steps.table, q_KGTH, rows.dout_KGTH, lse2, rows.delta_KGT),
        *(*(x[None] for x in meets.intervals), k, v, dq, dk, dv),
    )


def _kernel(where, active, table, *refs, blocks: Blocks, num_grads: int):
    q_ref, dout_ref, lse_ref, delta_ref, lo_ref, hi_ref, k_ref, v_ref, before_ref, _, _, *refs = refs
    dq_ref, dk_hbm, dv_hbm, held, more, flags, reads, writes = refs
    core, head, n = (pl.program_id(dim) for dim in range(3))
    word, last_step = table[core, n], pl.num_programs(2) - 1
    kind, key = read_field(word, "kind"), read_field(word, "key")
    num_groups, num_queries, head_dim = q_ref.shape
    num_keys, size = k_ref.shape[0], blocks.rows
    parts, scale = num_queries // size, head_dim**-0.5
    own = tuple(where[x] for x in range(num_grads))
    copies = _Copies((dk_hbm, dv_hbm), (*own, head), held, flags, (reads, writes))

    before = read_field(table[core, jnp.maximum(n - 1, 0)], "key")
    after = read_field(table[core, jnp.minimum(n + 1, last_step)], "key")
    is_working = active[core] > 0
    begins, ends = is_working & ((n == 0) | (before != key)), is_working & ((n == last_step) | (after != key))

    pl.when(n == 0)(lambda: copies.begin(key, is_working))

    @pl.when(read_field(word, "first") == 1)
    def _():
        dq_ref[...] = before_ref[...]

    def add(part, is_masked):
        group, start = lax.div(part, parts), pl.multiple_of(lax.rem(part, parts) * size, size)
        at = pl.ds(start, size)
        q, dout, k = q_ref[group, at, :], dout_ref[group, at, :], k_ref[:, :head_dim]
        lse, delta = lse_ref[pl.ds(group, 1), at], delta_ref[pl.ds(group, 1), at]
        p = jnp.exp2(dot(k, q, NT) * (scale * LOG2E) - lse)
        if is_masked:
            index = key * num_keys + lax.broadcasted_iota(jnp.int32, p.shape, 0)
            p = jnp.where((index >= lo_ref[:, at]) & (index < hi_ref[:, at]), p, 0.0)
        more[1] += dot(p.astype(dout.dtype), dout, NN)
        ds = (p * (dot(v_ref[:, :head_dim], dout, NT) - delta)).astype(q.dtype)
        dq_ref[group, at, :] += dot(ds, k, TN)
        more[0] += dot(ds, q, NN)

    def add_all(is_masked):
        more[...] = jnp.zeros_like(more)
        count = num_groups * parts
        lax.fori_loop(0, count, lambda part, _: add(part, is_masked), None, unroll=min(_UNROLL, count))

    pl.when(kind == FULL)(partial(add_all, False))
    pl.when(kind == EDGE)(partial(add_all, True))
    pl.when(begins)(copies.arrive)

    @pl.when(kind != NONE)
    def _():
        slot, of_head = copies.slot, pl.ds(0, head_dim)
        is_dk = lax.broadcasted_iota(jnp.int32, more.shape, 0) == 0
        before = held[slot, :, :, of_head].astype(jnp.float32)
        held[slot, :, :, of_head] = (before + more[...] * jnp.where(is_dk, scale, 1.0)).astype(held.dtype)

    pl.when(ends)(lambda: copies.leave(key, after, n == last_step))


class _Copies:
    """Copies of dK and dV of a block between their buffers and two slots of VMEM.

    The read of the next block starts when the write of the block before the present one has ended. Pallas' own pipeline
    reads an aliased input up to two steps ahead, and short documents come back to a block within two steps.
    """

    def __init__(self, buffers, index, held, flags, semaphores):
        """`flags` in SMEM are the slot of the present block, and whether a write is under way."""
        self.buffers, self.index, self.held, self.flags, self.semaphores = buffers, index, held, flags, semaphores

    @property
    def slot(self):
        """The present block's slot."""
        return self.flags[0]

    def _each(self, block, slot, is_read):
        num_keys = self.held.shape[2]
        at = (*self.index, pl.ds(pl.multiple_of(block * num_keys, num_keys), num_keys))
        for number, buffer in enumerate(self.buffers):
            pair = (buffer.at[at], self.held.at[slot, number])
            semaphore = self.semaphores[0 if is_read else 1].at[slot, number]
            yield pltpu.make_async_copy(*(pair if is_read else pair[::-1]), semaphore)

    def _start(self, block, slot, is_read):
        for copy in self._each(block, slot, is_read):
            copy.start()

    def _wait(self, slot, is_read):
        for copy in self._each(0, slot, is_read):
            copy.wait()

    def begin(self, block, is_working):
        """Reads the first block of a core and head."""
        self.flags[0] = 0
        self.flags[1] = 0
        pl.when(is_working)(lambda: self._start(block, 0, True))

    def arrive(self):
        """Waits for the present block."""
        self._wait(self.slot, True)

    def leave(self, block, after, is_last):
        """Writes the present block, and reads the block `after` it unless it is the last."""
        slot, flags = self.slot, self.flags
        self._start(block, slot, False)
        # Of the block before: its slot is free then, and its place may be read.
        pl.when(flags[1] > 0)(lambda: self._wait(1 - slot, False))
        flags[1] = 1

        @pl.when(jnp.logical_not(is_last))
        def _():
            # `after` is another block than this one, so no read overtakes this write.
            self._start(after, 1 - slot, True)
            flags[0] = 1 - slot

        @pl.when(is_last)
        def _():
            self._wait(slot, False)
