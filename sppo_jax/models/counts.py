"""Parameters, FLOPs and activation elements of a decoder, from its shape alone: counts, no seconds, no jax.

Planner, metrics, reports and benchmarks all count with this file.

Letters: V vocabulary, D hidden size, L layers, N query heads, K key and value heads, H head size, F size of the MLP or
of an expert, E experts, S tokens of a sequence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from fractions import Fraction
from functools import lru_cache
from typing import Any

from sppo_jax.config import ModelConfig
from sppo_jax.mixers.delta_work import delta_flops

# Attention has two matmuls forward and five backward; a linear layer has one and two.
ATTENTION_BACKWARD = 2.5
LINEAR_BACKWARD = 2.0


def layer_matrices(model: ModelConfig) -> list[tuple[int, ...]]:
    """Returns the dims of a layer's matrices; the experts' lie in three arrays, one matrix an expert."""
    return [*_mixer_matrices(model), *_mlp_matrices(model), *expert_arrays(model)]


def _mixer_matrices(model: ModelConfig) -> list[tuple[int, ...]]:
    """Returns the dims of the matrices before and behind a layer's attention, or its gated delta rule."""
    hidden, head = model.hidden_size, model.head_dim
    if model.mixer == "delta":
        keys, values = _delta_heads(model)
        of_values = [(hidden, *values), (hidden, *values), (*values, hidden)]
        return [*[(hidden, *keys)] * 2, *of_values, *[(hidden, model.delta.value_heads)] * 2]
    of_queries = [(hidden, model.num_heads, head)] * (1 + model.output_gate)
    return [*of_queries, (model.num_heads, head, hidden), *[(hidden, model.num_kv_heads, head)] * 2]


def _delta_heads(model: ModelConfig) -> tuple[tuple[int, int], tuple[int, int]]:
    """Returns heads and size of queries and keys, and those of values."""
    delta = model.delta
    return (delta.key_heads, delta.key_size), (delta.value_heads, delta.value_size)


def _mlp_matrices(model: ModelConfig) -> list[tuple[int, ...]]:
    """Returns the dims of the MLP's matrices; with experts those of the router and of the shared expert."""
    hidden, experts = model.hidden_size, model.experts
    if not experts.count:
        return [(hidden, model.mlp_size)] * (2 if model.mlp == "gelu" else 3)
    shared = experts.shared_size
    return [(hidden, experts.count), *[(hidden, shared), (hidden, shared), (shared, hidden)] * bool(shared)]


def expert_arrays(model: ModelConfig) -> list[tuple[int, ...]]:
    """Returns the dims of the arrays that hold the matrices of all experts of a layer: none without experts."""
    count, hidden, size = model.experts.count, model.hidden_size, model.experts.size
    return [(count, hidden, size), (count, hidden, size), (count, size, hidden)] if count else []


def layer_vectors(model: ModelConfig) -> list[tuple[int, ...]]:
    """Returns the dims of a layer's norms, biases, sinks and taps."""
    experts = model.experts
    vectors: list[tuple[int, ...]] = [(model.hidden_size,)] * (4 if model.norms == "both" else 2)
    vectors += _delta_vectors(model) if model.mixer == "delta" else _attention_vectors(model)
    if model.output_bias:
        vectors.append((model.hidden_size,))
    if experts.count and experts.bias:
        vectors += [(experts.count,), *_expert_biases(model)]
    if experts.count and experts.choice_bias:
        vectors.append((experts.count,))
    if experts.count and experts.shared_gate:
        vectors.append((model.hidden_size,))
    return vectors


def _attention_vectors(model: ModelConfig) -> list[tuple[int, ...]]:
    head, vectors = model.head_dim, []
    if model.qk_norm:
        together = model.qk_norm_over_heads
        vectors += [(heads * head,) for heads in ((model.num_heads, model.num_kv_heads) if together else (1, 1))]
    if model.qkv_bias:
        vectors += [(model.num_heads, head), *[(model.num_kv_heads, head)] * 2]
    return [*vectors, *[(model.num_heads,)] * model.sinks]


def _delta_vectors(model: ModelConfig) -> list[tuple[int, ...]]:
    (keys, values), taps, heads = _delta_heads(model), model.delta.taps, model.delta.value_heads
    return [(*keys, taps), (*keys, taps), (*values, taps), (heads,), (heads,), (model.delta.value_size,)]


def _expert_biases(model: ModelConfig) -> list[tuple[int, ...]]:
    experts = model.experts
    return [*[(experts.count, experts.size)] * 2, (experts.count, model.hidden_size)]


def num_tables(model: ModelConfig) -> int:
    """Returns the number of tables [V, D]: the embedding and, if the two are not tied, the head."""
    return 1 if model.tied_embeddings else 2


def layer_params(model: ModelConfig) -> int:
    """Counts the parameters of one decoder layer, in a model whose layers are alike."""
    return sum(map(math.prod, (*layer_matrices(model), *layer_vectors(model))))


def all_layers(model: ModelConfig) -> list[tuple[ModelConfig, int]]:
    """Returns the model of each layer type, and its layers."""
    return model.counts(model.num_layers)


def vocabulary_params(model: ModelConfig) -> int:
    """Counts the parameters of the embedding and, if the two are not tied, of the output head."""
    return num_tables(model) * model.vocab_size * model.hidden_size


def num_params(model: ModelConfig) -> int:
    """Counts all parameters of a decoder; a tied embedding counts once, and the final norm is among them."""
    layers = sum(count * layer_params(layer_type) for layer_type, count in all_layers(model))
    return layers + vocabulary_params(model) + model.hidden_size


def num_active_params(model: ModelConfig) -> int:
    """Counts the parameters that one token uses: all but those of experts to which it is not sent."""
    return num_params(model) - sum(count * _idle_params(layer_type) for layer_type, count in all_layers(model))


def _idle_params(model: ModelConfig) -> int:
    """Counts the parameters of a layer's experts to which a token is not sent."""
    experts = model.experts
    if not experts.count:
        return 0
    arrays = [*expert_arrays(model), *(_expert_biases(model) if experts.bias else [])]
    return (experts.count - experts.chosen) * (sum(map(math.prod, arrays)) // experts.count)


def flops_per_token(model: ModelConfig, length: int) -> float:
    """Returns the FLOPs of a token in a training step, as MFU counts them: 6 P + 6 L N H S without a window.

    P are the parameters that multiply a token: the matrices of all layers, of experts those to which a token is
    sent, and the head V D, be it tied or not. The lookup of the embedding multiplies nothing, so an embedding of
    its own is not in P. Attention is causal: a token sees half of the sequence on average, or less with a window, 4
    N H FLOPs for each token seen, and twice that in backward. The gated delta rule counts as a recurrence over
    tokens. Nothing that is computed twice counts twice. A sequence of several documents needs fewer FLOPs; for
    packed data this is an upper bound.

    Args:
        model: the model shape.
        length: S, tokens of the sequence.
    """
    total = model.num_layers * layer_costs(model).linear_flops + head_flops(model)
    for layer_type, count in all_layers(model):
        window = layer_type.window_within(length)
        pairs = chunk_pairs(0, length, window) / length if window else length / 2
        total += count * (layer_costs(layer_type).pair_flops * pairs + layer_costs(layer_type).state_flops)
    return float(3 * total)


def head_flops(model: ModelConfig) -> float:
    """Returns the FLOPs of a token in the head, forward."""
    return 2.0 * model.vocab_size * model.hidden_size


@dataclass(frozen=True, kw_only=True)
class LayerCosts:
    """Work and size of one decoder layer, forward; the mean of all layers where they are of several types.

    Args:
        params: parameters of the layer.
        linear_flops: FLOPs of a token in the linear parts, those of its experts among them.
        expert_flops: of these, those of its experts, shared ones aside.
        pair_flops: FLOPs of a query and a key that it attends to, over all heads.
        state_flops: FLOPs of a token in a mixer with a state.
        input_elements: activation elements of a token's layer input.
        attention_elements: activation elements of a token's attention output.
        lse_elements: float32 elements of a token's log-sum-exp.
        rest_elements: activation elements of a token that saves recomputing the linear parts; experts are computed
            again all the same.
        rest_sums: float32 elements besides these: the router's products.
        choices: the integers that say which experts a token is sent to.
        kv_elements: elements of a token's keys and values together, all heads.
        state_elements: activation elements of a sequence's state.
        state_sums: float32 elements besides these.
    """

    params: int
    linear_flops: float
    expert_flops: float
    pair_flops: float
    state_flops: float
    input_elements: int
    attention_elements: int
    lse_elements: int
    rest_elements: int
    rest_sums: int
    choices: int
    kv_elements: int
    state_elements: int
    state_sums: int


@lru_cache(maxsize=64)
def layer_costs(model: ModelConfig) -> LayerCosts:
    """Counts one decoder layer of a model shape; of layers of several types it returns the mean."""
    if model.layers:
        return _mean([(layer_costs(layer_type), count) for layer_type, count in all_layers(model)])
    experts, hidden = model.experts, model.hidden_size
    dense = sum(map(math.prod, (*_mixer_matrices(model), *_mlp_matrices(model))))
    of_experts = sum(map(math.prod, expert_arrays(model))) // max(1, experts.count) * experts.chosen
    mixer = _delta_costs(model) if model.mixer == "delta" else _attention_costs(model)
    rest, rest_sums = _mlp_products(model)
    mixer["rest_elements"] += hidden + rest
    mixer["rest_sums"] += rest_sums
    return LayerCosts(
        params=layer_params(model),
        linear_flops=2.0 * (dense + of_experts),
        expert_flops=2.0 * of_experts,
        input_elements=hidden,
        choices=experts.chosen if experts.count else 0,
        **mixer,
    )


def _attention_costs(model: ModelConfig) -> dict[str, Any]:
    """Returns the fields of `LayerCosts` that attention decides; of `rest_elements` and `rest_sums` its part."""
    query, kv = model.num_heads * model.head_dim, 2 * model.num_kv_heads * model.head_dim
    return {
        "pair_flops": 4.0 * query,
        "state_flops": 0.0,
        "attention_elements": query,
        "lse_elements": model.num_heads,
        # Queries, and the matrix products whose values gradients need: norms and activations are computed again.
        "rest_elements": query * (1 + model.output_gate) + (query + kv // 2 if model.qk_norm else 0),
        "rest_sums": 0,
        "kv_elements": kv,
        "state_elements": 0,
        "state_sums": 0,
    }


def _delta_costs(model: ModelConfig) -> dict[str, Any]:
    """Returns the fields of `LayerCosts` that the gated delta rule decides, as `_attention_costs`."""
    delta = model.delta
    keys, values = (heads * size for heads, size in _delta_heads(model))
    return {
        "pair_flops": 0.0,
        "state_flops": delta_flops(delta.key_heads, delta.value_heads, delta.key_size, delta.value_size, delta.taps),
        # The stash never holds the output, which a backward makes anyway.
        "attention_elements": 0,
        "lse_elements": 0,
        # What the rule takes, and the output's gates; decays and shares of what is written, and their products.
        "rest_elements": 2 * keys + values + values,
        "rest_sums": 4 * delta.value_heads,
        "kv_elements": 0,
        "state_elements": (delta.taps - 1) * (2 * keys + values),
        "state_sums": delta.value_heads * delta.key_size * delta.value_size,
    }


def _mean(of_types: list[tuple[LayerCosts, int]]) -> LayerCosts:
    """Returns the exact mean of the costs of all layers."""
    total = sum(count for _, count in of_types)

    def mean(name: str) -> Any:
        value = sum(count * Fraction(getattr(costs, name)) for costs, count in of_types) / total
        return value.numerator if value.denominator == 1 else value

    return LayerCosts(**{spec.name: mean(spec.name) for spec in fields(LayerCosts)})


def _mlp_products(model: ModelConfig) -> tuple[int, int]:
    """Returns the elements of a token's products in the MLP that gradients need, and those that are sums in float32."""
    experts, has_norm_behind = model.experts, model.norms != "before"
    if not experts.count:
        return (1 if model.mlp == "gelu" else 2) * model.mlp_size + has_norm_behind * model.hidden_size, 0
    gated = bool(experts.shared_gate)
    needs_output = gated or has_norm_behind and experts.shared_size is not None
    return 2 * (experts.shared_size or 0) + needs_output * model.hidden_size, experts.count + gated


def chunk_pairs(start: float, tokens: float, window: int = 0) -> float:
    """Returns the number of (query, key) pairs of a causal chunk.

    Args:
        start: the token at which the chunk begins.
        tokens: tokens of the chunk.
        window: tokens that a token attends to; 0: all before it.
    """
    if not window or start + tokens <= window:
        return tokens * start + tokens * tokens / 2
    growing = max(0, window - start)
    return chunk_pairs(start, growing) + (tokens - growing) * window


def balance_weights(model: ModelConfig, length: int) -> tuple[float, float]:
    """Returns FLOPs a (query, key) pair and FLOPs a token of a layer, forward and backward with recomputed linears.

    With a window every token attends to about as many, so what its pairs take counts for the token.

    Args:
        model: the model shape.
        length: tokens of a sequence.
    """
    pair, token = 0.0, float(layer_costs(model).linear_flops) * (2 + LINEAR_BACKWARD)
    for layer_type, count in all_layers(model):
        flops = count / model.num_layers * layer_costs(layer_type).pair_flops * (1 + ATTENTION_BACKWARD)
        window = layer_type.window_within(length)
        pair, token = (pair, token + window * flops) if window else (pair + flops, token)
    return pair, token
