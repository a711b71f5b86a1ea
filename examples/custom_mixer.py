"""Trains a decoder whose layers have a mixer of their own in place of attention: a gated linear recurrence.

A mixer is an object with `reach`, `empty_state`, `mix` and `flops_per_token`, and the attribute `mixer` of a layer.
Its past is a state of constant size. The pipeline hands the state from chunk to chunk, gives each device all tokens of
a chunk for its share of the heads, and sends the state's gradient back; `mix` knows nothing of devices. A planner
counts such a layer as attention of the config's heads.

    python examples/custom_mixer.py      # 4 simulated devices on the CPU, about a minute
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import sppo_jax
from sppo_jax.config import Config, MeshConfig, ModelConfig, OptimizerConfig, SequenceConfig, TrainConfig
from sppo_jax.mixers.mixer import Operands, TokenRun
from sppo_jax.models import Decoder, RMSNorm, dense_loss

Pair = tuple[jax.Array, jax.Array]


class Recurrence:
    """h = decay h + (1 - decay) value in each document; heads: value and decay [T, N, V]; no constants."""

    reach = 1

    def empty_state(self, operands: Operands) -> jax.Array:
        """Returns h before a sequence, [N, V]."""
        value = operands.heads["value"]
        return jnp.zeros(value.shape[1:], value.dtype)

    def mix(self, operands: Operands, state: jax.Array, place: TokenRun) -> tuple[jax.Array, jax.Array]:
        """Returns h of each token, and behind the last one; padding keeps it and gives zeros."""
        value, decay = operands.heads["value"], operands.heads["decay"]
        before = jnp.concatenate([place.before_W, place.documents_T[:-1]])
        is_real = (jnp.arange(value.shape[0], dtype=jnp.int32) < place.num_real)[:, None, None]
        goes_on = (place.documents_T == before)[:, None, None]
        kept = jnp.where(is_real, jnp.where(goes_on, decay, 0), 1)
        added = jnp.where(is_real, (1 - decay) * value, 0)

        def join(a: Pair, b: Pair) -> Pair:
            return a[0] * b[0], a[1] * b[0] + b[1]

        kept, added = jax.lax.associative_scan(join, (kept, added))
        h = kept * state + added
        return jnp.where(is_real, h, 0), h[-1]

    def flops_per_token(self, operands: Operands) -> float:
        """Returns the work of a token: three products and sums of each element."""
        heads, size = operands.heads["value"].shape[1:]
        return 6.0 * float(heads * size)


class RecurrentBlock(nnx.Module):
    """x + recurrence(norm(x)), then an MLP."""

    mixer = Recurrence()

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        """Creates one layer; `Decoder` stacks `config.num_layers` of them."""
        self.config = config
        hidden, heads, size = config.hidden_size, config.num_heads, config.head_dim
        mlp_size = config.mlp_size or 4 * hidden

        def matrix(*shape: int) -> nnx.Param[jax.Array]:
            return nnx.Param(config.init_scale * jax.random.normal(rngs.params(), shape))

        self.norm = RMSNorm(hidden, eps=config.norm_eps, dtype=jnp.dtype(jnp.float32))
        self.mlp_norm = RMSNorm(hidden, eps=config.norm_eps, dtype=jnp.dtype(jnp.float32))
        self.value, self.decay, self.gate = (matrix(hidden, heads * size) for _ in range(3))
        self.output = matrix(heads * size, hidden)
        self.up, self.down = matrix(hidden, mlp_size), matrix(mlp_size, hidden)

    def before_attention(self, x: jax.Array, positions: jax.Array) -> Operands:
        """Returns what the mixer takes, by heads."""
        h, shape = self.norm(x), (*x.shape[:-1], self.config.num_heads, self.config.head_dim)
        value = (h @ self.value[...].astype(x.dtype)).reshape(shape)
        decay = jax.nn.sigmoid(2 + h @ self.decay[...].astype(x.dtype)).reshape(shape)
        return Operands({"value": value, "decay": decay}, {})

    def after_attention(self, x: jax.Array, out: jax.Array) -> jax.Array:
        """Returns the next layer's input [..., tokens, hidden]."""
        gate = jax.nn.silu(self.norm(x) @ self.gate[...].astype(x.dtype))
        x = x + (out.reshape(gate.shape) * gate) @ self.output[...].astype(x.dtype)
        inner = jnp.square(jax.nn.relu(self.mlp_norm(x) @ self.up[...].astype(x.dtype)))
        return x + inner @ self.down[...].astype(x.dtype)


def make_config() -> Config:
    """Returns 2 stages of 2 devices; every sequence goes through them in 4 chunks."""
    shape = ModelConfig(vocab_size=256, hidden_size=64, num_layers=4, num_heads=4, mlp_size=256)
    return Config(
        model=shape,
        mesh=MeshConfig(pipe=2, seq=2),
        sequence=SequenceConfig(length=256, chunks=4, per_pipeline=4),
        optimizer=OptimizerConfig(lr=1e-2),
        train=TrainConfig(steps=40),
    )


def text_batch(rng: np.random.Generator, config: Config) -> dict[str, np.ndarray]:
    """Cuts windows of bytes out of this very file."""
    text = np.frombuffer(Path(__file__).read_bytes(), np.uint8).astype(np.int32)
    length = config.sequence.length
    starts = rng.integers(0, len(text) - length, config.num_sequences)
    windows = np.stack([text[start : start + length + 1] for start in starts])
    positions = np.broadcast_to(np.arange(length, dtype=np.int32), (len(starts), length))
    documents = np.zeros_like(positions)
    return {"tokens": windows[:, :-1], "targets": windows[:, 1:], "positions": positions, "document_ids": documents}


def main() -> tuple[list[float], float]:
    """Trains; returns the losses, and the dense model's first loss."""
    jax.config.update("jax_num_cpu_devices", 4)
    config = make_config()
    plan = sppo_jax.make_plan(config)
    model = Decoder(config.model, rngs=nnx.Rngs(params=config.train.seed), layer=RecurrentBlock)
    params = nnx.state(model, nnx.Param)
    loss_and_grads = sppo_jax.value_and_grad(plan, model)
    optimizer = optax.adamw(config.optimizer.lr)
    moments = optimizer.init(params)
    rng, losses = np.random.default_rng(config.train.seed), []

    @jax.jit
    def update(
        params: optax.Params, moments: optax.OptState, grads: optax.Updates
    ) -> tuple[optax.Params, optax.OptState]:
        changes, moments = optimizer.update(grads, moments, params)
        return optax.apply_updates(params, changes), moments

    for step in range(config.train.steps):
        batch = text_batch(rng, config)
        loss, grads = loss_and_grads(params, batch)
        if step == 0:
            dense = float(dense_loss(model, params, jax.tree.map(jnp.asarray, batch)))
            print(f"first loss: pipeline {loss:.6f}, dense model {dense:.6f}")
        params, moments = update(params, moments, grads)
        losses.append(float(loss))
        if step % 5 == 0 or step + 1 == config.train.steps:
            print(f"step {step:3d} loss {loss:.4f}")
    return losses, dense


if __name__ == "__main__":
    main()
