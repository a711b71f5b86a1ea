"""Parameters of a stage: those that it works with, and those that a device owns between steps."""

import math
from dataclasses import dataclass
from functools import lru_cache

from sppo_jax.config import ModelConfig
from sppo_jax.models.counts import expert_arrays, layer_matrices, layer_params, layer_vectors, num_tables
from sppo_jax.predict.shape import MemoryShape
from sppo_jax.program.spread import padded, spread


@dataclass(frozen=True, kw_only=True)
class StageParams:
    """Parameters of a stage.

    Args:
        whole: all of them, which a step works with.
        own: those that a device owns between steps.
        matrices: of these, those in matrices of layers.
        tables: of these, those in the embedding and the head.
    """

    whole: int
    own: int
    matrices: int
    tables: int


@lru_cache(maxsize=1024)
def stage_params(model: ModelConfig, layers: int, pipe: int, data: int, seq: int) -> StageParams:
    """Counts a stage's layers and its share of the vocabulary, spread over its devices as `params.storage` does.

    Args:
        model: the model shape.
        layers: layers of a stage.
        pipe: stages.
        data: pipelines.
        seq: devices of a stage in one pipeline.
    """
    table, tables = (-(-model.vocab_size // pipe), model.hidden_size), num_tables(model)
    whole, matrices, vectors = tables * math.prod(table), 0, 0
    for layer_type, count in model.counts(layers):
        whole += count * layer_params(layer_type)
        matrices += count * layer_share(layer_type, data, seq)
        vectors += count * sum(_share(dims, data, seq) for dims in layer_vectors(layer_type))
    of_tables = tables * _share(table, data, seq)
    # Every device has the final norm.
    own = matrices + vectors + of_tables + model.hidden_size
    return StageParams(whole=whole + model.hidden_size, own=own, matrices=matrices, tables=of_tables)


def stage_params_of(shape: MemoryShape, num_groups: int, num_stages: int) -> StageParams:
    """Returns the parameters of a stage of so many groups of layers."""
    return stage_params(shape.model, shape.layers * num_groups, num_stages, shape.data, shape.seq)


def layer_share(model: ModelConfig, data: int, seq: int) -> int:
    """Returns a device's share of the matrices of a layer, where all layers are alike."""
    return sum(_share(dims, data, seq) for dims in layer_matrices(model))


def table_params(model: ModelConfig, num_stages: int) -> int:
    """Returns the parameters of a stage's rows of the embedding, or of the head."""
    return -(-model.vocab_size // num_stages) * model.hidden_size


def largest_matrix(model: ModelConfig) -> int:
    """Returns the parameters of a layer's largest matrix, those of experts aside, where all layers are alike."""
    experts = expert_arrays(model)
    return max(math.prod(dims) for dims in layer_matrices(model) if dims not in experts)


def _share(dims: tuple[int, ...], data: int, seq: int) -> int:
    return math.prod(padded(dims, spread(dims, data, seq))) // (data * seq)
