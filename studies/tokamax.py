"""tokamax's attention kernels under MaxText's runs on TPUs: their bundles as compiled, and constants that follow.

The bundles are those of tokamax 0.0.17 with blocks of 1024 and heads of 256, compiled by libtpu 0.0.50.1 as ours are
(bench/results/tpu_kernel.md says what a bundle is, and has them beside ours). The backward compiles for the v5p only
with more memory for blocks than libtpu's limit, and its bundles would reach more than the peak. Steps have the blocks
of MaxText's recipes.

One core of the v5p runs a backward: all dims of its grid are sequential, and the schedule compiled for the v5p has its
body in a region of the first core. Where a device has two sequences, jax adds a dim for them that both cores share.
"""

from typing import NamedTuple

from sppo_jax.hardware import DEVICES
from sppo_jax.hardware.tpu_chips import SCORES, STEP_S, TPU_CHIPS
from studies.systems import Rates

HEAD_DIM = 256


class Kernel(NamedTuple):
    """Bundles of 1024 x 1024 scores of one head, forward and backward, and tokens of a block in a step of the grid."""

    forward: int
    backward: int
    block: int


KERNELS = {"v5p": Kernel(8395, 17333, 1024), "tpu7x": Kernel(3527, 5038, 2048)}


def rates(name: str, reached: float, clock_hz: float) -> Rates:
    """Returns the constants of MaxText on a device.

    Args:
        name: the device.
        reached: cycles that bundles would take, by cycles that they take.
        clock_hz: cycles a second.
    """
    device, chip, kernel = DEVICES[name], TPU_CHIPS[name], KERNELS[name]
    step_s = STEP_S / kernel.block**2

    def score_s(bundles: int, products: int) -> float:
        at_peak_s = products * 2 * HEAD_DIM / device.matmul_flops_s
        return max(bundles / SCORES / clock_hz / chip.cores, at_peak_s) / reached + step_s / chip.cores

    forward_s, backward_s = score_s(kernel.forward, 2), score_s(kernel.backward, 5)
    return Rates(
        matmul_efficiency=device.matmul_efficiency,
        attention_efficiency=4 * HEAD_DIM / forward_s / device.matmul_flops_s,
        overhead_s=0.0,
        attention_backward=backward_s / forward_s,
    )
