"""Walking jaxprs: every equation with how often it runs and which loops and branches it is in."""

from collections.abc import Iterator
from typing import NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr


class Found(NamedTuple):
    """An equation, the primitives it is nested in, and how often scans repeat it."""

    eqn: object
    inside: tuple[str, ...]
    times: int

    @property
    def name(self) -> str:
        return self.eqn.primitive.name

    @property
    def axes(self) -> tuple:
        """Mesh axes of a collective."""
        axes = self.eqn.params.get("axes") or self.eqn.params.get("axis_name") or ()
        return axes if isinstance(axes, tuple) else (axes,)

    @property
    def is_collective(self) -> bool:
        return any(isinstance(axis, str) for axis in self.axes) and self.name != "axis_index"


def walk(jaxpr, inside=(), times=1) -> Iterator[Found]:
    """Yields all equations of a jaxpr and of those within it."""
    for eqn in jaxpr.eqns:
        yield Found(eqn, inside, times)
        name = eqn.primitive.name
        repeated = times * eqn.params["length"] if name == "scan" else times
        for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: isinstance(x, Jaxpr | ClosedJaxpr)):
            if isinstance(value, Jaxpr | ClosedJaxpr):
                yield from walk(getattr(value, "jaxpr", value), (*inside, name), repeated)


def is_host(atom) -> bool:
    """Returns whether a variable of a jaxpr is typed as lying in host memory."""
    return "<host>" in str(atom.aval)
