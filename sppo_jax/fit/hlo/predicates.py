"""The loops and conditionals of a scheduled HLO text that read from the device whether to go on."""

from collections.abc import Mapping, Sequence

from sppo_jax.fit.hlo.products import Products
from sppo_jax.fit.hlo.text import branches_of, loop_of, name_of


class Predicates:
    """Finds the first such read among instructions.

    Args:
        computations: the lines of each computation, by name.
        products: of these computations.
        graphed: names of the loops and conditionals in CUDA graphs, which read nothing.
    """

    def __init__(self, computations: Mapping[str, Sequence[str]], products: Products, graphed: frozenset[str]):
        self._computations, self._products, self._graphed = computations, products, graphed
        self._known: dict[str, int | None] = {}

    def flops_before(self, lines: Sequence[str]) -> int | None:
        """Returns the FLOPs of the matrix products before the first read; None if no instruction reads."""
        flops = 0
        for line in lines:
            inside = self._before_in(line)
            if inside is not None:
                return flops + inside
            flops += self._products.flops([line])
        return None

    def _before_in(self, line: str) -> int | None:
        """Returns the FLOPs before the first read that an instruction makes, itself or in what it runs."""
        loop = loop_of(line)
        if not (loop or branches_of(line)) or name_of(line) in self._graphed:
            return None
        if loop is None or loop[1] is None:
            return 0  # a conditional, or a loop whose iterations are not known
        body = loop[0]
        if body not in self._known:
            self._known[body] = self.flops_before(self._computations.get(body, ()))
        return self._known[body]
