"""A few steps of training: beside the same steps without the host, saved and restored, and against shipped losses."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from sppo_jax.check.row import FAILS, SLOW, UNKNOWN, Figures, Row, Wanted, errors
from sppo_jax.compat import host_is_device
from sppo_jax.config import Config, config_from_dict, to_dict
from sppo_jax.evaluation.placement import batch_shapes, local_rows, place_batch
from sppo_jax.hardware import Cluster, make_cluster
from sppo_jax.hardware.datasheets import DEVICES
from sppo_jax.models import build_model
from sppo_jax.pipeline import api
from sppo_jax.pipeline.params import layout, storage
from sppo_jax.plan.plan import Plan
from sppo_jax.search.make import make_plan
from sppo_jax.train.checkpoints import layer_order
from sppo_jax.train.checkpoints.read import restore_newest
from sppo_jax.train.checkpoints.save import Checkpoints
from sppo_jax.train.state import TrainState, init_state, shardings_of, state_shapes
from sppo_jax.train.step import make_optimizer, make_schedule, make_train_step
from sppo_jax.train.watch.signals import Signals

_NUM_STEPS = 3
# The kernel that adds gradients in any order gives other losses after a step; plain attention does not.
_SAME, _NEAR = 1e-6, 1e-3
_REFERENCE = Path(__file__).with_name("losses.json")
# How far ten steps may be from the shipped losses, in nats.
_MOST_NATS = {"float32": 1e-3, "bfloat16": 0.02}


class Small(NamedTuple):
    """A training step of a small config, and what it needs.

    Attributes:
        config, plan: the settings and what was decided.
        mesh: its devices.
        step: jitted.
        optimizer: gives the first state.
        shapes, saved: of the state where it runs, and in a checkpoint.
        batch: of all steps.
    """

    config: Config
    plan: Plan
    mesh: jax.sharding.Mesh
    step: Any
    optimizer: Any
    shapes: TrainState
    saved: TrainState
    batch: Mapping[str, jax.Array]

    def state(self) -> TrainState:
        """Returns the state before any step."""
        return init_state(self.config, self.optimizer, self.shapes)

    def lower(self) -> Any:
        """Returns the lowered step."""
        signals = Signals(self.mesh).array()
        return self.step.lower(self.shapes, batch_shapes(self.plan, self.mesh), signals)


def prepare(config: Config, plan: Plan, devices: Sequence[jax.Device] | None = None) -> Small:
    """Returns the step of a config.

    Args:
        config: small.
        plan: of the config.
        devices: of this process alone, as the plan's mesh asks; None: all of all processes.
    """
    mesh = layout.make_mesh(plan, devices)
    model = build_model(config, abstract=True)
    params = nnx.state(model, nnx.Param)
    optimizer = make_optimizer(config.optimizer, make_schedule(config.optimizer, config.train.steps), params)
    shapes, saved = (
        state_shapes(optimizer, storage.stored_shapes(plan, params, mesh, in_order=in_order), mesh)
        for in_order in (False, True)
    )
    step = make_train_step(api.value_and_grad(plan, model, mesh), optimizer, shardings_of(shapes), config.model)
    whole = draw(plan.num_sequences, plan.sequence_length, config.model.vocab_size)
    if devices is None:
        rows = local_rows(mesh, plan.num_sequences)
        batch = place_batch({key: value[rows] for key, value in whole.items()}, plan, mesh)
    else:  # each process has all of its own mesh
        places = batch_shapes(plan, mesh)
        batch = {key: jax.device_put(layout.stripe(value, plan), places[key].sharding) for key, value in whole.items()}
    return Small(config, plan, mesh, step, optimizer, shapes, saved, batch)


def draw(num_sequences: int, length: int, vocab_size: int) -> dict[str, np.ndarray]:
    """Returns sequences of two documents, by a rule in whole numbers: the same with every version of numpy."""
    places = np.arange(num_sequences * length, dtype=np.int64).reshape(num_sequences, length)
    tokens = ((places * 7919 + places // 3 * 104_729) % 100_003 % vocab_size).astype(np.int32)
    column = np.broadcast_to(np.arange(length, dtype=np.int32), tokens.shape)
    documents = (column >= length // 3).astype(np.int32)
    targets = np.roll(tokens, -1, axis=1)
    targets[:, [length // 3 - 1, length - 1]] = -1
    positions = np.where(documents > 0, column - length // 3, column).astype(np.int32)
    return {"tokens": tokens, "targets": targets, "positions": positions, "document_ids": documents}


def run_steps(small: Small, state: TrainState, count: int, step: Any = None) -> tuple[TrainState, list[float]]:
    """Returns the state after some steps, and their losses.

    Args:
        small: the step.
        state: given up.
        count: of steps.
        step: compiled; None: that of `small`.
    """
    losses, signals = [], Signals(small.mesh)
    for _ in range(count):
        state, metrics = (step or small.step)(state, small.batch, signals.array())
        losses.append(float(metrics["loss"]))
    return state, losses


def measure(small: Small, lowered: Any, folder: Path) -> Figures:
    """Returns the losses of three steps, those of their twin, and of the next step before and after a restore.

    Args:
        small: the step.
        lowered: the same step.
        folder: empty, of all processes; takes a checkpoint.
    """
    plan, config, state, twin = small.plan, small.config, small.state(), []
    if plan.optimizer == "device" and _uses_host(plan):
        with host_is_device():
            twin_step = small.lower().compile()
        copy = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree), out_shardings=shardings_of(small.shapes))
        _, twin = run_steps(small, copy(state), _NUM_STEPS, twin_step)
    step = lowered.compile()
    state, losses = run_steps(small, state, _NUM_STEPS, step)
    checkpoints = Checkpoints(folder, config.checkpoint, small.saved)
    run = {"step": _NUM_STEPS, "config": to_dict(config), "plan": plan.to_dict(), "data": {}}
    state, problem = checkpoints.save(state, run, step=_NUM_STEPS)
    problem = (problem or checkpoints.close() or "").partition("; ")[0]  # without what a run does then
    _, after = run_steps(small, state, 1, step)
    found = {"losses": losses, "twin": twin, "next": after[0], "problem": problem, "kernel": plan.kernel}
    if problem:
        return found
    restored = restore_newest(folder, small.saved, lambda _: None)
    assert restored is not None
    _, again = run_steps(small, layer_order.rearrange(restored.state, small.shapes), 1, step)
    return found | {"restored_next": again[0]}


def _uses_host(plan: Plan) -> bool:
    stash = plan.stash
    return "host" in (stash.inputs, stash.attention, stash.rest, stash.waiting, stash.kv) or stash.inputs == "period"


def judge(found: Sequence[Figures], wanted: Wanted) -> Row:
    """Returns the row of three steps."""
    if problem := errors(found):
        return Row(value=problem, verdict=FAILS)
    one = found[0]
    if "left_out" in one:
        return Row(value=one["left_out"], verdict=UNKNOWN)
    losses = ", ".join(f"{loss:.6f}" for loss in one["losses"])
    if not all(map(math.isfinite, one["losses"])):
        return Row(value=f"losses {losses}", expected="finite losses", verdict=FAILS, change="look at the rows above")
    for process, other in enumerate(found):
        if other["losses"] != one["losses"]:
            value = f"losses of process {process} on {other['host']} differ"
            return Row(value=value, expected=losses, verdict=FAILS, change="leave that process's devices out")
        if other["problem"]:
            value = f"{other['problem']} in process {process} on {other['host']}"
            return Row(value=value, expected="a whole checkpoint", verdict=FAILS, change="look at checkpoint.dir")
        if not _distance([other["next"]], [other["restored_next"]]) <= _SAME:
            value = f"next loss {other['restored_next']:.6f} after a restore in process {process} on {other['host']}"
            expected = f"{other['next']:.6f} as without"
            return Row(value=value, expected=expected, verdict=FAILS, change="look at the disk and at host memory")
    limit = _NEAR if one["kernel"] == "cudnn" else _SAME
    if one["twin"] and not _distance(one["losses"], one["twin"]) <= limit:
        twin = ", ".join(f"{loss:.6f}" for loss in one["twin"])
        value, expected = f"losses {losses}", f"{twin} with all buffers on the device"
        return Row(value=value, expected=expected, verdict=SLOW, change="keep the stash on the device, and report it")
    beside = ", as with all buffers on the device" if one["twin"] else ""
    return Row(value=f"losses {losses}{beside}; saved, restored, next {one['next']:.6f}")


def _distance(a: Sequence[float], b: Sequence[float]) -> float:
    return float(np.max([abs(x - y) / max(abs(y), 1e-30) for x, y in zip(a, b, strict=True)]))


def reference_losses(dtype: str, kernel: str, cluster: Cluster, device: jax.Device) -> list[float]:
    """Returns the losses of ten steps of the shipped config, on one device.

    Args:
        dtype: of compute.
        kernel: of attention.
        cluster: gives the kind of device.
        device: of this process.
    """
    settings = json.loads(_REFERENCE.read_text(encoding="utf-8"))["config"]
    settings["model"] = settings["model"] | {"compute_dtype": dtype, "kernel": kernel}
    config = config_from_dict(settings)
    small = prepare(config, make_plan(config, make_cluster(cluster.device)), [device])
    return run_steps(small, small.state(), config.train.steps)[1]


def measure_reference(dtypes: Sequence[str], cluster: Cluster, device: jax.Device) -> Figures:
    """Returns the losses of the shipped config by dtype.

    Args:
        dtypes: "float32" runs with blockwise attention, "bfloat16" with what the device takes.
        cluster: gives the kind of device.
        device: of this process.
    """
    kernels = {"float32": "blockwise", "bfloat16": "auto"}
    return {"losses": {dtype: reference_losses(dtype, kernels[dtype], cluster, device) for dtype in dtypes}}


def judge_reference(found: Sequence[Figures], wanted: Wanted) -> Row:
    """Returns the row of the shipped losses."""
    if problem := errors(found):
        return Row(value=problem, verdict=FAILS)
    right, shown = json.loads(_REFERENCE.read_text(encoding="utf-8"))["losses"], []
    for process, one in enumerate(found):
        for dtype, losses in one["losses"].items():
            off = float(np.max([abs(a - b) for a, b in zip(losses, right, strict=True)]))  # no number if one is none
            text = f"{dtype} at most {off:.2g} nats off"
            if not off <= _MOST_NATS[dtype]:
                value = f"{text} in process {process} on {one['host']}"
                expected = f"{_MOST_NATS[dtype]:g} nats from losses.json"
                return Row(
                    value=value, expected=expected, verdict=FAILS, change="look at the rows of products and attention"
                )
            shown.append(text)
    return Row(value=", ".join(dict.fromkeys(shown)), expected="ten losses as on a CPU in float32")


def write_reference() -> None:
    """Writes the shipped losses again, for this version of the model and its initial weights."""
    settings = json.loads(_REFERENCE.read_text(encoding="utf-8"))
    cluster = make_cluster(DEVICES["cpu"])
    settings["losses"] = reference_losses("float32", "blockwise", cluster, jax.local_devices()[0])
    _REFERENCE.write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write_reference()
