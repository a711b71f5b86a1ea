"""Finding the newest checkpoint that is whole, and loading it onto any mesh."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sppo_jax import distributed
from sppo_jax.train.checkpoint import from_tree, to_tree
from sppo_jax.train.checkpoint_read import changed_arrays, checkpoint_steps, first_line, read_arrays, read_run
from sppo_jax.train.state import TrainState


@dataclass(frozen=True, kw_only=True)
class Restored:
    """A state that was saved, and what was saved beside it."""

    state: TrainState
    run: dict[str, Any]


def restore_newest(directory: Path, shapes: TrainState, report: Callable[[str], None]) -> Restored | None:
    """Load the newest checkpoint that is whole; set those aside that are not.

    Args:
        directory: of the run's checkpoints.
        shapes: the state's shapes, dtypes and shardings, of any mesh.
        report: is told of each checkpoint that is passed over.

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
                report(f"passed over {torn}: {reason}; it is now {_set_aside(torn).name}")
            return restored
        broken[path] = why
    if broken:
        path, why = next(iter(broken.items()))
        raise ValueError(
            f"a checkpoint of the run must be whole, got none of {len(broken)} in {directory} "
            f"({path.name}: {why}); move them away to begin anew"
        )
    return None


def _try(path: Path, shapes: TrainState) -> tuple[Restored | None, str]:
    """Load one checkpoint; every process comes to the same verdict."""
    restored, error = None, None
    try:
        restored = _load(path, shapes)
    except ValueError as problem:
        error = str(problem)
    except Exception as problem:  # orbax and tensorstore raise many kinds for a torn file
        error = f"it cannot be read ({first_line(problem)})"
    try:
        distributed.agree(error)
    except ValueError as problem:
        return None, str(problem)
    assert restored is not None
    if problem := changed_arrays(to_tree(restored.state), restored.run, path):
        return None, problem
    return restored, ""


def _load(path: Path, shapes: TrainState) -> Restored:
    run = read_run(path)
    missing = {"config", "plan", "data", "fingerprints"} - set(run)
    if missing:
        raise ValueError(f"it does not say its {', '.join(sorted(missing))}")
    return Restored(state=from_tree(read_arrays(path, to_tree(shapes)), shapes), run=run)


def _set_aside(path: Path) -> Path:
    """Rename a checkpoint that is not whole, so that its step can be saved again, and it can be looked at."""
    number = 0
    while (aside := path.with_name(f"{path.name}.broken-{number}")).exists():
        number += 1
    if distributed.is_main():
        path.rename(aside)
    distributed.agree(None)
    return aside
