"""Bytes of the arrays that an HLO text names."""

import re

# The type of the elements, the dims, and the layout where there is one.
SHAPE = re.compile(r"\b(pred|[a-z]+\d+(?:e\d+m\d+\w*)?)\[([\d,]*)\](?:\{([^}]*)\})?")
_BITS = {"pred": 8, "bf16": 16}


def array_bytes(element: str, dims: str) -> int:
    """Returns the bytes of an array of this type and these dims, as `SHAPE` finds them."""
    digits = re.search(r"\d+", element)
    bits = _BITS.get(element) or int(digits.group()) if digits else 8
    size = bits // 8
    for dim in filter(None, dims.split(",")):
        size *= int(dim)
    return size


def total_bytes(text: str) -> int:
    """Returns the bytes of all arrays that a text names."""
    return sum(array_bytes(element, dims) for element, dims, _ in SHAPE.findall(text))
