"""What a training step changes, made directly on the devices where it belongs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sppo_jax.config import Config
from sppo_jax.models import build_model
from sppo_jax.pipeline.storage import store


class TrainState(NamedTuple):
    """What a run is after a step.

    Attributes:
        step: int32 number of steps done, skipped ones included.
        num_skipped: int32 number of steps skipped for a loss or gradient that was not finite.
        num_skipped_in_row: int32 number of those since the last step that was not skipped.
        params: in the tree of `nnx.state(model, nnx.Param)`.
        opt_state: the optimizer's state.
    """

    step: jax.Array
    num_skipped: jax.Array
    num_skipped_in_row: jax.Array
    params: nnx.State
    opt_state: optax.OptState


def first_state(params: nnx.State, opt_state: optax.OptState) -> TrainState:
    """Return the state before any step."""
    zero = jnp.zeros((), jnp.int32)
    return TrainState(step=zero, num_skipped=zero, num_skipped_in_row=zero, params=params, opt_state=opt_state)


def state_shardings(
    optimizer: optax.GradientTransformation, params: nnx.State, param_shardings: nnx.State, mesh: Mesh
) -> TrainState:
    """Return shardings for a whole state: moments lie with their parameters, scalars everywhere.

    Args:
        optimizer: whose state it is.
        params: shapes of the parameters.
        param_shardings: a sharding for each.
        mesh: over which the scalars are replicated.
    """
    everywhere = NamedSharding(mesh, PartitionSpec())
    opt_state = optax.tree_map_params(
        optimizer,
        lambda _, sharding: sharding,
        jax.eval_shape(optimizer.init, params),
        param_shardings,
        transform_non_params=lambda _: everywhere,
    )
    return TrainState(
        step=everywhere,
        num_skipped=everywhere,
        num_skipped_in_row=everywhere,
        params=param_shardings,
        opt_state=opt_state,
    )


def state_shapes(optimizer: optax.GradientTransformation, stored: nnx.State, mesh: Mesh) -> TrainState:
    """Return shapes, dtypes and shardings of a run's state, without any array.

    Args:
        optimizer: whose state it is.
        stored: those of the parameters, from `pipeline.storage.stored_shapes`.
        mesh: over which the scalars are replicated.
    """
    shapes = jax.eval_shape(lambda params: first_state(params, optimizer.init(params)), stored)
    shardings = state_shardings(optimizer, stored, jax.tree.map(lambda leaf: leaf.sharding, stored), mesh)

    def place(shape: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)

    return jax.tree.map(place, shapes, shardings)


def shardings_of(shapes: TrainState) -> TrainState:
    """Return the shardings of `state_shapes`."""
    return jax.tree.map(lambda leaf: leaf.sharding, shapes)


def init_state(config: Config, optimizer: optax.GradientTransformation, shapes: TrainState) -> TrainState:
    """Create the state of step 0; no device ever holds more than its own part.

    Args:
        config: the model and its seed.
        optimizer: gives the optimizer's first state.
        shapes: from `state_shapes`.
    """

    def create() -> TrainState:
        params = store(nnx.state(build_model(config), nnx.Param), shapes.params)
        return first_state(params, optimizer.init(params))

    return jax.jit(create, out_shardings=shardings_of(shapes))()


def state_from(params: nnx.State, optimizer: optax.GradientTransformation, shardings: TrainState) -> TrainState:
    """Create the state of step 0 around parameters that are there, which it takes over.

    Args:
        params: placed as `shardings` say.
        optimizer: gives the optimizer's first state.
        shardings: from `state_shardings`.
    """

    def create(params: nnx.State) -> TrainState:
        return first_state(params, optimizer.init(params))

    return jax.jit(create, out_shardings=shardings, donate_argnums=0)(params)


def to_tree(state: TrainState) -> dict[str, Any]:
    """Return a state as plain dicts, so that nothing but names is needed to read it."""
    return {**state._asdict(), "params": nnx.to_pure_dict(state.params)}


def from_tree(tree: Mapping[str, Any], like: TrainState) -> TrainState:
    """Return the state whose tree was saved.

    Args:
        tree: as `to_tree` gives it, with other leaves perhaps.
        like: a state with the structure wanted.
    """
    # Copied, for what replaces the values does it in place.
    params = nnx.from_flat_state(nnx.to_flat_state(like.params))
    nnx.replace_by_pure_dict(params, tree["params"])
    return TrainState(**{**tree, "params": params})
