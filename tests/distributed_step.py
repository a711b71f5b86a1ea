"""What every process of a test runs: rows and batches of many meshes, then a step of each named case."""

import sys

import jax
import numpy as np
from exactness import quick_options, random_batch, small_model, small_plan
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from sppo_jax.evaluation.placement import local_rows, place_batch
from sppo_jax.pipeline.api import value_and_grad
from sppo_jax.pipeline.params.layout import make_mesh
from sppo_jax.pipeline.params.storage import param_shardings

STEPS = {
    "data-pipe": dict(chunks=(12, 12), mesh=(2, 2, 1)),
    "pipe-ring": dict(chunks=(12, 12), mesh=(1, 2, 2), kind="ring"),
    "data-pipe-sequences": dict(chunks=(14, 10), mesh=(2, 2, 1), schedule="seq1f1b", sequences=2),
    "pipe-ulysses": dict(chunks=(8, 8, 8), mesh=(1, 2, 2)),
}
MESHES = [(4, 1, 1), (2, 2, 1), (2, 1, 2), (1, 4, 1), (1, 2, 2), (1, 1, 4)]


def make_step(name):
    """Returns plan, model, parameters and batch of a case: the same wherever they are made."""
    plan = small_plan(**STEPS[name])
    model = small_model(vocab_size=20, dtype="float32")
    rows = plan.mesh.data * plan.sequences_per_pipeline
    batch = random_batch(np.random.default_rng(1), rows, plan.sequence_length, 20, padding=1)
    return plan, model, nnx.state(model, nnx.Param), batch


def run_step(name):
    """Returns loss and gradients, whole, on a mesh of the devices of all processes."""
    plan, model, params, batch = make_step(name)
    mesh = make_mesh(plan)
    shardings = param_shardings(plan, params, mesh)
    params = jax.tree.map(
        lambda x, s: jax.make_array_from_callback(x.shape, s, lambda i: np.asarray(x)[i]), params, shardings
    )
    rows = local_rows(mesh, len(batch["tokens"]))
    batch = place_batch({key: x[rows] for key, x in batch.items()}, plan, mesh)
    whole = NamedSharding(mesh, PartitionSpec())
    step = jax.jit(value_and_grad(plan, model, mesh), out_shardings=whole, compiler_options=quick_options())
    loss, grads = step(params, batch)
    return [np.asarray(x) for x in (loss, *jax.tree.leaves(grads))]


def check_rows():
    """Checks, on many meshes, that the rows a process reads are those it holds and that they make the whole batch."""
    length = 16
    for shape in MESHES:
        for num_sequences in (4, 12):
            plan = small_plan((8, 8), mesh=shape, sequences=num_sequences // shape[0])
            mesh = make_mesh(plan)
            rows = local_rows(mesh, num_sequences)
            whole = np.arange(num_sequences * length, dtype=np.int32).reshape(num_sequences, length)
            placed = place_batch({"tokens": whole[rows]}, plan, mesh)["tokens"]
            tokens = np.concatenate([np.asarray(shard.data).ravel() for shard in placed.addressable_shards])
            assert sorted({int(token) // length for token in tokens}) == rows, (shape, rows, tokens)
            for shard in placed.addressable_shards:
                np.testing.assert_array_equal(np.asarray(shard.data), whole.reshape(placed.shape)[shard.index])


if __name__ == "__main__":
    from sppo_jax.config import config_from_dict
    from sppo_jax.processes import distributed
    from sppo_jax.processes.environment import simulate_devices

    model = {"vocab_size": 24, "hidden_size": 16, "num_layers": 4, "num_heads": 2, "mlp_size": 32}
    simulate_devices(distributed.local_devices(4))
    distributed.start(config_from_dict({"model": model, "sequence": {"length": 64}, "train": {"steps": 3}}))
    check_rows()
    for name in sys.argv[2:]:
        arrays = run_step(name)
        if distributed.is_main():
            np.savez(f"{sys.argv[1]}/{name}.npz", *arrays)
    distributed.say("done")
