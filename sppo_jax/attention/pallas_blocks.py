"""How much of queries and keys a kernel for TPUs takes at a time.

Letters: T queries, S keys, G query heads of a key-value head.
"""

from dataclasses import dataclass

from sppo_jax.hardware.tpu_chips import TpuChip

LANES = 128
# Rows of queries (heads times tokens) that share a block of keys. A backward moves dK and dV once for all of them: with
# so many, the products take longer than these moves on every chip.
_ROWS = 4096
_KEYS = 512
_MOST_OF_PRODUCT = 1024


@dataclass(frozen=True)
class Blocks:
    """What a step computes.

    Args:
        queries: tokens of a block, each with all heads of one key-value head.
        keys: in a block.
        rows: queries of one product within a step; divide `queries`.
        cores: of a device.
        vmem_bytes: limit of the memory for blocks.
    """

    queries: int
    keys: int
    rows: int
    cores: int
    vmem_bytes: int


def choose_blocks(chip: TpuChip, num_groups: int, itemsize: int, num_queries: int, num_keys: int) -> Blocks:
    """Chooses the blocks of a chunk.

    Args:
        chip: that computes.
        num_groups: G, the most of any layer.
        itemsize: bytes of an element of queries and keys.
        num_queries, num_keys: T and S, multiples of 128.
    """
    wide = max(1, itemsize // 2)  # elements of 4 bytes take twice the memory
    queries = _largest_part(num_queries, _ROWS // wide // num_groups)
    keys = _largest_part(num_keys, _KEYS // wide)
    return Blocks(queries, keys, min(queries, _MOST_OF_PRODUCT // wide), chip.cores, chip.vmem_bytes)


def _largest_part(size: int, most: int) -> int:
    """Returns the largest power of two from 128 to `most` that divides `size`; at least 128."""
    part = LANES
    while part * 2 <= most and size % (part * 2) == 0:
        part *= 2
    return part
