"""What the planner assumes of one device, and the rates that follow."""

import math
from dataclasses import dataclass

from sppo_jax.hardware.attention_rates import AttentionRates
from sppo_jax.hardware.tpu_chips import REACHED, SCORES, TPU_CHIPS
from sppo_jax.plan.parts import cache_head_dim

# Share of the peak in float64 on devices that compute in bfloat16.
_FLOAT64_SHARE = 1 / 16
# Heads whose backward was measured in blocks of queries.
LONG_HEAD_DIM = 128


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
