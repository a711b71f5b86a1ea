"""The stash: per layer and chunk, what a backward needs of its forward, in device memory or on the host.

Every entry is cut along its first dim: the first `host_rows` go to the host, the others stay. Host parts move a tick
at a time: a forward gathers them in one array a name, the next compute tick writes them; one compute tick before a
backward they are fetched. Host reads and writes are unconditional slices at the top level of a tick, with a trash slot
for idle stages.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from sppo_jax import buffers
from sppo_jax.compat import to_device, to_host
from sppo_jax.pipeline.program import StashClass

Arrays = dict[str, jax.Array]


@dataclass(frozen=True)
class Entry:
    """One array a layer stashes: its shape for one layer and how many of its first rows go to the host."""

    shape: tuple[int, ...]
    dtype: jnp.dtype
    host_rows: int

    @property
    def host_shape(self) -> tuple[int, ...]:
        return (self.host_rows, *self.shape[1:])

    @property
    def kept_shape(self) -> tuple[int, ...]:
        return (self.shape[0] - self.host_rows, *self.shape[1:])


@dataclass(frozen=True)
class StashLayout:
    """The entries of a stash class and the number of layers stashed (1 where only a stage's input is)."""

    entries: dict[str, Entry]
    num_layers: int
    num_slots: int

    def _empty(self, lead: tuple[int, ...], part: str) -> Arrays:
        shapes = {name: getattr(entry, part) for name, entry in self.entries.items()}
        return {n: jnp.zeros((*lead, *s), self.entries[n].dtype) for n, s in shapes.items() if s[0] > 0}

    def kept_buffers(self) -> Arrays:
        """Buffers [slots + 1, layers, ...] in device memory; the last slot is trash."""
        return self._empty((self.num_slots + 1, self.num_layers), "kept_shape")

    def host_buffers(self) -> Arrays:
        """The same in pinned host memory."""
        return {n: to_host(x) for n, x in self._empty((self.num_slots + 1, self.num_layers), "host_shape").items()}

    def host_part(self) -> Arrays:
        """What one tick sends to, or fetches from, the host: [layers, ...] in device memory."""
        return self._empty((self.num_layers,), "host_shape")

    def put(self, kept: Arrays, host_part: Arrays, slot, layer, values: Arrays) -> tuple[Arrays, Arrays]:
        """Stash one layer's values: kept rows into their slot, host rows into the tick's part."""
        kept, host_part = dict(kept), dict(host_part)
        for name, entry in self.entries.items():
            value = values[name].reshape(entry.shape)
            if name in kept:
                kept[name] = buffers.write(kept[name], (slot, layer), value[entry.host_rows :])
            if name in host_part:
                host_part[name] = buffers.write(host_part[name], (layer,), value[: entry.host_rows])
        return kept, host_part

    def get(self, kept: Arrays, host_part: Arrays, slot, layer) -> Arrays:
        """Read one layer's values back."""
        values = {}
        for name, entry in self.entries.items():
            parts = []
            if name in host_part:
                parts.append(buffers.read(host_part[name], (layer,), entry.host_shape))
            if name in kept:
                parts.append(buffers.read(kept[name], (slot, layer), entry.kept_shape))
            values[name] = parts[0] if len(parts) == 1 else jnp.concatenate(parts)
        return values


def write_host(host: Arrays, slot, host_part: Arrays) -> Arrays:
    """Copy a tick's part to its slot on the host."""
    return {name: buffers.write_slot(buffer, slot, to_host(host_part[name])) for name, buffer in host.items()}


def fetch_host(host: Arrays, slot) -> Arrays:
    """Copy a slot back from the host."""
    return {name: to_device(buffers.read_slot(buffer, slot)) for name, buffer in host.items()}


def chunk_entries(stash: StashClass, shapes: dict[str, jax.ShapeDtypeStruct]) -> dict[str, Entry]:
    """Say for each stashed array how many of its rows go to the host.

    Args:
        stash: the class.
        shapes: of one layer: `x`, `out`, `lse` with tokens first, and any others, which go all or not at all.
    """
    rows = {"x": stash.host_inputs, "out": stash.host_attention, "lse": stash.host_attention}
    entries = {}
    for name, value in shapes.items():
        shape = value.shape or (1,)
        entries[name] = Entry(shape, value.dtype, rows.get(name, shape[0] if stash.host_rest else 0))
    return entries
