"""How many parameters a device holds: of its stage, and as its own share of them between steps."""

import math
from dataclasses import dataclass

from sppo_jax.config import ModelConfig
from sppo_jax.plan.spread import padded, spread


@dataclass(frozen=True, kw_only=True)
class StageParams:
    """Parameters of a stage: the whole of them, which a step works with, and those a device owns between steps."""

    whole: int
    own: int


def stage_params(model: ModelConfig, layers: int, pipe: int, data: int, seq: int) -> StageParams:
    """Counts a stage's layers and its share of the vocabulary, spread over its devices as `pipeline.storage` does.

    Args:
        model: the model shape.
        layers: layers of a stage.
        pipe: stages.
        data: pipelines.
        seq: devices of a stage in one pipeline.
    """
    arrays = [*_layer_matrices(model), *_layer_vectors(model)]
    table, tables = (-(-model.vocab_size // pipe), model.hidden_size), 1 if model.tied_embeddings else 2
    whole = layers * sum(map(math.prod, arrays)) + tables * math.prod(table)
    own = layers * sum(_share(dims, data, seq) for dims in arrays) + tables * _share(table, data, seq)
    # Every device has the final norm.
    return StageParams(whole=whole + model.hidden_size, own=own + model.hidden_size)


def largest_matrix(model: ModelConfig) -> int:
    """Returns the parameters of a layer's largest matrix."""
    return max(map(math.prod, _layer_matrices(model)))


def _share(dims: tuple[int, ...], data: int, seq: int) -> int:
    return math.prod(padded(dims, spread(dims, data, seq))) // (data * seq)


def _layer_matrices(model: ModelConfig) -> list[tuple[int, ...]]:
    """Returns the dims of a layer's matrices."""
    hidden, head = model.hidden_size, model.head_dim
    matrices: list[tuple[int, ...]] = [(hidden, model.num_heads, head), (model.num_heads, head, hidden)]
    matrices += [(hidden, model.num_kv_heads, head)] * 2
    matrices += [(hidden, model.mlp_size)] * (3 if model.mlp == "swiglu" else 2)
    return matrices


def _layer_vectors(model: ModelConfig) -> list[tuple[int, ...]]:
    """Returns the dims of a layer's norms and biases."""
    head = model.head_dim
    vectors: list[tuple[int, ...]] = [(model.hidden_size,)] * 2
    if model.qk_norm:
        vectors += [(head,)] * 2
    if model.qkv_bias:
        vectors += [(model.num_heads, head), *[(model.num_kv_heads, head)] * 2]
    return vectors
