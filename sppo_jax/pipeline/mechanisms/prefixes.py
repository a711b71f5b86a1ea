"""What a chunk needs of the chunks before it: their keys and values, which a backward may need again.

Where they are made again, the group of layers before has its keys and values written in the ticks in which a group goes
backward, from what came back from the host a tick earlier.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from sppo_jax.arrays import buffers
from sppo_jax.attention.spreading.sequence import Cache
from sppo_jax.attention.tags import Tags
from sppo_jax.pipeline import units, vocabulary
from sppo_jax.pipeline.layers import layer_group
from sppo_jax.pipeline.layers import stage as stages
from sppo_jax.pipeline.mechanism import Mechanism, TickOnDevice
from sppo_jax.pipeline.mechanisms.stash import Stash
from sppo_jax.pipeline.run import Run
from sppo_jax.pipeline.stash.buffers import HostPlace, Pieces

# Of each number of a unit that of the chunk whose keys and values are made again.
_AGAIN = {
    "start": "prefixes.again_start",
    "length": "prefixes.again_length",
    "group": "prefixes.again_group",
    "pattern": "again_pattern",
    "weights.slot": "prefixes.again_weights_slot",
    "prefixes.slot": "prefixes.again_prefixes_slot",
    "stash.slot": "prefixes.again_stash_slot",
}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Prefixes(Mechanism):
    """The prefixes of the sequences in flight.

    Args:
        caches: keys and values, in a cache for each shape of a layer's.
        grads: dK and dV of the caches; None in an evaluation.
        refetched: layer inputs, or keys and values, that came back for the next rebuild of keys and values.
    """

    caches: tuple[Cache, ...]
    grads: tuple[Cache, ...] | None = None
    refetched: Pieces | None = None

    @classmethod
    def begin(cls, run: Run, shapes: Sequence[tuple[int, ...]], grad_dtype=None) -> "Prefixes":
        """Allocates the buffers.

        Args:
            run: gives the slots.
            shapes: [layers, K, S, E] of one slot of each cache of one device.
            grad_dtype: dtype in which dK and dV are gathered; None for an evaluation.
        """
        program = run.program.prefixes
        caches = tuple(_zeros((program.num_slots, *shape), run.vocabulary_tables.dtype) for shape in shapes)
        if grad_dtype is None:
            return cls(caches)
        return cls(caches, tuple(_zeros((program.num_grad_slots, *shape), grad_dtype) for shape in shapes))

    def start(self, run: Run, tick: TickOnDevice, state: Any) -> Pieces | None:
        """Fetches what the next tick's rebuild needs from the stash."""
        name = tick.spec.prefixes.refetch
        if name is None:
            return None
        layout = run.layout(name)
        if not layout.again_lines:
            return None  # every layer has a window, and its period makes its keys and values again
        place = HostPlace(tick.row_to_fetch("prefixes.refetch_row"), tick.row_to_fetch("prefixes.refetch_short"))
        return layout.fetch_again(state.stash.host[name], place)

    def arrive(self, run: Run, tick: TickOnDevice, coming: Pieces | None) -> "Prefixes":
        """Keeps what was fetched for the next rebuild."""
        return replace(self, refetched=coming)

    def rebuilt(self, run: Run, tick: TickOnDevice, stage: stages.Stage, stash: Stash, tags: Tags) -> "Prefixes":
        """Writes the keys and values of this stage's chunk in the group of layers before again, if the tick does so."""
        of_class = tick.spec.prefixes.rebuild
        if of_class is None:
            return self
        me = vocabulary.stage_index(run.num_stages)
        spec = replace(tick.spec, tokens=of_class.tokens, stash=tick.spec.stash._replace(own=of_class))
        active = (tick.row[_AGAIN["start"]] < run.plan.sequence_length).astype(jnp.int32)
        row = tick.row.reading(_AGAIN, active=active)
        # Tells the compiler to write after what the tick before has read.
        tick = tick._replace(spec=spec, row=row).later(tick.begun(), ("prefixes.slot",))
        unit = units.unit(run, tick, spec.passes.forward, tags)
        # A shorter chunk than its tick has padding, where the next chunk already is.
        full = set(run.plan.chunk_lengths) == {spec.tokens * run.seq}
        behind = None if full else buffers.quotient(tick.mine("length", me), run.plan.ring)
        layout, kept, _ = stash.to_use(run, tick)
        filled = layout, kept, self.refetched
        split = units.split(run, spec.passes.forward)
        return replace(self, caches=layer_group.rebuild(stage, unit, self.caches, split, filled, behind))


def _zeros(shape: tuple[int, ...], dtype) -> Cache:
    return Cache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))
