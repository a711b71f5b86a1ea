"""The step of part `exact`: a small pipeline, its stash on the host against the device, all against the dense model.

Two sequences run one after the other, once more as one wave, and once more breadth-first.

On one device the executor's ticks, stash and host copies all run, without exchanges. Each program with a stash on the
host has a twin: the same program with these buffers in device memory. Most cases ask for kernels that add in a fixed
order, and then for the same bits of a program, its twin, and the program whose stash is kept. (On an H100 the kept one
differed where it has other loops, which XLA fuses otherwise. The twin tells such a difference from one that the copies
make.) One more case takes the kernels that a run takes, and says whether the
bits are the same: there a difference may be as large as that of the dense model in bfloat16.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from bench.gpu_parts.case import Case, Emit
from bench.gpu_parts.program import Program, Target, compile_together
from bench.gpu_parts.room import needed_gib
from sppo_jax.compat import deterministic_attention, host_is_device, writes_tables
from sppo_jax.config import Config, config_from_dict
from sppo_jax.models.build import build_model
from sppo_jax.models.dense import dense_value_and_grad
from sppo_jax.pipeline import api
from sppo_jax.pipeline.params import layout
from sppo_jax.search.make import make_plan

IN_WAVES, BREADTH_FIRST, WAITING = ", in waves", ", breadth-first", ", breadth-first, chunks wait on the host"
# The stash kept, on the host, at another share for some diagonals, and with attention outputs of late chunks alone.
PLACES = {
    "kept": {"inputs": "keep", "attention": "keep", "rest": "recompute", "alpha": 0.0},
    "host": {"inputs": "host", "attention": "host", "rest": "recompute", "alpha": 1.0},
    "half on the host": {"inputs": "host", "attention": "host", "rest": "recompute", "alpha": 0.5},
    "late on the host": {"inputs": "host", "attention": "host", "rest": "recompute", "alpha": 1.0},
}
KEPT = ("kept", f"kept{IN_WAVES}", f"kept{BREADTH_FIRST}", f"kept{WAITING}")
# Programs that must agree bit for bit with one whose stash is kept, and with a twin that has their host buffers in
# device memory.
PAIRS = {
    "host": "kept",
    "half on the host": "kept",
    f"host{IN_WAVES}": f"kept{IN_WAVES}",
    f"host{BREADTH_FIRST}": f"kept{BREADTH_FIRST}",
    f"late on the host{BREADTH_FIRST}": f"kept{BREADTH_FIRST}",
    f"host{WAITING}": f"kept{WAITING}",
}
TWIN = ", its buffers on the device"
MOST_TIMES_DENSE = 2.0
# Experts of the case with experts; of the dense model other experts may be chosen, where two are nearly as good.
EXPERTS = {"count": 16, "chosen": 4, "size": 256, "shared_size": 256, "balance": 0.01, "z": 0.001}
# Kernels that add in a fixed order, the same ones in both programs, and no value kept wider than its dtype. Where DMA
# engines copy rows of a table, XLA compares each row with the one that the device computes.
_FIXED_ORDER = "--xla_gpu_exclude_nondeterministic_ops=true"
_FLAGS = " ".join(
    (
        "--xla_gpu_enable_triton_gemm=false",
        "--xla_gpu_autotune_level=0",
        "--xla_allow_excess_precision=false",
        *(["--xla_gpu_experimental_dynamic_slice_fusion_verify_offsets=true"] * writes_tables()),
    )
)


def cases(*, tiny: bool) -> list[Case]:
    """List the cases."""
    model = {
        "vocab_size": 1000,
        "hidden_size": 512,
        "num_layers": 4,
        "num_heads": 8,
        "num_kv_heads": 2,
        "head_dim": 64,
        "mlp_size": 1024,
        "compute_dtype": "bfloat16",
    }
    settings = {"model": model, "length": 8192, "chunks": 8, "sequences": 2}
    orders: dict[str, list[str]] = {"step": [], "breadth-first step": [], "breadth-first step, chunks wait": []}
    for name in (*KEPT, *PAIRS):
        order = "breadth-first step" if BREADTH_FIRST in name else "step"
        orders[f"{order}, chunks wait" if name.endswith(WAITING) else order].append(name)
    if tiny:
        small = {"vocab_size": 64, "hidden_size": 32, "num_heads": 2, "num_kv_heads": 1, "head_dim": 16}
        small |= {"num_layers": 2, "mlp_size": 48, "compute_dtype": "float32"}
        settings = {"model": model | small, "length": 48, "chunks": 4, "sequences": 2}
        orders = {"step": [*KEPT, f"host{IN_WAVES}", f"late on the host{BREADTH_FIRST}"]}
    # Seconds with 16 cores, on which the programs of a case compile side by side: 48 measured for five of them.
    found = [_case(name, settings | {"places": places}, 70, tiny) for name, places in orders.items()]
    few = {"places": ["kept", "host"], "fixed_order": False}  # if the others abort
    experts = {"model": settings["model"] | {"experts": EXPERTS}, "places": ["kept", "host", f"kept{BREADTH_FIRST}"]}
    with_experts = _case("step with experts", settings | experts, 70, tiny)
    return found if tiny else [*found, with_experts, _case("step, kernels as they come", settings | few, 90, tiny)]


def _case(name: str, settings: dict, expected_s: float, tiny: bool) -> Case:
    fixed_order = settings.setdefault("fixed_order", True)
    return Case(
        part="exact",
        name=name,
        settings=settings,
        expected_s=20 if tiny else expected_s,
        limit_s=6 * expected_s,
        hbm_gib=0 if tiny else 16,
        host_gib=0 if tiny else needed_gib(1),
        flags=f"{_FIXED_ORDER} {_FLAGS}" if fixed_order else _FLAGS,
    )


def programs(settings: dict, target: Target) -> Iterator[Program]:
    """List the programs of the case."""
    for name in settings["places"]:
        batch = {key: target.shape(*x.shape, dtype=jnp.int32) for key, x in _batch(settings).items()}
        for twin in ("", TWIN) if name in PAIRS else ("",):
            f, params = _pipeline(settings, target, name)
            shapes = jax.tree.map(lambda x: target.shape(*x.shape, dtype=x.dtype), params)
            step = jax.jit(f, compiler_options=f.compiler_options)
            context = functools.partial(_context, settings["fixed_order"], bool(twin))
            yield Program(name + twin, step, (shapes, batch), context=context)


def _context(fixed_order: bool, on_device: bool) -> ExitStack:
    stack = ExitStack()
    if fixed_order:
        stack.enter_context(deterministic_attention())
    if on_device:
        stack.enter_context(host_is_device())
    return stack


def run(settings: dict, target: Target, emit: Emit) -> None:
    """Compare loss and every gradient."""
    config = _config(settings, target, "kept")
    params = jax.jit(lambda: nnx.state(build_model(config), nnx.Param))()
    batch = {key: jnp.asarray(value) for key, value in _batch(settings).items()}
    steps = compile_together(list(programs(settings, target)))
    found = {name: jax.device_get(step(params, batch)) for name, step in steps.items()}
    right, rounded = (_run_dense(settings, target, dtype, params, batch) for dtype in ("float32", "bfloat16"))
    bounds = relative_errors(rounded, right)
    least = None if settings["fixed_order"] else bounds
    first = settings["places"][0]
    emit(_bitwise(f"{first}, twice", found[first], jax.device_get(steps[first](params, batch)), least))
    for name in (name for name in PAIRS if name in found):
        emit(_bitwise(f"{name} against{TWIN.lstrip(',')}", found[name + TWIN], found[name], least))
        emit(_bitwise(f"{name} against kept", found[PAIRS[name]], found[name], least))
    for name in settings["places"]:
        emit(_against_dense(name, relative_errors(found[name], right), bounds))


def _against_dense(name: str, errors: dict[str, float], bounds: dict[str, float]) -> dict:
    times = {leaf: errors[leaf] / max(bounds[leaf], 1e-6) for leaf in errors}
    worst = max(times, key=lambda leaf: times[leaf])
    ok = all(value <= MOST_TIMES_DENSE for value in times.values())
    return {"what": f"{name} against dense float32", "ok": ok, "worst": worst, "times_dense": times[worst]}


def _config(settings: dict, target: Target, name: str) -> Config:
    return config_from_dict(
        {
            "model": settings["model"],
            "sequence": {
                "length": settings["length"],
                "chunks": settings["chunks"],
                "per_pipeline": settings["sequences"],
            },
            "schedule": _schedule(settings, name),
            "stash": PLACES[name.split(",")[0]] | ({"waiting": "host"} if name.endswith(WAITING) else {}),
            "hardware": {"cluster": target.cluster.name},
            "train": {"steps": 1},
        }
    )


def _schedule(settings: dict, name: str) -> dict:
    if BREADTH_FIRST in name:
        return {"name": "breadth-first", "interleave": 2}
    return {"name": "seq1f1b", "wave": settings["sequences"] if name.endswith(IN_WAVES) else 1}


def _pipeline(settings: dict, target: Target, name: str):
    config = _config(settings, target, name)
    plan = make_plan(config, target.cluster)
    if name.startswith("late"):
        plan = replace(plan, stash=replace(plan.stash, attention_from=settings["chunks"] // 2))
    model = build_model(config, abstract=True)
    mesh = layout.make_mesh(plan, target.devices)
    return api.value_and_grad(plan, model, mesh), nnx.state(model, nnx.Param)


def _run_dense(settings: dict, target: Target, dtype: str, params: nnx.State, batch: dict):
    config = _config(settings | {"model": settings["model"] | {"compute_dtype": dtype}}, target, "kept")
    return jax.device_get(jax.jit(precise_dense(config))(params, batch))


def precise_dense(config: Config) -> Callable[[nnx.State, dict], tuple]:
    """Return the dense step of a config; in float32 its products are those of float32."""
    step = dense_value_and_grad(build_model(config, abstract=True))

    def precise(params: nnx.State, batch: dict) -> tuple:
        with jax.default_matmul_precision("highest" if config.model.compute_dtype == "float32" else "default"):
            return step(params, batch)

    return precise


def _batch(settings: dict) -> dict[str, np.ndarray]:
    """Draw sequences of several documents, with padding at the end of the last sequence."""
    size, rng = (settings["sequences"], settings["length"]), np.random.default_rng(1)
    tokens = rng.integers(0, settings["model"]["vocab_size"], size, dtype=np.int32)
    documents = np.sort(rng.integers(0, 6, size, dtype=np.int32), axis=1)
    documents[-1, -size[1] // 10 :] = -1
    edge = np.ones((size[0], 1), bool)
    changes = documents[:, 1:] != documents[:, :-1]
    places = np.arange(size[1], dtype=np.int32)[None]
    begins = np.maximum.accumulate(np.where(np.concatenate([edge, changes], axis=1), places, 0), axis=1)
    targets = np.roll(tokens, -1, axis=1)
    targets[np.concatenate([changes, edge], axis=1) | (documents < 0)] = -1
    positions = (places - begins).astype(np.int32)
    return {"tokens": tokens, "targets": targets, "positions": positions, "document_ids": documents}


def _named(result) -> dict[str, np.ndarray]:
    loss, grads = result
    leaves = jax.tree_util.tree_leaves_with_path(grads)
    return {"loss": np.asarray(loss)} | {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


def _bitwise(what: str, a, b, bounds: dict[str, float] | None = None) -> dict:
    """Return a row: whether loss and every gradient agree bit for bit, and the distance of those that do not.

    Args:
        what: names the row.
        a, b: losses and gradients.
        bounds: the distance that a difference may have, by name; None: the bits must be the same.
    """
    errors, a, b = relative_errors(b, a), _named(a), _named(b)
    differing = {name: errors[name] for name, x in a.items() if x.tobytes() != b[name].tobytes()}
    ok = not differing if bounds is None else all(errors[name] <= max(bounds[name], 1e-6) for name in differing)
    return {"what": what, "ok": ok, "bitwise": True, "differing": differing}


def relative_errors(got, right) -> dict[str, float]:
    """Return |got - right| / |right| of the loss and of every gradient."""
    got, right = _named(got), _named(right)

    def error(name: str) -> float:
        want = right[name].astype(np.float64)
        return float(np.linalg.norm(got[name].astype(np.float64) - want) / max(np.linalg.norm(want), 1e-30))

    return {name: error(name) for name in right}
