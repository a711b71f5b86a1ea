"""Datasheet figures of devices and clusters that the planner and the compiler targets start from.

Sources:
  A100: NVIDIA A100 Tensor Core GPU datasheet (40 and 80 GB SXM); DGX A100 datasheet (hosts).
  H100, H200, B200: NVIDIA H100, H200 and DGX B200 datasheets (SXM; dense BF16, without sparsity). H100 PCIe: the same
  datasheet. GH200: NVIDIA GH200 Grace Hopper datasheet (96 GB HBM3, NVLink-C2C 450 GB/s one way, four fifths of it).
  H100 NVL, H200 NVL, B300, A800, H800, H20, A100 80GB PCIe, A30, A40, A10, A10G, L4, L40, L40S, RTX A6000 and RTX 6000
  Ada: NVIDIA's datasheets (dense BF16). RTX 3090, 4090, 5090 and RTX PRO 6000: NVIDIA's whitepapers on GA102, Ada and
  RTX Blackwell (dense BF16 with FP32 sums). These rows were written from memory. On 2026-11-26 public pages confirmed:
  BF16 of the B300, H20, A40, L40, L40S and RTX 4090; the speed of their memory, and of that of the A10, A10G, L4, RTX
  A6000, RTX 5090 and RTX PRO 6000; NVLink of the B300, A800, H800 and H20; cores of the B300, H20, A40, L40, L40S, RTX
  A6000, RTX 4090, RTX 5090 and RTX PRO 6000. No page confirmed the other figures of these rows, nor the bytes of memory
  that a driver leaves free. That the kernels of all of these reach the A100's, the H200's or the B200's shares of the
  peak is an assumption.
  GB200: NVIDIA's GB200 NVL72 page (a rack of 72 has 180 PFLOP/s in dense BF16, 576 TB/s of HBM, 130 TB/s of NVLink). A
  host is a tray: four GPUs and two Grace CPUs of 480 GB. A CPU shares NVLink-C2C of 900 GB/s both ways between its two
  GPUs: 225 GB/s one way, four fifths of it; its memory has the speed of a GH200's. One 400 Gb/s adapter a GPU. From
  memory too; on 2026-11-29 public pages confirmed 2500 TFLOP/s, 186 GB, four GPUs a host, and 152 cores and 189471 MiB
  (openxla/xla, target_config/specs/gb200.txtpb; an output of nvidia-smi).
  Devices of a host at most: boards with NVLink have 8 GPUs, two boards of A100 are joined to 16. That a host
  has 16 cards in PCIe slots at most is an assumption.
  TPU: Google Cloud TPU system architecture pages (v4, v5e, v5p, v6e); their 4-chip machine types (hosts). TPU7x
  (docs.cloud.google.com/tpu/docs/tpu7x): a chip has 2307 TFLOP/s in BF16, 192 GiB, 7380 GB/s, ICI of 1200 GB/s both
  ways in three dims, and is two devices; a host of four chips has 960 GB. A program gets 94.74 GiB of a device (libtpu
  0.0.50.1). The two devices share the chip's links; each is taken to have half of one.
  Hosts with x86 CPUs: eight H100 of a DGX that copy at once reach 33 GiB/s each (openxla/xla#21708); one H100 reached
  49 GiB/s (bench/results/gpu_h100.json). That five to eight GPUs of any such host reach 33 GiB/s each, and one to four
  47, is ASSUMED. So is that what a card copies to its host and sends to other hosts shares its x16 link at the rate of
  one copy (25 GB/s by PCIe gen 4), or at that of its adapter where this is faster: no such run was measured.
  Links are one way: NVLink 3, 4, 5 have 600, 900, 1800 GB/s both ways, of which collectives reach about three quarters;
  a DGX has one 200 Gb/s (A100) or 400 Gb/s (H100 and later) adapter a GPU. Host links are what copies reach of PCIe
  gen 5 x16, about four fifths; on the A100, where pairs of GPUs share a gen 4 x16 link, 13 GB/s (SPPO's Fig. 5: 12.9
  to 14.4; PipeOffload takes 15).
  Memory of hosts: 16 channels of DDR4-3200 (DGX A100) or DDR5-4800 (DGX H100, taken for later ones too); 384 GB/s a
  GH200. Float32 products of GPUs are TF32, at half the peak; those of TPUs are passes of bfloat16 at the peak.
  Attention of GPUs: NVIDIA's own benchmark of cuDNN's kernel (cuDNN 9.27, bfloat16, causal, 32K tokens, 64 query and 8
  key-value heads of 128), in github.com/NVIDIA/cudnn-frontend, benchmark/attention_training/results/llama3.1 of
  2026-09-28: A100 80GB PCIe 176 TFLOP/s forward and 143 backward, H200 619 and 528.
  The same benchmark's table of cuDNN 9.19 (2026-02-27, one sequence) has 688 and 581 for the H200. That table is older,
  and an H100 with cuDNN 9.19 reached a sixth less. Which cuDNN is installed changes no plan.
  Shorter heads on Hopper: one H100 SXM, cuDNN 9.19, one call of 8192 queries and 32768 keys, 32 query and 8 key-value
  heads, measured on 2026-11-26 (bench/results/gpu_h100.json): 586 TFLOP/s forward and 541 backward with heads of
  128, 427 and 425 with heads of 64. So 30% of the seconds with heads of 128 do not fall with the size of a head (26% by
  another process of that day, which reached 577 and 524 with heads of 128). Blackwell takes the same share, other GPUs
  none: nobody measured them for us.
  The H100 (SXM) takes its own rates, of the same run (`h100.json`, made by bench/device_row.py): 580 for a forward of a
  rectangle of 32768 queries and keys, and 490 for a backward, the mean of 487 for this rectangle and 493 for a triangle
  of 8192. A backward of 8192 queries and 32768 keys reached 523.5 and 540.6 in two processes, 532 in the mean. So calls
  get 8192 queries with heads of 128 or more; shorter ones were not measured so. No other Hopper GPU was measured for
  us: the H100 PCIe, H100 NVL, H800, H20 and GH200 take the H200's shares of the peak.
  GB200 1622 and 1226 (2026-04-24, cuDNN 9.22), taken for the B200 too. studies/kernels.py compares the cost model with
  these and with other tables of that benchmark.
  Matmul of the A100: calibrated by studies/papers.py on the 1F1B run of 7B, 32K tokens, 16 sequences in Seq1F1B's
  table. Matmul of the H100: products of a traced step of Llama-3.2-1B at 128K tokens (the same run) take 1.60 s for
  1.16 PFLOP, 0.73 of the peak; what a step does beside products and attention's kernel reaches 0.57 of the memory's
  rate there (`predict/seconds/elementwise.py`). The matmul efficiencies of all other devices are assumptions, and hide
  that work. Of TPUs: for a step of Llama-3.1-8B on v5p, XLA estimates 0.77 of the peak for products of a forward and
  0.72 of a backward, and a fifth of their time for copies of layouts besides (libtpu 0.0.50.1): about 0.6 in all.
  Attention of TPUs by the kernel for them: `tpu_chips`; the share of half the peak holds where another kernel runs,
  and is assumed.
  Networks: FlexSP's released all-to-all rates on 16, 32 and 64 A100 with one 400 Gb/s adapter a host are 0.88, 0.74 and
  0.69 of the adapters' rate: about the share that collectives reach of NVLink.
"""

import difflib
import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sppo_jax.hardware.attention_rates import AttentionRates
from sppo_jax.hardware.existing import nearest_shapes, shape_of_chips, slice_shapes
from sppo_jax.hardware.measured_figures import Profile, read_profile
from sppo_jax.hardware.tpu_chips import BLOCK_ROWS, REACHED, SCORES, TPU_CHIPS
from sppo_jax.plan.parts import cache_head_dim

_GiB = 2**30
# Above any machine; a planner that tries every divisor of more would not come back.
_MOST_DEVICES = 2**20
# Share of the peak in float64 on devices that compute in bfloat16.
_FLOAT64_SHARE = 1 / 16
# What collectives reach of a link's rate. NVLink: nccl-tests' bus bandwidth on a DGX A100 is about 230 of 300 GB/s.
# Networks: the mean of FlexSP's three rates.
_COLLECTIVE_SHARE = 0.77
# What a copy reaches of a PCIe gen 4 x16 link.
_GEN4_BYTES_S = 25e9
# Heads whose backward was measured in blocks of queries.
LONG_HEAD_DIM = 128
# Devices of a host that copy at once without slowing each other.
_FEW_DEVICES = 4


@dataclass(frozen=True, kw_only=True)
class Device:
    """What the planner assumes of one device.

    Args:
        name: the name in plans and on command lines.
        hbm_bytes: memory of the device, rounded down to GiB; `capacity` says what a run gets of it.
        hbm_bytes_s: bytes a second between device memory and its compute units.
        host_link_bytes_s: bytes a second between device and host, one way.
        link_bytes_s: bytes a second to a device of the same host (or TPU slice), one way.
        network_bytes_s: bytes a second to a device of another host, one way.
        matmul_flops_s: peak FLOP/s in the compute dtype.
        host_bytes: memory of a usual host.
        devices_per_host: devices of a usual host.
        most_per_host: devices that a host has at most; 0: no limit is known.
        linked_devices: devices that the links of a host join, where these reach other hosts too; 0: those of the host.
        kernel: the attention kernel that runs there: "cudnn", "pallas" or "blockwise".
        matmul_efficiency: share of the peak that a long matmul reaches, 0..1.
        elementwise_efficiency: share of `hbm_bytes_s` that work beside products and attention's kernel reaches, 0..1;
            0: the matmul efficiency has this work in it.
        attention_efficiency: share of the peak that attention's forward over a long prefix reaches, 0..1.
        attention_backward: seconds of attention's backward for one of its forward.
        backward_queries: queries that a call of the fused kernel's backward gets at most, with heads of
            `LONG_HEAD_DIM` or more; 0: any number.
        attention_backward_in_blocks: what `attention_backward` is with calls of so many queries; 0: the same.
        attention_head_dim: elements of a head with which attention reaches that share.
        fused_head_dim: the most elements of a head that the fused kernel takes, forward and backward.
        attention_fixed: share of the fused kernel's time with heads of 128 that shorter heads take as well, 0..1: that
            of the exponentials of scores.
        attention_block: queries and keys of a block of the blockwise kernel, which computes whole ones; 0: not counted.
        attention_rates: measured rates by the lengths of a call; the other figures of attention are of the fastest
            calls, and hold where there are none.
        attention_rows: queries times heads that occupy all compute units of the fused kernel once, or that are a block
            of the kernel for TPUs; 0: not counted.
        overhead_s: seconds a tick takes whatever its length.
        overhead_tokens: tokens of a device whose matmuls take as long as reading their weights.
        tile: token counts a device computes are multiples of this.
        smallest_chunk: shortest chunk, in tokens over a whole stage, that still computes efficiently.
        compute_bytes: bytes of one activation in the default compute dtype.
        host_memory_bytes_s: bytes a second of a usual host's memory, which the copies of all its devices share.
        host_links_bytes_s: bytes a second of a device to its host at most, one way, while up to four devices of the
            host copy, and while more do.
        slot_bytes_s: bytes a second of the link of a card, one way, where the card's copies to its host and what it
            sends to other hosts share it.
        loop_wait_share: share of a write to the host for which a loop of an unknown count waits.
        float32_share: share of the peak in float32, where `compute_bytes` is 2.
        assumed: whether the matmul efficiency is an assumption: neither calibrated on published runs nor measured.
        platform: the compiler that makes its programs: "cpu", "gpu" or "tpu".
        devices_per_chip: devices of a chip; the sizes of a TPU slice are in chips.
        has_bundles: whether the kernel for TPUs takes what its compiled bundles say (`tpu_chips`).
    """

    name: str
    hbm_bytes: int
    hbm_bytes_s: float
    host_link_bytes_s: float
    link_bytes_s: float
    network_bytes_s: float
    matmul_flops_s: float
    host_bytes: int
    devices_per_host: int
    most_per_host: int = 0
    linked_devices: int = 0
    kernel: str = "blockwise"
    matmul_efficiency: float = 0.6
    elementwise_efficiency: float = 0.0
    attention_efficiency: float = 0.5
    attention_backward: float = 2.5
    backward_queries: int = 0
    attention_backward_in_blocks: float = 0.0
    attention_head_dim: int = 128
    fused_head_dim: int = 128
    attention_fixed: float = 0.0
    attention_block: int = 0
    attention_rates: AttentionRates | None = None
    attention_rows: int = 0
    overhead_s: float = 3e-4
    overhead_tokens: int = 128
    tile: int = 16
    smallest_chunk: int = 2048
    compute_bytes: int = 2
    host_memory_bytes_s: float = math.inf
    host_links_bytes_s: tuple[float, float] = (math.inf, math.inf)
    slot_bytes_s: float = math.inf
    loop_wait_share: float = 1.0
    float32_share: float = 1.0
    assumed: bool = True
    platform: str = "gpu"
    devices_per_chip: int = 1
    has_bundles: bool = False

    def peak_flops_s(self, compute_bytes: int) -> float:
        """Returns the peak FLOP/s of a matmul whose operands have elements of so many bytes."""
        if compute_bytes <= self.compute_bytes:
            return self.matmul_flops_s
        if compute_bytes == 8:
            return self.matmul_flops_s * (0.5 if self.compute_bytes == 4 else _FLOAT64_SHARE)
        return self.matmul_flops_s * self.float32_share

    def linear_flops_s(self, compute_bytes: int) -> float:
        """Returns the FLOP/s that a long matmul reaches."""
        return self.peak_flops_s(compute_bytes) * self.matmul_efficiency

    @property
    def elementwise_bytes_s(self) -> float:
        """Bytes a second of work beside products and attention's kernel; inf: products' seconds have it in them."""
        return self.hbm_bytes_s * self.elementwise_efficiency if self.elementwise_efficiency else math.inf

    def attention_flops_s(self, compute_bytes: int, kernel: str, head_dim: int) -> float:
        """Returns the FLOP/s that attention over a long prefix reaches.

        The figures of an accelerator are those of a fused kernel, unless they were measured. The blockwise kernel
        passes its scores through device memory: in float32 they are written once and read twice, and their exponentials
        are written and read in the compute dtype. So many bytes a second are then what limits it (an assumption: no
        blockwise kernel was measured on an accelerator).

        Args:
            compute_bytes: bytes of an element.
            kernel: "cudnn", "pallas" or "blockwise".
            head_dim: elements of a head.
        """
        if kernel == "pallas" and self.has_bundles:
            return 4 * head_dim / self.score_s(compute_bytes, head_dim)[0]
        reached = self.peak_flops_s(compute_bytes) * self.attention_efficiency
        if kernel == "cudnn":
            return reached * self._head_share(head_dim) / self._head_share(self.attention_head_dim)
        if self.platform == "cpu" or self.attention_block or kernel == "pallas":
            return reached
        score_bytes = 3 * max(4, compute_bytes) + 2 * compute_bytes
        return min(reached, 4 * head_dim * self.hbm_bytes_s / score_bytes)

    def score_s(self, compute_bytes: int, head_dim: int) -> tuple[float, float]:
        """Returns the seconds of a score of one head that the kernel for TPUs takes, forward and backward.

        The score is in a block that is visible as a whole. Bundles that would reach more than the peak take as long as
        the peak does.
        """
        chip, peak = TPU_CHIPS[self.name], self.peak_flops_s(compute_bytes)
        bundles, head_dim = chip.bundles_of(head_dim, compute_bytes), cache_head_dim("pallas", head_dim)
        forward, backward = (
            count / SCORES / (chip.cores * chip.clock_hz) for count in (bundles.forward, bundles.backward)
        )
        return max(forward, 4 * head_dim / peak) / REACHED, max(backward, 10 * head_dim / peak) / REACHED

    def _head_share(self, head_dim: int) -> float:
        """Returns the fused kernel's FLOP/s with heads of a size, as a share of those with heads of 128.

        Longer heads are taken to be no faster: nobody measured them for us.
        """
        size = min(1.0, head_dim / 128)
        return size / (self.attention_fixed + (1 - self.attention_fixed) * size)


def _gpu(
    name: str,
    hbm_gib: int,
    hbm: float,
    host_link: float,
    link: float,
    network: float,
    flops: float,
    like: dict[str, Any],
) -> Device:
    """Returns a GPU from its datasheet, and what is assumed of GPUs like it."""
    slot = {"slot_bytes_s": max(_GEN4_BYTES_S, host_link)}
    return Device(
        name=name,
        hbm_bytes=hbm_gib * _GiB,
        hbm_bytes_s=hbm,
        host_link_bytes_s=host_link,
        link_bytes_s=_COLLECTIVE_SHARE * link,
        network_bytes_s=_COLLECTIVE_SHARE * network,
        matmul_flops_s=flops,
        kernel="cudnn",
        float32_share=0.5,
        **_HOST | slot | like,
    )


def _tpu(
    name: str, hbm_gib: int, hbm: float, host_gib: int, link: float, flops: float, devices_per_chip: int = 1
) -> Device:
    return Device(
        name=name,
        hbm_bytes=hbm_gib * _GiB,
        hbm_bytes_s=hbm,
        host_link_bytes_s=16e9,
        link_bytes_s=link,
        network_bytes_s=link,  # hosts of a slice are joined by the same links
        matmul_flops_s=flops,
        host_bytes=host_gib * _GiB,
        devices_per_host=4 * devices_per_chip,
        kernel="pallas" if name in TPU_CHIPS else "blockwise",
        attention_rows=BLOCK_ROWS if name in TPU_CHIPS else 0,
        has_bundles=name in TPU_CHIPS,
        tile=128,
        platform="tpu",
        devices_per_chip=devices_per_chip,
    )


_HOST: dict[str, Any] = {
    "host_bytes": 2 * 1000**4,
    "devices_per_host": 8,
    "most_per_host": 8,
    "host_memory_bytes_s": 614e9,
    "host_links_bytes_s": (47 * _GiB, 33 * _GiB),
}
_SMALL_HOST: dict[str, Any] = {"host_bytes": 1000**4}
_SLOTS: dict[str, Any] = {"most_per_host": 16}
_GRACE: dict[str, Any] = {
    "host_bytes": 4 * 480 * 1000**3,
    "devices_per_host": 4,
    "most_per_host": 4,
    "host_memory_bytes_s": 4 * 384e9,
    # NVLink-C2C joins a GPU to its CPU.
    "host_links_bytes_s": (math.inf, math.inf),
    "slot_bytes_s": math.inf,
}
# Two CPUs for four GPUs, and a rack of 18 such hosts within one NVLink.
_TRAY: dict[str, Any] = _GRACE | {
    "host_bytes": 2 * 480 * 1000**3,
    "host_memory_bytes_s": 2 * 384e9,
    "linked_devices": 72,
}
# Made from bench/results/gpu_h100.json by bench/device_row.py.
_MEASURED: dict[str, Any] = json.loads(Path(__file__).with_name("h100.json").read_text(encoding="utf-8"))
# `attention_rows` is the rows of a tile of the fused kernel times the multiprocessors.
_A100: dict[str, Any] = {
    "matmul_efficiency": 0.641,  # calibrated by studies/papers.py
    "attention_efficiency": 176 / 312,
    "attention_backward": 2.5 * 176 / 143,
    "attention_rows": 128 * 108,
    "assumed": False,
    "host_memory_bytes_s": 410e9,
    "most_per_host": 16,
}
_ASSUMED: dict[str, Any] = {"assumed": True}
_HOPPER: dict[str, Any] = {
    # cuDNN's support matrix: a backward of 256 on Hopper, of 128 on Ampere.
    "fused_head_dim": 256,
    "attention_efficiency": 619 / 989,
    "attention_backward": 2.5 * 619 / 528,
    "attention_fixed": _MEASURED["attention_fixed"],
    "attention_rows": 128 * 132,
}
# One H100's own rates.
_H100: dict[str, Any] = _HOPPER | {
    "matmul_efficiency": _MEASURED["matmul_efficiency"],
    "elementwise_efficiency": _MEASURED["elementwise_efficiency"],
    "assumed": False,
    "attention_efficiency": _MEASURED["forward_flops_s"] / 989e12,
    "attention_backward": 2.5 * _MEASURED["forward_flops_s"] / _MEASURED["backward_flops_s"],
    "backward_queries": _MEASURED["backward_queries"],
    "attention_backward_in_blocks": 2.5 * _MEASURED["forward_flops_s"] / _MEASURED["backward_in_blocks_flops_s"],
}
_BLACKWELL: dict[str, Any] = {
    "attention_efficiency": 1622 / 2250,
    "attention_backward": 2.5 * 1622 / 1226,
    "attention_fixed": 0.3,
    "attention_rows": 256 * 148,
}

_H100_PCIE = _HOPPER | _SMALL_HOST | _SLOTS | {"attention_rows": 128 * 114}
_GB200 = _BLACKWELL | _TRAY | {"attention_efficiency": 1622 / 2500, "attention_rows": 256 * 152}

# Copies to the host, links and network of cards in PCIe slots: devices exchange over the slot that their copies share.
_GEN4, _GEN5 = (_GEN4_BYTES_S, 32e9, 25e9), (50e9, 64e9, 25e9)


def _card(like: dict[str, Any], cores: int) -> dict[str, Any]:
    """Returns what is assumed of a card whose kernels nobody measured for us: the shares of the peak of another GPU."""
    host = {"host_bytes": 512 * 1000**3, "host_memory_bytes_s": 410e9}
    return like | _ASSUMED | host | _SLOTS | {"attention_rows": 128 * cores}


DEVICES = {
    device.name: device
    for device in (
        Device(
            name="cpu",
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
            tile=1,
            smallest_chunk=256,
            compute_bytes=4,
            assumed=False,  # a simulated device has no speed of its own
            platform="cpu",
        ),
        _gpu("a100-40g", 39, 1.555e12, 13e9, 300e9, 25e9, 312e12, _A100 | _SMALL_HOST),
        _gpu("a100-80g", 79, 2.039e12, 13e9, 300e9, 25e9, 312e12, _A100),
        _gpu("h100", 79, 3.35e12, 50e9, 450e9, 50e9, 989e12, _H100),
        # Without NVLink: devices of a host exchange over the PCIe link that their copies to the host share.
        _gpu("h100-pcie", 79, 2.0e12, 50e9, 64e9, 25e9, 756e12, _H100_PCIE),
        # NVLink-C2C joins the chip to its own 480 GB; four chips a host.
        _gpu("gh200", 95, 4.0e12, 350e9, 450e9, 50e9, 989e12, _HOPPER | _GRACE),
        _gpu("h200", 139, 4.8e12, 50e9, 450e9, 50e9, 989e12, _HOPPER),
        _gpu("b200", 178, 8e12, 50e9, 900e9, 50e9, 2250e12, _BLACKWELL),
        _gpu("b300", 267, 8e12, 50e9, 900e9, 100e9, 2250e12, _BLACKWELL | {"attention_rows": 256 * 160}),
        _gpu("gb200", 184, 8e12, 175e9, 900e9, 50e9, 2500e12, _GB200),
        # Chips for China: slower NVLink, or fewer units.
        _gpu("a800-80g", 79, 2.039e12, 13e9, 200e9, 25e9, 312e12, _A100 | _ASSUMED),
        _gpu("h800", 79, 3.35e12, 50e9, 200e9, 50e9, 989e12, _HOPPER),
        _gpu("h20", 95, 4.0e12, 50e9, 450e9, 50e9, 148e12, _HOPPER | {"attention_rows": 128 * 78}),
        # Cards, like the H100 PCIe above; a bridge of two or four of them (NVL) is not counted.
        _gpu("a100-pcie", 79, 1.935e12, *_GEN4, 312e12, _A100 | _ASSUMED),
        _gpu("h100-nvl", 93, 3.9e12, *_GEN5, 835e12, _HOPPER | _SLOTS),
        _gpu("h200-nvl", 139, 4.8e12, *_GEN5, 835e12, _HOPPER | _SLOTS),
        _gpu("a30", 23, 933e9, *_GEN4, 165e12, _card(_A100, 56)),
        _gpu("a40", 44, 696e9, *_GEN4, 149.7e12, _card(_A100, 84)),
        _gpu("a6000", 47, 768e9, *_GEN4, 154.8e12, _card(_A100, 84)),
        _gpu("a10", 22, 600e9, *_GEN4, 125e12, _card(_A100, 72)),
        _gpu("a10g", 22, 600e9, *_GEN4, 70e12, _card(_A100, 80)),
        _gpu("rtx-3090", 23, 936e9, *_GEN4, 71e12, _card(_A100, 82)),
        _gpu("l4", 22, 300e9, *_GEN4, 121e12, _card(_A100, 58)),
        _gpu("l40", 44, 864e9, *_GEN4, 181e12, _card(_A100, 142)),
        _gpu("l40s", 44, 864e9, *_GEN4, 362e12, _card(_A100, 142)),
        _gpu("rtx-6000-ada", 47, 960e9, *_GEN4, 364.2e12, _card(_A100, 142)),
        _gpu("rtx-4090", 23, 1.008e12, *_GEN4, 165.2e12, _card(_A100, 128)),
        _gpu("rtx-5090", 31, 1.792e12, *_GEN5, 209.5e12, _card(_A100, 170)),
        _gpu("rtx-pro-6000", 95, 1.792e12, *_GEN5, 503.8e12, _card(_A100, 188)),
        _tpu("v4", 32, 1.228e12, 400, 50e9, 275e12),
        _tpu("v5e", 16, 0.819e12, 192, 50e9, 197e12),
        _tpu("v5p", 95, 2.765e12, 448, 100e9, 459e12),
        _tpu("v6e", 31, 1.638e12, 720, 100e9, 918e12),
        _tpu("tpu7x", 94, 3.69e12, 960, 50e9, 1153.5e12, devices_per_chip=2),
    )
}


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Devices of one kind on hosts of one kind.

    Args:
        device: one device.
        num_hosts: hosts.
        devices_per_host: devices of each.
        host_bytes: memory of each host that activations may take.
        topology: chips along each dim of a TPU slice; empty elsewhere.
        spare: share of what a run gets of a device that plans leave free; None: as `capacity` says for the newest jax.
    """

    device: Device
    num_hosts: int
    devices_per_host: int
    host_bytes: int
    topology: tuple[int, ...] = ()
    spare: float | None = None

    @property
    def num_devices(self) -> int:
        return self.num_hosts * self.devices_per_host

    @property
    def num_linked(self) -> int:
        """Devices that are joined by the links of a host: those of the host, or of several."""
        return max(self.devices_per_host, self.device.linked_devices)

    @property
    def device_host_bytes(self) -> int:
        """Host memory that one device can have for itself; at least 1, because shares of it are shown."""
        return max(1, self.host_bytes // self.devices_per_host)

    @property
    def host_link_bytes_s(self) -> float:
        """Bytes a second of a device to its host, one way, while all devices of the host copy both ways."""
        share = self.device.host_memory_bytes_s / (2 * self.devices_per_host)
        return min(self.device.host_link_bytes_s, self._beside_others_bytes_s, share)

    @property
    def shares_host_link(self) -> bool:
        """Whether what is assumed of a host's other devices slows a device's copies."""
        return self.host_link_bytes_s == self._beside_others_bytes_s

    @property
    def _beside_others_bytes_s(self) -> float:
        few, many = self.device.host_links_bytes_s
        return few if self.devices_per_host <= _FEW_DEVICES else many

    @property
    def slot_bytes_s(self) -> float:
        """Bytes a second of what a device copies to its host and sends to other hosts, together; inf: apart."""
        device = self.device
        if self.num_hosts == 1:
            return math.inf
        return max(device.slot_bytes_s, device.host_link_bytes_s, device.network_bytes_s)

    @property
    def name(self) -> str:
        """The name that `parse_cluster` reads."""
        shape = self.topology or (self.num_hosts, max(1, self.devices_per_host // self.device.devices_per_chip))
        if self.device.platform == "tpu":
            shape = self.topology or shape_of_chips(self.device.name, math.prod(shape)) or shape
        return f"{self.device.name}:{'x'.join(map(str, shape))}"

    def link_bytes_s(self, span: int) -> float:
        """Returns bytes a second, one way, between members that span so many neighbouring devices."""
        return self.device.link_bytes_s if span <= self.num_linked else self.device.network_bytes_s


def make_cluster(device: Device, num_devices: int = 1) -> Cluster:
    """Returns usual hosts of a device, as few as hold `num_devices`; a lone host has no more devices than asked for."""
    per_host = num_devices if device.name == "cpu" else min(num_devices, device.devices_per_host)
    num_hosts = -(-num_devices // per_host)
    return Cluster(device=device, num_hosts=num_hosts, devices_per_host=per_host, host_bytes=device.host_bytes)


def _nearest(name: str) -> list[str]:
    """Returns the known devices whose names begin as this one, then those that are spelled like this one."""
    begin = sorted((known for known in DEVICES if f"{known}-".startswith(f"{name}-")), key=len)
    return [*begin, *(known for known in difflib.get_close_matches(name, DEVICES) if known not in begin)]


def parse_cluster(text: str) -> Cluster:
    """Reads NAME:HOSTSxDEVICES (e.g. a100-80g:16x8), or a TPU slice by its chips (e.g. v5p:4x4x4).

    Raises:
        ValueError: the device is not known, the shape is not positive whole numbers, or there is no such cluster.
    """
    name, _, shape = text.strip().partition(":")
    rule = "a cluster must read NAME:HOSTSxDEVICES, e.g. a100-80g:16x8, h200:1x1, or a TPU slice such as v5p:4x4x4"
    if name not in DEVICES:
        raise ValueError(
            f"{rule}, got {text!r}; name one of the devices {', '.join(_nearest(name.lower()) or DEVICES)}"
        )
    device = DEVICES[name]
    sizes = shape.split("x")
    if not all(size.isdecimal() and int(size) > 0 for size in sizes):
        raise ValueError(f"{rule}, with every size at least 1, got {text!r}; give the sizes")
    dims = tuple(map(int, sizes))
    num_devices = math.prod(dims) * device.devices_per_chip
    if num_devices > _MOST_DEVICES:
        raise ValueError(
            f"a cluster must have at most {_MOST_DEVICES:,} devices, got {text!r}; make the cluster smaller"
        )
    if device.platform != "tpu":
        if len(dims) != 2:
            raise ValueError(f"{rule}, got {text!r} with {len(dims)} sizes; give hosts and devices a host")
        _check_host(device, *dims)
        return Cluster(device=device, num_hosts=dims[0], devices_per_host=dims[1], host_bytes=device.host_bytes)
    _check_slice(device, dims)
    return slice_of(device, dims)


def slice_of(device: Device, shape: tuple[int, ...]) -> Cluster:
    """Returns the TPU slice of a shape in chips."""
    return replace(make_cluster(device, math.prod(shape) * device.devices_per_chip), topology=shape)


def _check_host(device: Device, num_hosts: int, per_host: int) -> None:
    """Refuses hosts of more GPUs than there are; names the fewest hosts that have as many in all."""
    most = device.most_per_host
    if not most or per_host <= most:
        return
    total = num_hosts * per_host
    each = max(size for size in range(1, most + 1) if total % size == 0)
    raise ValueError(
        f"a host of {device.name} must have at most {most} devices, got {device.name}:{num_hosts}x{per_host}; name "
        f"{device.name}:{total // each}x{each}"
    )


def _check_slice(device: Device, shape: tuple[int, ...]) -> None:
    """Refuses a TPU slice that does not exist; names those nearest to it."""
    if shape in slice_shapes(device.name):
        return
    near = " or ".join(f"{device.name}:{'x'.join(map(str, one))}" for one in nearest_shapes(device.name, shape))
    raise ValueError(
        f"a TPU slice must have a shape that exists, got {device.name}:{'x'.join(map(str, shape))}, "
        f"{math.prod(shape)} chips; name {near}"
    )


def measured(device: Device, path: Path) -> Device:
    """Returns a device with the figures that `sppo profile` or `sppo check` measured in the place of the datasheet's.

    Args:
        device: the device, whose capacities stay.
        path: the JSON file.

    Raises:
        ValueError: the file cannot be read, lacks figures, or was measured on another device.
    """
    profile = read_profile(path)
    if profile.device != device.name:
        raise ValueError(
            f"hardware.measured must be of the device that the plan is for, {device.name}, got {path}, measured on "
            f"{profile.device}; run sppo profile or sppo check on {device.name}, or leave out hardware.measured"
        )
    return with_profile(device, profile)


def with_profile(device: Device, profile: Profile) -> Device:
    """Returns a device with measured figures in the place of the datasheet's; its capacities stay."""
    attention = profile.attention_rates
    forward, backward = attention.fastest("forward"), attention.fastest("backward")
    return replace(
        device,
        matmul_flops_s=profile.matmul_flops_s,
        matmul_efficiency=profile.layer_flops_s / profile.matmul_flops_s,
        elementwise_efficiency=0.0,  # whole layers were measured
        attention_efficiency=forward / profile.matmul_flops_s,
        attention_backward=2.5 * forward / backward,
        attention_backward_in_blocks=0.0,
        attention_rates=attention,
        attention_head_dim=profile.head_dim,
        attention_block=profile.attention_block,
        has_bundles=False,
        hbm_bytes_s=profile.hbm_bytes_s,
        host_link_bytes_s=profile.host_link_bytes_s or device.host_link_bytes_s,
        # Copies were measured on all devices at once.
        host_memory_bytes_s=math.inf if profile.host_link_bytes_s else device.host_memory_bytes_s,
        host_links_bytes_s=(math.inf, math.inf) if profile.host_link_bytes_s else device.host_links_bytes_s,
        link_bytes_s=min(filter(None, (profile.link_bytes_s, profile.all_to_all_bytes_s)), default=device.link_bytes_s),
        network_bytes_s=profile.network_bytes_s or device.network_bytes_s,
        loop_wait_share=1.0 if profile.loop_wait_share is None else profile.loop_wait_share,
        overhead_s=profile.overhead_s,
        overhead_tokens=round(profile.overhead_tokens),
        assumed=False,
    )
