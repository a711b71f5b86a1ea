"""Reading checkpoints: found by run directory or path, whole or the parameters alone.

A checkpoint is a directory named by its step with two items: `state` (the logical tree: layers stacked, whatever the
mesh) and `run` (JSON: config, plan, position in the data, fingerprints of the arrays).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from flax import nnx

STATE, RUN = "state", "run"


def checkpoint_steps(directory: Path) -> list[int]:
    """Return the steps of the checkpoints in a directory that are finished, newest first."""
    if not directory.is_dir():
        return []
    return sorted((int(path.name) for path in directory.iterdir() if _is_checkpoint(path)), reverse=True)


def find_checkpoint(path: Path) -> Path:
    """Return a checkpoint by its own path, or the newest of a checkpoints or run directory.

    Raises:
        ValueError: there is none.
    """
    for directory in (path, path / "checkpoints"):
        steps = checkpoint_steps(directory)
        if steps:
            return directory / str(steps[0])
    if _is_checkpoint(path):
        return path
    raise ValueError(f"a checkpoint or a run directory with one was expected, got {path} with none; give another")


def read_run(checkpoint: Path) -> dict[str, Any]:
    """Return what a checkpoint says of its run: `config`, `plan`, `data`, `step`.

    Raises:
        ValueError: it cannot be read.
    """
    try:
        return json.loads((checkpoint / RUN / "metadata").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"a checkpoint must say of which run it is, got {checkpoint} ({error}); use another") from None


def load_params(checkpoint: Path, shapes: nnx.State) -> nnx.State:
    """Load the parameters alone, each straight onto its devices.

    Args:
        checkpoint: from `find_checkpoint`.
        shapes: the tree of `nnx.state(model, nnx.Param)` with `jax.ShapeDtypeStruct`s or abstract values; where a leaf
            has a sharding it is loaded so, else onto the default device.

    Returns:
        The parameters in that tree.

    Raises:
        ValueError: the checkpoint is torn, or of another model.
    """
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])

    def wanted(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=getattr(leaf, "sharding", None) or one)

    abstract = {"params": jax.tree.map(wanted, nnx.to_pure_dict(shapes))}
    restore_args = ocp.checkpoint_utils.construct_restore_args(abstract)
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            saved = checkpointer.restore(
                (checkpoint / STATE).resolve(),
                args=ocp.args.PyTreeRestore(item=abstract, restore_args=restore_args, partial_restore=True),
            )
    except Exception as error:  # orbax and tensorstore raise many kinds for a torn file
        raise ValueError(f"{checkpoint} does not hold this model whole ({first_line(error)}); use another") from None
    params = jax.tree.map(lambda leaf: leaf, shapes)
    nnx.replace_by_pure_dict(params, saved["params"])
    return params


def _is_checkpoint(path: Path) -> bool:
    return path.name.isdigit() and (path / STATE).is_dir() and (path / RUN).is_dir()


def first_line(error: Exception) -> str:
    """Return the first line of an error's text, at most 200 characters of it."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
