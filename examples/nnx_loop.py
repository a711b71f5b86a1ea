"""A plain Flax NNX and optax loop; the one line that is new is `sppo_jax.value_and_grad` for `jax.value_and_grad`.

python examples/nnx_loop.py      # 4 simulated devices on the CPU, some seconds
"""

import jax
import numpy as np
import optax
from flax import nnx

import sppo_jax
from sppo_jax.config import Config, MeshConfig, ModelConfig, SequenceConfig, TrainConfig
from sppo_jax.models import Decoder

STEPS, LENGTH, VOCAB = 10, 64, 32


def main() -> list[float]:
    """Teach a small decoder to count; returns the losses."""
    shape = ModelConfig(vocab_size=VOCAB, hidden_size=32, num_layers=2, num_heads=2, mlp_size=64, init_scale=0.1)
    chunks = SequenceConfig(length=LENGTH, chunks=4, per_pipeline=2)
    plan = sppo_jax.make_plan(
        Config(model=shape, sequence=chunks, mesh=MeshConfig(pipe=2, seq=2), train=TrainConfig(steps=STEPS))
    )
    model = Decoder(shape, rngs=nnx.Rngs(params=0))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)
    loss_and_grads = sppo_jax.value_and_grad(plan, model)
    generator, losses = np.random.default_rng(0), []
    for step in range(STEPS):
        counted = (generator.integers(VOCAB, size=(2, 1)) + np.arange(LENGTH + 1)).astype(np.int32) % VOCAB
        positions = np.tile(np.arange(LENGTH, dtype=np.int32), (2, 1))
        batch = {"tokens": counted[:, :-1], "targets": counted[:, 1:], "positions": positions}
        batch["document_ids"] = np.zeros_like(positions)
        loss, grads = loss_and_grads(nnx.state(model, nnx.Param), batch)
        optimizer.update(model, grads)
        losses.append(float(loss))
        print(f"step {step} loss {loss:.4f}")
    return losses


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 4)
    main()
