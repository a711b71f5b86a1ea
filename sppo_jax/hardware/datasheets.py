"""The table of devices: each figure that plans start from, with its source. A figure left out is `Device`'s own."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sppo_jax.hardware.device import Device
from sppo_jax.hardware.tpu_chips import BLOCK_ROWS, TPU_CHIPS

_GiB = 2**30
# Made from bench/results/gpu_h100.json by bench/device_row.py.
_MEASURED: dict[str, Any] = json.loads(Path(__file__).with_name("h100.json").read_text(encoding="utf-8"))
SOURCES = {
    "assumed": (
        "Nobody measured this for us. Kernels are taken to reach the shares of the peak of the A100, the H200 or "
        "the B200."
    ),
    "simulated": (
        "A simulated device has no speed of its own. These figures make plans for simulated devices comparable."
    ),
    # What NVIDIA states.
    "sheet": (
        "NVIDIA's datasheets of the A100 (SXM), H100 (SXM and PCIe), H200, DGX A100, DGX B200 and GH200 (96 GB "
        "HBM3): dense BF16, without sparsity."
    ),
    "page": (
        "NVIDIA's datasheets; of RTX cards its whitepapers on GA102, Ada and RTX Blackwell (dense BF16 with FP32 "
        "sums). The figure was written from memory. A public page confirmed it on 2026-11-26."
    ),
    "memory": "The same datasheets and whitepapers. The figure was written from memory, and no page confirmed it.",
    "driver": "Memory that a driver leaves free, in whole GiB: from memory. No page confirmed it.",
    "gb200": (
        "NVIDIA's GB200 NVL72 page: a rack of 72 has 180 PFLOP/s in dense BF16, 576 TB/s of HBM and 130 TB/s of "
        "NVLink. On 2026-11-29 public pages confirmed 2500 TFLOP/s, 186 GB, four GPUs a host, and 152 cores and "
        "189471 MiB (openxla/xla, target_config/specs/gb200.txtpb; an output of nvidia-smi)."
    ),
    "tray": "NVIDIA's GB200 NVL72 page, from memory: a host is a tray of four GPUs and two Grace CPUs of 480 GB.",
    # Links.
    "nvlink": (
        "NVLink 3, 4 and 5 have 600, 900 and 1800 GB/s both ways. Collectives reach 0.77 of a link's rate: the "
        "bus bandwidth of nccl-tests on a DGX A100 is about 230 of 300 GB/s."
    ),
    "pcie4-shared": (
        "What copies reach where pairs of GPUs share a PCIe gen 4 x16 link: SPPO's Fig. 5 has 12.9 to 14.4 GB/s, "
        "and PipeOffload takes 15."
    ),
    "pcie": (
        "About four fifths of a PCIe x16 link (gen 4: 25 GB/s, gen 5: 50 GB/s) for copies. Devices of a host "
        "exchange over the same link, of which collectives are taken to reach 0.77."
    ),
    "c2c": (
        "NVLink-C2C of a GH200 has 450 GB/s one way, and copies are taken to reach four fifths of it. Two GPUs of "
        "a GB200 share such a link of one CPU."
    ),
    "adapter": (
        "A DGX has one 200 Gb/s (A100) or 400 Gb/s (H100 and later) adapter a GPU. Collectives reach 0.77 of its "
        "rate: the mean of FlexSP's released all-to-all rates on 16, 32 and 64 A100 with one 400 Gb/s adapter a "
        "host, 0.88, 0.74 and 0.69."
    ),
    "one-link": (
        "ASSUMED: what a card copies to its host and sends to other hosts shares its x16 link at the rate of one "
        "copy (25 GB/s by PCIe gen 4), or at that of its adapter where this is faster. No such run was measured."
    ),
    # Hosts.
    "dgx": "DGX A100, H100 and B200 datasheets.",
    "small-host": "The DGX A100 with GPUs of 40 GB has 1 TB. Hosts of the H100 PCIe are taken to have as much.",
    "card-host": (
        "ASSUMED: hosts of cards have 512 GB of DDR4-3200 in 16 channels, and 16 cards in PCIe slots at most."
    ),
    "slots": "ASSUMED: a host has 16 cards in PCIe slots at most.",
    "boards": "Boards with NVLink have 8 GPUs. Two boards of A100 are joined to 16.",
    "channels": "16 channels of DDR4-3200 (DGX A100) or DDR5-4800 (DGX H100, taken for later hosts too).",
    "grace": "A Grace CPU has 480 GB, at 384 GB/s. A host has four GH200, or two Grace CPUs for four GB200.",
    "copies": (
        "Eight H100 of a DGX that copy at once reach 33 GiB/s each (openxla/xla#21708). One H100 reached 49 GiB/s "
        "(bench/results/gpu_h100.json). That five to eight GPUs of any host with x86 CPUs reach 33 GiB/s each, "
        "and one to four 47, is ASSUMED."
    ),
    # Kernels.
    "papers": "Calibrated by studies/papers.py on the 1F1B run of 7B, 32K tokens, 16 sequences in Seq1F1B's table.",
    "tf32": "Float32 products of GPUs are TF32, at half the peak.",
    "cudnn": (
        "NVIDIA's own benchmark of cuDNN's kernel (cuDNN 9.27, bfloat16, causal, 32K tokens, 64 query and 8 "
        "key-value heads of 128) in github.com/NVIDIA/cudnn-frontend, "
        "benchmark/attention_training/results/llama3.1 of 2026-09-28: A100 80GB PCIe 176 TFLOP/s forward and 143 "
        "backward, H200 619 and 528. The table of cuDNN 9.19 (2026-02-27, one sequence) has 688 and 581 for the "
        "H200, and an H100 with cuDNN 9.19 reached a sixth less. Which cuDNN is installed changes no plan. "
        "studies/kernels.py compares the cost model with these and with other tables of that benchmark."
    ),
    "cudnn-blackwell": (
        "The same benchmark with cuDNN 9.22 (2026-04-24): GB200 1622 and 1226 TFLOP/s, taken for the B200 too."
    ),
    "cudnn-heads": "cuDNN's support matrix: a backward of heads of 256 on Hopper, of 128 on Ampere.",
    "h100-heads": (
        "One H100 SXM, cuDNN 9.19, one call of 8192 queries and 32768 keys, 32 query and 8 key-value heads, "
        "measured on 2026-11-26 (bench/results/gpu_h100.json): 586 TFLOP/s forward and 541 backward with heads of "
        "128, 427 and 425 with heads of 64. So 30% of the seconds with heads of 128 do not fall with the size of "
        "a head (26% by another process of that day, which reached 577 and 524 with heads of 128). Blackwell "
        "takes the same share, other GPUs none: nobody measured them for us."
    ),
    "h100": (
        "The same H100 (`h100.json`, made by bench/device_row.py): "
        "580 TFLOP/s for a forward of a rectangle of 32768 queries and keys, and 490 for a "
        "backward, the mean of 487 for this rectangle and 493 for a triangle of 8192. A backward of 8192 queries "
        "and 32768 keys reached 523.5 and 540.6 in two processes, 532 in the mean. So calls get 8192 queries with "
        "heads of 128 or more; shorter ones were not measured so. No other Hopper GPU was measured for us."
    ),
    "h100-step": (
        "Products of a traced step of Llama-3.2-1B at 128K tokens (the same H100) take 1.60 s for 1.16 PFLOP, "
        "0.73 of the peak. What a step does beside products and attention's kernel reaches 0.57 of the memory's "
        "rate (predict/seconds/elementwise.py). The matmul efficiencies of other devices hide that work."
    ),
    # TPUs.
    "tpu": (
        "Google Cloud TPU system architecture pages (v4, v5e, v5p, v6e) and their 4-chip machine types. XLA "
        "estimates 0.77 of the peak for products of a forward of Llama-3.1-8B on v5p and 0.72 of a backward, and "
        "a fifth of their time for copies of layouts besides (libtpu 0.0.50.1): about 0.6 in all, `Device`'s own "
        "share. Hosts of a slice are joined by the same links."
    ),
    "tpu7x": (
        "docs.cloud.google.com/tpu/docs/tpu7x: a chip has 2307 TFLOP/s in BF16, 192 GiB, 7380 GB/s and ICI of "
        "1200 GB/s both ways in three dims, and is two devices; a host of four chips has 960 GB. A program gets "
        "94.74 GiB of a device (libtpu 0.0.50.1). The two devices share the chip's links; each is taken to have "
        "half of one."
    ),
}
# What collectives reach of a link's rate: `nvlink` and `adapter` of SOURCES.
_COLLECTIVE_SHARE = 0.77


class Figure(NamedTuple):
    """A figure of a device, and the key of its source in SOURCES."""

    value: Any
    source: str


Figures = dict[str, Figure]


class DeviceRow(NamedTuple):
    """A device of the table: its figures, and what is true of its make."""

    name: str
    figures: Figures
    facts: dict[str, Any]


def _from(source: str, **values: Any) -> Figures:
    return {name: Figure(value, source) for name, value in values.items()}


def _collective(source: str, **links: float) -> Figures:
    return _from(source, **{name: _COLLECTIVE_SHARE * value for name, value in links.items()})


def _cores(source: str, count: int, tile: int = 128) -> Figures:
    """Returns the rows that occupy all multiprocessors: those of a tile of the fused kernel for each."""
    return _from(source, attention_rows=tile * count)


def _gpu(
    name: str, hbm_gib: int, hbm: float, flops: float, *parts: Figures, by: Sequence[str] = ("sheet",)
) -> DeviceRow:
    """Returns a GPU: its memory, the bytes a second of the memory, the peak, and parts of which later ones win.

    Args:
        name: the name in plans.
        hbm_gib: memory that a driver leaves free.
        hbm: bytes a second of device memory.
        flops: the peak in BF16.
        parts: other figures.
        by: the source of the speed of memory and of the peak, or one of each.
    """
    figures = _from("driver", hbm_bytes=hbm_gib * _GiB) | _from(by[0], hbm_bytes_s=hbm)
    figures |= _from(by[-1], matmul_flops_s=flops) | _from("tf32", float32_share=0.5) | _HOST
    for part in parts:
        figures |= part
    return DeviceRow(name, figures, {"kernel": "cudnn"})


def _tpu(name: str, hbm_gib: int, hbm: float, host_gib: int, link: float, flops: float, chip: int = 1) -> DeviceRow:
    figures = _from(
        "tpu7x" if chip > 1 else "tpu",
        hbm_bytes=hbm_gib * _GiB,
        hbm_bytes_s=hbm,
        link_bytes_s=link,
        network_bytes_s=link,
        matmul_flops_s=flops,
        host_bytes=host_gib * _GiB,
        devices_per_host=4 * chip,
    )
    is_known = name in TPU_CHIPS
    facts = {"kernel": "pallas" if is_known else "blockwise", "has_bundles": is_known, "devices_per_chip": chip}
    facts |= {"attention_rows": BLOCK_ROWS if is_known else 0, "tile": 128, "platform": "tpu"}
    return DeviceRow(name, figures | _from("assumed", host_link_bytes_s=16e9), facts)


_HOST = (
    _from("dgx", host_bytes=2 * 1000**4, devices_per_host=8)
    | _from("boards", most_per_host=8)
    | _from("channels", host_memory_bytes_s=614e9)
    | _from("copies", host_links_bytes_s=(47 * _GiB, 33 * _GiB))
)
_SMALL_HOST = _from("small-host", host_bytes=1000**4)
_SLOTS = _from("slots", most_per_host=16)
_CARD_HOST = _from("card-host", host_bytes=512 * 1000**3, host_memory_bytes_s=410e9, most_per_host=16)
_GRACE = _from(
    "grace", host_bytes=4 * 480 * 1000**3, devices_per_host=4, most_per_host=4, host_memory_bytes_s=4 * 384e9
)
# NVLink-C2C joins a GPU to its CPU.
_C2C = _from("c2c", host_link_bytes_s=350e9, host_links_bytes_s=(math.inf, math.inf), slot_bytes_s=math.inf)
_TRAY = (
    _GRACE
    | _C2C
    | _from("tray", host_bytes=2 * 480 * 1000**3, host_memory_bytes_s=2 * 384e9)
    | _from("c2c", host_link_bytes_s=175e9)
    # A rack of 18 hosts within one NVLink.
    | _from("gb200", linked_devices=72)
)

# Links of boards: the generation, and the adapter of a GPU.
_GEN4_SHARED = _from("pcie4-shared", host_link_bytes_s=13e9) | _from("one-link", slot_bytes_s=25e9)
_GEN4_COPIES = _from("pcie", host_link_bytes_s=25e9) | _from("one-link", slot_bytes_s=25e9)
_GEN5_COPIES = _from("pcie", host_link_bytes_s=50e9) | _from("one-link", slot_bytes_s=50e9)
_NVLINK3 = _GEN4_SHARED | _collective("nvlink", link_bytes_s=300e9) | _collective("adapter", network_bytes_s=25e9)
_NVLINK4 = _GEN5_COPIES | _collective("nvlink", link_bytes_s=450e9) | _collective("adapter", network_bytes_s=50e9)
_NVLINK5 = _NVLINK4 | _collective("nvlink", link_bytes_s=900e9)
# Cards in PCIe slots: devices exchange over the slot that their copies share.
_GEN4 = _GEN4_COPIES | _collective("pcie", link_bytes_s=32e9) | _collective("adapter", network_bytes_s=25e9)
_GEN5 = _GEN5_COPIES | _collective("pcie", link_bytes_s=64e9) | _collective("adapter", network_bytes_s=25e9)

_AMPERE = _from("cudnn", attention_efficiency=176 / 312, attention_backward=2.5 * 176 / 143) | _cores("sheet", 108)
_A100_HOST = _from("channels", host_memory_bytes_s=410e9) | _from("boards", most_per_host=16)
_A100 = _AMPERE | _from("papers", matmul_efficiency=0.641) | _A100_HOST
_LIKE_A100 = _A100 | _from("assumed", matmul_efficiency=0.641)
_HOPPER = (
    _from("cudnn-heads", fused_head_dim=256)
    | _from("cudnn", attention_efficiency=619 / 989, attention_backward=2.5 * 619 / 528)
    | _from("h100-heads", attention_fixed=_MEASURED["attention_fixed"])
    | _cores("sheet", 132)
)
_FORWARD = _MEASURED["forward_flops_s"]
_H100 = (
    _HOPPER
    | _from("h100-step", **{name: _MEASURED[name] for name in ("matmul_efficiency", "elementwise_efficiency")})
    | _from(
        "h100",
        attention_efficiency=_FORWARD / 989e12,
        attention_backward=2.5 * _FORWARD / _MEASURED["backward_flops_s"],
        backward_queries=_MEASURED["backward_queries"],
        attention_backward_in_blocks=2.5 * _FORWARD / _MEASURED["backward_in_blocks_flops_s"],
    )
)
_BLACKWELL = (
    _from("cudnn-blackwell", attention_efficiency=1622 / 2250, attention_backward=2.5 * 1622 / 1226)
    | _from("h100-heads", attention_fixed=_MEASURED["attention_fixed"])
    | _cores("sheet", 148, tile=256)
)


def _card(source: str, cores: int) -> Figures:
    """Returns what is assumed of a card: the shares of the peak of an A100."""
    shares = {name: Figure(figure.value, "assumed") for name, figure in _LIKE_A100.items()}
    return shares | _CARD_HOST | _cores(source, cores)


_CPU = _from(
    "simulated",
    hbm_bytes=8 * _GiB,
    hbm_bytes_s=20e9,
    host_link_bytes_s=10e9,
    link_bytes_s=5e9,
    network_bytes_s=1e9,
    matmul_flops_s=5e10,
    host_bytes=8 * _GiB,
    devices_per_host=1,
    matmul_efficiency=1.0,
    attention_efficiency=1.0,
    overhead_tokens=8,
)
ROWS = (
    DeviceRow("cpu", _CPU, {"tile": 1, "smallest_chunk": 256, "compute_bytes": 4, "platform": "cpu"}),
    _gpu("a100-40g", 39, 1.555e12, 312e12, _A100, _SMALL_HOST, _NVLINK3),
    _gpu("a100-80g", 79, 2.039e12, 312e12, _A100, _NVLINK3),
    _gpu("h100", 79, 3.35e12, 989e12, _H100, _NVLINK4),
    _gpu("h100-pcie", 79, 2.0e12, 756e12, _HOPPER, _SMALL_HOST, _SLOTS, _cores("sheet", 114), _GEN5),
    _gpu("gh200", 95, 4.0e12, 989e12, _HOPPER, _NVLINK4, _GRACE, _C2C),
    _gpu("h200", 139, 4.8e12, 989e12, _HOPPER, _NVLINK4),
    _gpu("b200", 178, 8e12, 2250e12, _BLACKWELL, _NVLINK5),
    _gpu(
        "b300",
        267,
        8e12,
        2250e12,
        _BLACKWELL,
        _NVLINK5,
        _collective("page", link_bytes_s=900e9),
        _collective("memory", network_bytes_s=100e9),
        _cores("page", 160, tile=256),
        by=("page",),
    ),
    _gpu(
        "gb200",
        184,
        8e12,
        2500e12,
        _BLACKWELL,
        _NVLINK5,
        _TRAY,
        _from("cudnn-blackwell", attention_efficiency=1622 / 2500),
        _cores("gb200", 152, tile=256),
        _from("gb200", hbm_bytes=184 * _GiB),
        by=("gb200",),
    ),
    # Chips for China: slower NVLink, or fewer units.
    _gpu(
        "a800-80g", 79, 2.039e12, 312e12, _LIKE_A100, _NVLINK3, _collective("page", link_bytes_s=200e9), by=("memory",)
    ),
    _gpu("h800", 79, 3.35e12, 989e12, _HOPPER, _NVLINK4, _collective("page", link_bytes_s=200e9), by=("memory",)),
    _gpu(
        "h20",
        95,
        4.0e12,
        148e12,
        _HOPPER,
        _NVLINK4,
        _collective("page", link_bytes_s=450e9),
        _cores("page", 78),
        by=("page",),
    ),
    # Cards, like the H100 PCIe above; a bridge of two or four of them (NVL) is not counted.
    _gpu("a100-pcie", 79, 1.935e12, 312e12, _LIKE_A100, _GEN4, by=("memory",)),
    _gpu("h100-nvl", 93, 3.9e12, 835e12, _HOPPER, _SLOTS, _GEN5, by=("memory",)),
    _gpu("h200-nvl", 139, 4.8e12, 835e12, _HOPPER, _SLOTS, _GEN5, by=("memory",)),
    _gpu("a30", 23, 933e9, 165e12, _card("memory", 56), _GEN4, by=("memory",)),
    _gpu("a40", 44, 696e9, 149.7e12, _card("page", 84), _GEN4, by=("page",)),
    _gpu("a6000", 47, 768e9, 154.8e12, _card("page", 84), _GEN4, by=("page", "memory")),
    _gpu("a10", 22, 600e9, 125e12, _card("memory", 72), _GEN4, by=("page", "memory")),
    _gpu("a10g", 22, 600e9, 70e12, _card("memory", 80), _GEN4, by=("page", "memory")),
    _gpu("rtx-3090", 23, 936e9, 71e12, _card("memory", 82), _GEN4, by=("memory",)),
    _gpu("l4", 22, 300e9, 121e12, _card("memory", 58), _GEN4, by=("page", "memory")),
    _gpu("l40", 44, 864e9, 181e12, _card("page", 142), _GEN4, by=("page",)),
    _gpu("l40s", 44, 864e9, 362e12, _card("page", 142), _GEN4, by=("page",)),
    _gpu("rtx-6000-ada", 47, 960e9, 364.2e12, _card("memory", 142), _GEN4, by=("memory",)),
    _gpu("rtx-4090", 23, 1.008e12, 165.2e12, _card("page", 128), _GEN4, by=("page",)),
    _gpu("rtx-5090", 31, 1.792e12, 209.5e12, _card("page", 170), _GEN5, by=("page", "memory")),
    _gpu("rtx-pro-6000", 95, 1.792e12, 503.8e12, _card("page", 188), _GEN5, by=("page", "memory")),
    _tpu("v4", 32, 1.228e12, 400, 50e9, 275e12),
    _tpu("v5e", 16, 0.819e12, 192, 50e9, 197e12),
    _tpu("v5p", 95, 2.765e12, 448, 100e9, 459e12),
    _tpu("v6e", 31, 1.638e12, 720, 100e9, 918e12),
    _tpu("tpu7x", 94, 3.69e12, 960, 50e9, 1153.5e12, chip=2),
)


def _device(row: DeviceRow) -> Device:
    """Returns the device of a row; its matmul efficiency is an assumption where no source says otherwise."""
    efficiency = row.figures.get("matmul_efficiency", Figure(0.0, "assumed"))
    values = {name: figure.value for name, figure in row.figures.items()}
    return Device(name=row.name, assumed=efficiency.source == "assumed", **row.facts, **values)


DEVICES = {row.name: _device(row) for row in ROWS}
