"""The stash: the arrays of a forward that a backward needs, by layer and chunk, in device memory or on the host.

Every entry is cut along its first dim: the first `host_rows` go to the host, the others stay. The host parts of a tick
move as one array. A forward packs them, and the next compute tick writes them. The compute tick before a backward
fetches them. A tick makes one copy of each piece in each direction, because the compiler overlaps only a few copies
at once. Host reads and writes are unconditional slices at the top level of a tick; `program.host_rows` says of which
rows.

On the host a row lies in one array, or in several: its pieces. Each piece has some columns of all lines, so that rows,
lines and steps are the same in all pieces.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sppo_jax.arrays import buffers
from sppo_jax.compat import to_device, to_host
from sppo_jax.pipeline.layer_types import At
from sppo_jax.plan.host_pieces import ONE_PIECE, cut_line
from sppo_jax.program.stash import StashClass

Arrays = dict[str, jax.Array]
Pieces = tuple[jax.Array, ...]  # one array of each piece
ELEMENT = jnp.uint16  # of packed arrays of any dtype
KEYS_VALUES = ("k", "v")
OUTS = ("out", "lse")
STATE = "state"  # with a number: an array of the state before a chunk, which stays on the device
TAILS = ("tail_k", "tail_v")


class HostPlace(NamedTuple):
    """Where a stash lies in the buffer of its class on the host: its row, and how many rows before are short."""

    row: jax.Array
    num_short: jax.Array


@dataclass(frozen=True)
class StashEntry:
    """One array a layer stashes: its shape for one layer and how many of its first rows go to the host.

    Layers of several types share an entry where they stash an array of one name and one shape.

    Args:
        name: of the array.
        shape: for one layer.
        dtype: of the array.
        host_rows: its first rows, which go to the host.
        layer_types: of the layers that have the array.
        num_layers: layers of a group that have the array.
        again: whether it makes keys and values be there again; see `StashLayout`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: jnp.dtype
    host_rows: int
    layer_types: tuple[str | None, ...] = (None,)
    num_layers: int = 1
    again: bool = False

    @property
    def host_shape(self) -> tuple[int, ...]:
        return (self.host_rows, *self.shape[1:])

    @property
    def kept_shape(self) -> tuple[int, ...]:
        return (self.shape[0] - self.host_rows, *self.shape[1:])

    @property
    def host_elements(self) -> int:
        """Length of the host part when packed."""
        return math.prod(self.host_shape) * max(1, jnp.dtype(self.dtype).itemsize // 2)

    def pack(self, value: jax.Array) -> jax.Array:
        """Returns the host part of a value as elements, bit by bit."""
        value = value[: self.host_rows]
        return (
            value.astype(ELEMENT) if jnp.dtype(self.dtype).itemsize == 1 else lax.bitcast_convert_type(value, ELEMENT)
        )

    def unpack(self, elements: jax.Array) -> jax.Array:
        """Returns the host part of a value from its elements: the inverse of `pack`."""
        size = jnp.dtype(self.dtype).itemsize
        if size == 1:
            return elements.reshape(self.host_shape).astype(self.dtype)
        shape = self.host_shape if size == 2 else (*self.host_shape, size // 2)
        return lax.bitcast_convert_type(elements.reshape(shape), self.dtype)


@dataclass(frozen=True)
class StashLayout:
    """The entries of a stash class, and how they lie.

    Some entries make keys and values be there again: layer inputs, or keys and values. They lie first, and come back
    from the host by themselves. Rows then lie in steps that divide both their lines and those of these entries: a GPU's
    DMA engines copy whole steps only.

    Args:
        entries: by name, which is that of the array unless another entry has arrays of the name.
        num_layers: layers stashed; 1 where only a stage's input is.
        num_slots: slots in device memory.
        has_short_rows: whether some rows on the host are short: the next row overwrites their attention outputs, which
            lie last in each row.
        host_pieces: the share of every row on the host, in 1024ths, that lies in each array.
        lanes: arrays in device memory whose last dim is a multiple of it have that dim innermost there; 0: the compiler
            chooses an order. XLA:TPU chooses other ones for the loops that write and for those that read, and copies
            all slots between them.
    """

    entries: dict[str, StashEntry]
    num_layers: int
    num_slots: int
    has_short_rows: bool = False
    host_pieces: tuple[int, ...] = ONE_PIECE
    lanes: int = 0

    @property
    def host_shape(self) -> tuple[int, int]:
        """Lines and elements of a line in the host part of all layers; every entry of a layer fills whole lines.

        One line of all elements does not work: long chunks have more elements than an int32 offset can count. The lines
        of one entry lie together, layer after layer, so that each entry of all layers is one piece of memory.
        """
        entries = [entry for entry in self.entries.values() if entry.host_rows]
        line = math.gcd(*(entry.host_elements for entry in entries))
        return (sum(entry.num_layers * entry.host_elements for entry in entries) // line, line) if line else (0, 0)

    @property
    def _short_by(self) -> int:
        """Lines by which a short row is shorter: those of the attention outputs of all layers, which are the last."""
        if not self.has_short_rows:
            return 0
        return self._lines_of(lambda entry: entry.name in OUTS)

    def kept_buffers(self) -> Arrays:
        """Buffers [slots + 1, layers, ...] in device memory; the last slot is trash."""
        kept = {name: entry for name, entry in self.entries.items() if entry.kept_shape[0] > 0}
        lead = self.num_slots + 1
        return {name: jnp.zeros((lead, one.num_layers, *one.kept_shape), one.dtype) for name, one in kept.items()}

    @property
    def columns(self) -> tuple[int, ...]:
        """Elements of a line that lie in each piece."""
        return cut_line(self.host_shape[1], self.host_pieces)

    def host_buffer(self, num_rows: int, num_short: int = 0) -> Pieces:
        """Buffer [rows and their steps, lines of a step, elements] in pinned host memory, in pieces.

        Args:
            num_rows: rows.
            num_short: how many of them, before the last one, are short.
        """
        lead = (self.first_step(num_rows, num_short), self.step_lines)
        return tuple(to_host(jnp.zeros((*lead, elements), ELEMENT)) for elements in self.columns)

    @property
    def step_lines(self) -> int:
        """Lines of one index of the host's buffer."""
        return math.gcd(self.host_shape[0], self.again_lines, self._short_by)

    def first_step(self, row, num_short):
        """Returns the first index of a row in the host's buffer, where so many rows before are short."""
        first = row * (self.host_shape[0] // self.step_lines)
        return first - num_short * (self._short_by // self.step_lines) if self.has_short_rows else first

    def write_host(self, host: Pieces, place: "HostPlace", host_part: Pieces) -> Pieces:
        """Copies a tick's part to its row on the host."""
        steps = [part.reshape(-1, *piece.shape[1:]) for piece, part in zip(host, host_part, strict=True)]
        first = self.first_step(*place)
        return tuple(buffers.write(piece, (first,), to_host(x)) for piece, x in zip(host, steps, strict=True))

    def fetch_host(self, host: Pieces, place: "HostPlace") -> Pieces:
        """Copies what a backward reads of a row back from the host: all but keys and values."""
        return self._fetch(host, place, self.unread_lines, self.host_shape[0])

    def fetch_again(self, host: Pieces, place: "HostPlace") -> Pieces:
        """Copies the entries that make keys and values be there again back from the host."""
        return self._fetch(host, place, 0, self.again_lines)

    def _fetch(self, host: Pieces, place: "HostPlace", begin: int, end: int) -> Pieces:
        first = self.first_step(*place) + begin // self.step_lines

        def fetch(piece: jax.Array) -> jax.Array:
            steps = buffers.read(piece, (first,), ((end - begin) // self.step_lines, *piece.shape[1:]))
            return to_device(steps).reshape(end - begin, piece.shape[-1])

        return tuple(map(fetch, host))

    def host_part(self) -> Pieces:
        """Zeros [lines, elements] in device memory, in pieces, for the part that one tick sends to the host."""
        return tuple(jnp.zeros((self.host_shape[0], elements), ELEMENT) for elements in self.columns)

    def _lines(self) -> dict[str, tuple[int, tuple[int, int]]]:
        """First line, and shape in lines of one layer, of each entry that has a host part."""
        (_, line), places, first = self.host_shape, {}, 0
        for name, entry in sorted(self.entries.items(), key=lambda x: (not x[1].again, x[1].name in OUTS)):
            if entry.host_rows:
                shape = (entry.host_elements // line, line)
                places[name], first = (first, shape), first + entry.num_layers * shape[0]
        return places

    def _lines_of(self, counts: Callable[[StashEntry], bool]) -> int:
        """Lines of some entries of all layers."""
        found = [(self.entries[key], shape) for key, (_, shape) in self._lines().items()]
        return sum(entry.num_layers * shape[0] for entry, shape in found if counts(entry))

    def put(self, kept: Arrays, host_part, slot, at: At, values: Arrays) -> tuple[Arrays, Pieces | None]:
        """Stashes one layer's values: kept rows into their slot, host rows into the tick's part."""
        kept, lines = dict(kept), self._lines()
        for name, entry in self.entries.items():
            if at.layer_type not in entry.layer_types or entry.name not in values:
                continue
            layer, value = at.among(entry.layer_types), values[entry.name].reshape(entry.shape)
            if name in kept:
                kept[name] = buffers.write(kept[name], (slot, layer), self._ordered(value[entry.host_rows :]))
            if name in lines:
                first, shape = lines[name]
                place = (first + layer * shape[0],)
                pieces = zip(host_part, self._cut(entry.pack(value).reshape(shape)), strict=True)
                host_part = tuple(buffers.write(part, place, piece) for part, piece in pieces)
        return kept, host_part

    def _ordered(self, x: jax.Array) -> jax.Array:
        return buffers.row_major(x) if self.lanes and x.shape[-1] % self.lanes == 0 else x

    def put_choices(self, kept: Arrays, host_part, slot, layer, values: Arrays) -> tuple[Arrays, Pieces | None]:
        """Stashes one layer's choices beside the stage's input, the only layer stashed."""
        if "chosen" not in kept:
            return kept, host_part
        buffer = kept["chosen"]  # [slots, 1, T, layers, k]
        chosen_Tk = values["chosen"][None, None, :, None]
        return {**kept, "chosen": buffers.write(buffer, (slot, 0, 0, layer), chosen_Tk)}, host_part

    def _cut(self, lines: jax.Array) -> list[jax.Array]:
        """Cuts whole lines into those of each piece."""
        return [lines] if len(self.columns) == 1 else lax.split(lines, self.columns, axis=1)

    @property
    def again_lines(self) -> int:
        """Lines of the entries that make keys and values be there again, of all layers, which are the first."""
        return self._lines_of(lambda entry: entry.again)

    @property
    def unread_lines(self) -> int:
        """Lines of keys and values, which no backward of the same chunk reads."""
        return self._lines_of(lambda entry: entry.name in KEYS_VALUES)

    def get(self, kept: Arrays, fetched, slot, at: At) -> Arrays:
        """Reads back what a layer's backward needs; `fetched` is from `fetch_host`."""
        skipped = self.unread_lines
        return {
            entry.name: self._get_one(name, kept, fetched, slot, at, skipped)
            for name, entry in self.entries.items()
            if at.layer_type in entry.layer_types and entry.name not in KEYS_VALUES
        }

    def get_again(self, kept: Arrays, fetched, slot, at: At) -> Arrays:
        """Reads what makes one layer's keys and values be there again; `fetched` is from `fetch_again`."""
        return {
            entry.name: self._get_one(name, kept, fetched, slot, at, 0)
            for name, entry in self.entries.items()
            if at.layer_type in entry.layer_types and entry.again
        }

    def _get_one(self, name: str, kept: Arrays, host_part, slot, at: At, skipped: int) -> jax.Array:
        entry, lines, parts = self.entries[name], self._lines(), []
        layer = at.among(entry.layer_types)
        if name in lines:
            first, shape = lines[name]
            first -= skipped
            place = (first + layer * shape[0],)
            pieces = [buffers.read(piece, place, (shape[0], piece.shape[1])) for piece in host_part]
            parts.append(entry.unpack(pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, axis=1)))
        if name in kept:
            parts.append(self._ordered(buffers.read(kept[name], (slot, layer), entry.kept_shape)))
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts)


def chunk_entries(
    stash: StashClass,
    shapes: Mapping[str | None, dict[str, jax.ShapeDtypeStruct]],
    groups: Sequence[Sequence[str | None]],
    again: Callable[[str | None, str], bool] = lambda layer_type, name: False,
) -> dict[str, StashEntry]:
    """Returns the entry of each stashed array, with the number of its rows that go to the host.

    Args:
        stash: the class.
        shapes: for each type arrays of one layer: `x`, `chosen`, `out`, `lse`, `k`, `v` with tokens first, and others,
            which move whole or not at all: tails where any inputs do, states never. Under `WHOLE.layer_type` those of a
            group.
        groups: the types of the layers of each group, which takes its turn in the same buffers.
        again: whether an array of a type makes keys and values be there again.
    """
    rows = dict.fromkeys(("x", "chosen"), stash.host_inputs) | dict.fromkeys(OUTS, stash.host_attention)
    rows |= dict.fromkeys(KEYS_VALUES, stash.host_kv)
    having: dict[tuple, list[str | None]] = {}
    for layer_type, of_type in shapes.items():
        for name, value in of_type.items():
            having.setdefault((name, value.shape or (1,), value.dtype, again(layer_type, name)), []).append(layer_type)
    entries: dict[str, StashEntry] = {}
    for (name, shape, dtype, is_again), found in having.items():
        key = name if name not in entries else f"{name}.{found[0]}"
        moves = stash.host_inputs > 0 if name in TAILS else stash.host_rest and not name.startswith(STATE)
        host_rows = rows.get(name, shape[0] if moves else 0)
        num_layers = max(sum(layer_type in found for layer_type in layer_types) for layer_types in groups)
        entries[key] = StashEntry(name, shape, dtype, host_rows, tuple(found), num_layers, is_again)
    return entries
