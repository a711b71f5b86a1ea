"""Saving a run's state with Orbax, in the logical tree: layers stacked, whatever the mesh."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
from flax import nnx

from sppo_jax.planner.plan import Plan
from sppo_jax.train.state import TrainState


def save_checkpoint(directory: Path, state: TrainState, plan: Plan, loader_state: dict[str, int]) -> Path:
    """Write `directory/STEP` whole or not at all, and wait until it is there.

    Args:
        directory: of all checkpoints of the run.
        state: to save; item `state` with keys step, params and opt_state.
        plan: saved beside it, with the loader's state, in the JSON item `run`.
        loader_state: from which the loader goes on.

    Returns:
        The checkpoint's path.
    """
    step = int(state.step)
    items = ocp.args.Composite(
        state=ocp.args.StandardSave(_plain(state)),
        run=ocp.args.JsonSave({"plan": json.loads(plan.to_json()), "loader": loader_state}),
    )
    with ocp.CheckpointManager(directory.resolve()) as manager:
        manager.save(step, args=items)
    return directory / str(step)


def _plain(state: TrainState) -> dict[str, Any]:
    """Return the parameters as plain dicts, so that nothing but names is needed to read them."""
    return {"step": state.step, "params": nnx.to_pure_dict(state.params), "opt_state": state.opt_state}
