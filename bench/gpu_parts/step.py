"""Part `step`: whole train steps, as `sppo train` runs them: kept, as planned, and all on the host.

Beside each: the compiler's bytes of the very program that ran, and the planner's seconds and bytes of its Plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from bench.cases import random_batch
from bench.gpu_parts.case import Case, Emit
from bench.gpu_parts.probe import GRAPHS_FLAG, NO_GRAPHS_FLAG
from bench.gpu_parts.program import TIMED_RUNS, Program, Target, figures_of, median, target_here, timed
from bench.gpu_parts.room import cluster_of, needed_gib
from sppo_jax.config import Config, config_from_dict, to_dict
from sppo_jax.fit.figures import Figures
from sppo_jax.fit.lowering import TrainProgram, train_program
from sppo_jax.hardware import DEVICES, Cluster, pool_bytes
from sppo_jax.models.counts import flops_per_token
from sppo_jax.pipeline.params.layout import stripe
from sppo_jax.plan.plan import Plan
from sppo_jax.processes import environment
from sppo_jax.processes.host_pool import fill_pools
from sppo_jax.search.make import make_plan
from sppo_jax.search.search import search
from sppo_jax.train.metrics.memory_peak import peak_memory
from sppo_jax.train.state import TrainState, init_state

_K, _GIB = 1024, 2**30
# Kept and on the host take the same chunks, and both recompute the rest: what differs is the offload.
STASHES = {
    "kept": {"inputs": "keep", "attention": "keep", "rest": "recompute"},
    "planned": {},
    "all on the host": {"inputs": "host", "attention": "host", "rest": "recompute", "alpha": 1.0},
}
_PINNED_CHUNKS = 16
ONE_BILLION, EIGHT_BILLION, EXPERTS = ({"preset": name} for name in ("llama3.2-1b", "llama3-8b", "qwen3-30b-a3b"))
HYBRID = {"preset": "qwen3.5-4b", "num_layers": 4, "layers": "2x(delta,full)"}
BREADTH_FIRST = {"name": "breadth-first", "interleave": "auto"}
TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 16,
    "mlp_size": 48,
}
# Part `exact` has the tiny step whose stash is on the host; one is enough.
TINY_STEP = {"model": TINY, "length": 128, "chunks": 4, "stash": "kept", "host_gib": 1}
TINY_HYBRID = TINY_STEP | {"model": TINY | {"layers": "delta,full"}, "length": 48, "chunks": 2}
# A step at 512K then takes under 15 s; a stage needs two layers to hide its copies.
FEW_LAYERS = 2
# What XLA does otherwise: what it takes into CUDA graphs, and loops of two iterations, in which two arrays hold a
# packed stash in turn and none is copied (docs/log/host-copies.md).
_OTHERWISE = {
    "loops in CUDA graphs": GRAPHS_FLAG,
    "no CUDA graphs": NO_GRAPHS_FLAG,
    "loops of two iterations": "--xla_gpu_enable_while_loop_double_buffering=true",
}
# Longer steps are timed twice, others three times.
_LONG_S, _LONG_RUNS = 5.0, 2
# Host memory that a plan may take.
HOST_GIB = 60
# Parameters, moments and gradients of 8B take 116 GiB. Breadth-first, 1B at 128K takes 84 GiB of an H100's host.
_LARGE_HOST_GIB, _WHOLE_HOST_GIB = 100, 124


def cases(*, tiny: bool) -> list[Case]:
    """List the cases."""
    if tiny:
        return [_case("tiny, kept", TINY_STEP, 10), _case("tiny hybrid, kept", TINY_HYBRID, 20)]
    found = []
    for name, model, length, expected_s in (
        ("1B at 32K", ONE_BILLION, 32, (60, 60, 75)),
        ("1B at 128K", ONE_BILLION, 128, (80, 120, 110)),
        (f"1B's widths, {FEW_LAYERS} layers, at 512K", ONE_BILLION | {"num_layers": FEW_LAYERS}, 512, (115, 120, 155)),
    ):
        for stash, seconds in zip(STASHES, expected_s, strict=True):
            settings = {"model": model, "length": length * _K, "stash": stash, "host_gib": HOST_GIB}
            found.append(_case(f"{name}, {stash}", settings, seconds))
            if (length, stash) == (128, "all on the host"):  # the same step, to compare
                for what, flag in _OTHERWISE.items():
                    found.append(_case(f"{name}, {stash}, {what}", settings | {"xla": what}, seconds, flag))
    groups = {"model": ONE_BILLION, "length": 128 * _K, "schedule": BREADTH_FIRST}
    for stash in STASHES:
        host_gib = _LARGE_HOST_GIB if stash == "planned" else HOST_GIB
        found.append(_case(f"1B at 128K, {stash}, breadth-first", groups | {"stash": stash, "host_gib": host_gib}, 120))
    wide = {"model": EIGHT_BILLION, "length": 128 * _K, "stash": "planned", "host_gib": HOST_GIB}
    eight = wide | {"model": EIGHT_BILLION | {"num_layers": 8}}
    experts = wide | {"model": EXPERTS | {"num_layers": FEW_LAYERS}}
    hybrid = wide | {"model": HYBRID}
    few = {"model": ONE_BILLION | {"num_layers": FEW_LAYERS}, "stash": "planned", "host_gib": HOST_GIB}
    lengths = [2**22, 2**23]
    on_host = {"model": EIGHT_BILLION, "stash": "planned", "host_gib": _WHOLE_HOST_GIB, "optimizer": "host"}
    longest = on_host | {"longest": [2**18, 2**19], "length": 2**18}
    return [
        *found,
        _case("8B's widths, 8 layers, at 128K, planned", eight, 105),
        _case(
            "8B's widths, 8 layers, at 128K, planned, no CUDA graphs",
            eight | {"xla": "no CUDA graphs"},
            105,
            NO_GRAPHS_FLAG,
        ),
        _case("8B's widths at 128K, planned", wide | {"most_layers": True}, 190),
        _case(f"30B-A3B's widths, {FEW_LAYERS} layers, at 128K, planned", experts, 120),
        _case("Qwen3.5-4B's widths, 2x(delta,full), at 128K, planned", hybrid, 120),
        _case("8B at 128K, optimizer on the host", on_host | {"length": 128 * _K}, 330),
        _case("8B, optimizer on the host, longest", longest, 150),
        _case("longest", few | {"longest": lengths, "length": lengths[0]}, 130),
    ]


def _case(name: str, settings: dict, expected_s: float, flags: str = "") -> Case:
    needs = {"hbm_gib": 70.0, "host_gib": _needed_host_gib(settings)} if not name.startswith("tiny") else {}
    limit_s = 3 * expected_s + 60
    return Case(part="step", name=name, settings=settings, expected_s=expected_s, limit_s=limit_s, flags=flags, **needs)


def _needed_host_gib(settings: dict) -> float:
    """Return the GiB of host memory that a case's machine must have; a program that is only compiled pins none."""
    return needed_gib(0 if settings["stash"] == "kept" or "longest" in settings else settings["host_gib"])


def programs(settings: dict, target: Target) -> Iterator[Program]:
    """List the programs of a case."""
    for length in settings.get("longest", [settings["length"]]):
        config = config_of(settings | {"length": length}, target.cluster)
        program = train_program(config, make_plan(config, target.cluster), target.devices, target.platform)
        name = f"{settings['stash']}, {length} tokens"
        yield Program(name, program.step, _arguments(program), program.turn_shares)


def run(settings: dict, device: str, emit: Emit) -> None:
    """Measure the steps of a case, or find the longest sequence whose step the compiler can place."""
    if "longest" in settings:
        _search_longest(settings, device, emit)
        return
    ready, variant = prepare(settings, device), _variant_of(settings)
    named = {"what": f"{ready.config.model.num_layers} layers, {settings['stash']}{variant}", "variant": variant}
    emit(named | {"stash": settings["stash"]} | measure(ready, device))


@dataclass
class Ready:
    """A compiled train step with its arguments on the device; each call trains one step.

    Args:
        config, plan: what was compiled.
        compiled: the step.
        state: of training, replaced by each call.
        batch, signals: the same for each call.
        loss: nats a target, before each call's update.
        turn_shares: of loops of at most one turn, see `sppo_jax.fit.turns`.
    """

    config: Config
    plan: Plan
    compiled: jax.stages.Compiled
    state: TrainState
    batch: dict[str, jax.Array]
    signals: jax.Array
    loss: list[float]
    turn_shares: dict[str, float]

    def once(self) -> jax.Array:
        """Train one step; return its loss, whose value is there once the step is done."""
        self.state, metrics = self.compiled(self.state, self.batch, self.signals)
        self.loss.append(float(metrics["loss"]))
        return metrics["loss"]


def measure(ready: Ready, device: str) -> dict[str, Any]:
    """Time a step, and put the compiler's and the planner's figures beside its seconds."""
    config, plan = ready.config, ready.plan
    seconds = timed(ready.once, runs=_LONG_RUNS if plan.predicted.step_s > _LONG_S else TIMED_RUNS)
    tokens = plan.sequence_length
    flops_s = flops_per_token(config.model, tokens) * tokens / median(seconds)
    return {
        "length": tokens,
        "num_layers": config.model.num_layers,
        "num_chunks": len(plan.chunk_lengths),
        "alpha": [round(float(alpha), 3) for alpha in plan.stash.alpha],
        "step_s": seconds,
        "tokens_per_s": tokens / median(seconds),
        "mfu": flops_s / (DEVICES[device].matmul_flops_s * plan.mesh.num_devices),
        "loss": ready.loss,
        **peak_memory(),
        "compiler": figures_of(ready.compiled, ready.turn_shares),
        "predicted": {
            "step_s": plan.predicted.step_s,
            "hbm_bytes": max(plan.predicted.hbm_bytes),
            "host_bytes": max(plan.predicted.host_bytes),
        },
        "config": to_dict(config),
        "plan": plan.to_dict(),
    }


def order_of(settings: dict) -> str:
    """Name the order of a case where it is not depth-first."""
    return f", {settings['schedule']['name']}" if "schedule" in settings else ""


def _variant_of(settings: dict) -> str:
    """Name what differs in a case besides model, length and stash."""
    place = f", optimizer on the {settings['optimizer']}" if "optimizer" in settings else ""
    return order_of(settings) + place + (f", {settings['xla']}" if "xla" in settings else "")


def prepare(settings: dict, device: str) -> Ready:
    """Plan, set the environment as `sppo train` does, compile, and create the first state."""
    cluster = cluster_of(DEVICES[device])
    config = config_of(settings, cluster)
    return ready_of(config, make_plan(config, cluster), lambda: target_here(device))


def ready_of(config: Config, plan: Plan, find_target: Callable[[], Target]) -> Ready:
    """Set the environment, compile, and create the first state; `find_target` starts jax in this environment."""
    pools_are_new = environment.set_limits(plan)
    target = find_target()
    if pools_are_new:
        fill_pools(plan, target.devices)
    program = train_program(config, plan, target.devices, target.platform)
    compiled = program.lower().compile()
    batch = random_batch(1, plan.sequence_length, config.model.vocab_size)
    return Ready(
        config=config,
        plan=plan,
        compiled=compiled,
        state=init_state(config, program.optimizer, program.state),
        batch={key: jax.device_put(stripe(value, plan), program.batch[key].sharding) for key, value in batch.items()},
        signals=jax.device_put(np.zeros(program.signals.shape, np.int32), program.signals.sharding),
        loss=[],
        turn_shares=program.turn_shares,
    )


def config_of(settings: dict, cluster: Cluster) -> Config:
    """Write the config of a case, with as many layers as fit if it asks for those."""
    model = dict(settings["model"]) | {"compute_dtype": "float32" if cluster.device.platform == "cpu" else "bfloat16"}
    planned = settings["stash"] == "planned"
    values: dict[str, Any] = {
        "model": model,
        "sequence": {
            "length": settings["length"],
            "chunks": "auto" if planned else settings.get("chunks", _PINNED_CHUNKS),
        },
        "mesh": {"data": 1, "pipe": 1, "seq": 1},
        "schedule": settings.get("schedule", {}),
        "stash": STASHES[settings["stash"]],
        "optimizer": {"place": settings.get("optimizer", "device")},
        "hardware": {"cluster": cluster.name, "host_bytes": settings["host_gib"] * _GIB},
        "train": {"steps": 100},
    }
    config = config_from_dict(values)
    if not settings.get("most_layers"):
        return config
    for num_layers in range(config.model.num_layers, FEW_LAYERS, -1):
        config = config_from_dict(values | {"model": model | {"num_layers": num_layers}})
        if search(config, cluster).fits:
            return config
    raise ValueError(f"{settings['model']} must fit with {FEW_LAYERS + 1} layers, got no plan that fits; shorten it")


def _arguments(program: TrainProgram) -> tuple:
    return program.state, program.batch, program.signals


def _search_longest(settings: dict, device: str, emit: Emit) -> None:
    """Compile for longer and longer sequences until the device or the host is full; nothing is run."""
    target = target_here(device)
    capacity = {"hbm_bytes": pool_bytes(target.cluster), "host_bytes": settings["host_gib"] * _GIB}
    for program, length in zip(programs(settings, target), settings["longest"], strict=True):
        compiled = program.lower().compile()
        figures = Figures.of(compiled, program.turn_shares, platform=target.platform).to_dict()
        fits = all(figures[name] <= limit for name, limit in capacity.items())
        emit({"what": "longest, compiled", "length": length, "fits": fits, "compiler": figures})
        if not fits:
            return
