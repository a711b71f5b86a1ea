"""What rearranged rows cost, counted from the tags of their batches: attention pairs, critical path, bytes sent.

A batch's tags are its document ids and positions. `count` reads no placement, so a wrong placement has wrong counts.

Letters: w rows, C chunks, R members.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from sppo_jax.data.rows.flex import window_pieces
from sppo_jax.data.rows.packing import PackedRows
from sppo_jax.flex.baselines import Baseline, baselines
from sppo_jax.flex.contract import far_cells
from sppo_jax.flex.placement import Pieces, Placement
from sppo_jax.flex.rows import Content, write
from sppo_jax.flex.shape import WindowShape


@dataclass(frozen=True, kw_only=True)
class Sent:
    """The sizes that decide how many bytes a layer sends.

    Args:
        heads: query heads.
        kv_heads: key/value heads.
        head_dim: elements of a head.
        layers: layers of the model.
        stream: how a stream cell exchanges, "ulysses" or "ring".
    """

    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    stream: str

    def near(self, level: int) -> int:
        """Returns bytes that a device sends for each slot of a team cell, forward and backward, all layers.

        Keys and values in bfloat16 travel twice; their float32 gradients travel home once.
        """
        return 16 * self.kv_heads * self.head_dim * self.layers * (2**level - 1)

    def far(self, members: int) -> int:
        """Returns bytes that a device sends for each slot of a stream cell, forward and backward, all layers.

        A ring's figure holds the keys of the chunk alone; what a ring sends for the prefix comes on top.
        """
        if self.stream == "ring":
            return self.near(members.bit_length() - 1)
        return 12 * (self.heads + self.kv_heads) * self.head_dim * self.layers * (members - 1) // members


class Ticks(NamedTuple):
    """What the forward ticks of a window run, int64 [ticks] each.

    `level`: exchanges of the team cells. `stream`: 1 if a cell is stream. `slots`: tokens of a device, padding too.
    """

    level: np.ndarray
    stream: np.ndarray
    slots: np.ndarray


def per_tick(values_wC: np.ndarray, shape: WindowShape) -> np.ndarray:
    """Returns the maximum over the units of each forward tick, at least 0: int64 [forward ticks]."""
    by_unit = np.append(values_wC.reshape(shape.data, -1).max(0), 0)
    return by_unit[shape.units[shape.ops == "F"]].max(1)


def forward_ticks(far_wC: np.ndarray, level_wC: np.ndarray, shape: WindowShape) -> Ticks:
    """Returns what the forward ticks run; each cell runs backward once too, in a tick of the same cells or others."""
    slots = shape.tick_slots[shape.ops == "F"]
    return Ticks(per_tick(level_wC, shape), per_tick(far_wC.astype(np.int64), shape), slots)


def sent_bytes(ticks: Ticks, sent: Sent, members: int) -> int:
    """Returns the bytes that a device sends in a step, forward and backward."""
    near = np.array([sent.near(level) for level in range(members.bit_length())], np.int64)
    return int(((near[ticks.level] + ticks.stream * sent.far(members)) * ticks.slots).sum())


def count(batches: Sequence[Mapping[str, np.ndarray]], shape: WindowShape, sent: Sent) -> dict[str, Any]:
    """Counts what some windows cost.

    Args:
        batches: one window each.
        shape: the window.
        sent: the sizes that decide the bytes.

    Returns:
        JSON values. `critical_pairs` is the sum over forward ticks of the pairs of the device that has most: a tick
        that has team and stream cells adds both.
    """
    pairs, critical, size = 0, 0, 0
    ticks: dict[str, int] = {}
    for batch in batches:
        pairs_wCR = count_pairs(batch, shape)
        far, level = far_cells(np.asarray(batch["document_ids"]), shape)
        most = pairs_wCR.max(2)
        near_pairs, far_pairs = (per_tick(np.where(which, most, 0), shape) for which in (~far, far))
        found = forward_ticks(far, level, shape)
        pairs += int(pairs_wCR.sum())
        critical += int((near_pairs + far_pairs).sum())
        size += sent_bytes(found, sent, shape.members)
        for own, stream in zip(found.level.tolist(), found.stream.tolist(), strict=True):
            name = "stream" if stream else f"level {own}"
            ticks[name] = ticks.get(name, 0) + 1
    return {
        "pairs": pairs,
        "critical_pairs": critical,
        "sent_bytes": size,
        "forward_ticks": {name: ticks[name] for name in sorted(ticks)},
    }


def contents_of(rows: PackedRows, number: int, pieces: Pieces) -> dict[tuple[int, int], Content]:
    """Reads the documents of a window; returns them by their row and first index in the packed rows."""
    found, firsts = {}, np.searchsorted(pieces.row, np.arange(int(pieces.row[-1]) + 1))
    window = len(firsts)
    for piece, (row, begin) in enumerate(zip(pieces.row.tolist(), pieces.begin.tolist(), strict=True)):
        tokens, targets = rows.read_piece(number * window + row, piece - int(firsts[row]))
        found[row, begin] = Content(tokens, targets, np.arange(len(tokens), dtype=np.int32))
    return found


def batch_of(placement: Placement, contents: Mapping[tuple[int, int], Content]) -> dict[str, np.ndarray]:
    """Writes a placement as a batch."""
    own = zip(placement.pieces.row.tolist(), placement.pieces.begin.tolist(), strict=True)
    return write(placement, [contents[key] for key in own])


def placed(
    rows: PackedRows, number: int, shape: WindowShape
) -> dict[str, tuple[Baseline, list[dict[str, np.ndarray]]]]:
    """Returns each baseline of a window with its batches, by name."""
    pieces = window_pieces(rows, number, shape.rows)
    contents = contents_of(rows, number, pieces)
    return {
        name: (baseline, [batch_of(window, contents) for window in baseline.windows])
        for name, baseline in baselines(pieces, shape).items()
    }


def count_pairs(batch: Mapping[str, np.ndarray], shape: WindowShape) -> np.ndarray:
    """Counts the (query, key) pairs of each member's queries from the positions and document ids of rows.

    Args:
        batch: arrays [w, S]; a key is seen by the queries of its document at its position and behind it.
        shape: says which chunk and which member an index belongs to.

    Returns:
        int64 [w, C, R].
    """
    documents, positions = (np.asarray(batch[name]) for name in ("document_ids", "positions"))
    pairs = np.zeros((len(documents), shape.num_chunks, shape.members), np.int64)
    index = np.arange(shape.length)
    chunk = np.searchsorted(shape.starts, index, side="right") - 1
    member = shape.member_of[index % shape.members]
    for row, (ids, places) in enumerate(zip(documents, positions, strict=True)):
        by_place = np.lexsort((places, ids))
        ordered = ids[by_place]
        seen = np.empty(shape.length, np.int64)
        seen[by_place] = np.arange(shape.length) - np.searchsorted(ordered, ordered) + 1
        np.add.at(pairs[row], (chunk, member), np.where(ids >= 0, seen, 0))
    return pairs
