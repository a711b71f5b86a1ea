"""Trains a decoder whose layers are not ours: a parallel block, in which attention and MLP read the same norm.

A layer is any Flax NNX module with two methods that treat every token alone: `before_attention(x, positions)` gives
queries, keys and values; `after_attention(x, out)` takes what attention made of them. Chunking, the pipeline, the
sequence-parallel ring and the stash come from the plan, and the block knows nothing of them.

    python examples/custom_block.py      # 4 simulated devices on the CPU, about a minute
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import sppo_jax
from sppo_jax.config import Config, MeshConfig, ModelConfig, OptimizerConfig, SequenceConfig, TrainConfig
from sppo_jax.models import Decoder, RMSNorm, dense_loss, rotary_cos_sin, rotate


class ParallelBlock(nnx.Module):
    """x + attention(norm(x)) + mlp(norm(x)), with one key and value head for all queries."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        """Creates one layer; `Decoder` stacks `config.num_layers` of them."""
        self.config = config
        hidden, heads, size = config.hidden_size, config.num_heads, config.head_dim
        mlp_size = config.mlp_size or 4 * hidden

        def matrix(*shape: int) -> nnx.Param[jax.Array]:
            return nnx.Param(config.init_scale * jax.random.normal(rngs.params(), shape))

        self.norm = RMSNorm(hidden, eps=config.norm_eps, dtype=jnp.dtype(jnp.float32))
        self.query = matrix(hidden, heads * size)
        self.key_value = matrix(hidden, 2 * size)
        self.output = matrix(heads * size, hidden)
        self.up = matrix(hidden, mlp_size)
        self.down = matrix(mlp_size, hidden)

    def before_attention(self, x: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns q [..., tokens, heads, size] and k, v [..., tokens, 1, size]."""
        config, h = self.config, self.norm(x)
        q = (h @ self.query[...].astype(x.dtype)).reshape(*x.shape[:-1], config.num_heads, config.head_dim)
        k, v = jnp.split((h @ self.key_value[...].astype(x.dtype))[..., None, :], 2, axis=-1)
        cos, sin = rotary_cos_sin(positions, config.rope, config.head_dim, x.dtype)
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def after_attention(self, x: jax.Array, out: jax.Array) -> jax.Array:
        """Returns the next layer's input [..., tokens, hidden]."""
        attended = out.reshape(*x.shape[:-1], -1) @ self.output[...].astype(x.dtype)
        inner = jnp.square(jax.nn.relu(self.norm(x) @ self.up[...].astype(x.dtype)))
        return x + attended + inner @ self.down[...].astype(x.dtype)


def make_config() -> Config:
    """Returns 2 stages of 2 devices; every sequence goes through them in 4 chunks."""
    shape = ModelConfig(vocab_size=256, hidden_size=64, num_layers=4, num_heads=4, num_kv_heads=1, mlp_size=256)
    return Config(
        model=shape,
        mesh=MeshConfig(pipe=2, seq=2),
        sequence=SequenceConfig(length=256, chunks=4, split="ring", per_pipeline=4),
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


def main() -> None:
    """Compare the first loss with the dense model's, then train."""
    jax.config.update("jax_num_cpu_devices", 4)
    config = make_config()
    plan = sppo_jax.make_plan(config)
    model = Decoder(config.model, rngs=nnx.Rngs(params=config.train.seed), layer=ParallelBlock)
    params = nnx.state(model, nnx.Param)
    loss_and_grads = sppo_jax.value_and_grad(plan, model)
    optimizer = optax.adamw(config.optimizer.lr)
    moments = optimizer.init(params)
    rng = np.random.default_rng(config.train.seed)

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
            dense = dense_loss(model, params, jax.tree.map(jnp.asarray, batch))
            print(f"first loss: pipeline {loss:.6f}, dense model {dense:.6f}")
        params, moments = update(params, moments, grads)
        if step % 5 == 0 or step + 1 == config.train.steps:
            print(f"step {step:3d} loss {loss:.4f}")


if __name__ == "__main__":
    main()
