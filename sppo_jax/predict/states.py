"""Bytes and seconds of layers whose mixer has a state: no run has measured these rates, they are guesses."""

import math
from typing import NamedTuple

from sppo_jax.config import ModelConfig
from sppo_jax.mixers.delta_work import longest_stretch
from sppo_jax.models.counts import layer_costs
from sppo_jax.models.state_counts import device_bytes, state_counts
from sppo_jax.predict.group_layers import group_states
from sppo_jax.predict.shape import MemoryShape

# The share of the FLOP/s of matrix products that a mixer reaches: small products in float32, one after another.
STATE_RATE = 0.1
# Seconds of a step, and tokens between two steps: eight runs of blocks of 64 tokens go side by side.
STATE_STEP_S, STATE_STEP_TOKENS = 20e-6, 8 * 64
# Forwards' worth of work in a backward: the run made again, once more stretch by stretch, and the gradients.
_BACKWARD = 4.0

# Arrays of a stretch's keys, in the dtype of sums, that a mixer has at once, as compiled. In a forward: queries, keys,
# values, what a block reads and keeps, products and inverse of a block, output. A backward has their cotangents too,
# and of each block the state before it and, in all spans but the last, its map: each is two arrays or more.
_FORWARD_ARRAYS, _BACKWARD_ARRAYS = 8, 28


class StateWork(NamedTuple):
    """The mixers with a state of a model, in the mean of all its layers.

    Args:
        share: of all layers, those that have a state.
        flops: FLOPs of a token, forward.
        sent: elements of a token of a device that leave it and come back, forward, in the compute dtype; with replicas.
        sent_sums: the same in the dtype of sums.
    """

    share: float
    flops: float
    sent: float
    sent_sums: float

    def token_s(self, op: str, seq: int, flops_s: float) -> float:
        """Returns the seconds of a token of a device in a layer; arguments as `CostModel.seconds`."""
        forward = self.flops / (STATE_RATE * flops_s) + self.share * seq * STATE_STEP_S / STATE_STEP_TOKENS
        return {"F": 1.0, "B": _BACKWARD, "H": 0.0}[op] * forward

    def sent_bytes(self, op: str, seq: int, compute_bytes: int, sum_bytes: int) -> float:
        """Returns the bytes that a token of a device sends in a layer: in a backward all goes both ways."""
        forward = self.sent * compute_bytes + self.sent_sums * sum_bytes
        return {"F": 1.0, "B": 2.0, "H": 0.0}[op] * (seq - 1) / seq * forward


def state_work(model: ModelConfig, seq: int) -> StateWork | None:
    """Returns the work of a model's mixers on stages of `seq` devices; None where all layers have attention."""
    share = flops = sent = sums = 0.0
    for layer_type, count in model.counts(model.num_layers):
        counts = state_counts(layer_type)
        if counts is None:
            continue
        of_all = count / model.num_layers
        share, flops = share + of_all, flops + of_all * layer_costs(layer_type).state_flops
        sent += of_all * seq * device_bytes((*counts.takes, counts.gives), seq, 1, 0)
        sums += of_all * seq * device_bytes(counts.takes, seq, 0, 1)
    return StateWork(share, flops, sent, sums) if share else None


def state_bytes_of_group(shape: MemoryShape) -> int:
    """Returns the bytes of the states of a group of layers on one device, each of one chunk or sequence."""
    return sum(
        count * device_bytes(counts.keeps, shape.seq, shape.compute_bytes, shape.sum_bytes)
        for counts, count in group_states(shape)
    )


def stretch_bytes(model: ModelConfig, tokens: int, seq: int, sum_bytes: int) -> tuple[int, int]:
    """Returns what the mixer of a layer works on in a forward and in a backward on one device: of one stretch.

    More tokens never take less, as the search's bounds ask for; stretches of one length may be up to half as long.

    Args:
        model: of a type whose layers have a state.
        tokens: of the tick on one device.
        seq: devices of a stage, over which heads are spread.
        sum_bytes: of an element of the rule.
    """
    delta = model.delta
    elements = math.lcm(delta.value_heads, seq) // seq * max(delta.key_size, delta.value_size)
    stretch = longest_stretch(tokens * seq, elements) * elements * sum_bytes
    return _FORWARD_ARRAYS * stretch, _BACKWARD_ARRAYS * stretch
