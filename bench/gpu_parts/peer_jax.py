"""Plain JAX as people write it: a scan over rematerialized layers, cuDNN's attention, the loss in tiles, AdamW.

Letters: B sequences (one), S tokens, D hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import jax
import jax.numpy as jnp
from flax import nnx

from bench.cases import random_batch
from bench.gpu_parts.case import Emit
from bench.gpu_parts.program import Program, Target, figures_of, median, target_here, timed
from sppo_jax.config import ModelConfig, OptimizerConfig
from sppo_jax.evaluation.placement import batch_of
from sppo_jax.fit.figures import Figures
from sppo_jax.hardware import pool_bytes
from sppo_jax.models.decoder import Decoder
from sppo_jax.models.dense import tiled_loss_sum
from sppo_jax.train.metrics.memory_peak import peak_memory
from sppo_jax.train.state import TrainState, first_state
from sppo_jax.train.step import make_optimizer, make_schedule, make_train_step


def programs(settings: dict, target: Target, model: ModelConfig) -> Iterator[Program]:
    """List the train steps, one a length."""
    for length in settings["lengths"]:
        yield _program(target, model, length)


def run(settings: dict, device: str, model: ModelConfig, emit: Emit) -> None:
    """Measure a step at each length, or only compile it; stop where memory is short."""
    target = target_here(device)
    for length in settings["lengths"]:
        program = _program(target, model, length)
        compiled = program.lower().compile()
        figures = Figures.of(compiled).to_dict() if settings.get("compile_only") else figures_of(compiled)
        row = {"framework": "jax", "length": length, "compiler": figures}
        if settings.get("compile_only"):
            fits = figures["hbm_bytes"] <= pool_bytes(target.cluster)
            emit(row | {"status": "compiled" if fits else "out of memory", "fits": fits})
            if not fits:
                return
            continue
        seconds, losses = _measure(settings, target, model, length, compiled)
        ran = {"status": "ran", "step_s": seconds, "loss": losses, "tokens_per_s": length / median(seconds)}
        emit(row | ran | peak_memory())


def _measure(settings: dict, target: Target, model: ModelConfig, length: int, compiled) -> tuple[list, list]:
    optimizer, sharding = _optimizer(model), target.shape(1).sharding

    def create() -> TrainState:
        params = nnx.state(Decoder(model, rngs=nnx.Rngs(0)), nnx.Param)
        return first_state(params, optimizer.init(params))

    state, losses = jax.jit(create, out_shardings=sharding)(), []
    batch = {key: jax.device_put(x, sharding) for key, x in random_batch(1, length, model.vocab_size).items()}
    signals = jax.device_put(jnp.zeros((1,), jnp.int32), sharding)

    def once():
        nonlocal state
        state, metrics = compiled(state, batch, signals)
        losses.append(float(metrics["loss"]))

    return timed(once, runs=settings["timed_steps"]), losses


def _optimizer(model: ModelConfig):
    config, decoder = OptimizerConfig(), nnx.eval_shape(lambda: Decoder(model, rngs=nnx.Rngs(0)))
    return make_optimizer(config, make_schedule(config, 100), nnx.state(decoder, nnx.Param))


def _program(target: Target, model: ModelConfig, length: int) -> Program:
    """Build the train step: gradients by autodiff, then the same optimizer as ours."""
    optimizer, sharding = _optimizer(model), target.shape(1).sharding
    decoder = nnx.eval_shape(lambda: Decoder(model, rngs=nnx.Rngs(0)))
    params = nnx.state(decoder, nnx.Param)
    state = jax.eval_shape(lambda: first_state(_zeros(params), optimizer.init(_zeros(params))))
    state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), state)
    value_and_grad = jax.value_and_grad(lambda params, batch: _loss(decoder, params, batch, target.platform))
    step = make_train_step(value_and_grad, optimizer, jax.tree.map(lambda x: x.sharding, state))
    return Program(f"{length} tokens", step, (state, batch_of((1, length), sharding), target.shape(1, dtype=jnp.int32)))


def _zeros(params: nnx.State) -> nnx.State:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), params)


def _loss(decoder: Decoder, params: nnx.State, batch: Mapping[str, jax.Array], platform: str) -> jax.Array:
    """Return the mean cross-entropy; only each layer's input is kept for the backward pass."""
    graph, _, rest = nnx.split(decoder, nnx.Param, ...)
    model = nnx.merge(graph, params, rest)
    layer_graph, stacked = nnx.split(model.layers)

    def run_layer(x_BSD: jax.Array, weights: nnx.State) -> tuple[jax.Array, None]:
        layer = nnx.merge(layer_graph, weights)
        q, k, v = layer.before_attention(x_BSD, batch["positions"])
        kernel = "cudnn" if platform == "gpu" else "xla"
        out = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=kernel)
        return layer.after_attention(x_BSD, out), None

    x_BSD = model.embedding[...][batch["tokens"]].astype(model.dtype)
    x_BSD, _ = jax.lax.scan(jax.checkpoint(run_layer, prevent_cse=False), x_BSD, stacked)
    return tiled_loss_sum(model, x_BSD, batch["targets"]) / jnp.sum(batch["targets"] >= 0).astype(jnp.float32)
