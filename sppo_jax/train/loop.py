"""The training loop, top to bottom.

Outputs are read one step late: the loop hands step n + 1 to the devices, then waits for step n, so that the devices
always have work. Step n also returns the request on which all processes agreed: continue, save, or save and stop.
Before the loop saves or validates the state, the loop waits for the newest step too, because the next step reuses the
state's memory. A request to stop is also read between the batches of a validation and after a save, where no step runs;
a process without others reads its own at every step.
"""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from sppo_jax.compat import one_at_a_time
from sppo_jax.config import Config, to_dict
from sppo_jax.evaluation.context import context_size_of_run, plan_for_cuts
from sppo_jax.evaluation.placement import batch_shapes, place_batch
from sppo_jax.evaluation.validate import Interrupted, Validation, validate
from sppo_jax.files.format_bytes import NOT_FINITE
from sppo_jax.models import build_model
from sppo_jax.plan.stall_limit import stall_limit_s, stall_problem, stall_text
from sppo_jax.processes.same_program import check_lowered
from sppo_jax.processes.software import run_facts
from sppo_jax.train.checkpoints.read import shapes_of
from sppo_jax.train.checkpoints.save import ONE_PASS, Checkpoints
from sppo_jax.train.metrics.meter import STAY_FINITE, Meter
from sppo_jax.train.metrics.record import Record
from sppo_jax.train.setup import Experiment, Start
from sppo_jax.train.state import TrainState, shardings_of
from sppo_jax.train.step import TrainStep, make_train_step
from sppo_jax.train.watch.signals import GO, STOP, Signals
from sppo_jax.train.watch.watchdog import Watchdog
from sppo_jax.version import __version__


class RunFailed(Exception):
    """A run cannot continue; the message says why, and which checkpoint is saved."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """How a run ended: steps done, the last validation (None: nothing held out), and the signal that stopped it."""

    step: int
    validation: Validation | None
    stopped_by: str | None


def train(experiment: Experiment, run_dir: Path, start: Start) -> Result:
    """Trains until `train.steps` steps are done, or a signal comes.

    Args:
        experiment: from `prepare`.
        run_dir: claimed by this run.
        start: from `begin`; the first step reuses the memory of its state.

    Returns:
        How the run ended: finished, or stopped with its state saved.

    Raises:
        RunFailed: too many steps in a row were not finite, or the last save failed.
        Different: the processes would compile different programs.
    """
    config, mesh = experiment.config, experiment.mesh
    with closing(Record(run_dir, config, step=start.step)) as record, Signals(mesh) as signals:
        record.events(start.events, start.step)
        if start.step >= config.train.steps:
            # The process may have died, or been stopped, between the last save and this mark.
            record.finish(f"{start.step} steps; saved {start.directory / str(start.step)}")
            record.event("stop", start.step, f"all {config.train.steps} steps were done; raise train.steps to continue")
            return Result(step=start.step, validation=None, stopped_by=None)
        watchdog = _watchdog(experiment, start, record)
        step = _compile(experiment, start.state, signals, record)
        running = experiment.shapes if experiment.plan.saves == "blocking" else None
        shapes, beat = experiment.saved_shapes, watchdog.beat_again
        checkpoints = Checkpoints(start.directory, config.checkpoint, shapes, running=running, beat=beat)
        meter, state, validation = Meter(experiment, record, first=start.step), start.state, None
        done, saved_s, asked = start.step, time.monotonic(), GO
        one_step_in_flight = one_at_a_time(mesh.devices.flat[0].platform)
        signals.begin()

        with watchdog:
            while done < config.train.steps and asked < STOP:
                # Read the sequences of this process and put them on its devices.
                done += 1
                watchdog.beat(done, "data")
                with meter.loading():
                    batch = place_batch(next(experiment.loader), experiment.plan, mesh)

                # Start this step; then wait for the step before, write its metrics, and read the request.
                watchdog.beat(done, "step")
                overdue = 0 < config.checkpoint.every_s <= time.monotonic() - saved_s
                state, outputs = step(state, batch, signals.array(save=overdue))
                asked = max(meter.wait(), signals.alone)
                if one_step_in_flight:
                    jax.block_until_ready(outputs)
                meter.write()
                meter.expect(done, outputs)

                validates, saves = _due(config, done, asked)
                if not (validates or saves):
                    continue

                # Validate: wait for this step, then score the sequences held out.
                asked, validated = max(asked, meter.wait()), None
                if validates:
                    watchdog.beat(done, "evaluate")
                    validated = _validate(experiment, state, done, watchdog, signals, record)
                    validation, asked = validated or validation, max(asked, signals.agreed())
                meter.write(validated.metrics() if validated else None)
                if validated:
                    _say(validated, done, record)

                # Save: the copy to disk continues during the next steps, unless the plan says "blocking".
                if saves or asked > GO:
                    watchdog.beat(done, "save")
                    with meter.saving():
                        loss = validated.loss if validated else None
                        beside = to_save(experiment, done, meter.failure)
                        state, problem = checkpoints.save(state, beside, step=done, loss=loss)
                    saved_s, asked = time.monotonic(), max(asked, signals.agreed())
                    record.saving(done, checkpoints.directory, problem)
                record.report_soon()

        stopped_by = (signals.stop_reason or "another process") if done < config.train.steps else None
        _end(record, checkpoints, done, meter.failure, stopped_by)
        return Result(step=done, validation=validation, stopped_by=stopped_by)


def _watchdog(experiment: Experiment, start: Start, record: Record) -> Watchdog:
    """Returns the watchdog, which starts after compiling, and says after how many seconds it ends the run."""
    plan, given = experiment.plan, experiment.config.train.stall_s
    record.say(f"the run {stall_text(plan, given)}")
    if problem := stall_problem(plan, given):
        record.event("warning", start.step, problem)
    return Watchdog(stall_limit_s(plan, given))


def _compile(experiment: Experiment, state: TrainState, signals: Signals, record: Record) -> TrainStep:
    """Compiles the one program of the run."""
    start_s = time.perf_counter()
    step = make_train_step(
        experiment.value_and_grad,
        experiment.optimizer,
        shardings_of(experiment.shapes),
        experiment.config.model,
    )
    lowered = step.lower(state, batch_shapes(experiment.plan, experiment.mesh), signals.array())
    devices = experiment.mesh.local_devices
    facts = run_facts(experiment.plan, len(devices), experiment.kernel_check)
    check_lowered("training step", lowered, devices[0], facts)
    compiled = lowered.compile()
    record.say(f"compiled the training step in {time.perf_counter() - start_s:.1f} s")
    return compiled


def _due(config: Config, done: int, asked: int) -> tuple[bool, bool]:
    """Returns whether to validate and whether to save after a step."""
    train, checkpoint, is_last = config.train, config.checkpoint, done == config.train.steps
    in_turn = train.eval_every > 0 and done % train.eval_every == 0
    to_validate = is_last or (in_turn and asked < STOP)  # a run that is told to stop has little time left
    to_save = asked > GO or (is_last and checkpoint.final) or (to_validate and checkpoint.keep_best > 0)
    return to_validate, to_save or (checkpoint.every_steps > 0 and done % checkpoint.every_steps == 0)


def _validate(
    experiment: Experiment, state: TrainState, done: int, watchdog: Watchdog, signals: Signals, record: Record
) -> Validation | None:
    """Returns the validation; None if nothing is held out, or if the processes agree to stop before its end."""
    config, plan, scores, contexts = experiment.config, experiment.plan, experiment.token_scores, ()
    if experiment.validation is None:
        return None
    if experiment.cut_scores is not None and done == config.train.steps:
        plan, scores = plan_for_cuts(plan), experiment.cut_scores
        contexts = (context_size_of_run(plan.sequence_length),)

    def told() -> bool:
        watchdog.beat_again()
        return signals.agreed() == STOP

    try:
        return validate(
            scores,
            state.params,
            experiment.validation,
            plan,
            experiment.mesh,
            num_wanted=config.train.eval_sequences,
            contexts=contexts,
            told=told,
        )
    except Interrupted as stop:
        later = f"; sppo eval {record.run_dir} measures it" if done == config.train.steps else ""
        record.event("warning", done, f"step {done}: the validation {stop}; what it measured is dropped{later}")
        return None


def _say(validation: Validation, done: int, record: Record) -> None:
    """Shows a validation, and warns of a loss that is not finite."""
    record.say(validation.describe())
    if not validation.is_finite:
        record.event("warning", done, f"step {done}: the validation loss is {NOT_FINITE}; {STAY_FINITE}")


def to_save(experiment: Experiment, done: int, failure: str | None) -> dict[str, Any]:
    """Returns the JSON that is saved beside the state."""
    config = experiment.config
    return {
        "step": done,
        "data": {**experiment.loader.state, "fingerprint": experiment.data_fingerprint},
        "sequence_weights": "tokens",  # by which the losses over sequences weigh
        "seeds": {"parameters": config.train.seed, "data": config.data.seed},  # no other random numbers are drawn
        "config": to_dict(config),
        "plan": experiment.plan.to_dict(),
        "shapes": shapes_of(nnx.state(build_model(config, abstract=True), nnx.Param)),  # without a mesh's zeros
        "version": __version__,
        "failure": failure,
        "validation": ONE_PASS,
    }


def _end(record: Record, checkpoints: Checkpoints, done: int, failure: str | None, stopped_by: str | None) -> None:
    """Waits for the last save, and records how the run ended.

    Raises:
        RunFailed: too many steps in a row were not finite, or the last save failed.
    """
    if checkpoints.close():
        record.event("warning", done, f"{checkpoints.problem}")
    problem = checkpoints.problem
    newest = max(checkpoints.steps, default=None)
    saved = "nothing is saved" if newest is None else f"saved {checkpoints.directory / str(newest)}"
    again = f"rerun the same command with --run-dir {record.run_dir} to resume"
    if failure:
        record.event("stop", done, f"{failure}; {saved}")
    elif stopped_by:
        record.event("stop", done, f"stopped by {stopped_by} after step {done}; {saved}; {again}")
    elif problem:
        record.event("stop", done, f"all {done} steps are done, but the last save failed; {saved}; {again}")
    else:
        record.finish(f"{done} steps; {saved}")
        record.event("stop", done, f"all {done} steps are done; {saved}")
    record.report()
    if failure or problem:
        raise RunFailed(f"{failure or problem}; {saved}")
