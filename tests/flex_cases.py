"""Small windows of many kinds of lengths, and their documents with tokens that are all different."""

from pathlib import Path

import numpy as np

from sppo_jax.data.rows.best_fit import best_fit
from sppo_jax.flex.placement import Pieces, Placement
from sppo_jax.flex.rows import Content
from sppo_jax.flex.shape import WindowShape, simple_weights
from sppo_jax.schedule.generators import make_table

WIKIPEDIA = Path(__file__).parents[1] / "sppo_jax/flex/wikipedia_lengths.csv"
KINDS = ("tail", "ones", "fifths", "two thirds", "uniform", "one long", "empty", "short")


def make_shape(
    rows=4, chunk_lengths=(64, 64), *, data=1, ring=4, ulysses=1, stages=2, name="seq1f1b", **weights
) -> WindowShape:
    """Makes a window; `weights` replaces costs of a token, a pair, what is sent, and what stream sends."""
    costs = simple_weights(chunk_lengths, ring * ulysses, **weights)
    table = make_table(name, stages, rows // data, chunk_lengths)
    return WindowShape(
        rows=rows, data=data, ring=ring, ulysses=ulysses, chunk_lengths=chunk_lengths, table=table, weights=costs
    )


def draw_shape(rng: np.random.Generator) -> WindowShape:
    """Draws a window with 2, 4 or 8 members, in any division into ring and ulysses, of equal or unequal chunks."""
    members, data = int(rng.choice([2, 4, 8])), int(rng.choice([1, 2]))
    ring = int(rng.choice([2**level for level in range(members.bit_length())]))
    slots = rng.integers(4, 40, int(rng.integers(1, 5)))
    if rng.random() < 0.5:
        slots[:] = slots[0]
    lengths = tuple(int(count) * members for count in slots)
    hidden = int(rng.choice([1, 16, 256]))  # so that attention, or what is sent, decides
    rows = data * int(rng.integers(1, 4))
    stages = int(rng.integers(1, 4))
    return make_shape(rows, lengths, data=data, ring=ring, ulysses=members // ring, stages=stages, hidden=hidden)


def draw_sizes(rng: np.random.Generator, kind: str, shape: WindowShape) -> np.ndarray:
    """Draws the lengths of more documents than a window holds."""
    num, length = shape.rows * shape.length, shape.length
    longest = int(shape.slots.max()) * shape.members
    draws = {
        "tail": lambda: 1 + (3 * rng.pareto(1.0, num)).astype(np.int64),
        "ones": lambda: np.ones(num, np.int64),
        "fifths": lambda: longest // 5 + rng.integers(0, 3, num),
        "two thirds": lambda: 2 * longest // 3 + rng.integers(0, 3, num),
        "uniform": lambda: rng.integers(1, length + 1, num),
        "one long": lambda: np.concatenate([[length], rng.geometric(0.1, num)]),
        "empty": lambda: np.zeros(0, np.int64),
        "short": lambda: rng.geometric(0.2, num),
    }
    return np.clip(draws[kind](), 1, length)


def pack(sizes: np.ndarray, shape: WindowShape, fill: float = 0.98) -> Pieces:
    """Packs the first documents that fill a share of a window into its rows, as `PackedRows` does."""
    sizes = sizes[np.cumsum(sizes) <= max(fill * shape.rows * shape.length, sizes[:1].sum())]
    if not len(sizes):
        return Pieces.packed([[]] * shape.rows)
    order, firsts = best_fit(sizes, shape.length)
    rows = [sizes[order[a:b]].tolist() for a, b in zip(firsts[:-1], firsts[1:], strict=True)][: shape.rows]
    return Pieces.packed(rows + [[]] * (shape.rows - len(rows)))


def contents_of(pieces: Pieces) -> list[Content]:
    """Makes documents whose tokens count on from one to the next; each target is the token behind."""
    ends = np.cumsum(pieces.size)
    return [
        Content(np.arange(end - size, end), np.arange(end - size, end) + 1, np.arange(size))
        for end, size in zip(ends.tolist(), pieces.size.tolist(), strict=True)
    ]


def same(one: Placement, other: Placement) -> bool:
    """Returns whether two placements put every document in the same place."""
    names = ("row", "chunk", "degree", "member", "offset", "begin", "order")
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in names)


def wikipedia_like(num: int, seed: int) -> np.ndarray:
    """Draws lengths of Wikipedia's documents from their quantiles, or from a log-normal where these are not there."""
    rng = np.random.default_rng(seed)
    if not WIKIPEDIA.exists():
        return np.clip(np.exp(rng.normal(6.3, 1.1, num)), 1, 100_000).astype(np.int64)
    lines = [line.split(",") for line in WIKIPEDIA.read_text().splitlines() if line and not line.startswith("#")]
    quantiles = np.array([line for line in lines if line[0][0].isdigit()], np.float64)
    return np.maximum(1, np.interp(rng.random(num), quantiles[:, 0], quantiles[:, 1])).astype(np.int64)
