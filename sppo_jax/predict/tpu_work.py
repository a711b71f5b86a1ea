"""What the backward of a layer works on where the kernel for TPUs attends: the arrays that XLA:TPU keeps, one by one.

They were counted in the buffers of compiled plans (docs/log/tpu-kernel.md). XLA for GPUs keeps more arrays of a
token: XLA:TPU makes norms and rotary positions again inside the products that read them.
"""

from sppo_jax.plan.parts import cache_head_dim
from sppo_jax.predict.shape import MemoryShape
from sppo_jax.predict.workspace import kv_heads_per_device

# Of a token's hidden state there are the MLP's input behind its norm, and the cotangents of both outputs: the MLP's
# and attention's.
HIDDEN_ARRAYS = 3
_FLOAT32 = 4


def attention_bytes(shape: MemoryShape, tokens: int, prefix_tokens: int) -> int:
    """Returns what the backward of attention holds besides caches, their gradients, and arrays of the hidden state.

    The kernel reads queries, the output's cotangent, LSE and the product of output and cotangent, and each core writes
    a part of dQ. On a ring, what travels is there again as it comes in. Its gradients are sent and received one hop
    late, while the kernel makes others.

    Args:
        shape: of the model on a stage.
        tokens: of the tick on one device.
        prefix_tokens: whose keys and values a device holds, after the all-to-all.
    """
    model, size = shape.model, shape.compute_bytes
    rows = tokens * model.num_heads
    read, dq = rows * 2 * (model.head_dim * size + shape.sum_bytes), rows * model.head_dim * _FLOAT32
    own = read + shape.cores * dq
    if shape.seq == shape.ulysses:
        return own
    heads = kv_heads_per_device(model, shape.ulysses)
    elements = 2 * prefix_tokens * heads * cache_head_dim("pallas", model.head_dim)
    travel = {"q": read + 2 * dq, "kv": elements * (2 * size + 3 * shape.sum_bytes)}
    return own + travel.get(shape.ring_pass, min(travel.values()))
