"""How many keys of the past, and how many queries, a call of a fused kernel takes; program and planner read this."""

# Many keys, so that merging is little work, within what a tile's copies may take.
TILE_BYTES, MAX_TILE = 64 * 2**20, 32768


def past_tile(num_keys: int, row_bytes: int, most: int = MAX_TILE) -> int:
    """Returns the keys in a tile of the past: a power of two, or `num_keys` if that is less.

    Args:
        num_keys: in the buffer.
        row_bytes: of one key, over all its heads.
        most: keys in a tile at most.
    """
    fitting = max(1, TILE_BYTES // row_bytes)
    return min(2 ** (fitting.bit_length() - 1), most, num_keys)


def block_size(num_queries: int, most: int) -> int:
    """Returns the queries of a block of a backward: blocks are as long as each other, but for the last.

    Args:
        num_queries: of a chunk on one ring member.
        most: of a block; 0: the chunk is one block.
    """
    return -(-num_queries // -(-num_queries // most)) if most else num_queries
