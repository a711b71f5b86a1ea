"""A stage's layers of which each device holds its share: gathered, and their gradients scattered, a group at a time.

Letters: v groups of layers a stage.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from sppo_jax import buffers
from sppo_jax.dtypes import accumulator
from sppo_jax.pipeline.layout import fit
from sppo_jax.pipeline.storage import gather_members, sum_over_members, within_group


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
        """Returns zeros for the whole weights of so many groups, [slots, layers, ...]."""
        return jax.tree.map(lambda like: jnp.zeros((count, *like.shape), like.dtype), self.wholes)

    def sums(self, count: int):
        """Returns zeros for the whole gradient sums of so many groups, [slots, layers, ...]."""
        return jax.tree.map(lambda like: jnp.zeros((count, *like.shape), accumulator(like.dtype)), self.wholes)

    def totals(self):
        """Returns zeros for this device's share of the gradient sums of all groups."""
        return jax.tree.map(lambda x, like: jnp.zeros(x.shape, accumulator(like.dtype)), self.shards, self.wholes)

    def gather(self, slots, group, slot):
        """Returns the slots with the weights of a group in one of them."""

        def one(buffer, shard, share, like):
            mine = buffers.read_slot(shard, group).astype(like.dtype)
            return buffers.write_slot(buffer, slot, fit(gather_members(mine, within_group(share)), like.shape))

        return jax.tree.map(one, slots, self.shards, self.shares, self.wholes)

    def scatter(self, totals, sums, group, slot):
        """Adds the sums of a group over the devices of the stage, and to this device's share of the totals.

        Returns:
            The totals, and the sums with zeros in the slot.
        """

        def one(total, buffer, share):
            return buffers.add(total, (group,), sum_over_members(buffers.read_slot(buffer, slot), within_group(share)))

        totals = jax.tree.map(one, totals, sums, self.shares)
        # Without the barrier XLA may copy the sums before it writes zeros.
        totals, sums = lax.optimization_barrier((totals, sums))
        zeroed = jax.tree.map(lambda x: buffers.write_slot(x, slot, jnp.zeros(x.shape[1:], x.dtype)), sums)
        return totals, zeroed
