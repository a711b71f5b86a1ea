"""What the kernel for TPUs and the planner must know of a chip: cores, their memory and clock, and what is compiled.

Sources: Google Cloud TPU system architecture pages; libtpu 0.0.50.1, which says what it takes of the memory of a core.
Bundles: bench/results/tpu_kernel.json. Clocks: the peak of a chip by the products of its matrix units in a cycle (v5e,
v5p: four of 128 x 128 a core; v6e: four of 256 x 256). That of TPU7x is not published: it is the one with which
studies/papers.py predicts MaxText's run of 2M tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from sppo_jax.plan.parts import cache_head_dim
from sppo_jax.rules import KERNEL_TILE

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
_MOST_OF_PRODUCT = 1024
# What the compiler takes of a core's memory for blocks, by what they have: at most 11% more, for registers that spill.
SPILLED = 1.15


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
        device_kind: how jax names the device.
        cores: that share the memory of the device and run one program.
        vmem_bytes: of the memory of a core for blocks, what a kernel may use.
        clock_hz: cycles a second.
        bundles: of the kernel, by elements of a head, and bytes of an element.
    """

    name: str
    device_kind: str
    cores: int
    vmem_bytes: int
    clock_hz: float = 0.0
    bundles: Mapping[tuple[int, int], Bundles] = field(default_factory=dict)

    @property
    def is_interpreter(self) -> bool:
        """Whether it is no chip: a CPU runs the kernel."""
        return self.device_kind == "cpu"

    def bundles_of(self, head_dim: int, itemsize: int) -> Bundles:
        """Returns the kernel's bundles for heads of so many elements, which are filled up to whole lanes."""
        return self.bundles[cache_head_dim("pallas", head_dim), itemsize]


_Counts = tuple[int, int, int, int]


def _bundles(in_bfloat16: tuple[_Counts, _Counts], in_float32: tuple[_Counts, _Counts]) -> dict:
    """Returns bundles of heads of 128 and of 256; those in float32 are of a quarter as many scores."""
    found = {(128 * number, 2): Bundles(*counts) for number, counts in enumerate(in_bfloat16, 1)}
    wide = (Bundles(*(4 * count for count in counts)) for counts in in_float32)
    return found | {(128 * number, 4): counts for number, counts in enumerate(wide, 1)}


TPU_CHIPS = {
    chip.name: chip
    for chip in (
        TpuChip("cpu", "cpu", 2, 56 * _MiB),
        TpuChip(
            *("v5e", "TPU v5 lite", 1, 100 * _MiB, 1.5e9),
            _bundles(
                ((4337, 5334, 8853, 9501), (7794, 8761, 17602, 18087)),
                ((1558, 2303, 2717, 2815), (2100, 2477, 4841, 5024)),
            ),
        ),
        TpuChip(
            *("v5p", "TPU v5", 2, 56 * _MiB, 1.75e9),
            _bundles(
                ((4364, 5385, 8548, 9526), (7653, 8710, 18504, 18195)),
                ((1542, 2423, 2712, 2794), (2107, 2478, 4848, 5011)),
            ),
        ),
        TpuChip(
            *("v6e", "TPU v6 lite", 1, 100 * _MiB, 1.75e9),
            _bundles(
                ((2741, 3919, 5249, 6550), (2920, 3933, 5368, 6741)),
                ((1074, 1491, 2155, 2287), (1442, 1875, 2209, 2346)),
            ),
        ),
        TpuChip(
            *("tpu7x", "TPU7x", 1, 56 * _MiB, 1.907e9),
            _bundles(
                ((2788, 4110, 5567, 6085), (3482, 4710, 4812, 5842)),
                ((1037, 1467, 1663, 1802), (1416, 1751, 1774, 1912)),
            ),
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


def num_blocks(num_queries: int, num_keys: int, num_groups: int, itemsize: int) -> tuple[int, int]:
    """Returns the blocks of queries of a chunk, and those of the keys of its buffer.

    Args:
        num_queries: of a chunk on a ring member.
        num_keys: of the buffer of a ring member.
        num_groups: query heads of a key-value head.
        itemsize: bytes of an element.
    """
    sizes = block_queries(num_queries, num_groups, itemsize), block_keys(num_keys, itemsize)
    return -(-num_queries // sizes[0]), -(-num_keys // sizes[1])


def block_bytes(num_groups: int, head_dim: int, itemsize: int, *, queries: int = 0) -> int:
    """Returns the bytes of a core's memory that the larger of the two kernels takes for a step.

    They are those of what comes in and goes out, twice each, of sums, and of scores.

    Args:
        num_groups: query heads of a key-value head.
        head_dim: elements of a head.
        itemsize: bytes of an element.
        queries: tokens of a block; 0: the most that a chunk may have.
    """
    queries = queries or block_queries(BLOCK_ROWS, num_groups, itemsize)
    keys, rows = block_keys(BLOCK_KEYS, itemsize), num_groups * queries
    head, scores = cache_head_dim("pallas", head_dim), 4 * keys * min(queries, product_rows(itemsize))
    moved = 2 * 2 * keys * head * itemsize
    forward = 2 * rows * head * (itemsize + 2 * 4) + 4 * rows * (head + 2 * KERNEL_TILE) + scores
    backward = 2 * rows * head * (2 * itemsize + 2 * 4) + 6 * 4 * keys * head + 2 * scores
    return moved + max(forward, backward)


def product_rows(itemsize: int) -> int:
    """Returns the most queries of one product within a step."""
    return _MOST_OF_PRODUCT // _wide(itemsize)


def block_keys(num_keys: int, itemsize: int) -> int:
    """Returns the tokens of a block of keys, of which a buffer has `num_keys`."""
    return _largest_part(num_keys, BLOCK_KEYS // _wide(itemsize))


def _wide(itemsize: int) -> int:
    return max(1, itemsize // 2)  # elements of 4 bytes take twice the memory


def _largest_part(size: int, most: int) -> int:
    """Returns the largest power of two from 128 to `most` that divides `size`; at least 128."""
    part = KERNEL_TILE
    while part * 2 <= most and size % (part * 2) == 0:
        part *= 2
    return part


def chip_of(device_kind: str) -> TpuChip:
    """Returns the chip of a device, by jax's name of its kind.

    Raises:
        ValueError: the kernel was not compiled for this chip.
    """
    found = [chip for chip in TPU_CHIPS.values() if chip.device_kind == device_kind]
    if not found:
        known = ", ".join(chip.name for chip in TPU_CHIPS.values() if chip.name != "cpu")
        raise ValueError(f"model.kernel=pallas must run on {known}, got {device_kind}; use model.kernel=blockwise")
    return found[0]
