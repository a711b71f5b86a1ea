"""Part `step`: whole train steps as planned, behind the check of their kernel that a run begins with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax

from bench.gpu_parts.case import Case, Emit
from bench.gpu_parts.program import Program, Target, target_here
from bench.gpu_parts.room import cluster_of
from bench.gpu_parts.step import TINY, measure, ready_of
from sppo_jax.config import Config, config_from_dict
from sppo_jax.fit.lowering import train_program
from sppo_jax.hardware import DEVICES
from sppo_jax.search.make import make_plan
from sppo_jax.train.kernel_check import check_kernels_once

_K = 1024
_RING = {"sequence": {"split": "ring", "ring_pass": "kv", "chunks": 2}}


def cases(*, tiny: bool) -> list[Case]:
    """List the cases."""
    if tiny:
        model = TINY | {"head_dim": 64, "kernel": "pallas"}
        return [_case("tiny ring", model, 512, 2, 30, _RING)]
    qwen, llama = {"preset": "qwen3-0.6b"}, {"preset": "llama3.2-1b"}
    eight = {"preset": "llama3-8b", "num_layers": 8}
    return [
        _case("0.6B at 32K, one device", qwen, 32 * _K, 1, 120),
        _case("0.6B at 128K, a ring of four whose keys travel", qwen, 128 * _K, 4, 150, _RING),
        _case("1B (heads of 64) at 128K, four devices", llama, 128 * _K, 4, 180),
        _case("8B's widths, 8 layers, at 128K, four devices", eight, 128 * _K, 4, 180),
    ]


def _case(name: str, model: dict, length: int, devices: int, expected_s: float, sections: dict | None = None) -> Case:
    sections = sections or {}
    sequence = {"length": length} | sections.get("sequence", {})
    mesh = {"data": 1, "pipe": 1, "seq": devices} if sections else {}
    return Case(
        part="step",
        name=name,
        settings={"model": model, "sequence": sequence, "mesh": mesh, "devices": devices},
        expected_s=expected_s,
        limit_s=4 * expected_s,
        devices=devices,
        folder="tpu_parts",
    )


def programs(settings: dict, target: Target) -> Iterator[Program]:
    """List the program of a case."""
    config = _config(settings, target.platform)
    program = train_program(config, make_plan(config, target.cluster), target.devices, target.platform)
    yield Program("step", program.step, (program.state, program.batch, program.signals), program.turn_shares)


def run(settings: dict, device: str, emit: Emit) -> None:
    """Check the kernel, and measure the step."""
    config = _config(settings, DEVICES[device].platform)
    plan = make_plan(config, cluster_of(DEVICES[device], settings["devices"]))
    ready = ready_of(config, plan, lambda: target_here(device, settings["devices"]))
    check_kernels_once(config, plan, jax.devices()[0])
    what = f"{config.model.num_layers} layers, {plan.kernel}, {plan.sequence_kind}, {plan.mesh.num_devices} devices"
    emit({"what": what, "stash": "planned"} | measure(ready, device))


def _config(settings: dict, platform: str) -> Config:
    dtype = {"compute_dtype": "float32" if platform == "cpu" else "bfloat16"}
    values: dict[str, Any] = {name: settings[name] for name in ("sequence", "mesh")}
    return config_from_dict(values | {"model": settings["model"] | dtype, "train": {"steps": 100}})
