"""The most memory that this process has held, on its devices and on its host; imports no part of the training loop."""

from __future__ import annotations

import resource
import sys

import jax


def peak_memory() -> dict[str, int | None]:
    """Returns the most memory held so far: on the fullest of this process's devices, and by the process on its host."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    peaks = [found["peak_bytes_in_use"] for found in stats if "peak_bytes_in_use" in found]
    # Kilobytes, but bytes on macOS.
    unit = 1 if sys.platform == "darwin" else 1024
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return {"hbm_peak_bytes": max(peaks, default=None), "host_peak_bytes": host}
