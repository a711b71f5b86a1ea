"""All parts of a run, made and checked before the run writes files or trains."""

from __future__ import annotations

import dataclasses
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

from sppo_jax.config import Config
from sppo_jax.data.ends import earlier_end_token
from sppo_jax.data.loader import Loader
from sppo_jax.data.open import prepare_data
from sppo_jax.data.rows.flex import FlexRows, check_start, window_pieces
from sppo_jax.data.rows.protocol import Rows
from sppo_jax.evaluation.context import plan_for_cuts
from sppo_jax.evaluation.placement import local_rows
from sppo_jax.evaluation.validate import Scores
from sppo_jax.flex.choose import gain, with_teams
from sppo_jax.flex.of_plan import window_shape
from sppo_jax.hardware import Cluster
from sppo_jax.models import build_model
from sppo_jax.models.hf.read import load_hf_params
from sppo_jax.pipeline import api
from sppo_jax.pipeline.params import layout, storage
from sppo_jax.plan.plan import Plan
from sppo_jax.processes import distributed
from sppo_jax.processes.prepare import prepare_process
from sppo_jax.rules import Facts, broken
from sppo_jax.search.make import costs_of
from sppo_jax.train.checkpoints import layer_order
from sppo_jax.train.checkpoints.init_from import state_of_run
from sppo_jax.train.checkpoints.read import Restored, bytes_to_save, other_folders, restore_newest
from sppo_jax.train.checkpoints.run_dir import checkpoint_directory
from sppo_jax.train.checkpoints.save import ONE_PASS
from sppo_jax.train.kernel_check import check_kernels_once
from sppo_jax.train.one_document import for_documents
from sppo_jax.train.rate import rate_change
from sppo_jax.train.state import TrainState, init_state, state_from, state_shapes
from sppo_jax.train.step import ValueAndGrad, make_optimizer, make_schedule


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """The parts of a run that fit together.

    Args:
        config: all settings.
        plan: the static decisions.
        mesh: devices, axes data, pipe and seq.
        kernel_check: what the check of attention's kernel came to here, in words.
        loader: this process's part of the training batches, without end.
        data_fingerprint: differs between data whose sequences differ.
        validation: the sequences held out; None if there are none.
        value_and_grad: loss and gradients of a batch.
        token_scores: each token's loss, and whether its target is the most likely token.
        cut_scores: the same of rows whose documents are cut; None without `train.eval_context`.
        schedule: learning rate by step.
        optimizer: turns gradients into updates.
        shapes: shapes, dtypes and shardings of the state.
        saved_shapes: the same of the state in a checkpoint, where layers lie in order.
    """

    config: Config
    plan: Plan
    mesh: Mesh
    kernel_check: str
    loader: Loader
    data_fingerprint: str
    validation: Rows | None
    value_and_grad: ValueAndGrad
    token_scores: Scores
    cut_scores: Scores | None
    schedule: optax.Schedule
    optimizer: optax.GradientTransformation
    shapes: TrainState
    saved_shapes: TrainState


# Windows whose documents decide whether teams are worth it.
_WINDOWS_LOOKED_AT = 4


def prepare(config: Config, plan: Plan, cluster: Cluster | None = None) -> Experiment:
    """Loads the data, chooses teams, prepares the process, and builds the model's programs for a plan.

    Args:
        config: all settings.
        plan: the static decisions.
        cluster: as for `make_plan`.

    Raises:
        ValueError: config, plan, data and devices do not fit together.
    """
    data = prepare_data(config)
    plan = for_documents(plan, data)
    plan, training = _with_teams(config, plan, data.training, cluster)
    prepare_process(plan, stall_s=config.train.stall_s)
    mesh = layout.make_mesh(plan)
    kernel_check = check_kernels_once(config, plan, *mesh.local_devices)
    rows = local_rows(mesh, config.num_sequences)
    model = build_model(config, abstract=True)
    params = nnx.state(model, nnx.Param)
    schedule = make_schedule(config.optimizer, config.train.steps)
    optimizer = make_optimizer(config.optimizer, schedule, params)
    return Experiment(
        config=config,
        plan=plan,
        mesh=mesh,
        kernel_check=kernel_check,
        loader=Loader(training, num_sequences=config.num_sequences, local_rows=rows),
        data_fingerprint=data.fingerprint,
        validation=data.validation,
        value_and_grad=api.value_and_grad(plan, model, mesh),
        token_scores=api.evaluate(plan, model, mesh),
        cut_scores=api.evaluate(plan_for_cuts(plan), model, mesh) if config.train.eval_context else None,
        schedule=schedule,
        optimizer=optimizer,
        shapes=state_shapes(optimizer, storage.stored_shapes(plan, params, mesh), mesh),
        saved_shapes=state_shapes(optimizer, storage.stored_shapes(plan, params, mesh, in_order=True), mesh),
    )


def _with_teams(config: Config, plan: Plan, rows: Rows, cluster: Cluster | None) -> tuple[Plan, Rows]:
    """Returns the plan and the rows, both with teams where the plan has or gets them."""
    seq, window = plan.mesh.seq, plan.num_sequences
    possible = seq > 1 and seq & (seq - 1) == 0
    if plan.groups == "static" and (config.sequence.groups != "auto" or not possible):
        return plan, rows
    if plan.groups == "static" and (problem := _unmovable(config, plan)):
        return dataclasses.replace(plan, reasons={**plan.reasons, "groups": f"static: {problem}"}), rows
    shape = window_shape(plan, costs_of(plan, config, cluster))
    if plan.groups == "static":
        windows = [window_pieces(rows, number, window) for number in range(_WINDOWS_LOOKED_AT)]
        plan = with_teams(plan, gain(windows, shape))
    return plan, rows if plan.groups == "static" else FlexRows(rows, window=window, shape=shape, per_step=window)


def _unmovable(config: Config, plan: Plan) -> str | None:
    """Returns why a plan without teams cannot have them: a loss that balances experts would need another schedule."""
    facts = Facts(
        balance_over=config.model.routed.penalty_over,
        groups="flex",
        sequences=plan.sequences_per_pipeline,
        schedule=plan.schedule.name,
        wave=plan.schedule.wave,
        forwards_first=not plan.outline().has_forwards_among_backwards,
    )
    return next((problem.must for problem in broken(facts)), None)


@dataclass(frozen=True, kw_only=True)
class Start:
    """The first state, the steps done before it, and the events to record.

    Args:
        state: on the devices.
        step: number of steps done before.
        directory: of the run's checkpoints.
        events: name and text of each event.
    """

    state: TrainState
    step: int
    directory: Path
    events: tuple[tuple[str, str], ...]


def begin(experiment: Experiment, run_dir: Path) -> Start:
    """Makes or loads the first state, and moves the loader to the batch that comes next.

    Args:
        experiment: from `prepare`; its loader is moved.
        run_dir: claimed by this run.

    Raises:
        ValueError: the run has checkpoints and none is whole.
    """
    config, directory = experiment.config, checkpoint_directory(experiment.config, run_dir)
    notes: list[str] = []
    restored = restore_newest(directory, experiment.saved_shapes, notes.append)
    if restored:
        return _go_on(experiment, restored, directory, notes)
    if config.train.init is not None:
        state, text = state_of_run(config, experiment.optimizer, experiment.shapes, experiment.saved_shapes)
        text = f"starts in {run_dir} {text}"
    elif (origin := config.model.hf) is not None:
        shapes = nnx.state(build_model(config, abstract=True), nnx.Param)
        params = distributed.together(lambda: load_hf_params(origin, shapes, experiment.saved_shapes.params))
        params = layer_order.rearrange(params, experiment.shapes.params)
        state = state_from(params, experiment.optimizer, experiment.shapes)
        text = f"starts in {run_dir} from the weights in {origin}"
    else:
        state = init_state(config, experiment.optimizer, experiment.shapes)
        text = f"starts in {run_dir}"
    return Start(state=state, step=0, directory=directory, events=(("start", text),))


def _go_on(experiment: Experiment, restored: Restored, directory: Path, notes: list[str]) -> Start:
    step, fingerprint = int(restored.run["step"]), restored.run["data"]["fingerprint"]
    if fingerprint != experiment.data_fingerprint:
        earlier = earlier_end_token(experiment.config)
        ends = f"set data.end_token={earlier} if the run began before texts ended with the tokenizer's eos_token, "
        raise ValueError(
            "the documents must be those with which the run started, got other documents (fingerprint "
            f"{experiment.data_fingerprint}, not {fingerprint}); {ends if earlier else ''}name the old documents with "
            "data.source, or choose another --run-dir"
        )
    if experiment.plan.groups == "flex":
        check_start(restored.run["data"]["sequence"], experiment.plan.num_sequences)
    experiment.loader.state = {"sequence": restored.run["data"]["sequence"]}
    # A run that stopped after too many skipped steps in a row may skip as many in a row again.
    state = layer_order.rearrange(restored.state, experiment.shapes)
    state = state._replace(num_skipped_in_row=state.num_skipped_in_row * np.int32(0))
    before, after = restored.run["plan"], experiment.plan.to_dict()
    changed = [name for name in ("mesh", "chunk_lengths", "sequence_kind", "schedule") if before[name] != after[name]]
    plan = f"; the plan's {', '.join(changed)} changed" if changed else ""
    places = [values.get("optimizer", "device") for values in (before, after)]
    if places[0] != places[1]:
        plan += f"; optimizer state moved from {places[0]} to {places[1]} memory"
    rate = rate_change(restored.run.get("config", {}), experiment.config, step - int(state.num_skipped))
    text = f"resumes from {directory / str(step)}, {restored.run['data']['sequence']} sequences read{plan}{rate}"
    rules = (*new_weights(experiment.config, restored.run), *rule_of_best(experiment.config, restored.run))
    events = (*(("corrupt", note) for note in notes), ("resume", text), *rules)
    return Start(state=state, step=step, directory=directory, events=events)


def new_weights(config: Config, saved: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    """Returns the event of a run whose experts were balanced by sequences of one weight, whatever their padding.

    Args:
        config: all settings.
        saved: what was saved beside the state from which the run goes on.
    """
    if config.model.routed.penalty_over != "sequence" or "sequence_weights" in saved:
        return ()
    text = (
        "the loss that balances experts now weighs each packed sequence by its tokens without padding; before, all "
        "sequences of a step weighed alike"
    )
    return (("warning", text),)


def rule_of_best(config: Config, saved: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    """Returns the event of a run whose best checkpoints were chosen by the rule of an older version, if it keeps any.

    That rule measured whole batches, and began again where the held-out sequences ended.

    Args:
        config: all settings.
        saved: what was saved beside the state from which the run goes on.
    """
    kept = config.checkpoint.keep_best
    if not kept or saved.get("validation") == ONE_PASS:
        return ()
    text = (
        "the best checkpoints are now chosen by one pass over the held-out sequences, each counted once; what "
        f"checkpoint.keep_best={kept} kept by the validation losses of an older version stays beside them, because the "
        "losses do not compare"
    )
    return (("warning", text),)


def check_room(experiment: Experiment, run_dir: Path) -> None:
    """Checks that there is room for checkpoints: names of steps, and space for one more before an old one is deleted.

    Raises:
        ValueError: a folder has the name of a step, or the disk has too little space.
    """
    directory = checkpoint_directory(experiment.config, run_dir)
    if others := other_folders(directory, experiment.config.train.steps):
        raise ValueError(
            f"the directory of checkpoints must leave the names of steps free, got {others[0]}, which is no "
            "checkpoint; move it away, or choose another checkpoint.dir"
        )
    of_one = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(experiment.shapes))
    needed_bytes = bytes_to_save(directory, of_one)
    there = next(path for path in (directory, *directory.absolute().parents) if path.is_dir())
    free_bytes = shutil.disk_usage(there).free
    if free_bytes < needed_bytes:
        raise ValueError(
            f"the disk must have space for two checkpoints, {needed_bytes / 2**30:.2f} GiB, got "
            f"{free_bytes / 2**30:.2f} GiB free at {directory}; free space, or set checkpoint.dir to another disk"
        )
