"""The state that a training step changes, created directly on its devices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sppo_jax.compat import in_device_memory, is_host
from sppo_jax.config import Config
from sppo_jax.models import build_model
from sppo_jax.pipeline.params.storage import store


class TrainState(NamedTuple):
    """The state of a run after a step.

    Attributes:
        step: int32 number of steps done, skipped ones included.
        num_skipped: int32 number of steps skipped for a loss, gradient or new state that was not finite.
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
    """Returns the state before any step."""
    zero = jnp.zeros((), jnp.int32)
    return TrainState(step=zero, num_skipped=zero, num_skipped_in_row=zero, params=params, opt_state=opt_state)


def state_shapes(optimizer: optax.GradientTransformation, stored: nnx.State, mesh: Mesh) -> TrainState:
    """Returns shapes, dtypes and shardings of a run's state, without any array.

    Moments lie where their parameters lie. Every device has the scalars.

    Args:
        optimizer: whose state it is.
        stored: parameters with their shardings, arrays or shapes from `pipeline.params.storage.stored_shapes`.
        mesh: over which the scalars are replicated.
    """
    everywhere = NamedSharding(mesh, PartitionSpec())
    shapes = jax.eval_shape(lambda params: first_state(params, optimizer.init(params)), stored)

    def place(like: jax.ShapeDtypeStruct, sharding: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=sharding)

    opt_state = optax.tree_map_params(
        optimizer,
        lambda moment, param: place(moment, param.sharding),
        shapes.opt_state,
        stored,
        transform_non_params=lambda leaf: place(leaf, everywhere),
    )
    return TrainState(
        step=place(shapes.step, everywhere),
        num_skipped=place(shapes.num_skipped, everywhere),
        num_skipped_in_row=place(shapes.num_skipped_in_row, everywhere),
        params=jax.tree.map(lambda leaf: place(leaf, leaf.sharding), stored),
        opt_state=opt_state,
    )


def shardings_of(shapes: TrainState) -> TrainState:
    """Returns the shardings of `state_shapes`."""
    return jax.tree.map(lambda leaf: leaf.sharding, shapes)


def on_host(shardings: TrainState) -> bool:
    """Returns whether parameters wait on the host, by the shardings of a state."""
    return any(is_host(sharding) for sharding in jax.tree.leaves(shardings.params))


def init_state(config: Config, optimizer: optax.GradientTransformation, shapes: TrainState) -> TrainState:
    """Creates the state of step 0; no device holds more than its own part at any time.

    Args:
        config: the model and its seed.
        optimizer: gives the optimizer's first state.
        shapes: from `state_shapes`.
    """

    shardings = shardings_of(shapes)

    def make_params() -> nnx.State:
        return store(nnx.state(build_model(config), nnx.Param), shapes.params)

    def create() -> TrainState:
        params = make_params()
        return first_state(params, optimizer.init(params))

    if not on_host(shardings):
        return jax.jit(create, out_shardings=shardings)()
    params = jax.jit(make_params, out_shardings=jax.tree.map(in_device_memory, shardings.params))()
    return state_from(jax.tree.map(move, params, shardings.params), optimizer, shapes)


def move(x: jax.Array, sharding: jax.sharding.Sharding) -> jax.Array:
    """Moves an array to the memory of a sharding like its own; the array is given up if it moves."""
    if x.sharding.memory_kind == sharding.memory_kind:
        return x
    moved = jax.block_until_ready(jax.device_put(x, sharding))
    x.delete()
    return moved


def state_from(params: nnx.State, optimizer: optax.GradientTransformation, shapes: TrainState) -> TrainState:
    """Creates the state of step 0 from existing parameters, whose memory the state takes over.

    Args:
        params: placed as `shapes` say.
        optimizer: gives the optimizer's first state.
        shapes: from `state_shapes`.
    """

    shardings = shardings_of(shapes)

    def create(params: nnx.State) -> TrainState:
        return first_state(params, optimizer.init(params))

    if not on_host(shardings):
        return jax.jit(create, out_shardings=shardings, donate_argnums=0)(params)

    # AdamW's first state is zeros; one array at a time, as the device has no space for all.
    def zeros(like: jax.ShapeDtypeStruct) -> jax.Array:
        return move(jnp.zeros(like.shape, like.dtype, device=in_device_memory(like.sharding)), like.sharding)

    return jax.tree.map(zeros, shapes._replace(params=()))._replace(params=params)


def to_tree(state: TrainState) -> dict[str, Any]:
    """Returns a state as plain dicts, which can be read by names alone."""
    return {**state._asdict(), "params": nnx.to_pure_dict(state.params)}


def from_tree(tree: Mapping[str, Any], like: TrainState) -> TrainState:
    """Returns a state from its tree: the inverse of `to_tree`.

    Args:
        tree: as `to_tree` returns it; the leaves may be of other types.
        like: a state with the structure of the result.
    """
    # A copy, because the next call replaces the values in place.
    params = nnx.from_flat_state(nnx.to_flat_state(like.params))
    nnx.replace_by_pure_dict(params, tree["params"])
    return TrainState(**{**tree, "params": params})
