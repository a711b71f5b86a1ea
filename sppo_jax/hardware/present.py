"""The GPUs of this machine that a process can see, from what the driver says of them; no backend is started.

CUDA_VISIBLE_DEVICES is read as CUDA reads it: indices, or beginnings of the names that `nvidia-smi -L` prints. An entry
that names nothing ends the list. Of the slices of a divided GPU (MIG) a process sees one.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sppo_jax.hardware.device import Device

_MiB, _GiB = 2**20, 2**30
_FIELDS = "name,uuid,memory.total,memory.reserved,mig.mode.current"
_NAMES = ("GPU-", "MIG-")
_WAIT_S = 30.0
# Below this difference the table's figure is taken, so that a plan for a machine is the one for its name.
_SAME_MEMORY = 0.03
_SLICES = 7  # parts of the compute units of a GPU that can be divided
# A slice "1g.10gb" has a little less than its name says: 9,984 MiB on an H100, 4,864 of 5,120 on an A100 of 40 GB.
_OF_SLICE = 0.95
_MIG_LINE = re.compile(r"MIG (?:\d+c\.)?(\d+)g\.(\d+)gb\S*\s+Device\s+\d+:\s+\(UUID: (\S+)\)")


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU, or a slice of one.

    Args:
        name: its own name, e.g. "NVIDIA A100-SXM-64GB".
        uuid: the name by which CUDA_VISIBLE_DEVICES may choose it; "" if unknown.
        memory_bytes: memory that programs can use; None if unknown.
        compute_share: share of the whole GPU's compute units.
        slices: the slices in its place, if it is divided.
    """

    name: str
    uuid: str
    memory_bytes: int | None
    compute_share: float = 1.0
    slices: tuple[Gpu, ...] = ()


def visible_gpus(environ: Mapping[str, str] = os.environ) -> tuple[Gpu, ...] | None:
    """Returns the GPUs that a program started with this environment can use, in CUDA's order; None without a driver.

    Args:
        environ: CUDA_VISIBLE_DEVICES, CUDA_DEVICE_ORDER, JAX_CUDA_VISIBLE_DEVICES and PATH are read.

    Raises:
        ValueError: a list names no GPU of this machine, or one of them twice.
    """
    gpus = _of_machine(environ.get("PATH", ""))
    if gpus is None:
        return None
    asked = environ.get("CUDA_VISIBLE_DEVICES")
    by_bus = environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    if not by_bus and len({gpu.name for gpu in gpus}) > 1:
        # CUDA puts the fastest first; of GPUs in one machine this is the one with the most memory.
        gpus = tuple(sorted(gpus, key=lambda gpu: -(gpu.memory_bytes or 0)))
    chosen = gpus if asked is None else _chosen(gpus, "CUDA_VISIBLE_DEVICES", asked)
    whole = tuple(gpu for gpu in chosen if not gpu.slices and gpu.compute_share == 1)
    first_slice = next((part for gpu in chosen for part in (gpu.slices or (gpu,)) if part not in whole), None)
    seen = whole or ((first_slice,) if first_slice else ())
    kept = environ.get("JAX_CUDA_VISIBLE_DEVICES", "all")
    return seen if kept == "all" else _chosen(seen, "JAX_CUDA_VISIBLE_DEVICES", kept)


def num_gpus(environ: Mapping[str, str] = os.environ) -> int | None:
    """Returns the number of GPUs that a program can use; None where no driver says so."""
    gpus = visible_gpus(environ)
    return None if gpus is None else len(gpus)


def present_device(device: Device, gpu: Gpu) -> Device:
    """Returns a device of the table with the memory that is there; of a slice of a GPU, with its part of the speed.

    Args:
        device: what is known by the GPU's name.
        gpu: the GPU that is there.
    """
    changes: dict[str, float | int] = {}
    if gpu.memory_bytes and abs(gpu.memory_bytes / device.hbm_bytes - 1) > _SAME_MEMORY:
        changes["hbm_bytes"] = gpu.memory_bytes
    if gpu.compute_share < 1:
        changes["matmul_flops_s"] = device.matmul_flops_s * gpu.compute_share
        changes["hbm_bytes_s"] = device.hbm_bytes_s * min(1.0, (gpu.memory_bytes or 0) / device.hbm_bytes)
        changes["attention_rows"] = int(device.attention_rows * gpu.compute_share)
        changes["assumed"] = True
    return replace(device, **changes)  # type: ignore[arg-type]


def _chosen(gpus: tuple[Gpu, ...], variable: str, text: str) -> tuple[Gpu, ...]:
    """Returns the GPUs that a list of indices and names chooses.

    Raises:
        ValueError: the first entry is an index or a name, and of no GPU; or an entry comes twice.
    """
    words = [word.strip() for word in text.split(",")]
    found: list[Gpu] = []
    for word in words:
        gpu = _named(gpus, word)
        if gpu is None:
            break
        found.append(gpu)
    if len(set(found)) < len(found):
        raise ValueError(
            f"{variable} must name each GPU once, got {text!r}; CUDA would find none: correct the variable"
        )
    if not found and (words[0].isdecimal() or words[0].startswith(_NAMES)):
        # Only nvidia-smi knows slices.
        others = "out slices that nvidia-smi lists" if words[0].startswith("MIG-") else f" {len(gpus)} GPUs"
        raise ValueError(
            f"{variable} must name GPUs of this machine, got {text!r} on one with{others}; correct the variable "
            "(nvidia-smi -L lists GPUs and slices), or leave it empty for the CPU"
        )
    return tuple(found)


def _named(gpus: tuple[Gpu, ...], word: str) -> Gpu | None:
    if word.isdecimal():
        return gpus[int(word)] if int(word) < len(gpus) else None
    if not word.startswith(_NAMES):
        return None
    parts = [part for gpu in gpus for part in (gpu, *gpu.slices)]
    return next((part for part in parts if part.uuid.startswith(word)), None)


@functools.cache
def _of_machine(path: str) -> tuple[Gpu, ...] | None:
    """Returns every GPU of the machine by its place on the bus: nvidia-smi knows the memory, the driver's files do not.

    Args:
        path: where programs are looked for.
    """
    program = shutil.which("nvidia-smi", path=path)
    found = _listed(program) if program else ()
    return found or _of_driver(Path("/proc/driver/nvidia/gpus"))


def _of_driver(folder: Path) -> tuple[Gpu, ...] | None:
    """Returns what the driver's files say; None if there are no such files."""
    gpus = []
    for path in sorted(folder.glob("*/information")):
        pairs = [line.partition(":") for line in path.read_text(errors="replace").splitlines()]
        facts = {key.strip(): value.strip() for key, _, value in pairs}
        gpus.append(Gpu(name=facts.get("Model", ""), uuid=facts.get("GPU UUID", ""), memory_bytes=None))
    return tuple(gpus) or None


def _listed(program: str) -> tuple[Gpu, ...]:
    rows = [line.split(",") for line in _said(program, f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits")]
    cells = [[cell.strip() for cell in row] for row in rows if len(row) == _FIELDS.count(",") + 1]
    slices = _slices(_said(program, "-L")) if any(row[4] == "Enabled" for row in cells) else {}
    return tuple(
        Gpu(
            name=name,
            uuid=uuid,
            memory_bytes=_usable_bytes(total, reserved),
            slices=tuple(_slice(name, *part) for part in slices.get(uuid, ())),
        )
        for name, uuid, total, reserved, _ in cells
    )


def _usable_bytes(total_mib: str, reserved_mib: str) -> int | None:
    """Returns what programs can use: what the driver keeps for itself is part of the total."""
    if not total_mib.isdecimal():
        return None  # memory shared with the host, which nvidia-smi does not count
    return (int(total_mib) - (int(reserved_mib) if reserved_mib.isdecimal() else 0)) * _MiB


def _slice(name: str, compute: str, memory_gb: str, uuid: str) -> Gpu:
    return Gpu(
        name=name,
        uuid=uuid,
        memory_bytes=int(int(memory_gb) * _GiB * _OF_SLICE),
        compute_share=min(0.999, int(compute) / _SLICES),  # a slice of all units is a slice still
    )


def _slices(lines: list[str]) -> dict[str, list[tuple[str, str, str]]]:
    """Returns the parts of compute, GB and name of the slices of each GPU, by the GPU's name."""
    found: dict[str, list[tuple[str, str, str]]] = {}
    gpu = ""
    for line in lines:
        if line.startswith("GPU "):
            gpu = line.rpartition("UUID: ")[2].rstrip(") ")
        elif match := _MIG_LINE.search(line):
            found.setdefault(gpu, []).append((match[1], match[2], match[3]))
    return found


def _said(program: str, *words: str) -> list[str]:
    """Returns the lines that a program prints; none if it fails."""
    try:
        done = subprocess.run([program, *words], capture_output=True, text=True, timeout=_WAIT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.splitlines()
