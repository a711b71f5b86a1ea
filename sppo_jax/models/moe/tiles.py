"""How many tiles of rows the experts' products have, whatever a router does; imports no jax.

The rows of an expert are cut into tiles, and as many tiles as a lot has are multiplied at once (`models.moe.grouped`).
"""

# Rows of a tile, and tiles whose experts' arrays are copied at once.
TILE, LOT = 512, 64


def tile_sizes(num_pairs: int, num_experts: int) -> tuple[int, int]:
    """Returns rows of a tile and tiles of a lot: fewer where there are few pairs.

    Args:
        num_pairs: pairs of a token and one of its experts.
        num_experts: experts of a layer.
    """
    tile = min(TILE, max(1, num_pairs // num_experts))
    return tile, min(LOT, -(-num_pairs // tile) + num_experts)


def num_tiles(num_pairs: int, num_experts: int) -> int:
    """Returns the tiles that any router fits in: at most P / B + E, in whole lots; arguments as above."""
    tile, lot = tile_sizes(num_pairs, num_experts)
    return -(-(num_pairs // tile + num_experts) // lot) * lot
