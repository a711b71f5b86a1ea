"""What a training step changes, made directly on the devices where it belongs."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sppo_jax.config import Config
from sppo_jax.models import build_model


class TrainState(NamedTuple):
    """Number of steps done, parameters in the tree of `nnx.state(model, nnx.Param)`, and the optimizer's state."""

    step: jax.Array
    params: nnx.State
    opt_state: optax.OptState


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
    return TrainState(step=everywhere, params=param_shardings, opt_state=opt_state)


def init_state(config: Config, optimizer: optax.GradientTransformation, shardings: TrainState) -> TrainState:
    """Create the state of step 0; no device ever holds more than its own part.

    Args:
        config: the model and its seed.
        optimizer: gives the optimizer's first state.
        shardings: from `state_shardings`.
    """

    def create() -> TrainState:
        params = nnx.state(build_model(config), nnx.Param)
        return TrainState(step=jnp.zeros((), jnp.int32), params=params, opt_state=optimizer.init(params))

    return jax.jit(create, out_shardings=shardings)()
