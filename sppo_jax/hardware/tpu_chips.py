"""What the kernel for TPUs and the planner must know of a chip: cores, their memory and clock, and what is compiled.

Sources: Google Cloud TPU system architecture pages; libtpu 0.0.50.1, which says what it takes of the memory of a core.
Bundles: bench/results/tpu_kernel.json. Clocks: the peak of a chip by the products of its matrix units in a cycle (v5e,
v5p: four of 128 x 128 a core; v6e: four of 256 x 256). That of TPU7x is not published: it is the one with which
studies/papers.py predicts MaxText's run of 2M tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

_MiB = 2**20
# Scores of one head in a turn of the kernel's inner loop: 1024 queries and 1024 keys.
SCORES = 2**20
# Cycles that bundles would take, by cycles that they take: calibrated by studies/papers.py on MaxText's run of 2M
# tokens on 64 v5p, whose kernel's bundles are known; assumed of ours, and of other chips.
REACHED = 0.86
# Seconds of a step of a grid besides its work; assumed.
STEP_S = 0.35e-6
# Rows of queries (heads times tokens) that share a block of keys, and its keys. A backward moves dK and dV once for all
# of them: with so many, the products take longer than these moves on every chip.
BLOCK_ROWS, BLOCK_KEYS = 4096, 512
_LANES = 128


@dataclass(frozen=True)
class Bundles:
    """Instruction words of a turn of the kernel's inner loop, as compiled; each takes a cycle if nothing waits.

    Args:
        forward, backward: of blocks that are visible as a whole.
        forward_edge, backward_edge: of blocks at an edge of a mask.
    """

    forward: int
    forward_edge: int
    backward: int
    backward_edge: int


@dataclass(frozen=True)
class TpuChip:
    """One device of a kind of chip.

    Args:
        name: as in `hardware.DEVICES`; "cpu" for a CPU that interprets the kernel.
        kind: how jax names the device.
        cores: that share the memory of the device and run one program.
        vmem_bytes: of the memory of a core for blocks, what a kernel may use.
        clock_hz: cycles a second.
        bundles: of the kernel, by elements of a head.
    """

    name: str
    kind: str
    cores: int
    vmem_bytes: int
    clock_hz: float = 0.0
    bundles: Mapping[int, Bundles] = field(default_factory=dict)

    @property
    def is_interpreter(self) -> bool:
        """Whether it is no chip: a CPU runs the kernel."""
        return self.kind == "cpu"


def _bundles(of_128: tuple[int, int, int, int], of_256: tuple[int, int, int, int]) -> dict[int, Bundles]:
    return {128: Bundles(*of_128), 256: Bundles(*of_256)}


TPU_CHIPS = {
    chip.name: chip
    for chip in (
        TpuChip("cpu", "cpu", 2, 56 * _MiB),
        TpuChip(
            *("v5e", "TPU v5 lite", 1, 100 * _MiB, 1.5e9),
            _bundles((4337, 5334, 8853, 9501), (7794, 8761, 17602, 18087)),
        ),
        TpuChip(
            *("v5p", "TPU v5", 2, 56 * _MiB, 1.75e9), _bundles((4364, 5385, 8548, 9526), (7653, 8710, 18504, 18195))
        ),
        TpuChip(
            *("v6e", "TPU v6 lite", 1, 100 * _MiB, 1.75e9), _bundles((2741, 3919, 5249, 6550), (2920, 3933, 5368, 6741))
        ),
        TpuChip(
            *("tpu7x", "TPU7x", 1, 56 * _MiB, 1.907e9), _bundles((2788, 4110, 5567, 6085), (3482, 4710, 4812, 5842))
        ),
    )
}


def block_queries(num_queries: int, num_groups: int, itemsize: int) -> int:
    """Returns the tokens of a block of queries: a power of two that divides a multiple of 128.

    Args:
        num_queries: of a chunk.
        num_groups: query heads of a key-value head.
        itemsize: bytes of an element.
    """
    return _largest_part(num_queries, BLOCK_ROWS // _wide(itemsize) // num_groups)


def block_keys(num_keys: int, itemsize: int) -> int:
    """Returns the tokens of a block of keys, of which a buffer has `num_keys`."""
    return _largest_part(num_keys, BLOCK_KEYS // _wide(itemsize))


def _wide(itemsize: int) -> int:
    return max(1, itemsize // 2)  # elements of 4 bytes take twice the memory


def _largest_part(size: int, most: int) -> int:
    """Returns the largest power of two from 128 to `most` that divides `size`; at least 128."""
    part = _LANES
    while part * 2 <= most and size % (part * 2) == 0:
        part *= 2
    return part


def chip_of(kind: str) -> TpuChip:
    """Returns the chip of a device, by jax's name of its kind.

    Raises:
        ValueError: the kernel was not compiled for this chip.
    """
    found = [chip for chip in TPU_CHIPS.values() if chip.kind == kind]
    if not found:
        known = ", ".join(chip.name for chip in TPU_CHIPS.values() if chip.name != "cpu")
        raise ValueError(f"model.kernel=pallas must run on {known}, got {kind}; use model.kernel=blockwise")
    return found[0]
