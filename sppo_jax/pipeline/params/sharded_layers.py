"""A stage's layers of which each device holds its share: gathered, and their gradients scattered, a group at a time.

Arrays are flat in their slots, and where they are sent. XLA would otherwise give slots and parameters the layout of an
all-gather, in which the gathered dim comes first, and copy them whole wherever a matrix product wants another layout.

Letters: v groups of layers a stage.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from sppo_jax.arrays import buffers
from sppo_jax.arrays.dtypes import accumulator
from sppo_jax.models.stacks import of_stack
from sppo_jax.pipeline.layer_types import with_part
from sppo_jax.pipeline.params.group_rows import GroupRows
from sppo_jax.pipeline.params.storage import gather_whole, scatter_sum, within_group
from sppo_jax.pipeline.when import when

Some = TypeVar("Some", bound="ShardedLayers")


@dataclass(frozen=True)
class ShardedLayers:
    """The parameters of a stage's layers, and how its devices share them. Call the methods inside `shard_map`.

    Args:
        shards: tree of this device's shares [v, layers, ...], in the dtype of the parameters.
        shares: the same tree, how each array is shared.
        wholes: the same tree, the shape of a group's whole array [layers, ...] and its dtype in a step.
        rows: where a group lies in the stacks of which only some groups have layers.
    """

    shards: object
    shares: object
    wholes: object
    rows: Mapping[str | None, GroupRows] = field(default_factory=dict, kw_only=True)

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

    def of_stacks(self: Some, group, change: Callable[[Some, Any, tuple], tuple], carried: tuple) -> tuple:
        """Returns `change(layers, row, carried)` of the stacks of which a group has layers; other stacks do not change.

        Args:
            group: the group; its number is the row where all groups have layers of each stack.
            change: called once for all stacks, or once for each if some groups lack layers of some stack.
            carried: trees like `shards`, and scalars, which go from stack to stack.
        """
        if not self.rows:
            return change(self, group, carried)
        for name in self.shards:
            own = replace(self, rows={}, **{key: of_stack(getattr(self, key), name) for key in _TREES})
            part = tuple(x if _is_scalar(x) else of_stack(x, name) for x in carried)
            if name in self.rows:
                row, has = self.rows[name].row(group), self.rows[name].has(group)
                part = when(has, lambda part, own=own, row=row: change(own, row, part), part)
            else:
                part = change(own, group, part)
            both = zip(carried, part, strict=True)
            carried = tuple(new if _is_scalar(x) else with_part(x, name, new) for x, new in both)
        return carried

    def gather(self, slots, group, slot):
        """Returns the slots with the weights of a group in one of them."""

        def change(layers, row, carried):
            def one(buffer, shard, share, like):
                whole = gather_whole(buffers.read_slot(shard, row), within_group(share), like)
                return buffers.write_slot(buffer, slot, whole.reshape(_flat(like)))

            return (jax.tree.map(one, *carried, layers.shards, layers.shares, layers.wholes),)

        return self.of_stacks(group, change, (slots,))[0]

    def scatter(self, totals, sums, group, slot):
        """Adds the sums of a group over the devices of the stage, and to this device's share of the totals.

        Returns:
            The totals, and the sums with zeros in the slot.
        """

        # Zeros of an only slot depend on no sums. XLA would put the scatter off behind the ticks of the next group, and
        # hold the sums of two groups; and it would make all zeros once, and hold them.
        def zeros(x, total):
            return buffers.write_slot(x, slot, jnp.full(x.shape[1:], buffers.after(total), x.dtype))

        def change(layers, row, carried):
            def one(total, buffer, share, like):
                whole = buffers.read_slot(buffer, slot).reshape(like.shape)
                return buffers.add(total, (row,), scatter_sum(whole, within_group(share)))

            totals = jax.tree.map(one, *carried, layers.shares, layers.wholes)
            # Without the barrier XLA may copy the sums before it writes zeros.
            totals, sums = lax.optimization_barrier((totals, carried[1]))
            return totals, jax.tree.map(zeros, sums, totals)

        return self.of_stacks(group, change, (totals, sums))


_TREES = ("shards", "shares", "wholes")


def _is_scalar(x: Any) -> bool:
    return isinstance(x, jax.Array) and x.ndim == 0


def _flat(like: jax.ShapeDtypeStruct) -> tuple[int, int]:
    return like.shape[0], math.prod(like.shape[1:])
