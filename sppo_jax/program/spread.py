"""How a stage's devices share a parameter between steps: evenly, whatever their number; what does not divide is padded.

The devices of a stage, data * seq of them, are its members. They are numbered pipeline by pipeline, in the order of the
mesh. A parameter is cut along one dim into as many parts, or along two dims into `major * minor` parts: the first cut
goes to runs of `minor` members. A dim that the parts do not divide gets zeros at its end.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

# A single cut is taken where it adds no more than this share of zeros: then there is no need for two.
_LITTLE = 0.1


@dataclass(frozen=True)
class Cut:
    """A dim that is cut, and into how many parts."""

    dim: int
    parts: int


def padded(dims: Sequence[int], cuts: Sequence[Cut]) -> tuple[int, ...]:
    """Returns the dims with the zeros that cuts add."""
    sizes = list(dims)
    for cut in cuts:
        sizes[cut.dim] = -(-sizes[cut.dim] // cut.parts) * cut.parts
    return tuple(sizes)


@lru_cache(maxsize=4096)
def spread(dims: tuple[int, ...], data: int, seq: int) -> tuple[Cut, ...]:
    """Returns the cuts of a parameter, major first: one if it adds next to no zeros, else those that add fewest.

    One cut is of the largest dim. Of three dims or more it is of the first one where this adds no zeros: parts of the
    first dim follow each other in memory, so that the experts of a layer are gathered without a transposition.

    Args:
        dims: that may be cut: a layer's own, or a stage's rows of the vocabulary and the hidden size.
        data: pipelines.
        seq: devices of a stage in one pipeline.
    """
    members = data * seq
    if members == 1 or not dims:
        return ()
    if len(dims) > 2 and dims[0] % members == 0:
        return (Cut(0, members),)
    largest_first = sorted(range(len(dims)), key=lambda dim: -dims[dim])
    single = min(((Cut(dim, members),) for dim in largest_first), key=lambda cuts: math.prod(padded(dims, cuts)))
    if math.prod(padded(dims, single)) <= (1 + _LITTLE) * math.prod(dims):
        return single
    pairs = [
        (Cut(first, major), Cut(second, members // major))
        for major in _majors(data, seq)
        for first in largest_first
        for second in largest_first
        if first != second
    ]
    return min([single, *pairs], key=lambda cuts: math.prod(padded(dims, cuts)))


def _majors(data: int, seq: int) -> list[int]:
    """Returns the numbers of parts of a first cut, whose runs of members are whole on the mesh: some, not all."""
    runs = {count for count in range(1, data + 1) if data % count == 0}
    runs |= {data * count for count in range(1, seq + 1) if seq % count == 0}
    return sorted(runs - {1, data * seq})
