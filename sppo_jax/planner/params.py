"""How many parameters a device holds: of its stage, and as its own share of them between steps."""

import math
from dataclasses import dataclass

from sppo_jax.config import ModelConfig
from sppo_jax.models.counts import layer_matrices, layer_vectors, num_tables
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
    arrays = [*layer_matrices(model), *layer_vectors(model)]
    table, tables = (-(-model.vocab_size // pipe), model.hidden_size), num_tables(model)
    whole = layers * sum(map(math.prod, arrays)) + tables * math.prod(table)
    own = layers * sum(_share(dims, data, seq) for dims in arrays) + tables * _share(table, data, seq)
    # Every device has the final norm.
    return StageParams(whole=whole + model.hidden_size, own=own + model.hidden_size)


def largest_matrix(model: ModelConfig) -> int:
    """Returns the parameters of a layer's largest matrix."""
    return max(map(math.prod, layer_matrices(model)))


def _share(dims: tuple[int, ...], data: int, seq: int) -> int:
    return math.prod(padded(dims, spread(dims, data, seq))) // (data * seq)
