"""Saves a run's state with Orbax: the logical tree, layers stacked, alike for every mesh.

An asynchronous save copies the state to host memory and is written while training goes on. A blocking save needs host
memory for one array: the state itself is put in order, and array after array is written while training waits.
"""

from __future__ import annotations

import gc
import logging
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from flax import nnx
from orbax.checkpoint import checkpoint_managers
from orbax.checkpoint._src.serialization import types as serialization  # the place that Orbax's own docs import

from sppo_jax.config import CheckpointConfig, Config, to_dict
from sppo_jax.train.checkpoints.fingerprint import stamp
from sppo_jax.train.checkpoints.layer_order import in_order, rearrange
from sppo_jax.train.checkpoints.read import RUN, STATE, is_checkpoint
from sppo_jax.train.state import TrainState, to_tree

_OF_ORBAX = "_CHECKPOINT_METADATA"
_VALIDATION_LOSS, _DISK_FULL = "validation_loss", "No space left on device"
# How a validation loss was measured. Runs of older versions measured whole batches, some sequences twice, and do not
# say so.
ONE_PASS = "one pass"


class Checkpoints:
    """Writes checkpoints of one run, one at a time, and keeps those that the config asks for."""

    def __init__(
        self,
        directory: Path,
        config: CheckpointConfig,
        shapes: TrainState,
        *,
        running: TrainState | None = None,
        beat: Callable[[], None] = lambda: None,
    ):
        """Opens the directory and removes what a killed save left.

        Args:
            directory: holds all checkpoints of the run; created if needed.
            config: says which checkpoints to keep.
            shapes: of the state in a checkpoint, with shardings.
            running: the same of the state where it runs, for blocking saves; None: saves are asynchronous.
            beat: called at each array while training waits; from several threads.
        """
        self.directory, self._config, self._shapes, self._running = directory, config, shapes, running
        self._beat = beat
        self._manager = self._open()
        self._saving: int | None = None
        self.problem: str | None = None  # why the newest save failed; None where the save succeeded or runs

    def _open(self) -> ocp.CheckpointManager:
        # Orbax logs each item of each save, and a failed one with many tracebacks; the run itself says what matters.
        for name in ("absl", "asyncio"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        if sys.unraisablehook is sys.__unraisablehook__:
            sys.unraisablehook = _except_late_writes
        options = ocp.CheckpointManagerOptions(
            preservation_policy=_what_to_keep(self._config),
            best_fn=_loss_of,  # without it the loss is not written down
            best_mode="min",
            cleanup_tmp_directories=True,
            step_name_format=OwnSteps(),
        )
        one_by_one = {STATE: _array_by_array(self._beat), RUN: ocp.JsonCheckpointHandler()}
        handlers = None if self._running is None else one_by_one
        return ocp.CheckpointManager(self.directory.resolve(), options=options, item_handlers=handlers)

    def save(
        self, state: TrainState, run: Mapping[str, Any], *, step: int, loss: float | None = None
    ) -> tuple[TrainState, str | None]:
        """Begins to write `directory/step`, which appears there whole or not at all; waits for the save before.

        An asynchronous save has copied the arrays before this returns: they may be given away then. A blocking one is
        written before this returns.

        Args:
            state: to save; a blocking save gives up its arrays.
            run: JSON to save beside it.
            step: of the state, and the checkpoint's name.
            loss: of validation of this state, in nats; decides which checkpoints are best, if it is finite.

        Returns:
            The state to go on with, and why the save before, or this one, failed; None where neither did.
        """
        problem = self.finish()
        beside = {**run, **stamp(to_tree(state), to_tree(self._shapes), self._beat)}
        if self._running is None:
            return state, self._begin(to_tree(in_order(state, self._shapes, self._beat)), beside, step, loss) or problem
        state = rearrange(state, self._shapes, self._beat)
        problem = self._begin(to_tree(state), beside, step, loss) or self.finish() or problem
        return rearrange(state, self._running, self._beat), problem

    def _begin(self, tree: dict[str, Any], run: Mapping[str, Any], step: int, loss: float | None) -> str | None:
        """Begins to write a tree whose layers are in order; returns why that failed, None if it did not."""
        measured = loss is not None and math.isfinite(loss)
        metrics = {_VALIDATION_LOSS: loss, "measured": ONE_PASS} if measured else None
        of_state = ocp.args.StandardSave(tree) if self._running is None else ocp.args.PyTreeSave(tree)
        items = ocp.args.Composite(**{STATE: of_state, RUN: ocp.args.JsonSave(run)})
        try:
            if self._manager.save(step, args=items, metrics=metrics, force=True):
                self._saving, self.problem = step, None
        except Exception as error:  # a full or vanished disk, in the words of orbax, tensorstore or the system
            return self._start_over(step, error)
        return None

    def finish(self) -> str | None:
        """Waits for the running save; returns why it failed, None if it did not."""
        try:
            self._manager.wait_until_finished()
        except Exception as error:  # as in save
            return self._start_over(self._saving, error)
        finally:
            self._saving = None
        return None

    def close(self) -> str | None:
        """Finishes and closes; returns why the last save failed, None if it did not."""
        problem = self.finish()
        self._manager.close()
        return problem

    @property
    def steps(self) -> list[int]:
        """Steps of the existing checkpoints, oldest first."""
        return sorted(self._manager.all_steps())

    def _start_over(self, step: int | None, error: Exception) -> str:
        """Opens the directory again after a failed save, because the old manager would fail at every later save."""
        text = " ".join(str(error).split())
        text = _DISK_FULL if _DISK_FULL in text else text[:200]
        self._manager = self._open()
        _collect_quietly()
        self.problem = f"the checkpoint of step {step} was not saved ({text})"
        return f"{self.problem}; the run continues and retries"


class OwnSteps(ocp.path.step.NameFormat):
    """Names of steps as Orbax writes them; other folders with numbers for names are not seen, kept or deleted."""

    def __init__(self) -> None:
        """Takes the names of Orbax."""
        self._names = ocp.path.step.standard_name_format()

    def build_name(self, step: int) -> str:
        """Returns the name of a step's folder."""
        return self._names.build_name(step)

    def find_all(self, base_path: Any) -> Iterator[Any]:
        """Yields what Orbax knows of each checkpoint in a directory."""
        found = ((step, Path(step.path)) for step in self._names.find_all(base_path))
        # What a killed process has half deleted is still to be deleted: Orbax's own file marks it.
        return (step for step, path in found if is_checkpoint(path) or (path / _OF_ORBAX).exists())

    def find_step(self, base_path: Any, step: int) -> Any:
        """Returns what Orbax knows of the checkpoint of a step."""
        return self._names.find_step(base_path, step)


class OneByOne(serialization.DefaultSerializationStatusCallback):
    """Lets Orbax copy no array to the host before the arrays before are written, and tells of each array."""

    def __init__(self, beat: Callable[[], None] = lambda: None) -> None:
        """Takes what is called, in a thread of Orbax, when an array is on the host and when it is written."""
        self._beat = beat

    def key_priority(self, _: Any) -> serialization.TransferPriority:
        return serialization.TransferPriority.ASYNCHRONOUS_DEPRIORITIZED

    def on_transfer_end(self, _: Any) -> None:
        self._beat()

    def on_write_end(self, _: Any) -> None:
        self._beat()


def _array_by_array(beat: Callable[[], None]) -> ocp.PyTreeCheckpointHandler:
    """Returns a handler that copies one array to the host at a time, whatever its size; saves are not asynchronous."""
    arrays = ocp.type_handlers.ArrayHandler(callback=OneByOne(beat))
    registry = ocp.type_handlers.create_type_handler_registry((jax.Array, arrays))
    one_byte_in_gb = 1e-9  # arrays that are larger than the limit go alone
    return ocp.PyTreeCheckpointHandler(save_device_host_concurrent_gb=one_byte_in_gb, type_handler_registry=registry)


def _collect_quietly() -> None:
    """Collects the coroutines that a failed save left behind, because each would print a traceback."""
    hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
    try:
        gc.collect()
    finally:
        sys.unraisablehook = hook


def _except_late_writes(problem: Any) -> None:
    """Reports an error that nothing caught, but not that a write of a failed save ended after the save."""
    if str(problem.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(problem)


def _loss_of(metrics: Mapping[str, float]) -> float:
    return metrics[_VALIDATION_LOSS]


def _what_to_keep(config: CheckpointConfig) -> checkpoint_managers.PreservationPolicy:
    policies: list[checkpoint_managers.PreservationPolicy] = [checkpoint_managers.LatestN(config.keep_last)]
    if config.keep_every:
        policies.append(checkpoint_managers.EveryNSteps(config.keep_every))
    if config.keep_best:
        policies.append(_Best(config.keep_best))
    return checkpoint_managers.AnyPreservationPolicy(policies)


class _Best(checkpoint_managers.PreservationPolicy):
    """Keeps the checkpoints of lowest validation loss: the best of one pass, and the best of an older version's rule.

    Losses of the two rules do not compare, so neither takes the other's place.
    """

    def __init__(self, num_kept: int) -> None:
        """Takes the number of checkpoints to keep of each rule."""
        self._num_kept = num_kept

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> Sequence[bool]:
        """Returns for each checkpoint whether it is among the best; of equal ones the newest are."""
        groups: dict[Any, list[tuple[float, int]]] = {}
        for info in checkpoints:
            if info.metrics is not None and math.isfinite(_loss_of(info.metrics)):
                groups.setdefault(info.metrics.get("measured"), []).append((_loss_of(info.metrics), -info.step))
        best = {-step for group in groups.values() for _, step in sorted(group)[: self._num_kept]}
        return [info.step in best for info in checkpoints]


def save_params(directory: Path, params: nnx.State, config: Config) -> Path:
    """Writes `directory/0`: parameters before any step, without an optimizer's state or a place in the data.

    Args:
        directory: of checkpoints.
        params: the tree of `nnx.state(model, nnx.Param)`.
        config: saved beside them.

    Returns:
        The checkpoint's path.
    """
    logging.getLogger("absl").setLevel(logging.ERROR)
    tree = {"params": nnx.to_pure_dict(params)}
    run = {"config": to_dict(config), "step": 0, **stamp(tree, tree)}
    items = ocp.args.Composite(**{STATE: ocp.args.StandardSave(tree), RUN: ocp.args.JsonSave(run)})
    with ocp.CheckpointManager(directory.resolve()) as manager:
        manager.save(0, args=items)
    return directory / "0"
