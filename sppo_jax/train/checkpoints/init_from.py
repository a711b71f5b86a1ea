"""The first state of a run from the weights of another run, with the optimizer's moments where they are asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

from sppo_jax.config import Config, to_dict
from sppo_jax.files.paths import local_path
from sppo_jax.models import build_model
from sppo_jax.processes import distributed
from sppo_jax.train.checkpoints.layer_order import rearrange
from sppo_jax.train.checkpoints.read import find_checkpoint, load_params, read_run, restore
from sppo_jax.train.state import TrainState, state_from

# Fields of a model that say where its weights came from or how they are computed with, not what they mean.
_BESIDE = ("kernel", "compute_dtype", "preset", "hf", "init_scale", "check_kernels")
_NOTHING = np.int32(0)  # times a number of all processes it is a number of all processes


def state_of_run(
    config: Config, optimizer: optax.GradientTransformation, shapes: TrainState, saved_shapes: TrainState
) -> tuple[TrainState, str]:
    """Returns the state of step 0 with the weights that `train.init` names, and a sentence about them.

    Moments keep their own count of steps, which corrects their bias; the learning rate starts from step 0.

    Args:
        config: the settings; `train.init` is a run directory or a checkpoint.
        optimizer: of the run.
        shapes: of its state.
        saved_shapes: of its state as a checkpoint has them.

    Raises:
        ValueError: there is no checkpoint, it is torn, or it is of a model of another shape.
    """
    checkpoint = distributed.together(lambda: find_checkpoint(local_path(str(config.train.init), "train.init")))
    checkpoint = Path(distributed.share_text(str(checkpoint)))  # processes may see a new one at different times
    run = distributed.together(lambda: read_run(checkpoint))
    of_model = nnx.state(build_model(config, abstract=True), nnx.Param)
    if config.train.init_optimizer:
        state = rearrange(restore(checkpoint, saved_shapes, of_model), shapes)
        counts = {name: getattr(state, name) * _NOTHING for name in ("step", "num_skipped", "num_skipped_in_row")}
        state = state._replace(opt_state=_from_first_step(state.opt_state), **counts)
        what = "the weights and moments"
    else:
        params = distributed.together(lambda: load_params(checkpoint, of_model, saved_shapes.params))
        state = state_from(rearrange(params, shapes.params), optimizer, shapes)
        what = "the weights"
    before, after = run.get("config", {}).get("model", {}), to_dict(config)["model"]
    changes = "".join(f"; model.{name}: {old} -> {new}" for name, old, new in _changes(before, after))
    unread = f"; the weights in {config.model.hf} are not read" if config.model.hf else ""
    return state, f"from {what} in {checkpoint}{changes}{unread}"


def _from_first_step(opt_state: optax.OptState) -> optax.OptState:
    """Returns an optimizer's state whose learning rate is that of the first step."""

    def is_schedule(node: Any) -> bool:
        return isinstance(node, optax.ScaleByScheduleState)

    return jax.tree.map(
        lambda node: node._replace(count=node.count * _NOTHING) if is_schedule(node) else node,
        opt_state,
        is_leaf=is_schedule,
    )


def _changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    for name, value in after.items():
        if name in before and before[name] != value and name not in _BESIDE:
            yield name, before[name], value
