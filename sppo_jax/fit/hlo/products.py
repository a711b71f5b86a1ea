"""FLOPs of the matrix products in a scheduled HLO text: what a copy beside them has time for.

A lower bound. Of branches the cheapest counts, a loop whose iterations the text does not say counts once, and
attention, whose pieces depend on the prefix, counts nothing.
"""

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from math import isqrt, prod

from sppo_jax.fit.hlo.text import branches_of, fused_in, loop_of

_SHAPE = re.compile(r"[a-z]+\d+(?:e\d+m\d+\w*)?\[([\d,]*)\]")
_RESULT = re.compile(r"^(?:ROOT )?%([\w.\-]+) = (.*)$")
_DOT = re.compile(r" dot\(%([\w.\-]+), .*lhs_contracting_dims=\{([\d,]*)\}")
# XLA:TPU makes every product a convolution.
_CONVOLUTION = re.compile(r" convolution\(%([\w.\-]+), %([\w.\-]+)\), (?!.*(?:stride|dilate|group_count))")
_GEMM = re.compile(r' custom-call\(%([\w.\-]+),.*"__cublas.*"lhs_contracting_dimensions":\[([^\]]*)\]')
# A matrix product, or a kernel that has some.
PRODUCT = re.compile(r"__cublas|__cudnn|tpu_custom_call|gemm| dot\(| convolution\(")


class Products:
    """Counts the FLOPs of instructions.

    Args:
        computations: the lines of each computation, by name.
    """

    def __init__(self, computations: Mapping[str, Sequence[str]]):
        self._computations = computations
        self._known: dict[str, int] = {}

    def flops(self, lines: Sequence[str]) -> int:
        """Returns the FLOPs of instructions, of everything that they run."""
        return sum(map(self._of_line, lines))

    def _of_computation(self, name: str) -> int:
        if name not in self._known:
            self._known[name] = self.flops(self._computations.get(name, ()))
        return self._known[name]

    def _of_line(self, line: str) -> int:
        line = line.partition(", metadata=")[0] + line.partition("backend_config=")[2]
        fused, loop, branches = fused_in(line), loop_of(line), branches_of(line)
        if fused:
            return self._of_computation(fused)
        if loop:
            body, trips = loop
            return self._of_computation(body) * (trips or 1)
        if branches:
            return min(map(self._of_computation, branches))
        return self._of_product(line)

    def _of_product(self, line: str) -> int:
        convolution = _CONVOLUTION.search(line)
        if convolution:
            # Of [m, k] and [k, n], in whatever order and however divided: each length is in two of the three arrays.
            sizes = (prod(self._shapes.get(name, [0])) for name in convolution.groups())
            return 2 * isqrt(prod(_dims(line)) * prod(sizes))
        found = _DOT.search(line) or _GEMM.search(line)
        shape = self._shapes.get(found.group(1)) if found else None
        if not found or not shape:
            return 0
        return 2 * prod(_dims(line)) * prod(shape[int(dim)] for dim in re.findall(r"\d+", found.group(2)))

    @cached_property
    def _shapes(self) -> dict[str, list[int]]:
        """Dims of every result, by its name, which is unique in a text but for those of parameters."""
        found = {}
        for lines in self._computations.values():
            for line in lines:
                result = _RESULT.match(line)
                if result:
                    found[result.group(1)] = _dims(result.group(2))
        return found


def _dims(text: str) -> list[int]:
    """Returns the dims of the first shape in a text."""
    shape = _SHAPE.search(text)
    return [int(dim) for dim in shape.group(1).split(",") if dim] if shape else []
