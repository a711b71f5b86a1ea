"""The kernel for TPUs as `check` calls it: the keys in two parts, one after the other, as hops of a ring bring them.

The second part continues the first one's result, and adds to the same dK and dV. The parts meet inside a block of keys.

Letters: as in `check`; K, G and P as in `pallas`.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from sppo_jax.attention.check import LOW_SCORE, CheckedKernel, Extent, Pattern
from sppo_jax.attention.cudnn import CudnnOperands, CudnnResults
from sppo_jax.attention.intervals import Intervals, Meets
from sppo_jax.attention.operands import Cotangent, Gradients, Mask, Prefix
from sppo_jax.attention.pallas_blocks import Blocks
from sppo_jax.attention.tags import Tags
from sppo_jax.attention.tpu.pallas import PallasKernel, with_blocks
from sppo_jax.plan.parts import cache_head_dim

_KERNEL = PallasKernel()
_SLOT = 1  # of the keys and of their gradients; another sequence has the slot before


def checked_kernel(blocks: Blocks) -> CheckedKernel:
    """Returns the kernel with blocks of given sizes, and rows for two blocks of queries and three of keys."""
    return CheckedKernel(partial(_forward, blocks), partial(_backward, blocks), _extent_for(blocks))


def _extent_for(blocks: Blocks) -> Extent:
    """Returns rows of which some blocks are visible as a whole, some in part, and some not at all."""
    queries, keys, size = 2 * blocks.queries, 3 * blocks.keys, min(2 * blocks.queries, 3 * blocks.keys)
    patterns = {
        "ragged lengths": Pattern((queries - 70, keys - 116), (queries - 70, size - 71), 0.0),
        "whole blocks and low scores": Pattern((queries, keys), (size, size), LOW_SCORE),
        "one query and low scores": Pattern((1, 1), (1, 1), LOW_SCORE),
    }
    return Extent(queries, keys, patterns, windows=(24, blocks.keys + blocks.keys // 2 + 22))


def _forward(blocks: Blocks, given: CudnnOperands, *, causal: bool, window: int = 0):
    prefix, meets = _prefix(given), _parts(blocks, given, causal, window)
    with _as_in_a_run(given):
        q = _KERNEL.queries(_by_tokens(given.q_NTH), prefix)
        state, _ = lax.scan(
            lambda state, part: (_KERNEL.attend(q, prefix, _mask(part), state), None), _KERNEL.nothing(q), meets
        )
    return tuple(_by_tokens(x) for x in _KERNEL.result(state))


def _backward(blocks: Blocks, given: CudnnOperands, results: CudnnResults, *, causal: bool, window: int = 0):
    prefix, meets = _prefix(given), _parts(blocks, given, causal, window)
    out, lse, dout = (_by_tokens(x) for x in results)
    delta = jnp.sum(out.astype(jnp.float32) * dout.astype(jnp.float32), axis=-1)
    sums = Gradients(*(jnp.zeros(prefix.k.shape, jnp.float32) for _ in range(2)))
    with _as_in_a_run(given):
        q = _KERNEL.queries(_by_tokens(given.q_NTH), prefix)
        rows = _KERNEL.rows(Cotangent(dout, lse, delta), q)

        def add(sums, part: Meets):
            return _KERNEL.differentiate(q, prefix, _mask(part), rows, sums[1], sums[0]), None

        (dq, (dk, dv)), _ = lax.scan(add, (_KERNEL.no_gradient(q, meets), sums), meets)
    return _by_tokens(_KERNEL.gradient(dq)), *(x[_SLOT, ..., : given.k_KSH.shape[-1]] for x in (dk, dv))


def _as_in_a_run(given: CudnnOperands):
    """Sets the precision that products have in a run; float32 ones are exact, to find what else differs."""
    return jax.default_matmul_precision("default" if given.q_NTH.dtype.itemsize == 2 else "highest")


def _by_tokens(x):
    """[N, T, ...] -> [T, N, ...] and back."""
    return jnp.moveaxis(x, 0, 1)


def _prefix(given: CudnnOperands) -> Prefix:
    """Returns keys and values as a cache has them."""
    head_dim = given.k_KSH.shape[-1]
    more = (0, cache_head_dim("pallas", head_dim) - head_dim)
    keys = (jnp.pad(x, ((0, 0), (0, 0), more)) for x in (given.k_KSH, given.v_KSH))
    return Prefix(*(jnp.stack([-x, x]) for x in keys), (_SLOT,))


def _mask(part: Meets) -> Mask:
    nothing = Tags(jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32))  # the kernel reads no tags
    return Mask(nothing, nothing, part)


def _parts(blocks: Blocks, given: CudnnOperands, causal: bool, window: int) -> Meets:
    """Returns where the queries meet the last keys, and then the first."""
    rows, num_keys = jnp.arange(given.q_NTH.shape[1], dtype=jnp.int32), given.k_KSH.shape[1]
    hi = jnp.minimum(rows + 1, given.num_keys) if causal else jnp.full_like(rows, given.num_keys)
    hi = jnp.where(rows < given.num_queries, hi, 0)
    lo = jnp.maximum(rows + 1 - window, 0) if window else jnp.zeros_like(rows)
    middle = num_keys // 2
    parts = [Intervals(*(jnp.clip(x, *ends) for x in (lo, hi))) for ends in ((middle, num_keys), (0, middle))]
    return jax.tree.map(lambda *x: jnp.stack(x), *(with_blocks(part, num_keys, blocks) for part in parts))
