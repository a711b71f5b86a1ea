"""Everything a run needs, made and checked before anything is written or trained."""

from __future__ import annotations

from dataclasses import dataclass

import optax
from flax import nnx
from jax.sharding import Mesh

from sppo_jax.config import Config
from sppo_jax.data.loader import Loader
from sppo_jax.data.open import open_data
from sppo_jax.data.rows import Rows
from sppo_jax.models import build_model
from sppo_jax.pipeline import api, layout, storage
from sppo_jax.plan.plan import Plan
from sppo_jax.train.evaluate import Scores
from sppo_jax.train.optimizer import make_optimizer, make_schedule
from sppo_jax.train.placement import local_rows
from sppo_jax.train.state import TrainState, state_shapes
from sppo_jax.train.step import ValueAndGrad


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """The parts of a run that fit together.

    Args:
        config: all settings.
        plan: the static decisions.
        mesh: devices, axes data, pipe and seq.
        loader: this process's part of the training batches, endless.
        data_fingerprint: differs between data whose sequences differ.
        validation: the sequences held out; None where nothing is.
        value_and_grad: loss and gradients of a batch.
        token_scores: each token's loss, and whether its target is the most likely token.
        schedule: learning rate by step.
        optimizer: gradients to updates.
        shapes: of the state, with dtypes and shardings.
    """

    config: Config
    plan: Plan
    mesh: Mesh
    loader: Loader
    data_fingerprint: str
    validation: Rows | None
    value_and_grad: ValueAndGrad
    token_scores: Scores
    schedule: optax.Schedule
    optimizer: optax.GradientTransformation
    shapes: TrainState


def prepare(config: Config, plan: Plan) -> Experiment:
    """Load the data and build the model's programs for a plan.

    Raises:
        ValueError: config, plan, data and devices do not fit together.
    """
    data = open_data(config)
    mesh = layout.make_mesh(plan)
    rows = local_rows(mesh, config.num_sequences)
    model = build_model(config, abstract=True)
    params = nnx.state(model, nnx.Param)
    schedule = make_schedule(config.optimizer, config.train.steps)
    optimizer = make_optimizer(config.optimizer, schedule)
    return Experiment(
        config=config,
        plan=plan,
        mesh=mesh,
        loader=Loader(data.training, num_sequences=config.num_sequences, local_rows=rows),
        data_fingerprint=data.fingerprint,
        validation=data.validation,
        value_and_grad=api.value_and_grad(plan, model, mesh),
        token_scores=api.evaluate(plan, model, mesh),
        schedule=schedule,
        optimizer=optimizer,
        shapes=state_shapes(optimizer, storage.stored_shapes(plan, params, mesh), mesh),
    )
