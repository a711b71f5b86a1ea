"""The machine before a device is touched: errors and limits of GPUs, other users, locked memory, the disk."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from sppo_jax.check.row import FAILS, OK, SLOW, UNKNOWN, Figures, Row, Wanted, errors, worst
from sppo_jax.files.format_bytes import format_bytes
from sppo_jax.hardware import machine, visible_gpus
from sppo_jax.hardware.gpu_health import GpuHealth, read_gpus

# A lower limit of power than this share of the card's own makes a card slow under load.
_LEAST_POWER = 0.9
# Memory that a GPU without programs has in use at most.
_IDLE_BYTES = 2 * 2**30
_SLICE = "MIG-"
_TAKE_OUT = "reset the GPU or leave it out (CUDA_VISIBLE_DEVICES), and tell whoever keeps the machine"


def measure(checkpoint_dir: Path, *, has_gpus: bool) -> Figures:
    """Returns what the system of this process says.

    Args:
        checkpoint_dir: where checkpoints go; need not exist.
        has_gpus: whether this process may use GPUs.
    """
    there = next(path for path in (checkpoint_dir, *checkpoint_dir.absolute().parents) if path.is_dir())
    found: dict = {
        "lockable_bytes": machine.lockable_bytes(),
        "host_bytes": machine.host_bytes(),
        "free_disk_bytes": shutil.disk_usage(there).free,
        "disk": str(there),
        "has_gpus": has_gpus,
        "gpus": None,
    }
    if has_gpus:
        of_machine, visible = read_gpus(), [gpu.uuid for gpu in visible_gpus() or ()]
        is_slice = any(uuid.startswith(_SLICE) for uuid in visible)
        if of_machine is not None:
            mine = [gpu for gpu in of_machine if gpu.uuid in visible or (is_slice and gpu.is_divided)]
            found["gpus"] = [gpu.to_dict() for gpu in mine]
    return found


def judge(found: Sequence[Figures], wanted: Wanted) -> Row:
    """Returns the row of the machines of all processes."""
    if problem := errors(found):
        return Row(value=problem, verdict=FAILS)
    problems = [one for process, figures in enumerate(found) for one in _problems(process, figures, wanted)]
    problems += _models(found)
    verdict = worst([one.verdict for one in problems])
    if verdict != OK:
        return next(one for one in problems if one.verdict == verdict)
    gpus = [GpuHealth.from_dict(gpu) for figures in found for gpu in figures["gpus"] or ()]
    host = format_bytes(min(figures["host_bytes"] for figures in found))
    return Row(value=f"{len(gpus)} GPUs without errors, {host} of a host" if gpus else f"{host} of a host")


def _problems(process: int, found: Figures, wanted: Wanted) -> Iterator[Row]:
    at = f"of process {process} on {found['host']}"
    if found["free_disk_bytes"] < wanted.checkpoint_bytes:
        yield Row(
            value=f"{format_bytes(found['free_disk_bytes'])} free at {found['disk']} {at}",
            expected=f"{format_bytes(wanted.checkpoint_bytes)}, for two checkpoints",
            verdict=FAILS,
            change="free space, or set checkpoint.dir to another disk",
        )
    lockable = found["lockable_bytes"]
    if wanted.is_timed and lockable is not None and lockable < found["host_bytes"]:
        yield Row(
            value=f"ulimit -l {at} is {format_bytes(lockable)}",
            expected="no limit, where pinned memory and networks lock pages",
            verdict=SLOW,
            change="raise ulimit -l to unlimited",
        )
    if not found["has_gpus"]:
        return
    if not found["gpus"]:
        yield Row(value=f"nvidia-smi {at} says nothing", verdict=UNKNOWN, change="install nvidia-smi, or look by hand")
        return
    for number, values in enumerate(found["gpus"]):
        yield from _of_gpu(GpuHealth.from_dict(values), f"GPU {number} {at}")


def _of_gpu(gpu: GpuHealth, name: str) -> Iterator[Row]:
    if gpu.is_divided:
        yield Row(value=f"{name} is divided (MIG): what it says is of the whole card", verdict=UNKNOWN)
    if gpu.uncorrected:
        yield Row(value=f"{name} has {gpu.uncorrected} uncorrected errors of memory", verdict=FAILS, change=_TAKE_OUT)
    if gpu.remap_pending or gpu.remap_failed:
        does = "could not replace a row of memory" if gpu.remap_failed else "has to be reset to replace a row of memory"
        yield Row(value=f"{name} {does}", verdict=FAILS, change=_TAKE_OUT)
    if gpu.slowed_by:
        yield Row(
            value=f"{name} is slowed down by {', '.join(gpu.slowed_by)} ({gpu.sm_mhz} MHz, {gpu.temperature_c} C)",
            verdict=SLOW,
            change="look at cooling and power",
        )
    limit, usual = gpu.power_limit_w, gpu.default_power_limit_w
    if limit and usual and limit < _LEAST_POWER * usual:
        yield Row(
            value=f"{name} may take {limit:g} W",
            expected=f"{usual:g} W",
            verdict=SLOW,
            change="raise the limit with nvidia-smi -pl",
        )
    if gpu.process_ids or (gpu.used_bytes or 0) > _IDLE_BYTES:
        who = f"process {gpu.process_ids[0]}" if gpu.process_ids else "another program"
        used = "unknown" if gpu.used_bytes is None else format_bytes(gpu.used_bytes)
        yield Row(value=f"{who} uses {name} ({used})", verdict=SLOW, change="end the other program, or take other GPUs")
    unread = [
        text
        for text, value in (
            ("errors of memory", gpu.uncorrected),
            ("reasons of a low clock", gpu.slowed_by),
            ("limit of power", limit),
        )
        if value is None
    ]
    if unread:
        yield Row(value=f"{name} does not tell its {', '.join(unread)}", verdict=UNKNOWN)


def _models(found: Sequence[Figures]) -> Iterator[Row]:
    models: dict[str, str] = {}
    for process, figures in enumerate(found):
        for gpu in figures["gpus"] or ():
            models.setdefault(gpu["name"], f"process {process} on {figures['host']}")
    if len(models) > 1:
        shown = ", ".join(f"{model} in {where}" for model, where in models.items())
        yield Row(value=shown, expected="GPUs of one kind", verdict=FAILS, change="leave out the hosts that differ")
