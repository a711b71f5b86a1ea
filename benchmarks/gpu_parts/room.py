"""The memory that a case may take: HBM by the version of jax, and host memory as XLA's pool pins it. No jax."""

from __future__ import annotations

import math

from sppo_jax.hardware import Device
from sppo_jax.version import jaxlib_version

_GIB = 2**30
# The same programs take up to 11% more HBM with jax 0.11 than predicted.
_OLD_SHARE, _FIRST_EXACT = 0.9, (0, 12)
# What a process takes on its host besides what it pins: Python, CUDA, the compiler.
_PROCESS_GIB = 8


def planned_hbm_bytes(device: Device, version: tuple[int, ...] | None = None) -> int:
    """Return the HBM that a plan may count on.

    Args:
        device: the planner's figures of the device.
        version: of jaxlib; the installed one by default.
    """
    version = jaxlib_version() if version is None else version
    return device.hbm_bytes if version >= _FIRST_EXACT else int(device.hbm_bytes * _OLD_SHARE)


def pinned_bytes(num_bytes: int) -> int:
    """Return the host memory that XLA's pool pins for one allocation: the next power of two, every page of it.

    Args:
        num_bytes: of the allocation; the host temporaries of a program are one.
    """
    return 2 ** math.ceil(math.log2(num_bytes)) if num_bytes > 1 else num_bytes


def needed_gib(planned_gib: float) -> float:
    """Return the GiB of host memory that a process needs whose plan may take some GiB of it."""
    return pinned_bytes(int(planned_gib * _GIB)) / _GIB + _PROCESS_GIB
