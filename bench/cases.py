"""Parts that both sides of a benchmark share: model, plan, batch, and the dense step on any number of devices."""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from sppo_jax.config import Config, config_from_dict
from sppo_jax.hardware import DEVICES, make_cluster
from sppo_jax.models.decoder import Decoder
from sppo_jax.models.dense import dense_value_and_grad
from sppo_jax.plan.plan import Plan
from sppo_jax.search.make import make_plan

# (inputs, attention, rest, kv_grad_dtype) of the stash
PLACES = {
    "keep": ("keep", "keep", "recompute", "float32"),
    "host": ("host", "host", "recompute", "float32"),
    "recompute": ("recompute", "recompute", "recompute", "float32"),
    "host, bfloat16 dK dV": ("host", "host", "recompute", "bfloat16"),
}


class Layout(NamedTuple):
    """How devices are used: the mesh, and the sequences a pipeline takes in one step."""

    data: int
    pipe: int
    seq: int
    sequences: int
    schedule: str = "auto"
    interleave: int = 1

    @property
    def num_devices(self) -> int:
        return self.data * self.pipe * self.seq

    def __str__(self) -> str:
        devices = "1 device" if self.num_devices == 1 else f"pipe {self.pipe} x seq {self.seq}"
        groups = f" v={self.interleave}" if self.interleave > 1 else ""
        return devices + ("" if self.schedule == "auto" else f", {self.schedule}{groups}")


def make_config(model: dict, length: int, num_chunks: int, layout: Layout, places: str) -> Config:
    """Write the config of one measurement; all of the stash that may go to the host does (alpha 1)."""
    stash = dict(zip(("inputs", "attention", "rest", "kv_grad_dtype"), PLACES[places], strict=True))
    return config_from_dict(
        {
            "model": model,
            "mesh": {"data": layout.data, "pipe": layout.pipe, "seq": layout.seq},
            "sequence": {"length": length, "chunks": num_chunks, "per_pipeline": layout.sequences},
            "schedule": {"name": layout.schedule, "interleave": layout.interleave},
            "stash": {**stash, "alpha": 1.0},
            "train": {"steps": 1},
        }
    )


def plan_for(config: Config, device: str) -> Plan:
    """Make the plan for a device of the planner's list."""
    return make_plan(config, make_cluster(DEVICES[device], math.prod(config.mesh.pinned.values())))


def random_batch(num_sequences: int, length: int, vocab_size: int) -> dict[str, np.ndarray]:
    """Draw sequences of one document each, every token but the last with a target."""
    tokens = np.random.default_rng(0).integers(0, vocab_size, (num_sequences, length), dtype=np.int32)
    targets = np.roll(tokens, -1, axis=1)
    targets[:, -1] = -1
    positions = np.broadcast_to(np.arange(length, dtype=np.int32), tokens.shape)
    return {"tokens": tokens, "targets": targets, "positions": positions, "document_ids": np.zeros_like(tokens)}


def abstract_model(config: Config) -> Decoder:
    """Make the model's structure without its values."""
    return nnx.eval_shape(lambda: Decoder(config.model, rngs=nnx.Rngs(0)))


def dense_mesh(devices) -> Mesh:
    """Make the mesh of the dense step: every device takes whole sequences."""
    return Mesh(np.asarray(devices), ("data",), axis_types=(AxisType.Auto,))


def dense_step(model: Decoder, mesh: Mesh) -> Callable:
    """Make the dense step: the blockwise kernel, each layer checkpointed, the loss in tiles; data-parallel.

    The step uses `shard_map`, because the kernel takes sequences one by one and the partitioner alone would make every
    device compute all sequences. Every sequence has as many targets, so the mean of the means is the mean.
    """
    step = dense_value_and_grad(model)
    if mesh.size == 1:
        return step

    def on_device(params, batch):
        return jax.lax.pmean(step(params, batch), "data")

    return jax.shard_map(on_device, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=False)


def dense_shardings(mesh: Mesh) -> tuple[NamedSharding, NamedSharding]:
    """Return those of parameters and batch."""
    return NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
