"""A stage's layers of which each device holds its share: gathered, and their gradients scattered, a group at a time.

Arrays are flat in their slots, and where they are sent. XLA would otherwise give slots and parameters the layout of an
all-gather, in which the gathered dim comes first, and copy them whole wherever a matrix product wants another layout.

Letters: v groups of layers a stage.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from sppo_jax import buffers
from sppo_jax.dtypes import accumulator
from sppo_jax.pipeline.storage import gather_whole, scatter_sum, within_group


@dataclass(frozen=True)
class ShardedLayers:
    """The parameters of a stage's layers, and how its devices share them. Call the methods inside `shard_map`.

    Args:
        shards: tree of this device's shares [v, layers, ...], in the dtype of the parameters.
        shares: the same tree, how each array is shared.
        wholes: the same tree, the shape of a group's whole array [layers, ...] and its dtype in a step.
    """

    shards: object
    shares: object
    wholes: object

    def slots(self, count: int):
        """Returns zeros for the whole weights of so many groups, [slots, layers, elements]."""
        return jax.tree.map(lambda like: jnp.zeros((count, *_flat(like)), like.dtype), self.wholes)

    def sums(self, count: int):
        """Returns zeros for the whole gradient sums of so many groups, [slots, layers, elements]."""
        return jax.tree.map(lambda like: jnp.zeros((count, *_flat(like)), accumulator(like.dtype)), self.wholes)

    def totals(self):
        """Returns zeros for this device's share of the gradient sums of all groups, [v, elements]."""

        def zeros(x, like):
            return jnp.zeros((x.shape[0], math.prod(x.shape[1:])), accumulator(like.dtype))

        return jax.tree.map(zeros, self.shards, self.wholes)

    def gradients(self, totals):
        """Returns the totals in the shapes of the shares."""
        return jax.tree.map(lambda total, x: total.reshape(x.shape), totals, self.shards)

    def gather(self, slots, group, slot):
        """Returns the slots with the weights of a group in one of them."""

        def one(buffer, shard, share, like):
            whole = gather_whole(buffers.read_slot(shard, group), within_group(share), like)
            return buffers.write_slot(buffer, slot, whole.reshape(_flat(like)))

        return jax.tree.map(one, slots, self.shards, self.shares, self.wholes)

    def scatter(self, totals, sums, group, slot):
        """Adds the sums of a group over the devices of the stage, and to this device's share of the totals.

        Returns:
            The totals, and the sums with zeros in the slot.
        """

        def one(total, buffer, share, like):
            whole = buffers.read_slot(buffer, slot).reshape(like.shape)
            return buffers.add(total, (group,), scatter_sum(whole, within_group(share)))

        totals = jax.tree.map(one, totals, sums, self.shares, self.wholes)
        # Without the barrier XLA may copy the sums before it writes zeros.
        totals, sums = lax.optimization_barrier((totals, sums))

        # Zeros of an only slot depend on no sums. XLA would put the scatter off behind the ticks of the next group, and
        # hold the sums of two groups; and it would make all zeros once, and hold them.
        def zeros(x, total):
            return buffers.write_slot(x, slot, jnp.full(x.shape[1:], buffers.after(total), x.dtype))

        return totals, jax.tree.map(zeros, sums, totals)


def _flat(like: jax.ShapeDtypeStruct) -> tuple[int, int]:
    return like.shape[0], math.prod(like.shape[1:])
