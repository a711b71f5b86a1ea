"""Training through the pipeline: the dense run's losses, from one compiled step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from exactness import random_batch, relative_errors, small_model, small_plan
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from sppo_jax.models.dense import dense_value_and_grad
from sppo_jax.pipeline.api import value_and_grad
from sppo_jax.pipeline.params.layout import make_mesh
from sppo_jax.pipeline.params.storage import param_shardings
from sppo_jax.train.state import first_state, shardings_of, state_shapes
from sppo_jax.train.step import make_train_step

STEPS = 20


def run(value_and_grad, params, shardings, mesh, batches):
    """Trains on the batches; returns the losses, how often the step was traced and the last parameters."""
    optimizer, traces = optax.adamw(3e-3), []
    shardings = shardings_of(state_shapes(optimizer, jax.device_put(params, shardings), mesh))

    def counted(params, batch):
        traces.append(1)
        return value_and_grad(params, batch)

    step = make_train_step(counted, optimizer, shardings)
    with jax.numpy_dtype_promotion("standard"):
        state = first_state(params, optimizer.init(params))
    signals = jnp.zeros(1, jnp.int32)
    # A copy: the step gives the memory of the old state away.
    state, losses = jax.device_put(jax.tree.map(jnp.copy, state), shardings), []
    for batch in batches:
        state, metrics = step(state, {key: jnp.asarray(value) for key, value in batch.items()}, signals)
        losses.append(float(metrics["loss"]))
    return np.array(losses), len(traces), state.params


@pytest.mark.parametrize(
    "changes",
    [
        dict(chunks=(16,) * 4, mesh=(1, 2, 2), places=("host", "host", "recompute"), alpha=0.5),
        pytest.param(
            dict(chunks=(14, 10), mesh=(2, 2, 2), kind="ring", schedule="seq1f1b", sequences=2), marks=pytest.mark.slow
        ),
        pytest.param(
            dict(
                chunks=(14, 10),
                mesh=(2, 2, 2),
                schedule="breadth-first",
                interleave=2,
                kv="rebuild",
                weights="gathered",
                sequences=2,
            ),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["ulysses-host", "ring-seq1f1b", "breadth-first"],
)
def test_twenty_steps_have_the_dense_losses_and_one_trace(x64, changes):
    plan, model = small_plan(**changes), small_model(vocab_size=20)
    rows = plan.mesh.data * plan.sequences_per_pipeline
    rng = np.random.default_rng(0)
    few = [random_batch(rng, rows, plan.sequence_length, 20, documents=2 + i, padding=i) for i in range(4)]
    batches = [few[step % 4] for step in range(STEPS)]
    params = nnx.state(model, nnx.Param)
    alone = Mesh(jax.devices()[:1], ("data",), axis_types=(AxisType.Auto,))
    everywhere = jax.tree.map(lambda _: NamedSharding(alone, PartitionSpec()), params)
    want, _, want_params = run(dense_value_and_grad(model), params, everywhere, alone, batches)
    mesh = make_mesh(plan)
    got, traces, got_params = run(
        value_and_grad(plan, model, mesh), params, param_shardings(plan, params, mesh), mesh, batches
    )
    np.testing.assert_allclose(got, want, rtol=1e-8)
    assert max(relative_errors(got_params, want_params).values()) < 1e-6
    assert got[-4:].mean() < 0.8 * got[:4].mean()
    assert traces == 1
