"""What cuDNN's attention takes for itself in a call: device memory that ahead-of-time compilation does not see.

XLA learns the bytes of a workspace from cuDNN, with a GPU at hand; without one, a program has a workspace of 0 bytes.

Source: `get_fe_workspace_size_node` of the backward in github.com/NVIDIA/cudnn-frontend,
include/cudnn_frontend/node/scaled_dot_product_flash_attention.h: the float32 sum of dQ, and the row sums of dO * O.
Where several query heads share a key-value head, dK and dV of all query heads, in the dtype of the queries, are
tensors of the graph, which cuDNN sums up afterwards. They are taken to be in memory. A forward has no such array.
"""

# As in `attention.flash`, which imports jax: a test compares them.
_TILE_BYTES, _MOST_KEYS = 64 * 2**20, 32768


def past_tile(num_keys: int, row_bytes: int) -> int:
    """Returns the keys of the past in one call: see `attention.flash.past_tile`.

    Args:
        num_keys: in the buffer.
        row_bytes: of one key, over all its heads.
    """
    fitting = max(1, _TILE_BYTES // row_bytes)
    return min(2 ** (fitting.bit_length() - 1), _MOST_KEYS, num_keys)


def backward_bytes(
    *, num_heads: int, num_kv_heads: int, head_dim: int, queries: int, keys: int, compute_bytes: int
) -> int:
    """Returns the bytes of the workspace of one backward call.

    Args:
        num_heads: query heads of the call.
        num_kv_heads: key-value heads of the call.
        head_dim: elements of a head.
        queries: rows of the queries.
        keys: rows of the keys.
        compute_bytes: bytes of an element.
    """
    sums = 4 * num_heads * queries * (head_dim + 1)
    of_all_heads = 2 * num_heads * keys * head_dim * compute_bytes
    return sums + (of_all_heads if num_heads != num_kv_heads else 0)
