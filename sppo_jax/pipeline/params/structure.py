"""The parts of a model that a program depends on, and a check that parameters belong to a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

from sppo_jax.pipeline.params.storage import home_of
from sppo_jax.plan.plan import Plan


@dataclass(frozen=True, eq=False)
class Structure:
    """A model without the values of its parameters; two are equal if the same program serves both.

    Args:
        graphdef: its modules.
        params: shapes of its parameters.
        others: all its other arrays, constants of a user's block; equal only if they are the same arrays.
    """

    graphdef: nnx.GraphDef
    params: nnx.State
    others: nnx.State

    @classmethod
    def of(cls, model: nnx.Module) -> Structure:
        """Returns the structure of a model."""
        graphdef, params, others = nnx.split(model, nnx.Param, ...)
        return cls(graphdef, jax.eval_shape(lambda: params), others)

    def model(self) -> nnx.Module:
        """Returns the model with shapes in place of its parameters."""
        return nnx.merge(self.graphdef, self.params, self.others)

    @property
    def _key(self) -> tuple:
        shapes = tuple((leaf.shape, str(leaf.dtype)) for leaf in jax.tree.leaves(self.params))
        return self.graphdef, shapes, tuple(map(id, jax.tree.leaves(self.others)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Structure) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


def check_params(params: Any, shapes: nnx.State, plan: Plan) -> None:
    """Checks that parameters belong to a model: in their own shapes, or as `pipeline.params.storage` stores them.

    Args:
        params: the parameters to check.
        shapes: shapes of the model's parameters.
        plan: says how they are stored.

    Raises:
        ValueError: they do not; the message gives the rule, the value and the change to make.
    """
    if not isinstance(params, nnx.State):
        got = "the model itself" if isinstance(params, nnx.Module) else f"a {type(params).__name__}"
        raise ValueError(f"params must be an nnx.State, got {got}; give nnx.state(model, nnx.Param)")
    given, wanted = _shapes(params), _shapes(shapes)
    for what, names in (("with", given.keys() - wanted.keys()), ("without", wanted.keys() - given.keys())):
        if names:
            name = "/".join(map(str, min(names, key=str)))
            raise ValueError(
                f"params must be those of the plan's model, got params {what} {name}; give nnx.state(model, nnx.Param)"
            )
    for name, shape in wanted.items():
        if given[name] not in (shape, home_of(name[0], shape, plan).shape):
            raise ValueError(
                f"params must have the shapes of the plan's model, got {list(given[name])} for "
                f"{'/'.join(map(str, name))}, whose shape is {list(shape)}; make the plan and the model from one config"
            )


def _shapes(params: nnx.State) -> dict[tuple, tuple[int, ...]]:
    return {path: tuple(jax.tree.leaves(leaf)[0].shape) for path, leaf in nnx.to_flat_state(params)}
