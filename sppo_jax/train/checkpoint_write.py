"""Writing parameters alone as a checkpoint, for what reads them with `checkpoint_read`."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import orbax.checkpoint as ocp
from flax import nnx

from sppo_jax.config import Config
from sppo_jax.train.checkpoint_read import RUN, STATE


def save_params(directory: Path, params: nnx.State, config: Config) -> Path:
    """Write `directory/0`: parameters before any step, without an optimizer's state or a place in the data.

    Args:
        directory: of checkpoints.
        params: the tree of `nnx.state(model, nnx.Param)`.
        config: saved beside them.

    Returns:
        The checkpoint's path.
    """
    logging.getLogger("absl").setLevel(logging.ERROR)
    items = ocp.args.Composite(
        **{
            STATE: ocp.args.StandardSave({"params": nnx.to_pure_dict(params)}),
            RUN: ocp.args.JsonSave({"config": dataclasses.asdict(config), "step": 0}),
        }
    )
    with ocp.CheckpointManager(directory.resolve()) as manager:
        manager.save(0, args=items)
    return directory / "0"
