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
assert jax.tree.structure(grads) == jax.tree.structure(params)

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
