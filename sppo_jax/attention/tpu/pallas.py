"""The kernel for TPUs as ring, teams and chunks use it: where queries and keys meet, and the state that it takes in.

The same program runs on a CPU, which interprets the kernel.

Letters: T query tokens, N query heads, K key-value heads, G = N / K, H head dim, P cores.
"""

import jax
import jax.numpy as jnp

from sppo_jax.attention.intervals import Intervals, Meets
from sppo_jax.attention.operands import Cotangent, Gradients, Mask, Prefix
from sppo_jax.attention.pallas_blocks import Blocks, Target, choose_blocks
from sppo_jax.attention.tpu.backward import QueryRows, backward, backward_steps
from sppo_jax.attention.tpu.forward import Partial, forward, forward_steps


def find_meets(intervals: Intervals, num_keys: int, target: Target) -> Meets:
    """Prepares the masks of a chunk's queries and one member's keys once for all layers.

    Args:
        intervals: of the queries.
        num_keys: of the buffer.
        target: what the kernel is compiled for.

    Raises:
        ValueError: the kernel does not take so many queries or keys.
    """
    return with_blocks(intervals, num_keys, choose_blocks(target, intervals.lo.shape[0], num_keys))


def with_blocks(intervals: Intervals, num_keys: int, blocks: Blocks) -> Meets:
    """Lists the steps of both kernels for blocks of given sizes, which divide the queries and the keys."""
    steps = (list_steps(intervals, num_keys, blocks) for list_steps in (forward_steps, backward_steps))
    return Meets(intervals, *steps, blocks)


class PallasKernel:
    """The kernel for TPUs; its layout of queries is [K, G, T, H]."""

    lags = True

    def queries(self, q_TNH: jax.Array, prefix: Prefix) -> jax.Array:
        """See `kernels.Kernel`."""
        return _by_heads(q_TNH, prefix.k.shape[-3])

    def nothing(self, q: jax.Array) -> Partial:
        """See `kernels.Kernel`."""
        return Partial(jnp.zeros(q.shape, jnp.float32), jnp.full(q.shape[:3], -jnp.inf, jnp.float32))

    def attend(self, q: jax.Array, prefix: Prefix, mask: Mask, state: Partial | None = None) -> Partial:
        """See `kernels.Kernel`."""
        meets, keys = mask.meets, (prefix.k, prefix.v, prefix.index)
        return forward(q, keys, meets, state, interpret=meets.blocks.is_interpreted)

    def result(self, state: Partial) -> tuple[jax.Array, jax.Array]:
        """See `kernels.Kernel`."""
        return _by_tokens(state.out), _by_tokens(state.lse)

    def rows(self, cotangent: Cotangent, q: jax.Array) -> QueryRows:
        """See `kernels.Kernel`."""
        given = cotangent.dout_TNH.astype(q.dtype), cotangent.lse_TN, cotangent.summary
        return QueryRows(*(_by_heads(x, q.shape[0]) for x in given))

    def no_gradient(self, q: jax.Array, meets: Meets) -> jax.Array:
        """See `kernels.Kernel`: a part of each core, [P, K, G, T, H]."""
        return jnp.zeros((meets.blocks.cores, *q.shape), jnp.float32)

    def differentiate(
        self,
        q: jax.Array,
        prefix: Prefix,
        mask: Mask,
        rows: QueryRows,
        gradients: Gradients,
        dq: jax.Array | None = None,
    ) -> tuple[jax.Array, Gradients]:
        """See `kernels.Kernel`."""
        meets, keys = mask.meets, (prefix.k, prefix.v, prefix.index)
        sums = self.no_gradient(q, meets) if dq is None else dq, *gradients
        interpret = meets.blocks.is_interpreted
        dq, *sums = backward(q, keys, meets, rows, sums, prefix.grads_at, interpret=interpret)
        return dq, Gradients(*sums)

    def gradient(self, dq: jax.Array) -> jax.Array:
        """See `kernels.Kernel`."""
        return _by_tokens(dq.sum(0) * dq.shape[-1] ** -0.5)


def _by_heads(x_TN: jax.Array, num_kv_heads: int) -> jax.Array:
    """[T, N, ...] -> [K, G, T, ...]."""
    num_tokens, _, *rest = x_TN.shape
    return jnp.moveaxis(x_TN.reshape(num_tokens, num_kv_heads, -1, *rest), 0, 2)


def _by_tokens(x_KGT: jax.Array) -> jax.Array:
    """[K, G, T, ...] -> [T, N, ...]."""
    x = jnp.moveaxis(x_KGT, 2, 0)
    return x.reshape(x.shape[0], -1, *x.shape[3:])
