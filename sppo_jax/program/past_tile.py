"""How many keys of the past one call of a fused kernel takes; program and planner both read this."""

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
