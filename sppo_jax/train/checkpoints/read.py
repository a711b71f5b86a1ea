"""Reading checkpoints: found by run directory or path, whole or the parameters alone.

A checkpoint is a directory named by its step with two items: `state` (the logical tree: layers stacked, whatever the
mesh) and `run` (JSON: config, plan, position in the data, fingerprints of the arrays). Arrays have zeros at the ends of
dims that the devices of the run did not divide; they are read without, or with those that another mesh needs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from flax import nnx

from sppo_jax.files.whole import check_encoding, parse_json
from sppo_jax.processes import distributed
from sppo_jax.train.checkpoints.fingerprint import fingerprints, first_not_finite, leaf_name
from sppo_jax.train.state import TrainState, from_tree, to_tree

STATE, RUN = "state", "run"


def checkpoint_steps(directory: Path) -> list[int]:
    """Returns the steps of the checkpoints in a directory that are finished, newest first."""
    if not directory.is_dir():
        return []
    return sorted((int(path.name) for path in directory.iterdir() if is_checkpoint(path)), reverse=True)


def bytes_to_save(directory: Path, checkpoint_bytes: int) -> int:
    """Returns the bytes that checkpoints still need: two are there for a while, of which a directory may have one.

    Args:
        directory: of checkpoints; need not exist.
        checkpoint_bytes: of one.
    """
    return checkpoint_bytes if checkpoint_steps(directory) else 2 * checkpoint_bytes


def other_folders(directory: Path, num_steps: int) -> list[Path]:
    """Returns folders that have names of steps to come and are no checkpoints, such as those of years.

    Args:
        directory: of checkpoints; need not exist.
        num_steps: the last step of the run.
    """
    last = max(checkpoint_steps(directory), default=0)
    named = [path for path in directory.iterdir() if _step_of(path) is not None] if directory.is_dir() else []
    return sorted(path for path in named if last < int(path.name) <= num_steps and not is_checkpoint(path))


def find_checkpoint(path: Path) -> Path:
    """Returns a checkpoint by its own path, or the newest of a checkpoints or run directory.

    Raises:
        ValueError: there is none.
    """
    for directory in (path, path / "checkpoints"):
        steps = checkpoint_steps(directory)
        if steps:
            check_encoding(directory, "a checkpoint")
            return directory / str(steps[0])
    if is_checkpoint(path):
        check_encoding(path, "a checkpoint")
        return path
    raise ValueError(
        f"the path must be a checkpoint or a run directory with a checkpoint, got {path}; give another path"
    )


def read_run(checkpoint: Path) -> dict[str, Any]:
    """Returns what a checkpoint records about its run: `config`, `plan`, `data`, `step`.

    Raises:
        ValueError: it cannot be read.
    """
    try:
        return parse_json((checkpoint / RUN / "metadata").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"a checkpoint must say which run wrote the checkpoint, got {checkpoint} ({error}); use another checkpoint"
        ) from None


def load_params(checkpoint: Path, shapes: nnx.State, stored: nnx.State | None = None) -> nnx.State:
    """Loads the parameters alone, each straight onto its devices.

    Args:
        checkpoint: from `find_checkpoint`.
        shapes: the tree of `nnx.state(model, nnx.Param)` with `jax.ShapeDtypeStruct`s or abstract values; where a leaf
            has a sharding it is loaded so, else onto the default device.
        stored: the same tree in the shapes in which it is wanted (`sppo_jax.stored_shapes`); None: in `shapes`.

    Returns:
        The parameters in that tree.

    Raises:
        ValueError: the checkpoint is torn, or of another model.
    """
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])

    def wanted(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=getattr(leaf, "sharding", None) or one)

    like = shapes if stored is None else stored
    abstract, run = {"params": jax.tree.map(wanted, nnx.to_pure_dict(like))}, read_run(checkpoint)
    try:
        problem = _other_shapes(checkpoint, run, shapes)
        saved = None if problem else read_arrays(checkpoint, abstract)
    except Exception as error:  # orbax and tensorstore raise many kinds for a torn file
        raise ValueError(
            f"a checkpoint must hold the whole model, got {checkpoint} ({first_line(error)}); use another checkpoint"
        ) from None
    if problem := problem or changed_arrays(saved, run, checkpoint):
        raise ValueError(
            f"a checkpoint must hold the whole model, got {checkpoint} ({problem}); use another checkpoint"
        )
    params = jax.tree.map(lambda leaf: leaf, like)
    nnx.replace_by_pure_dict(params, saved["params"])
    return params


def read_arrays(checkpoint: Path, wanted: Any) -> Any:
    """Reads arrays of a checkpoint, each straight onto its devices, cut or padded with zeros to the wanted shapes.

    The values cut off must be zeros; `changed_arrays` checks that.

    Args:
        checkpoint: its directory.
        wanted: shapes, dtypes and shardings, in the whole tree that was saved or a part of it.

    Raises:
        Exception: of many kinds, where a file is torn or of another shape.
    """
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), wanted)
    restore_args = jax.tree.map(
        lambda args: dataclasses.replace(args, strict=False),
        ocp.checkpoint_utils.construct_restore_args(shapes, jax.tree.map(lambda x: x.sharding, wanted)),
    )
    args = ocp.args.PyTreeRestore(item=shapes, restore_args=restore_args, partial_restore=True)
    # The handler itself, not a Checkpointer: a process that fails must not leave the others waiting at a barrier.
    handler = ocp.PyTreeCheckpointHandler()
    try:
        return handler.restore((checkpoint / STATE).resolve(), args=args)
    finally:
        handler.close()


def shapes_of(params: nnx.State) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every parameter by its name in a checkpoint."""
    leaves = jax.tree_util.tree_leaves_with_path({"params": nnx.to_pure_dict(params)})
    return {leaf_name(path): tuple(leaf.shape) for path, leaf in leaves}


def _other_shapes(checkpoint: Path, run: Mapping[str, Any], shapes: nnx.State) -> str:
    """Returns a sentence that names a parameter whose shape is not the wanted one; "" if there is none."""
    wanted = shapes_of(shapes)
    # A checkpoint that does not record the shapes has its arrays in their own shapes.
    saved = run.get("shapes") or _shapes_on_disk(checkpoint)
    for name, shape in wanted.items():
        if tuple(saved.get(name, ())) != shape:
            return f"{name} must have the shape {list(shape)}, got {list(saved.get(name, ()))}"
    return ""


def _shapes_on_disk(checkpoint: Path) -> dict[str, tuple[int, ...]]:
    handler = ocp.PyTreeCheckpointHandler()
    try:
        found = handler.metadata((checkpoint / STATE).resolve())
    finally:
        handler.close()
    leaves = jax.tree_util.tree_leaves_with_path(found.tree)
    return {leaf_name(path): tuple(leaf.shape) for path, leaf in leaves}


def changed_arrays(tree: Any, run: Mapping[str, Any], checkpoint: Path) -> str:
    """Returns a sentence that names an array whose values are not those that were saved; "" if there is none.

    Args:
        tree: the arrays, all that were saved or a part of them.
        run: what was saved beside them, with their fingerprints.
        checkpoint: where that was.
    """
    if "fingerprints" not in run:
        return "the checkpoint lacks the fingerprints of the arrays"
    first_version = run.get("fingerprint_version", 1) == 1
    saved, got = run["fingerprints"], fingerprints(tree, _shapes_on_disk(checkpoint) if first_version else None)
    changed = [name for name, value in got.items() if saved.get(name) != value]
    return f"{len(changed)} of {len(got)} arrays differ from the saved arrays, e.g. {changed[0]}" if changed else ""


def is_checkpoint(path: Path) -> bool:
    """Returns whether a folder is a checkpoint, by its name and by the items within: a name alone may be a year."""
    return _step_of(path) is not None and (path / STATE).is_dir() and (path / RUN).is_dir()


def _step_of(path: Path) -> int | None:
    """Returns the step for which a checkpoint of this name would be; None if there is no such step."""
    name = path.name
    return int(name) if name.isascii() and name.isdecimal() and name == str(int(name)) else None


def first_line(error: Exception) -> str:
    """Returns the first line of an error's text, at most 200 characters of it."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


@dataclass(frozen=True, kw_only=True)
class Restored:
    """A state that was saved, and what was saved beside it."""

    state: TrainState
    run: dict[str, Any]


def restore_newest(directory: Path, shapes: TrainState, report: Callable[[str], None]) -> Restored | None:
    """Loads the newest checkpoint that is whole and sets newer ones aside.

    Args:
        directory: of the run's checkpoints.
        shapes: the state's shapes, dtypes and shardings, of any mesh.
        report: called with a line for each checkpoint that is passed over.

    Returns:
        What was saved; None where there is no checkpoint.

    Raises:
        ValueError: there are checkpoints, but not one is whole.
    """
    broken: dict[Path, str] = {}
    for step in checkpoint_steps(directory):
        path = directory / str(step)
        restored, why = _try(path, shapes)
        if restored:
            for torn, reason in broken.items():
                report(f"skipped the checkpoint {torn}: {reason}; renamed to {_set_aside(torn).name}")
            return restored
        broken[path] = why
    if broken:
        path, why = next(iter(broken.items()))
        raise ValueError(
            f"at least one checkpoint of the run must be whole, got none of {len(broken)} in {directory} "
            f"({path.name}: {why}); move the checkpoints away to start over"
        )
    return None


def restore(checkpoint: Path, shapes: TrainState, params: nnx.State) -> TrainState:
    """Loads the whole state of one checkpoint; all processes must call it.

    Args:
        checkpoint: from `find_checkpoint`.
        shapes: the state's shapes, dtypes and shardings, of any mesh.
        params: the parameters' shapes without the zeros of a mesh.

    Raises:
        ValueError: the checkpoint is torn, or of another model.
    """
    rule = f"a checkpoint must hold the whole state of the model, got {checkpoint}"

    def check() -> None:
        if problem := _other_shapes(checkpoint, read_run(checkpoint), params):
            raise ValueError(f"{rule} ({problem}); use another checkpoint")

    distributed.together(check)
    restored, why = _try(checkpoint, shapes)
    if restored is None:
        raise ValueError(f"{rule} ({why}); use another checkpoint")
    return restored.state


def _try(path: Path, shapes: TrainState) -> tuple[Restored | None, str]:
    """Loads one checkpoint; all processes agree on the result."""
    restored, error = None, None
    try:
        restored = _load(path, shapes)
    except ValueError as problem:
        error = str(problem)
    except Exception as problem:  # orbax and tensorstore raise many kinds for a torn file
        error = f"the checkpoint cannot be read ({first_line(problem)})"
    try:
        distributed.agree(error)
    except ValueError as problem:
        return None, str(problem)
    assert restored is not None
    tree = to_tree(restored.state)
    if problem := changed_arrays(tree, restored.run, path):
        return None, problem
    if name := first_not_finite(tree):
        return None, f"{name} has a value that is not finite"
    return restored, ""


def _load(path: Path, shapes: TrainState) -> Restored:
    run = read_run(path)
    missing = {"config", "plan", "data", "fingerprints"} - set(run)
    if missing:
        raise ValueError(f"the checkpoint lacks {', '.join(sorted(missing))}")
    return Restored(state=from_tree(read_arrays(path, to_tree(shapes)), shapes), run=run)


def _set_aside(path: Path) -> Path:
    """Renames a checkpoint that is not whole, so that its step can be saved again and the files can be inspected."""
    number = 0
    while (aside := path.with_name(f"{path.name}.broken-{number}")).exists():
        number += 1
    if distributed.is_main():
        path.rename(aside)
    distributed.agree(None)
    return aside
