"""The train step of a plan, the same as in a run, for devices that need not exist."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

from sppo_jax.config import Config
from sppo_jax.evaluation.placement import batch_shapes
from sppo_jax.fit.fingerprint import Lowering, asked_of, fingerprint, kernel_calls
from sppo_jax.fit.hlo.slices import Slice
from sppo_jax.fit.host_rows import planned_slices
from sppo_jax.fit.sources import sources_digest
from sppo_jax.fit.turns import turn_shares
from sppo_jax.hardware import Cluster
from sppo_jax.models import build_model
from sppo_jax.pipeline.api import Step
from sppo_jax.pipeline.params import layout, storage
from sppo_jax.plan.plan import Plan
from sppo_jax.program.fold import num_segments
from sppo_jax.train.state import TrainState, shardings_of, state_shapes
from sppo_jax.train.step import TrainStep, make_optimizer, make_schedule, make_train_step
from sppo_jax.train.watch.signals import signal_sharding


@dataclass(frozen=True, kw_only=True)
class TrainProgram:
    """The train step of a plan, and the shapes of its arguments.

    Args:
        step: jitted, `step(state, batch, signals) -> (state, metrics)`.
        optimizer: the optimizer, whose state is part of the state.
        state: shapes, dtypes and shardings of the state.
        batch: shapes, dtypes and shardings of the batch.
        signals: shape, dtype and sharding of the requests of the processes.
        num_bodies: bodies of ticks in the program; the compiler's time grows with them.
        turn_shares: of `fit/turns.py`.
        options: the compiler's options in the jit of the step.
        host_stash_bytes: of the stash on the host, of one device.
        slices: of buffers on the host that the plan's ticks copy.
    """

    step: TrainStep
    optimizer: optax.GradientTransformation
    state: TrainState
    batch: dict[str, jax.ShapeDtypeStruct]
    signals: jax.ShapeDtypeStruct
    num_bodies: int
    turn_shares: dict[str, float]
    options: Mapping[str, Any]
    host_stash_bytes: int
    slices: Sequence[Slice]

    def lower(self) -> jax.stages.Lowered:
        """Returns the step lowered for its devices."""
        return self.step.lower(self.state, self.batch, self.signals)

    def lowering(self, text: str, cluster: Cluster) -> Lowering:
        """Returns the digits and the counts of the lowered step.

        Args:
            text: of the lowered step, with the workspace of cuDNN's backward.
            cluster: whose devices the step is for.
        """
        asked = asked_of(self.options, cluster)
        return Lowering(
            fingerprint=fingerprint(text, asked),
            num_bodies=self.num_bodies,
            kernel_calls=kernel_calls(text),
            host_stash_bytes=self.host_stash_bytes,
            versions=asked.versions,
            sources=sources_digest(),
        )


def train_program(config: Config, plan: Plan, devices: Sequence, platform: str) -> TrainProgram:
    """Builds gradients and optimizer, as `sppo train` runs them, for the plan's mesh.

    Args:
        config: the model and the optimizer.
        plan: all other settings.
        devices: as many devices as the plan's mesh has; compile-only devices are enough.
        platform: platform of the devices: "cpu", "gpu" or "tpu".

    Raises:
        ValueError: plan, model and devices do not fit together.
    """
    step, mesh = _step_and_mesh(config, plan, devices, platform)
    params = nnx.state(step.model, nnx.Param)
    optimizer = make_optimizer(config.optimizer, make_schedule(config.optimizer, config.train.steps), params)
    state = state_shapes(optimizer, storage.stored_shapes(plan, params, mesh), mesh)
    return TrainProgram(
        step=make_train_step(step, optimizer, shardings_of(state), config.model),
        optimizer=optimizer,
        state=state,
        batch=batch_shapes(plan, mesh),
        signals=jax.ShapeDtypeStruct((mesh.size,), np.dtype("int32"), sharding=signal_sharding(mesh)),
        num_bodies=num_segments(step.program.items),
        turn_shares=turn_shares(step.program),
        options=step.compiler_options or {},
        host_stash_bytes=step.host_stash_bytes,
        slices=planned_slices(step),
    )


def counts_before_lowering(config: Config, plan: Plan, devices: Sequence, platform: str) -> dict[str, int]:
    """Returns the counts of a plan's train step that are known before it is lowered.

    Args and errors: as for `train_program`.

    Returns:
        By the names that they have in `Lowering`.
    """
    step, _ = _step_and_mesh(config, plan, devices, platform)
    return {"num_bodies": num_segments(step.program.items), "host_stash_bytes": step.host_stash_bytes}


def _step_and_mesh(config: Config, plan: Plan, devices: Sequence, platform: str) -> tuple[Step, Mesh]:
    dtype = config.model.compute_dtype
    if dtype == "auto":
        dtype = "float32" if platform == "cpu" else "bfloat16"
    model = build_model(replace(config, model=replace(config.model, compute_dtype=dtype)), abstract=True)
    mesh = layout.make_mesh(plan, devices)
    return Step(plan, model, mesh, train=True), mesh
