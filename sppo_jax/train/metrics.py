"""Numbers of a step: throughput, use of the hardware, peak memory."""

from __future__ import annotations

import resource
import sys

import jax

from sppo_jax.config import MetricsConfig, ModelConfig
from sppo_jax.hardware import find_device
from sppo_jax.models import num_params


def causal_flops_per_token(model: ModelConfig, sequence_length: int) -> float:
    """Return the FLOPs of forward and backward a token, nothing counted twice and no masked score counted.

    6 for every parameter, and 6 L N H S for attention: each token sees half of the sequence on average. A sequence of
    several documents needs less, so for packed data this is an upper bound.

    Args:
        model: its shape (L layers, N heads, H head size).
        sequence_length: S, in tokens.
    """
    attention = 6 * model.num_layers * model.num_heads * model.head_dim * sequence_length
    return 6 * num_params(model) + attention


def peak_flops_per_s(config: MetricsConfig, device: jax.Device) -> float | None:
    """Return a device's peak FLOP/s: as configured, else from its datasheet, None where that is not known."""
    if not isinstance(config.peak_flops, str):
        return config.peak_flops
    if device.platform == "cpu":
        return None
    try:
        return find_device(device.device_kind).matmul_flops_s
    except ValueError:
        return None


def peak_memory() -> dict[str, int | None]:
    """Return the most memory held so far: on the fullest of this process's devices, and by the process on its host."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    peaks = [found["peak_bytes_in_use"] for found in stats if "peak_bytes_in_use" in found]
    # Kilobytes, but bytes on macOS.
    unit = 1 if sys.platform == "darwin" else 1024
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return {"hbm_peak_bytes": max(peaks, default=None), "host_peak_bytes": host}
