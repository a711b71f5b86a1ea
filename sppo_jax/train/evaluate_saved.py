"""Validation of a checkpoint on the current devices, which may differ from those of its run."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from sppo_jax.config import Config, ConfigError, config_from_dict
from sppo_jax.config.renamed import with_new_names
from sppo_jax.data.ends import warn_of_other_ends
from sppo_jax.data.open import prepare_data
from sppo_jax.evaluation.context import context_sizes, plan_for_cuts
from sppo_jax.evaluation.validate import Validation, validate
from sppo_jax.hardware import Cluster
from sppo_jax.models import build_model
from sppo_jax.pipeline import api
from sppo_jax.pipeline.params import layout, storage
from sppo_jax.plan.parts import model_shape
from sppo_jax.plan.plan import Plan
from sppo_jax.processes.prepare import prepare_process
from sppo_jax.search.evaluation import for_evaluation, forward_batch_s, plan_evaluation
from sppo_jax.search.make import check_plan, make_plan
from sppo_jax.train.checkpoints import layer_order
from sppo_jax.train.checkpoints.read import load_params
from sppo_jax.train.kernel_check import check_kernels_once
from sppo_jax.train.one_document import for_documents

# Sections that say how devices share the work: the planner chooses them if the devices differ from the run's.
_OF_DEVICES = ("mesh", "schedule", "stash", "hardware")
# Settings that make the run's plan unusable if they change.
_OF_PLANS = (*_OF_DEVICES, "sequence", "model", "planner", "train.devices", "optimizer.place")


def saved_config(saved: Mapping[str, Any], overrides: Sequence[str]) -> Config:
    """Returns the config of a checkpoint with overrides; for any mesh if the overrides ask for other devices.

    A step takes as many sequences as in the run.

    Args:
        saved: from `read_run`.
        overrides: `section.key=value` strings.

    Raises:
        ValueError: the checkpoint has no config, or a setting is wrong.
    """
    settings = _settings(saved)
    config = config_from_dict(_for_any_mesh(settings) if _plans_anew(overrides) else settings, overrides)
    _check_model(settings, config)
    return config


def config_at(saved: Mapping[str, Any], overrides: Sequence[str], length: int | None) -> Config:
    """Returns the config of a checkpoint for sequences of a length on any mesh, one or as few as possible in a step.

    Args:
        saved: from `read_run`.
        overrides: `section.key=value` strings.
        length: tokens of a sequence; None: that of the run.

    Raises:
        ValueError: as `saved_config`.
    """
    settings = _settings(saved)
    others = _for_any_mesh(settings)
    config = config_from_dict({**others, "sequence": {"length": length or others["sequence"]["length"]}}, overrides)
    _check_model(settings, config)
    return config


def _check_model(settings: Mapping[str, Any], config: Config) -> None:
    """Checks that a config has the model of a checkpoint's settings."""
    before, now = model_shape(config_from_dict(settings).model), model_shape(config.model)
    for name, size in before.items():
        if now.get(name, 0) != size:
            raise ConfigError(
                f"model.{name} must be that of the checkpoint, {size}, got {now.get(name, 0)}; remove model.{name}"
            )


def plan_for_devices(saved: Mapping[str, Any], overrides: Sequence[str]) -> tuple[Config, Plan]:
    """Returns config and plan: the run's plan if the devices are as many and no such setting changes; else a new one.

    Args:
        saved: from `read_run`.
        overrides: `section.key=value` strings.

    Raises:
        ValueError: a setting is wrong, or the devices do not suit the model and the sequence.
    """
    config = saved_config(saved, overrides)
    if _plans_anew(overrides):
        return config, plan_of_rows(config, overrides, max(1, config.train.eval_sequences))
    plan = _saved_plan(saved, config)
    if plan is not None:
        return config, plan
    config = config_from_dict(_for_any_mesh(_settings(saved)), overrides)  # fewer or more devices than the run's
    return config, plan_of_rows(config, overrides, max(1, config.train.eval_sequences))


def expected_text(
    config: Config, plan: Plan, num_wanted: int, cluster: Cluster | None = None, *, num_passes: int = 1
) -> str:
    """Returns how long an evaluation will take, in words.

    Args:
        config: model and devices.
        plan: for the devices at hand.
        num_wanted: most sequences to evaluate.
        cluster: as for `make_plan`.
        num_passes: how often each sequence is scored.
    """
    batch_s = forward_batch_s(plan, config, cluster)
    num_batches = num_passes * -(-num_wanted // plan.num_sequences)
    return (
        f"evaluates at most {num_wanted:,} sequences of {plan.sequence_length:,} tokens: {num_batches:,} batches of "
        f"{batch_s:.3g} s (simulated), {num_batches * batch_s:.3g} s besides compiling"
    )


def evaluate_saved(
    checkpoint: Path,
    config: Config,
    plan: Plan,
    fingerprint: str | None = None,
    say: Callable[[str], None] = lambda _: None,
    by_context: bool = False,
) -> Validation:
    """Measures the validation loss of a checkpoint, by position and, where the data ask for recall, by distance.

    Args:
        checkpoint: from `find_checkpoint`.
        config: model, data, and `train.eval_sequences`.
        plan: for the devices at hand.
        fingerprint: of the run's data, where these are to be read; None: they may be others.
        say: gets a line on how long it will take, before it starts.
        by_context: whether to measure the gain by context too: of a half of the length, a quarter, ... 64 tokens.

    Raises:
        ValueError: nothing is held out, the length is too short for `by_context`, or the checkpoint is torn or
            of another model.
    """
    contexts = context_sizes(plan.sequence_length) if by_context else ()
    data = prepare_data(config)
    warn_of_other_ends(config, data.fingerprint, fingerprint)
    held_out = data.validation
    if held_out is None:
        raise ValueError(
            f"an evaluation must have held-out documents, got data.validation_fraction="
            f"{config.data.validation_fraction} of data.source={config.data.source}; raise "
            "data.validation_fraction, or set data.validation_source"
        )
    plan = plan_for_cuts(plan) if contexts else for_documents(plan, data)
    prepare_process(plan, trains=False)
    mesh, model = layout.make_mesh(plan), build_model(config, abstract=True)
    check_kernels_once(config, plan, *mesh.local_devices)
    shapes = nnx.state(model, nnx.Param)
    params = load_params(checkpoint, shapes, storage.stored_shapes(plan, shapes, mesh, in_order=True))
    params = layer_order.rearrange(params, storage.stored_shapes(plan, shapes, mesh))
    num_wanted = max(1, config.train.eval_sequences)
    scores = api.evaluate(plan, model, mesh)
    say(expected_text(config, plan, num_wanted, num_passes=1 + 2 * len(contexts)))
    found = validate(scores, params, held_out, plan, mesh, num_wanted=num_wanted, contexts=contexts)
    if found is None:
        raise ValueError(
            f"an evaluation must have targets, got none in the first {num_wanted} sequences of "
            f"data.source={config.data.source}; raise train.eval_sequences"
        )
    return found


def _settings(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of a checkpoint."""
    settings = saved.get("config")
    if not isinstance(settings, Mapping):
        raise ConfigError(
            "a checkpoint must hold the config of the run, got no config; use a checkpoint that sppo train wrote"
        )
    return with_new_names(settings)


def _plans_anew(overrides: Sequence[str]) -> bool:
    names = {override.partition("=")[0].strip() for override in overrides} - {"model.check_kernels"}
    return any(name == each or name.startswith(f"{each}.") for name in names for each in _OF_PLANS)


def _pins_a_step(overrides: Sequence[str]) -> bool:
    """Returns whether overrides say how a training step runs: then the plan is one of a training step."""
    names = [override.partition("=")[0].strip() for override in overrides]
    return any(
        name.partition(".")[0] in ("schedule", "stash", "planner", "optimizer")
        or (name.startswith("sequence.") and name != "sequence.length")
        for name in names
    )


def plan_of_rows(config: Config, overrides: Sequence[str], num_wanted: int, cluster: Cluster | None = None) -> Plan:
    """Returns a plan of forwards alone for the devices at hand; warns if it does not fit.

    Args:
        config: of sequences of the wanted length.
        overrides: where they say how a training step runs, the plan is one of such a step.
        num_wanted: sequences to evaluate.
        cluster: as for `make_plan`.

    Raises:
        ValueError: the devices do not suit the model and the length.
    """
    if _pins_a_step(overrides):
        return make_plan(config, cluster)
    found = plan_evaluation(for_evaluation(config, config.mesh), cluster, num_wanted)
    if found.problem:
        warnings.warn(found.problem, stacklevel=2)
    return found.plan


def _for_any_mesh(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings that leave to the planner how devices share the work."""
    config = config_from_dict(settings)
    kept = {name: value for name, value in settings.items() if name not in _OF_DEVICES}
    kept["optimizer"] = {name: value for name, value in settings.get("optimizer", {}).items() if name != "place"}
    return {**kept, "sequence": {"length": config.sequence.length, "per_step": config.num_sequences}}


def _saved_plan(saved: Mapping[str, Any], config: Config) -> Plan | None:
    """Returns the run's own plan if it is one for the devices at hand."""
    try:
        plan = Plan.from_dict(dict(saved["plan"]))
        check_plan(plan, config)
    except (ValueError, KeyError, TypeError):
        return None
    num_devices = config.train.num_simulated_devices or len(jax.devices())
    return plan if math.prod((plan.mesh.data, plan.mesh.pipe, plan.mesh.seq)) == num_devices else None
