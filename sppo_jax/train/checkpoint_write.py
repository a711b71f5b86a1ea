"""Writing parameters alone as a checkpoint, for what reads them with `checkpoint_read`."""

from __future__ import annotations

import logging
from pathlib import Path

import orbax.checkpoint as ocp
from flax import nnx

from sppo_jax.config import Config, to_dict
from sppo_jax.train.checkpoint_read import RUN, STATE
from sppo_jax.train.fingerprint import stamp


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
    tree = {"params": nnx.to_pure_dict(params)}
    run = {"config": to_dict(config), "step": 0, **stamp(tree)}
    items = ocp.args.Composite(**{STATE: ocp.args.StandardSave(tree), RUN: ocp.args.JsonSave(run)})
    with ocp.CheckpointManager(directory.resolve()) as manager:
        manager.save(0, args=items)
    return directory / "0"
