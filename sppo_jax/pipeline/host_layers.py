"""A stage's layers whose float32 parameters wait on the host: a group comes for its turn, and its gradients leave.

A group's share comes from the host when its weights are gathered. Its share of the gradient sums leaves for the host
when the sums are scattered. Vectors stay on the device.

Letters: v groups of layers a stage.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sppo_jax import buffers
from sppo_jax.compat import is_on_host, to_device, to_host
from sppo_jax.dtypes import accumulator
from sppo_jax.pipeline.sharded_layers import ShardedLayers
from sppo_jax.pipeline.storage import MEMBERS, Share, gather_whole, scatter_sum, within_group


class HostTotals(NamedTuple):
    """Gradient sums of all groups of layers.

    Args:
        sums: tree of this device's shares [v, 1, layers, ...], on the host where their parameters are.
        squares: the sum of the squares of those on the host, over all of this device's groups.
    """

    sums: object
    squares: jax.Array


@dataclass(frozen=True)
class HostLayers(ShardedLayers):
    """As `ShardedLayers`, with shares [v, 1, layers, ...] of which matrices are on the host."""

    def totals(self) -> HostTotals:
        """Returns buffers for this device's share of the gradient sums of all groups."""
        leaves, tree = jax.tree.flatten(self.shards)
        wholes, sums = jax.tree.leaves(self.wholes), []
        for number, (x, like) in enumerate(zip(leaves, wholes, strict=True)):
            dtype = accumulator(like.dtype)
            if is_on_host(x):
                # Every group is written once. XLA would make one buffer of two that begin alike, and copy it whole.
                sums.append(to_host(jnp.full(x.shape, number + 1, dtype)))
            else:
                sums.append(jnp.zeros(x.shape, dtype))
        widest = max((accumulator(like.dtype) for like in wholes), key=lambda dtype: dtype.itemsize)
        return HostTotals(jax.tree.unflatten(tree, sums), jnp.zeros((), widest))

    def gradients(self, totals: HostTotals):
        """Returns the sums without the dim of the stages."""
        return jax.tree.map(lambda x: lax.reshape(x, (x.shape[0], *x.shape[2:])), totals.sums)

    def squares(self, totals: HostTotals) -> jax.Array:
        """Returns the sum of the squares of all gradients on the host, over all devices."""
        return lax.psum(totals.squares, (*MEMBERS, "pipe"))

    def gather(self, slots, group, slot):
        """Returns the slots with the weights of a group in one of them."""

        def one(buffer, shard, share, like):
            mine = buffers.read_slot(shard, group)
            mine = (to_device(mine) if is_on_host(shard) else mine).squeeze(0)
            whole = gather_whole(mine, within_group(share), like)
            return buffers.write_slot(buffer, slot, whole.reshape(like.shape[0], -1))

        return jax.tree.map(one, slots, self.shards, self.shares, self.wholes)

    def scatter(self, totals: HostTotals, sums, group, slot):
        """Sends this device's share of the sums of a group, added over the devices of the stage, to the host.

        Returns:
            The totals, and the sums with zeros in the slot.
        """
        squares = []

        def one(total, buffer, share, like):
            whole = buffers.read_slot(buffer, slot).reshape(like.shape)
            mine = scatter_sum(whole, within_group(share)).reshape(total.shape[1:])
            if not is_on_host(total):
                return buffers.add(total, (group,), mine)
            squares.append(_squares(mine, share))
            return buffers.write_slot(total, group, to_host(mine))

        new = jax.tree.map(one, totals.sums, sums, self.shares, self.wholes)
        totals = HostTotals(new, sum(squares, totals.squares))
        totals, sums = lax.optimization_barrier((totals, sums))
        zeroed = jax.tree.map(lambda x: buffers.write_slot(x, slot, jnp.zeros(x.shape[1:], x.dtype)), sums)
        return totals, zeroed


def _squares(mine: jax.Array, share: Share) -> jax.Array:
    """Returns the sum of the squares of a device's share, so that a sum over the devices counts each element once."""
    total = jnp.sum(mine * mine)
    return total if share.cuts else total / lax.psum(1, MEMBERS)
