"""From a config to a Plan, and what a Plan must agree with."""

import math
import warnings
from typing import Any

from sppo_jax.config import Config
from sppo_jax.hardware import Cluster
from sppo_jax.plan.parts import model_shape
from sppo_jax.plan.plan import Plan
from sppo_jax.predict.seconds.documents import Documents
from sppo_jax.rules import Facts, check
from sppo_jax.search.evaluate import costs_of
from sppo_jax.search.given import without_effect
from sppo_jax.search.search import search
from sppo_jax.search.space.request import resolve_cluster

__all__ = ["check_plan", "costs_of", "make_plan", "resolve_cluster"]


def make_plan(config: Config, cluster: Cluster | None = None, documents: Documents | None = None) -> Plan:
    """Decides everything static about a training step.

    Args:
        config: the settings; what is "auto" is chosen.
        cluster: the devices; None: `hardware.cluster`, `train.devices` if simulated, else those of this machine.
        documents: how documents lie in sequences, see `search`; None: each is as long as a sequence.

    Raises:
        ValueError: the settings do not fit together; says the rule, what was got and what to change.
    """
    found = search(config, cluster, documents)
    if not found.fits:
        warnings.warn(found.problem, stacklevel=2)
    for line in without_effect(config, found.plan):
        warnings.warn(line, stacklevel=2)
    return found.plan


def check_plan(plan: Plan, config: Config) -> None:
    """Checks that a plan that was given is one for this config: its sequences, its mesh and its model.

    Raises:
        ValueError: it is not; says in what, and what to change.
    """
    sequence, mesh = config.sequence, plan.mesh
    wanted: dict[str, tuple[Any, Any]] = {}
    if sequence.groups != "auto":
        wanted["sequence.groups"] = (sequence.groups, plan.groups)
    wanted["sequence.length"] = (sequence.length, plan.sequence_length)
    if sequence.given_per_step is not None:
        wanted["sequence.per_step"] = (sequence.per_step, mesh.data * plan.sequences_per_pipeline)
    else:
        wanted["sequence.per_pipeline"] = (sequence.per_pipeline, plan.sequences_per_pipeline)
    alone = {} if sequence.given_per_step is not None else {"data": 1}
    for axis, size in (alone | config.mesh.pinned).items():
        wanted[f"mesh.{axis}"] = (size, getattr(mesh, axis))
    shape = model_shape(config.model)
    if not config.model.window_within(plan.sequence_length):
        # Plans from before there were windows do not name one that changes nothing.
        shape = {name: size for name, size in shape.items() if name != "sliding_window" or name in plan.model}
    if plan.model and set(plan.model) != set(shape):
        raise ValueError(
            f"the plan's model must have the fields {', '.join(shape)}, got {', '.join(plan.model)}; plan again"
        )
    for name, planned in plan.model.items():
        wanted[f"model.{name}"] = (shape[name], planned)
    if config.optimizer.place != "auto":
        wanted["optimizer.place"] = (config.optimizer.place, plan.optimizer)
    for name, (want, got) in wanted.items():
        if want != got:
            must, is_now = ("null" if each is None else each for each in (want, got))
            raise ValueError(
                f"the plan must agree with {name} = {must}, got {is_now}; set {name}={is_now}, or plan again"
            )
    simulated, devices = config.train.num_simulated_devices, math.prod((mesh.data, mesh.pipe, mesh.seq))
    if simulated and simulated != devices:
        raise ValueError(
            f"the plan must agree with train.devices = cpu:{simulated}, got a mesh of {devices}; "
            f"set train.devices=cpu:{devices}, or plan again"
        )
    check(
        Facts(
            num_layers=config.model.num_layers,
            layer_types=config.model.type_names if config.model.layers else (),
            stacks=config.model.stack_names if config.model.layers else (),
            num_heads=config.model.shared_heads[0],
            pipe=mesh.pipe,
            seq=mesh.seq,
            split=plan.sequence_kind,
            ulysses=plan.ulysses,
            window=config.model.shared_window(plan.sequence_length),
            interleave=plan.schedule.interleave,
            schedule=plan.schedule.name,
            sequences=plan.sequences_per_pipeline,
            wave=plan.schedule.wave,
            groups=plan.groups,
            balance_over=config.model.routed.penalty_over,
            forwards_first=not plan.outline().has_forwards_among_backwards,
        )
    )
