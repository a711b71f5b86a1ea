"""How little `sppo check` does: sizes of its rows, and configs of few steps, a given one made small or its own."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from sppo_jax.config import Config, config_from_dict, to_dict
from sppo_jax.config.layer_types import layers_text
from sppo_jax.hardware import Cluster
from sppo_jax.plan.plan import Plan

_MIB = 2**20
_MOST_CHUNKS, _MOST_SEQUENCES, _TILES = 4, 2, 8
_STEPS = 10
# On CPUs a config's widths and vocabulary are cut to these.
_WIDTHS = {"vocab_size": 64, "hidden_size": 32, "mlp_size": 48}
_HEAD_DIM = 8
_ON_CPU = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 16, **_WIDTHS}
_ON_DEVICE = {
    "vocab_size": 32000,
    "hidden_size": 1024,
    "num_heads": 8,
    "num_kv_heads": 2,
    "head_dim": 128,
    "mlp_size": 2816,
}
_ON_HOST = {"inputs": "host", "attention": "host", "rest": "recompute", "alpha": 1.0}


def own_settings(platform: str, num_devices: int, tile: int) -> dict[str, Any]:
    """Returns the settings of a small model that uses all devices: two stages, and the rest along the sequence.

    Args:
        platform: "cpu", "gpu" or "tpu".
        num_devices: of all processes.
        tile: tokens of a device's tile.
    """
    pipe = 2 if num_devices % 2 == 0 else 1
    seq = math.gcd(num_devices // pipe, 4)
    # A stage of one layer has no loop over layers: on a CPU such a step compiles in half the time.
    model = _ON_CPU | {"num_layers": pipe} if platform == "cpu" else _ON_DEVICE | {"num_layers": 2 * pipe}
    chunks = 2
    return {
        "model": model,
        "mesh": {"data": num_devices // pipe // seq, "pipe": pipe, "seq": seq},
        "sequence": {
            "length": chunks * (2 if platform == "cpu" else _TILES) * tile * seq,
            "chunks": chunks,
            "per_pipeline": 1,
        },
        "stash": _ON_HOST,
        "schedule": {"name": "seq1f1b", "interleave": 1},
        "optimizer": {"place": "device"},
        "train": {"steps": _STEPS},
    }


def shrunk(config: Config, plan: Plan, cluster: Cluster) -> Config:
    """Returns a config with the mesh, the layer types, the kernel and the places of another, and little work.

    Args:
        config: the config.
        plan: of the config.
        cluster: on which it runs.

    Raises:
        ValueError: it cannot be made small.
    """
    mesh, stash, device = plan.mesh, plan.stash, cluster.device
    settings = to_dict(config)
    num_chunks = min(_MOST_CHUNKS, len(plan.chunk_lengths))
    tiles = 2 if device.platform == "cpu" else _TILES
    sequences = min(_MOST_SEQUENCES, plan.sequences_per_pipeline)
    is_away = "host" in (stash.inputs, stash.attention, stash.rest) or stash.inputs == "period"
    return config_from_dict(
        {
            "model": _model(config, plan, device.platform),
            "mesh": {"data": mesh.data, "pipe": mesh.pipe, "seq": mesh.seq},
            "sequence": {
                "length": num_chunks * tiles * device.tile * mesh.seq,
                "chunks": num_chunks,
                "per_pipeline": sequences,
                "groups": "static",
            },
            "schedule": _schedule(config, plan, sequences),
            "stash": {
                "inputs": stash.inputs,
                "attention": stash.attention,
                "rest": stash.rest,
                "alpha": 1.0 if is_away else 0.0,
            },
            "optimizer": {**settings["optimizer"], "place": plan.optimizer, "warmup_steps": 0},
            "hardware": settings["hardware"],
            "checkpoint": settings["checkpoint"],
            "train": {"steps": _STEPS, "devices": config.train.devices, "seed": config.train.seed},
        }
    )


def _interleave(plan: Plan) -> int:
    """Returns the groups of layers of a stage: two where there are more."""
    return min(2, plan.schedule.interleave)


def _schedule(config: Config, plan: Plan, sequences: int) -> dict[str, Any]:
    if plan.schedule.name == "table":
        return {"name": "seq1f1b", "interleave": _interleave(plan), "wave": 1}
    wave = sequences if plan.schedule.wave > 1 else 1
    return {"name": plan.schedule.name, "interleave": _interleave(plan), "wave": wave}


def _model(config: Config, plan: Plan, platform: str) -> dict[str, Any]:
    """Returns the model with two layers, or a period of its layers, in each virtual stage; narrow on a CPU."""
    model, groups = config.model, plan.mesh.pipe * _interleave(plan)
    names = model.type_names
    per_group = min(len(names) // groups, max(2, _period(names)))
    settings = {**to_dict(config)["model"], "hf": None, "preset": None, "num_layers": per_group * groups}
    if settings["layers"]:
        settings["layers"] = layers_text(names[: per_group * groups])
    if platform != "cpu":
        return settings
    widths = {name: size for name, size in _WIDTHS.items() if settings[name]}
    if settings["experts"]["count"]:
        experts = settings["experts"]
        count = min(experts["count"], 8 * experts["expert_groups"])
        shared = 16 if experts["shared_size"] else None
        chosen = min(experts["chosen"], 2)
        widths["experts"] = {**experts, "count": count, "chosen": chosen, "size": 16, "shared_size": shared}
    return settings | widths | {"head_dim": _HEAD_DIM, "compute_dtype": "float32"}


def _period(names: tuple[str, ...]) -> int:
    """Returns after how many layers the layer types begin again; all of them where they do not."""
    sizes = (size for size in range(1, len(names)) if all(a == b for a, b in zip(names, names[size:], strict=False)))
    return next(sizes, len(names))


@dataclass(frozen=True, kw_only=True)
class CheckSizes:
    """Sizes and durations.

    Args:
        side: rows and columns of products.
        stream_bytes: of an array that is added to another.
        copy_rows: of a buffer on the host.
        copy_row_bytes: of each.
        copy_ways: ways of copies that are measured.
        row_elements: of a row on the host whose values are checked.
        exchanged: elements of 4 bytes that a device sends.
        loop_turns: of the loops that may wait.
        loop_side: rows and columns of their matrices.
        pinned_bytes: of a device.
        run_s: seconds of a timed run.
        runs: of which the median counts.
    """

    side: int
    stream_bytes: int
    copy_rows: int
    copy_row_bytes: int
    copy_ways: tuple[str, ...] = ("out", "back", "both")
    row_elements: int
    exchanged: int
    loop_turns: int = 8
    loop_side: int = 8192
    pinned_bytes: int = 4 * 2**30
    run_s: float
    runs: int


_SIZES_ON_CPU = CheckSizes(
    side=64,
    stream_bytes=_MIB,
    copy_rows=4,
    copy_row_bytes=_MIB // 4,
    copy_ways=("both",),
    row_elements=64,
    exchanged=1024,
    run_s=0.002,
    runs=3,
)
_SIZES_ON_DEVICE = CheckSizes(
    side=8192,
    stream_bytes=2**30,
    copy_rows=8,
    copy_row_bytes=64 * _MIB,
    row_elements=2**18,
    exchanged=64 * _MIB,
    run_s=0.5,
    runs=5,
)


def sizes_of(platform: str, *, quick: bool) -> CheckSizes:
    """Returns the sizes for a platform, "cpu", "gpu" or "tpu".

    Args:
        platform: of the devices.
        quick: whether runs are short.
    """
    if platform == "cpu":
        return _SIZES_ON_CPU
    return replace(_SIZES_ON_DEVICE, run_s=0.15, runs=3) if quick else _SIZES_ON_DEVICE
