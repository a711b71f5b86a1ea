# ruff: noqa: E402
"""The examples of docs/api.md, in their order; each continues those above.

python examples/api.py      # 4 simulated devices on the CPU, some seconds
"""

import tempfile
from pathlib import Path

import jax
import numpy as np
from flax import nnx

jax.config.update("jax_num_cpu_devices", 4)  # simulated; leave the line out on real devices
folder = Path(tempfile.mkdtemp())

# == sppo_jax.load_config
import sppo_jax

(folder / "c.yaml").write_text("""
model: {vocab_size: 64, hidden_size: 32, num_layers: 2, num_heads: 2, mlp_size: 64}
sequence: {length: 64, chunks: 2}
mesh: {pipe: 2, seq: 2}
train: {steps: 10, devices: "cpu:4"}
""")
config = sppo_jax.load_config(folder / "c.yaml", ["train.steps=20"])
assert config.train.steps == 20

# == sppo_jax.make_plan
plan = sppo_jax.make_plan(config)
print(plan.describe())
assert (plan.mesh.pipe, plan.mesh.seq) == (2, 2)

# == sppo_jax.Plan
again = sppo_jax.Plan.from_json(plan.to_json())
assert again == plan
print(plan.chunk_lengths, plan.predicted.hbm_bytes, plan.reasons["schedule"])

# == sppo_jax.build_model
model = sppo_jax.build_model(config)
params = nnx.state(model, nnx.Param)
logits = model(np.zeros((1, 64), np.int32))  # the dense reference, on one device
assert logits.shape == (1, 64, 64)

# == sppo_jax.value_and_grad
tokens = np.random.default_rng(0).integers(64, size=(1, 65), dtype=np.int32)
positions = np.arange(64, dtype=np.int32)[None]
batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "positions": positions, "document_ids": positions * 0}
loss, grads = sppo_jax.value_and_grad(plan, model)(params, batch)
assert grads.keys() == params.keys()

# == sppo_jax.evaluate
scores = sppo_jax.evaluate(plan, model)(params, batch)
assert scores.losses_BS.shape == scores.hits_BS.shape == (1, 64)


# == sppo_jax.token_loss
from collections.abc import Mapping


def kto(logp_BS: jax.Array, batch: Mapping[str, jax.Array]) -> jax.Array:
    """KTO: what is desired (sign 1) should become likelier than for the reference, what is not (sign -1) less."""
    gain_B = (logp_BS - batch["reference"]).sum(-1)  # 0 where there is no target, on both sides
    return (1 - jax.nn.sigmoid(0.1 * batch["sign"] * (gain_B - batch["kl"]))).mean()


rated = batch | {"reference": -scores.losses_BS, "sign": np.array([-1], np.float32), "kl": np.float32(0)}
value, grads = sppo_jax.token_loss(plan, model, kto)(params, rated)
assert abs(value - 0.5) < 1e-5  # the model is its own reference

# == sppo_jax.prepare_process
sppo_jax.prepare_process(plan)  # on GPUs: before jax's first computation, so before all of the above
assert sppo_jax.prepare_process(plan) == {}

# == sppo_jax.make_mesh
mesh = sppo_jax.make_mesh(plan)
assert dict(mesh.shape) == {"data": 1, "pipe": 2, "seq": 2}

# == sppo_jax.param_shardings
placed = jax.device_put(params, sppo_jax.param_shardings(plan, params, mesh))
assert placed["embedding"].shape == (64, 32)

# == sppo_jax.stored_shapes
stored = sppo_jax.stored_shapes(plan, params, mesh)  # where layers run, padded where they must be
assert stored.keys() == params.keys()

# == sppo_jax.make_train_step
import optax

from sppo_jax.train.state import shardings_of, state_shapes

optimizer = optax.adamw(1e-3)
shapes = state_shapes(optimizer, stored, mesh)
step = sppo_jax.make_train_step(sppo_jax.value_and_grad(plan, model, mesh), optimizer, shardings_of(shapes))
state, metrics = jax.eval_shape(step, shapes, batch, np.zeros(1, np.int32))  # without eval_shape, the step itself
assert metrics["loss"].shape == ()

# == sppo_jax.Attention
mixer = sppo_jax.Attention(window=32)  # of a layer of your own, see examples/custom_block.py
assert mixer.within(64) == 32 and mixer.within(16) == 0

# == sppo_jax.Operands
operands = sppo_jax.Operands(heads={"value": np.zeros((64, 2, 8))}, constants={})  # see examples/custom_mixer.py
assert operands.heads["value"].shape == (64, 2, 8)

# == sppo_jax.models.to_hf
from sppo_jax.models import to_hf

to_hf(model, folder / "exported")
assert (folder / "exported" / "config.json").exists()

# == sppo_jax.models.from_hf
from sppo_jax.models import from_hf

same = from_hf(folder / "exported", dtype="float32")
np.testing.assert_array_equal(same(batch["tokens"]), model(batch["tokens"]))

# == sppo_jax.config.config_from_dict
from sppo_jax.config import config_from_dict

shape = {"vocab_size": 64, "hidden_size": 32, "num_layers": 2, "num_heads": 2, "mlp_size": 64}
small = config_from_dict({"model": shape, "sequence": {"length": 64}, "train": {"steps": 1}})
assert small.sequence.chunks == "auto"

# == sppo_jax.search.search.search
from sppo_jax.search.search import search

found = search(
    config_from_dict(
        {"model": {"preset": "llama3-8b"}, "sequence": {"length": 131072}, "train": {"steps": 1}}
        | {"hardware": {"cluster": "h100:1x8"}}
    )
)
print(found.fits, found.plan.predicted.step_s, found.num_considered)

# == sppo_jax.models.dense_value_and_grad
from sppo_jax.models import dense_value_and_grad

dense_loss, _ = jax.jit(dense_value_and_grad(model))(params, batch)
np.testing.assert_allclose(dense_loss, loss, rtol=1e-5)
