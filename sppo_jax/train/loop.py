"""The training loop, top to bottom."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sppo_jax.attention.validate import KEYS
from sppo_jax.config import Config
from sppo_jax.data.packing import Batch
from sppo_jax.train.checkpoint import save_checkpoint
from sppo_jax.train.evaluate import Validation, evaluate
from sppo_jax.train.metrics import MetricsWriter, causal_flops_per_token, peak_flops_per_s, peak_memory
from sppo_jax.train.progress import Progress
from sppo_jax.train.setup import Experiment
from sppo_jax.train.state import init_state
from sppo_jax.train.step import make_train_step


def train(experiment: Experiment, run_dir: Path) -> Validation | None:
    """Train for `train.steps` steps, and leave metrics and a checkpoint in the run directory.

    Args:
        experiment: from `prepare`.
        run_dir: from `create_run_dir`.

    Returns:
        The last validation; None where nothing is held out.

    Raises:
        FloatingPointError: loss or gradients are not finite any more.
    """
    config, mesh, loader = experiment.config, experiment.mesh, experiment.loader
    writer = MetricsWriter(run_dir / "metrics.jsonl")

    state = init_state(config, experiment.optimizer, experiment.shardings)
    start_s = time.perf_counter()
    step = make_train_step(experiment.value_and_grad, experiment.optimizer, experiment.shardings)
    step = step.lower(state, batch_shapes(config, mesh)).compile()
    print(f"compiled the training step in {time.perf_counter() - start_s:.1f} s", flush=True)

    progress = Progress(config.train.steps)
    validation, last_logged, last_logged_s = None, 0, time.perf_counter()
    for done in range(1, config.train.steps + 1):
        state, outputs = step(state, place_batch(next(loader), mesh))
        is_last = done == config.train.steps
        to_validate = is_last or (config.train.eval_every and done % config.train.eval_every == 0)
        if not (is_last or to_validate or done % config.train.log_every == 0):
            continue

        outputs = jax.device_get(outputs)  # waits for the step
        step_s = (time.perf_counter() - last_logged_s) / (done - last_logged)
        metrics = step_metrics(experiment, done, outputs, step_s)
        if to_validate:
            validation = evaluate(
                experiment.token_scores,
                state.params,
                experiment.validation_batches(),
                lambda batch: place_batch(batch, mesh),
            )
            metrics |= validation.metrics() if validation else {}
        writer.write(metrics)
        progress.log(metrics)
        if validation and to_validate:
            progress.say(validation.describe())
        last_logged, last_logged_s = done, time.perf_counter()
    progress.close()

    if config.checkpoint.final:
        directory = Path(config.checkpoint.dir) if config.checkpoint.dir else run_dir / "checkpoints"
        saved = save_checkpoint(directory, state, experiment.plan, loader.state)
        print(f"saved {saved}", flush=True)
    return validation


def place_batch(batch: Batch, mesh: Mesh) -> Mapping[str, jax.Array]:
    """Spread the sequences of a batch over `data`; every pipeline gets whole sequences."""
    return jax.device_put(dict(batch), NamedSharding(mesh, PartitionSpec("data")))


def batch_shapes(config: Config, mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    """Return what `place_batch` gives, without values."""
    shape, sharding = (config.num_sequences, config.sequence.length), NamedSharding(mesh, PartitionSpec("data"))
    return {key: jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding) for key in KEYS}


def step_metrics(experiment: Experiment, done: int, outputs: Mapping[str, Any], step_s: float) -> dict[str, Any]:
    """Return what metrics.jsonl says of a step.

    Args:
        experiment: the run.
        done: steps done, this one included.
        outputs: scalars `loss` and `grad_norm`.
        step_s: seconds the step took.

    Raises:
        FloatingPointError: loss or gradients are not finite.
    """
    config, loss, grad_norm = experiment.config, float(outputs["loss"]), float(outputs["grad_norm"])
    if not (math.isfinite(loss) and math.isfinite(grad_norm)):
        raise FloatingPointError(
            f"loss and gradients must stay finite, got a loss of {loss} and a gradient norm of {grad_norm} at step "
            f"{done}; lower optimizer.lr or raise optimizer.warmup_steps"
        )
    length, num_devices = config.sequence.length, experiment.mesh.size
    tokens_per_s = config.num_sequences * length / step_s
    peak = peak_flops_per_s(config.metrics, experiment.mesh.devices.flat[0])
    flops_per_s = causal_flops_per_token(config.model, length) * tokens_per_s
    return {
        "step": done,
        "loss": loss,
        "grad_norm": grad_norm,
        "learning_rate": float(experiment.schedule(done - 1)),
        "tokens_per_s": tokens_per_s,
        "step_s": step_s,
        "mfu": flops_per_s / (peak * num_devices) if peak else None,
        **peak_memory(),
    }
