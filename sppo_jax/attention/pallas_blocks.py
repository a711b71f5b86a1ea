"""How much of queries and keys a kernel for TPUs takes at a time.

Letters: T queries, S keys, G query heads of a key-value head.
"""

from dataclasses import dataclass

from sppo_jax.hardware.tpu_chips import TpuChip, block_keys, block_queries, chip_of, product_rows
from sppo_jax.rules import KERNEL_TILE, nearest_multiples

LANES = KERNEL_TILE


@dataclass(frozen=True)
class Blocks:
    """What a step computes.

    Args:
        queries: tokens of a block, each with all heads of one key-value head.
        keys: in a block.
        rows: queries of one product within a step; divide `queries`.
        cores: of a device.
        vmem_bytes: limit of the memory for blocks.
        is_interpreted: whether a CPU runs the kernel.
    """

    queries: int
    keys: int
    rows: int
    cores: int
    vmem_bytes: int
    is_interpreted: bool = False


@dataclass(frozen=True)
class Target:
    """What the kernel is compiled for.

    Args:
        chip: that computes.
        num_groups: G, the most of any layer.
        itemsize: bytes of an element of queries and keys.
    """

    chip: TpuChip
    num_groups: int
    itemsize: int


def target_of(device_kind: str, num_groups: int, itemsize: int) -> Target:
    """Returns what the kernel is compiled for on a device, by jax's name of its kind.

    Raises:
        ValueError: the kernel takes neither the device nor elements of so many bytes.
    """
    if itemsize not in (2, 4):
        raise ValueError(
            f"model.kernel=pallas must have model.compute_dtype bfloat16 or float32, got {itemsize} bytes an element; "
            "use model.kernel=blockwise"
        )
    return Target(chip_of(device_kind), num_groups, itemsize)


def choose_blocks(target: Target, num_queries: int, num_keys: int) -> Blocks:
    """Chooses the blocks of a chunk.

    Args:
        target: what the kernel is compiled for.
        num_queries, num_keys: T and S.

    Raises:
        ValueError: T or S is not a multiple of 128.
    """
    for what, count in (("queries", num_queries), ("keys", num_keys)):
        if count % LANES:
            raise ValueError(
                f"model.kernel=pallas must get a multiple of {LANES} {what} on a ring member, got {count}; change the "
                f"chunks to {nearest_multiples(count, LANES)}, or use model.kernel=blockwise"
            )
    chip, size = target.chip, target.itemsize
    queries = block_queries(num_queries, target.num_groups, size)
    rows = min(queries, product_rows(size))
    keys = block_keys(num_keys, size)
    return Blocks(queries, keys, rows, chip.cores, chip.vmem_bytes, chip.is_interpreter)
