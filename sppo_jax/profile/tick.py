"""Seconds of a tick of the real pipeline with a few tokens and small layers."""

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from sppo_jax.config import Config, ModelConfig, config_from_dict
from sppo_jax.hardware import Device, make_cluster
from sppo_jax.models.decoder import Decoder
from sppo_jax.pipeline import api
from sppo_jax.pipeline.params import layout, storage
from sppo_jax.profile.timing import Timer
from sppo_jax.search.make import make_plan

_CHUNKS = 16
_CHUNK_TILES = 16
# Upper limits of the model's sizes: almost no compute for an accelerator, and the sizes of a small model for a CPU.
_HIDDEN, _MLP, _VOCABULARY = 128, 1024, 2048


def tick_seconds(timer: Timer, device: Device, model: ModelConfig) -> float:
    """Returns the fixed seconds of a tick, measured with two small layers a stage and one stage a device.

    Args:
        timer: gives the devices and the number of runs.
        device: gives the length of the chunks.
        model: gives the compute dtype, and the sizes if they are small.
    """
    config = _config(len(timer.devices), device, model)
    plan = make_plan(config, make_cluster(device, len(timer.devices)))
    mesh = layout.make_mesh(plan, timer.devices)
    decoder = nnx.eval_shape(lambda: Decoder(config.model, rngs=nnx.Rngs(0)))
    params = nnx.state(decoder, nnx.Param)
    shardings = storage.param_shardings(plan, params, mesh)

    def make():
        return jax.tree.map(lambda x: jax.numpy.full(x.shape, 0.01, x.dtype), params)

    step = jax.jit(api.value_and_grad(plan, decoder, mesh))
    params, batch = jax.jit(make, out_shardings=shardings)(), _batch(config, mesh)
    return timer.call_seconds(lambda: step(params, batch)) / len(plan.table().ticks)


def _config(num_devices: int, device: Device, model: ModelConfig) -> Config:
    return config_from_dict(
        {
            "model": {
                "vocab_size": min(model.vocab_size, _VOCABULARY),
                "hidden_size": min(model.hidden_size, _HIDDEN),
                "num_layers": 2 * num_devices,
                "num_heads": 2,
                "num_kv_heads": 1,
                "head_dim": 64,
                "mlp_size": min(model.mlp_size or _MLP, _MLP),
                "compute_dtype": model.compute_dtype,
            },
            "mesh": {"data": 1, "pipe": num_devices, "seq": 1},
            "sequence": {"length": _CHUNKS * _CHUNK_TILES * device.tile, "chunks": _CHUNKS},
            "stash": {"inputs": "keep", "attention": "keep", "rest": "recompute", "alpha": 0.0},
            "train": {"steps": 1},
        }
    )


def _batch(config: Config, mesh) -> dict[str, jax.Array]:
    row = np.arange(config.sequence.length, dtype=np.int32)[None]
    batch = {"tokens": row % 32, "targets": row % 32, "positions": row, "document_ids": np.zeros_like(row)}
    sharding = NamedSharding(mesh, P("data"))
    return {key: jax.make_array_from_callback(x.shape, sharding, x.__getitem__) for key, x in batch.items()}
