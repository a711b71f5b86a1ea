"""Datasheet figures of the devices that the planner knows."""

import os
from dataclasses import dataclass
from pathlib import Path

_GiB = 2**30


@dataclass(frozen=True, kw_only=True)
class Device:
    """What the planner assumes of one device.

    Args:
        name: the name in plans and on command lines.
        hbm_bytes: device memory a program can use.
        host_bytes: host memory a device can have for itself, on a usual host of its kind.
        host_link_bytes_s: bytes a second between device and host, one way.
        link_bytes_s: bytes a second to a neighbour device, one way.
        matmul_flops_s: peak FLOP/s in the compute dtype.
        efficiency: share of the peak that a long matmul or attention reaches, 0..1.
        overhead_s: seconds a tick takes whatever its length.
        overhead_tokens: tokens of a device whose matmuls take as long as reading their weights.
        tile: token counts a device computes are multiples of this.
        smallest_chunk: shortest chunk, in tokens over a whole stage, that still computes efficiently.
        compute_bytes: bytes of one activation in the default compute dtype.
    """

    name: str
    hbm_bytes: int
    host_bytes: int
    host_link_bytes_s: float
    link_bytes_s: float
    matmul_flops_s: float
    efficiency: float = 0.5
    overhead_s: float = 3e-4
    overhead_tokens: int = 128
    tile: int = 16
    smallest_chunk: int = 2048
    compute_bytes: int = 2


def _gpu(name: str, hbm_gib: int, host_link: float, link: float, flops: float) -> Device:
    return Device(
        name=name,
        hbm_bytes=hbm_gib * _GiB,
        host_bytes=128 * _GiB,
        host_link_bytes_s=host_link,
        link_bytes_s=link,
        matmul_flops_s=flops,
    )


def _tpu(name: str, hbm_gib: int, host_gib: int, link: float, flops: float) -> Device:
    return Device(
        name=name,
        hbm_bytes=hbm_gib * _GiB,
        host_bytes=host_gib * _GiB,
        host_link_bytes_s=16e9,
        link_bytes_s=link,
        matmul_flops_s=flops,
        tile=128,
    )


# Host links are what copies reach, about four fifths of the PCIe figure.
DEVICES = {
    device.name: device
    for device in (
        Device(
            name="cpu",
            hbm_bytes=8 * _GiB,
            host_bytes=8 * _GiB,
            host_link_bytes_s=10e9,
            link_bytes_s=5e9,
            matmul_flops_s=5e10,
            efficiency=1.0,
            overhead_tokens=8,
            tile=1,
            smallest_chunk=256,
            compute_bytes=4,
        ),
        _gpu("a100-40g", 39, 25e9, 300e9, 312e12),
        _gpu("a100-80g", 79, 25e9, 300e9, 312e12),
        _gpu("h100", 79, 50e9, 450e9, 989e12),
        _gpu("h200", 139, 50e9, 450e9, 989e12),
        _gpu("b200", 178, 50e9, 900e9, 2250e12),
        _tpu("v4", 32, 100, 50e9, 275e12),
        _tpu("v5e", 16, 48, 50e9, 197e12),
        _tpu("v5p", 95, 112, 100e9, 459e12),
        _tpu("v6e", 31, 180, 100e9, 918e12),
    )
}

# Words of an accelerator's own name, most telling first.
_WORDS = (
    ("b200", "b200"),
    ("h200", "h200"),
    ("h100", "h100"),
    ("a100-sxm4-40gb", "a100-40g"),
    ("a100-pcie-40gb", "a100-40g"),
    ("a100", "a100-80g"),
    ("v6", "v6e"),
    ("v5p", "v5p"),
    ("v5 lite", "v5e"),
    ("v5litepod", "v5e"),
    ("v5e", "v5e"),
    ("v5", "v5p"),
    ("v4", "v4"),
)


def find_device(name: str) -> Device:
    """Returns the device of a name, ours or the accelerator's own (e.g. "NVIDIA H200", "TPU v5 lite").

    Raises:
        ValueError: the device is not known.
    """
    text = name.strip().lower()
    if text in DEVICES:
        return DEVICES[text]
    for word, known in _WORDS:
        if word in text:
            return DEVICES[known]
    raise ValueError(f"unknown device {name!r}: choose one of {', '.join(DEVICES)}, or set the hardware group")


def local_device() -> Device:
    """Returns the device of this machine, from what the system says of it; no accelerator is touched.

    A machine without a known accelerator counts as a CPU.
    """
    if os.environ.get("JAX_PLATFORMS", "").lower().startswith("cpu"):
        return DEVICES["cpu"]
    names = [os.environ.get("TPU_ACCELERATOR_TYPE", "")]
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        names += [line.partition(":")[2] for line in path.read_text().splitlines() if line.startswith("Model")]
    for name in names:
        try:
            return find_device(name)
        except ValueError:
            continue
    return DEVICES["cpu"]
