"""Which clusters exist: the shapes of TPU slices.

Sources: Google Cloud's pages on v4, v5e, v5p, v6e and TPU7x (docs.cloud.google.com/tpu/docs, read on 2026-11-29).
Slices of v5e and v6e are rectangles of a list, up to 256 chips. Those of v4, v5p and TPU7x are parts of a cube of
4 x 4 x 4 chips, or whole cubes whose sizes do not fall, up to 4096, 6144 and 9216 chips. One chip is a slice too,
because a process may be given one chip of its host.
"""

import math
from functools import cache

Shape = tuple[int, ...]

_RECTANGLES: tuple[Shape, ...] = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
_PARTS: tuple[Shape, ...] = ((1, 1, 1), (2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))
# Chips along a side of a cube, along the longest side of a slice, and of the largest slice.
_CUBE, _LONGEST = 4, 256
_MOST_CHIPS = {"v4": 4096, "v5p": 6144, "tpu7x": 9216}


@cache
def slice_shapes(name: str) -> tuple[Shape, ...]:
    """Returns the shapes of the slices of a TPU in chips: fewest chips first, of equally many the nearest to a cube.

    Args:
        name: of the device.
    """
    if name not in _MOST_CHIPS:
        return _RECTANGLES
    most, cubes = _MOST_CHIPS[name], []
    for first in range(_CUBE, _LONGEST + 1, _CUBE):
        for second in range(first, _LONGEST + 1, _CUBE):
            longest = min(_LONGEST, most // (first * second))
            cubes += [(first, second, third) for third in range(second, longest + 1, _CUBE)]
    return tuple(sorted([*_PARTS, *cubes], key=lambda shape: (math.prod(shape), max(shape) - min(shape))))


def shape_of_chips(name: str, num_chips: int) -> Shape | None:
    """Returns the shape of a slice of so many chips that is nearest to a cube; None where there is no such slice."""
    return next((shape for shape in slice_shapes(name) if math.prod(shape) == num_chips), None)


def nearest_shapes(name: str, shape: Shape) -> list[Shape]:
    """Returns what to name in place of a shape that does not exist: one of as many chips, or the next two.

    Args:
        name: of the device.
        shape: in chips.
    """
    known, chips = slice_shapes(name), math.prod(shape)
    if (turned := tuple(sorted(shape))) in known:
        return [turned]
    if same := shape_of_chips(name, chips):
        return [same]
    counts = [math.prod(one) for one in known]
    near = (max((x for x in counts if x < chips), default=0), min((x for x in counts if x > chips), default=0))
    return [one for count in near if count and (one := shape_of_chips(name, count))]
