"""Part `flex`: teams of devices that fit the documents, against all documents on all devices, on several GPUs.

A plan with groups=flex takes rearranged rows. A plan with groups=static takes the same documents as they are packed.
Both must come to the loss and the gradients of the dense model in float32, up to twice the error of the dense model in
bfloat16. Then both take turns against a clock. One GPU has no teams: a case needs at least 2 devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from bench.gpu_parts.case import Case, Emit
from bench.gpu_parts.exact_step import MOST_TIMES_DENSE, precise_dense, relative_errors
from bench.gpu_parts.program import Program, Target, median, target_here, timed
from sppo_jax.config import Config, config_from_dict
from sppo_jax.flex.cells import candidates, today
from sppo_jax.flex.placement import Pieces, Placement
from sppo_jax.flex.rows import PADDING, Content, write
from sppo_jax.flex.shape import plan_shape
from sppo_jax.models.build import build_model
from sppo_jax.pipeline import api
from sppo_jax.pipeline.params import layout
from sppo_jax.plan.plan import Plan
from sppo_jax.search.make import make_plan

GROUPS = ("flex", "static")
# Part of a row that documents fill. Rows without padding leave nothing to deal.
_FILL = 0.9
_DENSE = ("float32", "bfloat16")
# The loss is one number, whose error in bfloat16 may happen to be zero.
_LEAST_BOUNDS = {"loss": 1e-4}


def cases(*, tiny: bool) -> list[Case]:
    """List the cases."""
    model = {
        "vocab_size": 1000,
        "hidden_size": 1024,
        "num_layers": 4,
        "num_heads": 8,
        "num_kv_heads": 8,
        "head_dim": 128,
        "mlp_size": 2816,
        "compute_dtype": "bfloat16",
    }
    settings = {"model": model, "length": 8192, "chunks": 4, "sequences": 4}
    counts = (2, 4, 8)
    if tiny:
        small = {"vocab_size": 64, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 4, "head_dim": 8}
        small |= {"num_layers": 2, "mlp_size": 48, "compute_dtype": "float32"}
        settings, counts = {"model": small, "length": 128, "chunks": 2, "sequences": 2}, (4,)
    return [
        Case(
            part="flex",
            name=f"{count} devices",
            settings=settings | {"devices": count},
            expected_s=30 if tiny else 110,
            limit_s=500,
            hbm_gib=0 if tiny else 16,
            devices=count,
        )
        for count in counts
    ]


def programs(settings: dict, target: Target) -> Iterator[Program]:
    """List the programs of a case."""
    for groups in GROUPS:
        plan, step, params = _pipeline(settings, target, groups)
        sharding = NamedSharding(layout.make_mesh(plan, target.devices), PartitionSpec())
        size = (settings["sequences"], settings["length"])
        batch = {name: jax.ShapeDtypeStruct(size, jnp.int32, sharding=sharding) for name in PADDING}
        shapes = jax.tree.map(lambda x, to=sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=to), params)
        yield Program(f"groups={groups}", step, (shapes, batch))


def run(settings: dict, device: str, emit: Emit) -> None:
    """Compare loss and every gradient; then time both."""
    target = target_here(device, settings["devices"])
    config = _config(settings, target, "flex")
    params = jax.jit(lambda: nnx.state(build_model(config), nnx.Param))()
    batches = placed_batches(settings, make_plan(config, target.cluster))
    right, rounded = (_run_dense(settings, target, dtype, params, batches["static"]) for dtype in _DENSE)
    bounds = relative_errors(rounded, right)
    for groups in GROUPS:
        step = _pipeline(settings, target, groups)[1]

        def call(step: Callable = step, batch: dict = batches[groups]) -> tuple:
            return step(params, batch)

        errors = relative_errors(jax.device_get(call()), right)
        times = {name: errors[name] / max(bounds[name], _LEAST_BOUNDS.get(name, 1e-6)) for name in errors}
        worst = max(times, key=lambda name: times[name] if times[name] == times[name] else np.inf)
        ok = all(value <= MOST_TIMES_DENSE for value in times.values())
        seconds = timed(call)
        tokens = int((batches[groups]["document_ids"] >= 0).sum())
        emit(
            {
                "what": f"groups={groups}",
                "ok": bool(ok),
                "worst": worst,
                "times_dense": times[worst],
                "step_s": seconds,
                "tokens_per_s": tokens / median(seconds),
            }
        )


def placed_batches(settings: dict, plan: Plan) -> dict[str, dict[str, np.ndarray]]:
    """Draw documents; return them on rearranged rows under "flex", and as they are packed under "static".

    Args:
        settings: of the case.
        plan: gives rows, chunks and members.
    """
    rng, length = np.random.default_rng(1), settings["length"]
    lengths = []
    for row in range(settings["sequences"]):
        own, left = [], int(length * _FILL)
        while left > 0:
            most = length // 2 if not (own or row) else length // settings["chunks"] // 4
            own.append(min(left, int(rng.integers(most // 2, most)) + 1))
            left -= own[-1]
        lengths.append(own)
    pieces, shape = Pieces.packed(lengths), plan_shape(plan)
    contents = [_content(rng, size, settings["model"]["vocab_size"]) for size in pieces.size.tolist()]
    rearranged = [found for found in candidates(pieces, shape).values() if _has_both(found)]
    best = min(rearranged, key=lambda placement: placement.cost)
    return {"flex": write(best, contents), "static": write(today(pieces, shape), contents)}


def _has_both(placement: Placement) -> bool:
    """Return whether some cells are stream and others team cells."""
    return bool(placement.cells.far.any()) and not placement.cells.far.all()


def _content(rng: np.random.Generator, size: int, vocab_size: int) -> Content:
    tokens = rng.integers(0, vocab_size, size, dtype=np.int32)
    return Content(tokens, np.append(tokens[1:], -1).astype(np.int32), np.arange(size, dtype=np.int32))


def _config(settings: dict, target: Target, groups: str, **model: str) -> Config:
    return config_from_dict(
        {
            "model": settings["model"] | model,
            "mesh": {"data": 1, "pipe": 1, "seq": settings["devices"]},
            "sequence": {
                "length": settings["length"],
                "chunks": settings["chunks"],
                "balance": "equal",
                "per_pipeline": settings["sequences"],
                "groups": groups,
            },
            "stash": {"inputs": "keep", "attention": "keep", "rest": "recompute", "alpha": 0.0},
            "hardware": {"cluster": target.cluster.name},
            "train": {"steps": 1},
        }
    )


def _pipeline(settings: dict, target: Target, groups: str) -> tuple[Plan, Callable, nnx.State]:
    config = _config(settings, target, groups)
    plan = make_plan(config, target.cluster)
    model = build_model(config, abstract=True)
    f = api.value_and_grad(plan, model, layout.make_mesh(plan, target.devices))
    return plan, jax.jit(f, compiler_options=f.compiler_options), nnx.state(model, nnx.Param)


def _run_dense(settings: dict, target: Target, dtype: str, params: nnx.State, batch: dict) -> tuple:
    return jax.device_get(
        jax.jit(precise_dense(_config(settings, target, "static", compute_dtype=dtype)))(params, batch)
    )
