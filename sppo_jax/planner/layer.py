"""FLOPs and elements of one decoder layer and of the vocabulary; counts alone, no seconds."""

from dataclasses import dataclass

from sppo_jax.config import ModelConfig

# Attention has two matmuls forward and five backward; a linear layer has one and two.
ATTENTION_BACKWARD = 2.5
LINEAR_BACKWARD = 2.0


@dataclass(frozen=True, kw_only=True)
class LayerCosts:
    """Work and size of one decoder layer, forward.

    Args:
        params: parameters of the layer.
        linear_flops: FLOPs of a token in the linear parts.
        pair_flops: FLOPs of a query and a key that it attends to, over all heads.
        input_elements: activation elements of a token's layer input.
        attention_elements: activation elements of a token's attention output.
        lse_elements: float32 elements of a token's log-sum-exp.
        rest_elements: activation elements of a token that saves recomputing the linear parts.
        kv_elements: elements of a token's keys and values together, all heads.
    """

    params: int
    linear_flops: float
    pair_flops: float
    input_elements: int
    attention_elements: int
    lse_elements: int
    rest_elements: int
    kv_elements: int


def layer_costs(model: ModelConfig) -> LayerCosts:
    """Counts one decoder layer of a model shape."""
    hidden, query = model.hidden_size, model.num_heads * model.head_dim
    kv = 2 * model.num_kv_heads * model.head_dim
    matrices = 3 if model.mlp == "swiglu" else 2
    weights = hidden * (query + kv) + query * hidden + matrices * hidden * model.mlp_size
    norms = 2 * hidden + (2 * model.head_dim if model.qk_norm else 0) + (query + kv if model.qkv_bias else 0)
    return LayerCosts(
        params=weights + norms,
        linear_flops=2.0 * weights,
        pair_flops=4.0 * query,
        input_elements=hidden,
        attention_elements=query,
        lse_elements=model.num_heads,
        # Queries, and the matrix products whose values gradients need: what norms and activations make is made anew.
        rest_elements=query + hidden + (matrices - 1) * model.mlp_size + (query + kv // 2 if model.qk_norm else 0),
        kv_elements=kv,
    )


def vocabulary_params(model: ModelConfig) -> int:
    """Returns the parameters of embedding, head and final norm, over all stages."""
    tables = 1 if model.tied_embeddings else 2
    return tables * model.vocab_size * model.hidden_size + model.hidden_size


def chunk_pairs(start: int, tokens: float) -> float:
    """Returns the number of (query, key) pairs of a causal chunk that begins at token `start`."""
    return tokens * start + tokens * tokens / 2


def balance_weights(model: ModelConfig) -> tuple[float, float]:
    """Returns FLOPs a (query, key) pair and FLOPs a token of a layer, forward and backward with recomputed linears."""
    layer = layer_costs(model)
    return layer.pair_flops * (1 + ATTENTION_BACKWARD), layer.linear_flops * (2 + LINEAR_BACKWARD)


def model_flops(model: ModelConfig, length: int) -> float:
    """Returns the FLOPs of a token of a training step, as MFU counts them: causal, nothing computed twice.

    Args:
        model: the model shape.
        length: tokens of the sequence.
    """
    layer = layer_costs(model)
    weights = model.num_layers * layer.linear_flops + 2.0 * model.vocab_size * model.hidden_size
    return 3 * (weights + model.num_layers * layer.pair_flops * length / 2)
