"""Which known device an accelerator is, and the devices of this machine."""

import math
import os
import re
from collections.abc import Sequence
from dataclasses import replace

from sppo_jax.hardware import machine
from sppo_jax.hardware.cluster import Cluster, make_cluster
from sppo_jax.hardware.datasheets import DEVICES
from sppo_jax.hardware.device import Device
from sppo_jax.hardware.present import Gpu, present_device, visible_gpus

# Words of an accelerator's own name, most telling first.
_WORDS = (
    ("b300", "b300"),
    ("gb300", "b300"),
    ("b200", "b200"),
    ("gb200", "gb200"),
    ("gh200", "gh200"),
    ("h200 nvl", "h200-nvl"),
    ("h200", "h200"),
    ("h100-pcie", "h100-pcie"),
    ("h100 pcie", "h100-pcie"),
    ("h100 nvl", "h100-nvl"),
    ("h100", "h100"),
    ("h800", "h800"),
    ("h20", "h20"),
    ("a100-sxm4-40gb", "a100-40g"),
    ("a100-pcie-40gb", "a100-40g"),
    ("a100 80gb pcie", "a100-pcie"),
    ("a100", "a100-80g"),
    ("a800", "a800-80g"),
    ("a30", "a30"),
    ("a40", "a40"),
    ("rtx a6000", "a6000"),
    ("a10g", "a10g"),
    ("a10", "a10"),
    ("l40s", "l40s"),
    ("l40", "l40"),
    ("l4", "l4"),
    ("rtx 6000 ada", "rtx-6000-ada"),
    ("rtx pro 6000", "rtx-pro-6000"),
    ("rtx 3090", "rtx-3090"),
    ("rtx 4090", "rtx-4090"),
    ("rtx 5090", "rtx-5090"),
    ("tpu7x", "tpu7x"),
    ("v7x", "tpu7x"),
    ("v6e", "v6e"),
    ("v6", "v6e"),
    ("v5p", "v5p"),
    ("v5 lite", "v5e"),
    ("v5litepod", "v5e"),
    ("v5e", "v5e"),
    ("v5", "v5p"),
    ("v4", "v4"),
)
# Words of cards that have the name of another card and not its speed.
_OTHER_CARDS = ("laptop", "max-q", "4090 d")


def find_device(name: str) -> Device:
    """Returns the device of a name, ours or the accelerator's own (e.g. "NVIDIA H200", "TPU v5 lite").

    Raises:
        ValueError: the device is not known.
    """
    text = name.strip().lower()
    if text in DEVICES:
        return DEVICES[text]
    if not any(_has_word(text, word) for word in _OTHER_CARDS):
        for word, known in _WORDS:
            if _has_word(text, word):
                return DEVICES[known]
    raise ValueError(
        f"unknown device {name.strip()!r}, none of {', '.join(DEVICES)}; set hardware.cluster to the nearest of "
        "them (NAME:HOSTSxDEVICES) and hardware.hbm_bytes, hardware.matmul_flops_s and hardware.link_bytes_s to the "
        "device's own figures, or JAX_PLATFORMS=cpu to take the CPU"
    )


def _has_word(text: str, word: str) -> bool:
    return re.search(rf"(?<![a-z0-9]){re.escape(word)}(?![a-z0-9])", text) is not None


def local_cluster() -> Cluster:
    """Returns the devices of this machine, from what the system says of them; no accelerator is touched.

    A machine without an accelerator that this process may use counts as one CPU. Memory is that of the machine.

    Raises:
        ValueError: the accelerator is not known, or there are several kinds.
    """
    if os.environ.get("JAX_PLATFORMS", "").lower().startswith("cpu"):
        return make_cluster(DEVICES["cpu"])
    if accelerator := os.environ.get("TPU_ACCELERATOR_TYPE", "").strip():
        return replace(make_cluster(find_device(accelerator)), host_bytes=machine.host_bytes())
    gpus = visible_gpus() or ()
    if not gpus:
        return make_cluster(DEVICES["cpu"])
    device = device_of(gpus)
    return Cluster(device=device, num_hosts=1, devices_per_host=len(gpus), host_bytes=machine.host_bytes())


def device_of(gpus: Sequence[Gpu]) -> Device:
    """Returns the device that GPUs of one machine are, with the memory of the smallest.

    Raises:
        ValueError: the GPU is not known, or there are several kinds.
    """
    names = sorted({gpu.name for gpu in gpus})
    if len(names) > 1:
        raise ValueError(
            f"all GPUs of a run must be of one kind, got {', '.join(names)}; set CUDA_VISIBLE_DEVICES to those of one"
        )
    return present_device(find_device(names[0]), min(gpus, key=lambda gpu: gpu.memory_bytes or math.inf))
