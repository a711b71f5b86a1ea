"""What the kernel for TPUs takes for a chunk: its blocks, those at an edge of the mask, and the steps of its grid."""

import math
from collections.abc import Callable
from typing import NamedTuple

from sppo_jax.hardware import Device
from sppo_jax.hardware.tpu_chips import BLOCK_KEYS, STEP_S, TPU_CHIPS, block_keys, block_queries
from sppo_jax.models.counts import chunk_pairs
from sppo_jax.predict.seconds.documents import PairCounts


class TpuCall(NamedTuple):
    """Attention of one device.

    Attributes:
        head_dim: elements of a head.
        num_kv_heads: of the device.
        num_groups: query heads of each.
        window: tokens that a token attends to; 0: all before it.
        members: devices on the ring.
        compute_bytes: bytes of an element.
    """

    head_dim: int
    num_kv_heads: int
    num_groups: int
    window: int
    members: int
    compute_bytes: int


def tpu_pairs(
    device: Device, call: TpuCall, attended: PairCounts | None = None
) -> Callable[[int, int], tuple[float, float]]:
    """Returns the (query, key) pairs that the kernel takes the time of for a chunk, forward and backward.

    A pair is one of a block that is visible as a whole. Blocks at an edge of the mask are computed whole, and take
    longer: those on the diagonal, and with a window those at its beginning. Tokens of ring members lie `members` apart,
    so that each pair of members has a diagonal of its own. A forward with fewer blocks of queries than cores deals the
    heads to the cores, or one core does all.

    Args:
        device: a TPU; where its `attention_rows` are 0, neither edges nor steps count.
        call: attention of the device.
        attended: the pairs within one document; None: sequences are one document each.
    """
    pairs_of = chunk_pairs if attended is None else attended.pairs
    chip, edges = TPU_CHIPS[device.name], 2 if call.window else 1
    scores_s = device.score_s(call.compute_bytes, call.head_dim)
    if not device.attention_rows:
        return lambda start, tokens: (pairs_of(start, tokens, call.window),) * 2
    bundles = chip.bundles_of(call.head_dim, call.compute_bytes)
    dearer = (
        max(1.0, bundles.forward_edge / bundles.forward) - 0.5,
        max(1.0, bundles.backward_edge / bundles.backward) - 0.5,
    )
    # One core takes a step, with the scores of all heads of a key-value head.
    steps = [STEP_S / (call.num_groups * score_s * chip.cores) for score_s in scores_s]
    shares_heads = call.num_kv_heads % chip.cores == 0

    def pairs(start: int, tokens: int) -> tuple[float, float]:
        counted, local = pairs_of(start, tokens, call.window), math.ceil(tokens / call.members)
        queries = block_queries(local, call.num_groups, call.compute_bytes)
        keys = block_keys(BLOCK_KEYS, call.compute_bytes)
        # Half of the pairs of blocks on a diagonal are visible.
        at_edges = edges * tokens * call.members * max(queries, keys)
        num_steps = (counted + at_edges / 2) / (queries * keys)
        forward, backward = (
            counted + at_edges * more + num_steps * step for more, step in zip(dearer, steps, strict=True)
        )
        idle = chip.cores if local < chip.cores * queries and not shares_heads else 1
        return forward * idle, backward

    return pairs
