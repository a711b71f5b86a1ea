"""What a process runs on, as short texts: what must be alike in all processes of a run for one program to be compiled.

Names of hosts, paths, the order of a start and the memory of a host beyond what the plan takes may differ.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import jax

from sppo_jax.compat import cudnn_version, driver_version, nccl_version
from sppo_jax.files.format_bytes import format_bytes
from sppo_jax.hardware import machine
from sppo_jax.plan.plan import Plan
from sppo_jax.version import installed_version

# The packages that hold the compilers of GPUs and TPUs.
_PLUGINS = ("jax-cuda13-pjrt", "jax-cuda12-pjrt", "libtpu")
# Flags that change no program: how many devices of the run this process simulates, and where XLA writes what.
_NO_PART = ("--xla_force_host_platform_device_count", "--xla_dump")


def software() -> dict[str, str]:
    """Returns versions and flags, by name; what is not installed is left out. No device is started."""
    found = {name: installed_version(name) for name in ("jax", "jaxlib", *_PLUGINS)}
    found |= {"cuDNN": dotted(_cudnn()), "NCCL": dotted(nccl_version()), "driver": driver_version()}
    found["XLA_FLAGS"] = " ".join(flags(os.environ))
    return {name: value for name, value in found.items() if value}


def flags(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Returns the flags of XLA that may change a program, in the order of the alphabet."""
    words = environ.get("XLA_FLAGS", "").split()
    return tuple(sorted(word for word in words if not word.startswith(_NO_PART)))


def device_facts(device: jax.Device) -> dict[str, str]:
    """Returns what is known of a device that has started: its kind, and the memory that XLA may take of it.

    Args:
        device: of this process.
    """
    stats = device.memory_stats() or {} if device.platform != "cpu" else {}
    limit = stats.get("bytes_limit")
    return {"kind of devices": device.device_kind} | ({} if limit is None else {"device memory": str(limit)})


def run_facts(plan: Plan, num_devices: int, kernel_check: str) -> dict[str, str]:
    """Returns what else must be alike in all processes of a run: what they found out by themselves.

    Args:
        plan: host memory counts up to what the plan takes of it.
        num_devices: of this process.
        kernel_check: the result of the check of attention's kernel, in words.
    """
    there, taken = machine.host_bytes(), max(plan.predicted.host_bytes) * num_devices
    memory = f"at least {format_bytes(taken)}" if there >= taken else format_bytes(there)
    return {"result of the kernel check": kernel_check, "host memory": memory}


def dotted(version: Sequence[int] | None) -> str:
    """Returns a version as it is written; "" for none."""
    return ".".join(map(str, version or ()))


def _cudnn() -> tuple[int, ...] | None:
    try:
        return cudnn_version()
    except ValueError:  # there is none: whoever needs it says so
        return None
