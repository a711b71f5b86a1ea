"""Linen both ways: our decoder as a Linen module under a Flax TrainState, and a Linen block in our decoder.

python examples/linen_model.py      # 4 simulated devices on the CPU, some seconds
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx
from flax.training.train_state import TrainState

import sppo_jax
from sppo_jax.config import Config, MeshConfig, ModelConfig, SequenceConfig, TrainConfig
from sppo_jax.models import Decoder, dense_loss
from sppo_jax.models.linen import linen_decoder, linen_layer, params_from_linen, params_to_linen

LENGTH, VOCAB = 32, 24
SHAPE = ModelConfig(vocab_size=VOCAB, hidden_size=32, num_layers=2, num_heads=2, mlp_size=64, init_scale=0.1)
CONFIG = Config(
    model=SHAPE,
    mesh=MeshConfig(pipe=2, seq=2),
    sequence=SequenceConfig(length=LENGTH, chunks=2, per_pipeline=2),
    train=TrainConfig(steps=6),
)


class LinenBlock(linen.Module):
    """A block written in Linen; it makes everything in `setup`, for both methods use it."""

    config: ModelConfig

    def setup(self) -> None:
        heads = (self.config.num_heads, self.config.head_dim)
        self.norm_in, self.norm_mlp = linen.RMSNorm(), linen.RMSNorm()
        self.qkv = [linen.DenseGeneral(heads) for _ in range(3)]
        self.output = linen.DenseGeneral(self.config.hidden_size, axis=(-2, -1))
        hidden = self.config.hidden_size
        self.up, self.down = linen.Dense(self.config.mlp_size or 4 * hidden), linen.Dense(hidden)

    def before_attention(self, x: jax.Array, positions: jax.Array) -> tuple[jax.Array, ...]:
        h = self.norm_in(x)
        return tuple(project(h) for project in self.qkv)

    def after_attention(self, x: jax.Array, out: jax.Array) -> jax.Array:
        x = x + self.output(out)
        return x + self.down(linen.gelu(self.up(self.norm_mlp(x))))


def counting_batch() -> dict[str, np.ndarray]:
    """Returns two sequences that count upwards."""
    counted = (np.array([[3], [11]]) + np.arange(LENGTH + 1)).astype(np.int32) % VOCAB
    positions = np.tile(np.arange(LENGTH, dtype=np.int32), (2, 1))
    document_ids = np.zeros_like(positions)
    return {
        "tokens": counted[:, :-1],
        "targets": counted[:, 1:],
        "positions": positions,
        "document_ids": document_ids,
    }


def train_under_linen(plan: sppo_jax.Plan) -> list[float]:
    """Trains our decoder with a Linen TrainState; the gradients come from the pipeline."""
    batch, module = counting_batch(), linen_decoder(SHAPE)
    variables = module.init(jax.random.key(0), jnp.asarray(batch["tokens"]))
    state = TrainState.create(apply_fn=module.apply, params=variables["params"], tx=optax.adamw(1e-2))
    model = Decoder(SHAPE, rngs=nnx.Rngs(params=0))
    like, loss_and_grads = nnx.state(model, nnx.Param), sppo_jax.value_and_grad(plan, model)
    losses = []
    for _ in range(CONFIG.train.steps):
        loss, grads = loss_and_grads(params_from_linen({"params": state.params}, like), batch)
        state = state.apply_gradients(grads=params_to_linen(grads)["params"])
        losses.append(float(loss))
    return losses


def linen_block_in_our_decoder(plan: sppo_jax.Plan) -> tuple[float, float]:
    """Returns the loss of a decoder of Linen blocks, by the pipeline and on one device."""
    model = Decoder(SHAPE, rngs=nnx.Rngs(params=0), layer=linen_layer(LinenBlock))
    params, batch = nnx.state(model, nnx.Param), counting_batch()
    loss, _ = sppo_jax.value_and_grad(plan, model)(params, batch)
    return float(loss), float(dense_loss(model, params, jax.tree.map(jnp.asarray, batch)))


def main() -> tuple[list[float], tuple[float, float]]:
    """Runs both."""
    plan = sppo_jax.make_plan(CONFIG)
    losses, both = train_under_linen(plan), linen_block_in_our_decoder(plan)
    print("our decoder under Linen, loss by step:", " ".join(f"{loss:.3f}" for loss in losses))
    print(f"a Linen block in our decoder: pipeline {both[0]:.6f}, one device {both[1]:.6f}")
    return losses, both


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 4)
    main()
