"""What cuDNN's attention takes for itself in a call: device memory that ahead-of-time compilation does not see.

XLA learns the bytes of a workspace from cuDNN, with a GPU at hand; without one, a program has a workspace of 0 bytes.

Source: `get_fe_workspace_size_node` of the backward in github.com/NVIDIA/cudnn-frontend,
include/cudnn_frontend/node/scaled_dot_product_flash_attention.h: the float32 sum of dQ, and the row sums of dO * O.
Where several query heads share a key-value head, dK and dV of all query heads, in the dtype of the queries, are
tensors of the graph, which cuDNN sums up afterwards. They are taken to be in memory. A forward has no such array.
"""

from __future__ import annotations

import math

from sppo_jax.config import ModelConfig
from sppo_jax.predict.shape import MemoryShape
from sppo_jax.program.past_tile import block_size, past_tile


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


def workspace_bytes(shape: MemoryShape, tokens: int, prefix_tokens: int) -> int:
    """Returns what the fused kernel takes for itself in the largest call of a backward; without the kernel 0.

    Args:
        shape: of the model on a stage.
        tokens: of the tick on one device.
        prefix_tokens: whose keys and values a device holds, after the all-to-all.
    """
    if shape.kernel != "cudnn":
        return 0
    # A band begins with as many queries that are none as its window has keys; it has no tiles of the past.
    model = shape.model
    window = model.window_within(shape.length) // (shape.seq // shape.ulysses)
    queries = tokens * shape.ulysses + window
    queries = queries if window else block_size(queries, shape.backward_queries)
    heads = kv_heads_per_device(model, shape.ulysses)
    tile = 0 if window else past_tile(prefix_tokens, heads * model.head_dim * shape.compute_bytes)
    return backward_bytes(
        num_heads=model.num_heads // shape.ulysses,
        num_kv_heads=heads,
        head_dim=model.head_dim,
        queries=queries,
        keys=max(tile, min(queries, prefix_tokens)),
        compute_bytes=shape.compute_bytes,
    )


def kv_heads_per_device(model: ModelConfig, ulysses: int) -> int:
    """Returns the key-value heads a device holds under `ulysses`; they are replicated until they divide evenly."""
    return math.lcm(model.num_kv_heads, ulysses) // ulysses
