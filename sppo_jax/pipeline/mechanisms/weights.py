"""Weights of layers and their gradient sums: resident, gathered group by group, or gathered from the host.

Gathered weights are whole for the groups of layers whose turn it is; all stages gather and scatter in the same ticks.
Where parameters wait on the host, a part of the next group's weights comes in each compute tick, and a part of the
gradients leaves in each backward. `ShardedLayers` and `HostLayers` say how.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from sppo_jax.arrays.dtypes import accumulator
from sppo_jax.pipeline.mechanism import Mechanism, TickOnDevice
from sppo_jax.pipeline.params.host_layers import HostLayers
from sppo_jax.pipeline.run import Run
from sppo_jax.pipeline.when import when


class Coming(NamedTuple):
    """What is under way in a tick.

    Args:
        weights: a part of the next group's weights.
        sums: all groups' gradient sums on the host, one part of which is being written; None in a forward.
    """

    weights: Any
    sums: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerWeights(Mechanism):
    """The weights of a stage's layers, and the sums of their gradients.

    Args:
        gathered: weights [slots, layers, elements] of the groups whose turn it is; None where all are resident.
        sums: gradient sums: of all groups, or [slots, layers, elements] of those whose turn it is. None in an
            evaluation, as what follows.
        totals: this device's shares of the sums of all groups, where weights are gathered.
        incoming, leaving: weights of a group on their way from the host, gradients of one on their way there; None
            where parameters are on the device.
    """

    gathered: Any
    sums: Any = None
    totals: Any = None
    incoming: Any = None
    leaving: Any = None

    @classmethod
    def begin(cls, run: Run, *, train: bool) -> "LayerWeights":
        """Allocates the buffers."""
        program, sharded = run.program.weights, run.sharded
        gathered = sharded.slots(program.num_slots) if sharded else None
        if not train:
            return cls(gathered)
        if sharded is None:
            params = run.stage.weights.params
            return cls(None, jax.tree.map(lambda x: jnp.zeros(x.shape, accumulator(x.dtype)), params))
        sums, totals = sharded.sums(program.num_sum_slots), sharded.totals()
        if not program.num_parts:
            return cls(gathered, sums, totals)
        return cls(gathered, sums, totals, sharded.incoming(), sharded.leaving())

    def before(self, run: Run, tick: TickOnDevice) -> "LayerWeights":
        """Gathers the weights of the group of layers whose turn begins, if one does, on all stages at once."""
        if not tick.spec.weights.gathers:
            return self
        row = tick.row
        group, slot = row["weights.gather_group"][0], row["weights.gather_slot"][0]
        on_way = (self.incoming, row["weights.come"][0]) if tick.spec.weights.streams else ()
        with jax.named_scope("gather_turn"):
            gathered = when(
                row["weights.gathers"], lambda slots: run.sharded.gather(slots, group, slot, *on_way), self.gathered
            )
        return replace(self, gathered=gathered)

    def start(self, run: Run, tick: TickOnDevice, state: Any) -> Coming | None:
        """Starts the copies of a part of weights from the host, and (B) of a part of gradients to it."""
        if not tick.spec.weights.streams:
            return None
        row, sums = tick.row, None
        weights = run.sharded.fetch(row["weights.fetch_group"][0], row["weights.fetch_part"][0])
        if tick.spec.op == "B":
            place = row["weights.leave_group"][0], row["weights.leave_part"][0]
            sums = run.sharded.write(self.totals.sums, self.leaving, *place)
        return Coming(weights, sums)

    def arrive(self, run: Run, tick: TickOnDevice, coming: Coming | None) -> "LayerWeights":
        """Puts a part of weights in its place."""
        if coming is None:
            return self
        incoming = run.sharded.take(self.incoming, coming.weights, tick.row["weights.fetch_part"][0])
        arrived = replace(self, incoming=incoming)
        return arrived if coming.sums is None else replace(arrived, totals=self.totals._replace(sums=coming.sums))

    def after(self, run: Run, tick: TickOnDevice) -> "LayerWeights":
        """Adds up the gradients of the group of layers whose turn ends, if one does, on all stages at once."""
        if not tick.spec.weights.scatters:
            return self
        with jax.named_scope("scatter_turn"):
            return self._scatter_and_flush(run, tick) if tick.spec.weights.streams else self._scatter(run, tick)

    def _scatter(self, run: Run, tick: TickOnDevice) -> "LayerWeights":
        group, slot = tick.row["weights.scatter_group"][0], tick.row["weights.scatter_slot"][0]

        def change(carried):
            return run.sharded.scatter(*carried, group, slot)

        totals, sums = when(tick.row["weights.scatters"], change, (self.totals, self.sums))
        return replace(self, totals=totals, sums=sums)

    def _scatter_and_flush(self, run: Run, tick: TickOnDevice) -> "LayerWeights":
        """Adds them up where they leave for the host; those of the turn before have left by then."""
        group, slot = tick.row["weights.scatter_group"][0], tick.row["weights.scatter_slot"][0]
        left_group, left = tick.row["weights.left_group"][0], tick.row["weights.left"][0]

        def change(carried):
            totals, sums, leaving = carried
            totals = totals._replace(sums=run.sharded.flush(totals.sums, leaving, left_group, left))
            return run.sharded.scatter(totals, sums, leaving, group, slot)

        carried = self.totals, self.sums, self.leaving
        totals, sums, leaving = when(tick.row["weights.scatters"], change, carried)
        return replace(self, totals=totals, sums=sums, leaving=leaving)

    def gradients(self, run: Run) -> tuple:
        """Returns the gradients at the end: whole sums, or shares; and the sum of the squares of those on the host."""
        if run.sharded is None:
            return (self.sums,)
        if not isinstance(run.sharded, HostLayers):
            return (run.sharded.gradients(self.totals),)
        # Those of the last turn, of the first group of layers, have not left.
        totals = self.totals._replace(sums=run.sharded.flush(self.totals.sums, self.leaving, 0, 0))
        return run.sharded.gradients(totals), run.sharded.squares(totals)
