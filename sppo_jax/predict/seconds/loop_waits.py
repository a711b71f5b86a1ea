"""Loops of a GPU that wait for writes to the host: where they are, and for how long they wait.

If only the data tell how often a loop runs, the host reads from the device whether the loop goes on. That read has the
direction of a write to the host, and one DMA engine serves all copies of one direction in the order of the requests. So
the device idles at the first such loop of a tick until the writes that are under way have ended. Devices wait for each
other at the next collective, so the slowest one counts.
"""

from functools import lru_cache
from typing import NamedTuple

from sppo_jax.config import ModelConfig
from sppo_jax.models.counts import layer_costs
from sppo_jax.models.state_counts import state_counts
from sppo_jax.predict.group_layers import types_of_groups
from sppo_jax.predict.shape import MemoryShape


def loop_wait_s(copying_s: float, before_s: float, beside_s: float) -> float:
    """Returns the seconds for which the first loop waits, less those by which the write outlasts all compute anyway.

    Args:
        copying_s: seconds of the writes that are under way.
        before_s: seconds of the compute between their start and the first loop.
        beside_s: seconds of all compute between their start and their end.
    """
    return max(0.0, copying_s - before_s) - max(0.0, copying_s - beside_s)


class Write(NamedTuple):
    """Writes to the host that are under way together in a tick.

    Attributes:
        copying_s: their seconds.
        before_s: seconds of the tick's compute before its first loop of an unknown number of iterations.
        share: of the wait that a loop really waits, as measured; 1 where nothing was.
    """

    copying_s: float = 0.0
    before_s: float = 0.0
    share: float = 1.0

    def tick_s(self, compute_s: float) -> float:
        """Returns the seconds of a tick that computes for so long."""
        return max(self.copying_s, compute_s) + self.share * loop_wait_s(self.copying_s, self.before_s, compute_s)


def has_unknown_loops(platform: str, kernel: str) -> bool:
    """Returns whether attention runs in loops that read from the device whether they go on.

    XLA:TPU keeps such reads on the device.

    Args:
        platform: the compiler, "cpu", "gpu" or "tpu".
        kernel: the attention kernel.
    """
    return platform == "gpu" and kernel == "cudnn"


@lru_cache(maxsize=4096)
def flops_before_loops(shape: MemoryShape, num_chunks: int) -> float | None:
    """Returns the FLOPs of a token in the products of a forward that come before its first such loop, if it has one.

    These are the layers before the first one whose attention has such a loop, and that layer's queries, keys and
    values. Where groups of layers have different patterns, each pattern is such a loop itself.

    Args:
        shape: of the layers.
        num_chunks: of a sequence.
    """
    groups = list(types_of_groups(shape))
    if len(groups) > 1:
        return 0.0
    flops = 0.0
    for layer_type in groups[0]:
        if _has_loop(layer_type, shape, num_chunks):
            return flops + _projection_flops(layer_type)
        flops += layer_costs(layer_type).linear_flops + layer_costs(layer_type).state_flops
    return None


def _has_loop(layer_type: ModelConfig, shape: MemoryShape, num_chunks: int) -> bool:
    """Returns whether a layer's attention loops over documents, or over the keys before a chunk; see `flash`.

    What a window holds of these keys is part of a document's call.
    """
    if state_counts(layer_type) is not None:
        return False
    return not shape.has_one_document or (num_chunks > 1 and not layer_type.window_within(shape.length))


def _projection_flops(layer_type: ModelConfig) -> float:
    """Returns the FLOPs of a token in the products that make a layer's queries, keys and values."""
    heads = layer_type.num_heads * (1 + layer_type.output_gate) + 2 * layer_type.num_kv_heads
    return 2.0 * layer_type.hidden_size * heads * layer_type.head_dim
