"""A stage's layers whose float32 parameters wait on the host: they come part by part, and their gradients leave so.

A group's share comes from the host in parts while the group before it runs (`program.share_transfers`), and waits in
the compute dtype. Its share of the gradient sums leaves for the host in parts after the sums are scattered. Vectors
stay on the device. All buffers of a share are flat, and a part is a run of elements. Where the parts do not divide a
share, the last ones overlap.

Letters: v groups of layers a stage, E elements of this device's share of a group.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sppo_jax.arrays import buffers
from sppo_jax.arrays.dtypes import accumulator
from sppo_jax.compat import is_on_host, to_device, to_host
from sppo_jax.pipeline.params.sharded_layers import ShardedLayers
from sppo_jax.pipeline.params.storage import MEMBERS, Share, gather_whole, scatter_sum, within_group


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
    """As `ShardedLayers`, with shares [v, 1, layers, ...] of which matrices are on the host.

    Args:
        num_parts: parts in which the share of a group travels.
    """

    num_parts: int

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

    def incoming(self):
        """Returns buffers [E] for the weights of a group on their way; of no elements for those on the device."""

        def zeros(x, like):
            return jnp.zeros(_share_size(x) if is_on_host(x) else 0, like.dtype)

        return jax.tree.map(zeros, self.shards, self.wholes)

    def leaving(self):
        """Returns buffers [E] for the gradients of a group on their way, as `incoming`."""
        return jax.tree.map(lambda x: jnp.zeros(x.shape, accumulator(x.dtype)), self.incoming())

    def fetch(self, group, part):
        """Starts the copies of a part of a group's weights; of no elements for those on the device."""

        def one(x, row):
            if not is_on_host(x):
                return jnp.zeros(0, x.dtype)
            start, size = self._run(_share_size(x), part)
            return to_device(buffers.read(_flat(x), (row, start), (1, size))).squeeze(0)

        return jax.tree.map(one, self.shards, self._nearest(group))

    def take(self, incoming, coming, part):
        """Returns the buffers of weights with a part that has come."""

        def one(buffer, x):
            return buffers.write(buffer, (self._run(buffer.size, part)[0],), x.astype(buffer.dtype))

        return jax.tree.map(one, incoming, coming)

    def gather(self, slots, group, slot, incoming=None, come=0):
        """Returns the slots with the weights of a group in one of them.

        Args:
            slots: of all groups whose turn it is.
            group: the group.
            slot: its slot.
            incoming: the buffers of weights on their way; None: nothing has come.
            come: how many parts have come. The others are fetched here, exposed.
        """
        incoming = self.incoming() if incoming is None else incoming

        def fetch_and_take(part, incoming):
            return self.take(incoming, self.fetch(group, part), part)

        incoming = lax.fori_loop(come, self.num_parts, fetch_and_take, incoming)

        def change(layers, row, carried):
            def one(buffer, arrived, shard, share, like):
                given = arrived.reshape(shard.shape[2:]) if is_on_host(shard) else None
                mine = buffers.read_slot(shard, row).squeeze(0) if given is None else given
                whole = gather_whole(mine, within_group(share), like)
                return buffers.write_slot(buffer, slot, whole.reshape(like.shape[0], -1))

            return jax.tree.map(one, *carried, layers.shards, layers.shares, layers.wholes), carried[1]

        return self.of_stacks(group, change, (slots, incoming))[0]

    def write(self, sums, leaving, group, part):
        """Starts the copies of a part of a group's gradients to the host; returns all groups' sums."""

        def one(total, buffer, row):
            if not is_on_host(total):
                return total
            start, size = self._run(buffer.size, part)
            mine = to_host(buffers.read(buffer, (start,), (size,)))[None]
            return lax.reshape(buffers.write(_flat(total), (row, start), mine), total.shape)

        return jax.tree.map(one, sums, leaving, self._nearest(group))

    def flush(self, sums, leaving, group, left):
        """Writes the parts of a group's gradients that have not left; these copies are exposed."""
        return lax.fori_loop(left, self.num_parts, lambda part, sums: self.write(sums, leaving, group, part), sums)

    def scatter(self, totals: HostTotals, sums, leaving, group, slot):
        """Adds the sums of a group over the devices of the stage; this device's share is then about to leave.

        Args:
            totals: of all groups.
            sums: of the groups whose turn it is.
            leaving: the buffers of gradients on their way, which are free.
            group: the group.
            slot: its slot.

        Returns:
            The totals, the sums with zeros in the slot, and the buffers with the group's share.
        """

        def change(layers, row, carried):
            *carried, before = carried
            squares = []

            def one(total, buffer, away, share, like):
                whole = buffers.read_slot(buffer, slot).reshape(like.shape)
                mine = scatter_sum(whole, within_group(share)).reshape(total.shape[1:])
                if not is_on_host(total):
                    return buffers.add(total, (row,), mine), away
                squares.append(_squares(mine, share))
                return total, mine.reshape(-1)

            both = jax.tree.map(one, *carried, layers.shares, layers.wholes)
            new, leaving = jax.tree.transpose(jax.tree.structure(carried[1]), jax.tree.structure((0, 0)), both)
            of_all = sum(squares, before)
            leaving, sums = lax.optimization_barrier((leaving, carried[1]))
            # Zeros that wait for the scatters, as in `ShardedLayers.scatter`.
            nothing = buffers.after(of_all)
            zeroed = jax.tree.map(lambda x: buffers.write_slot(x, slot, jnp.full(x.shape[1:], nothing, x.dtype)), sums)
            return new, zeroed, leaving, of_all

        new, zeroed, leaving, squares = self.of_stacks(group, change, (totals.sums, sums, leaving, totals.squares))
        return HostTotals(new, squares), zeroed, leaving

    def _nearest(self, group):
        """Returns for each array the row of a group, or the nearest one where the group has no layer of its stack.

        What comes then is not used, and what leaves has left before.
        """
        if not self.rows:
            return jax.tree.map(lambda _: group, self.shards)
        of_stack = {name: self.rows[name].row(group) if name in self.rows else group for name in self.shards}
        return jax.tree_util.tree_map_with_path(lambda path, _: of_stack[path[0].key], self.shards)

    def _run(self, num_elements: int, part) -> tuple[jax.Array, int]:
        """Returns where a part begins, and its elements; a slice that runs over the end of a share is shifted."""
        size = -(-num_elements // self.num_parts)
        return part * size, size


def _share_size(x: jax.Array) -> int:
    return math.prod(x.shape[1:])


def _flat(x: jax.Array) -> jax.Array:
    return lax.reshape(x, (x.shape[0], _share_size(x)))


def _squares(mine: jax.Array, share: Share) -> jax.Array:
    """Returns the sum of the squares of a device's share, so that a sum over the devices counts each element once."""
    total = jnp.sum(mine * mine)
    return total if share.cuts else total / lax.psum(1, MEMBERS)
