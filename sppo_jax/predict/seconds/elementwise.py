"""What a layer and the head move in device memory beside their products and attention's kernel, for each token.

Norms, rotary, activations and residual sums read and write arrays of a token; around the fused kernel queries and
results change their layout, and the parts of an output are merged in float32. The passes are counted by hand over the
program of a decoder layer. What they leave out: what does not depend on tokens (`CostModel.memory_bytes`), and experts
(`ExpertWork.moved_bytes`).

One trace fits the share of the memory's rate that these passes reach (`Device.elementwise_efficiency`): Llama-3.2-1B at
128K tokens on one H100 (bench/results/gpu_h100.json), whose elementwise kernels and slices take 0.91 s, 0.18 of them
for `memory_bytes` and the optimizer. It holds what the count leaves out: 8 layers of Llama-3-8B at 128K tokens,
compiled for an H100 (jax 0.12.0.1), move 1.89 TiB in their fusions, 0.69 s at 3 TB/s; 0.80 s are charged.
"""

from typing import NamedTuple

from sppo_jax.models.counts import LayerCosts

_FLOAT32 = 4


class _Passes(NamedTuple):
    """How often the elements of a token are read or written, in the compute dtype; of `sums` in float32.

    Attributes:
        hidden: elements of the layer's input.
        queries: elements of queries, or of attention's output.
        keys: elements of keys and values together.
        products: elements of the products behind the second norm.
        sums: elements of attention's output, of which the parts of two calls are merged.
    """

    hidden: float
    queries: float
    keys: float
    products: float
    sums: float

    def bytes_of(self, layer: LayerCosts, compute_bytes: int) -> float:
        """Returns the bytes of a token in a layer."""
        queries = layer.attention_elements
        products = max(0, layer.rest_elements - layer.input_elements - queries)
        moved = self.hidden * layer.input_elements + self.queries * queries
        moved += self.keys * layer.kv_elements + self.products * products
        return float(compute_bytes * moved + _FLOAT32 * self.sums * queries)


# A norm reads its input twice and writes once, a residual sum reads two arrays and writes one, rotary reads and writes.
# A merge reads the sum and a part, and writes the sum: of two parts, and the sum begins as zeros and ends in a cast.
_ATTENTION = _Passes(hidden=0, queries=6, keys=2, products=0, sums=6)
_FORWARD = _Passes(hidden=14, queries=2, keys=1, products=1.5, sums=0)
# Norms, rotary, and the activation, whose products a backward makes again or fetches.
_AGAIN = _Passes(hidden=9, queries=2, keys=1, products=1.5, sums=0)
_BACKWARD = _Passes(hidden=14, queries=14, keys=7, products=2.5, sums=6)


def layer_bytes(layer: LayerCosts, op: str, compute_bytes: int, *, linear: int, attention: bool) -> float:
    """Returns the bytes that a unit moves for a token in a layer.

    Args:
        layer: of the model.
        op: "F" or "B".
        compute_bytes: bytes of an activation.
        linear: how often a backward computes the linear parts again.
        attention: whether a backward computes attention again.
    """
    if op == "F":
        passes = [_FORWARD, _ATTENTION]
    else:
        passes = [_BACKWARD, *[_AGAIN] * linear, *[_ATTENTION] * attention]
    return sum(one.bytes_of(layer, compute_bytes) for one in passes)


def head_bytes(vocab_size: int, compute_bytes: int) -> float:
    """Returns the bytes that the head moves for a token: its logits' maximum, their sum, and a gradient that is cast.

    Args:
        vocab_size: logits of a token.
        compute_bytes: bytes of an activation.
    """
    return vocab_size * (3 * _FLOAT32 + compute_bytes)


def logit_bytes(vocab_size: int) -> float:
    """Returns the bytes that a head without gradients moves for a token: its logits' maximum, and their sum."""
    return vocab_size * 2 * _FLOAT32
