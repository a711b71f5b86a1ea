"""How many parameters a device holds: of its stage, and as its own share of them between steps."""

import math
from dataclasses import dataclass

from sppo_jax.config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class StageParams:
    """Parameters of a stage: the whole of them, which a step works with, and those a device owns between steps."""

    whole: int
    own: int


def stage_params(model: ModelConfig, layers: int, pipe: int, members: int) -> StageParams:
    """Counts a stage's layers and its share of the vocabulary.

    A matrix is spread over a stage's devices along its largest dim that they divide; what they do not divide, and
    vectors, everyone owns (`pipeline.layout.param_shardings`).

    Args:
        model: the model shape.
        layers: layers of a stage.
        pipe: stages.
        members: devices of a stage, over all pipelines.
    """
    matrices, vectors = _layer_matrices(model)
    whole = layers * (sum(map(math.prod, matrices)) + vectors)
    own = layers * (sum(_share(dims, dims, members) for dims in matrices) + vectors)
    tables = 1 if model.tied_embeddings else 2
    size, hidden = model.vocab_size, model.hidden_size
    whole += tables * -(-size // pipe) * hidden + hidden
    if size % pipe == 0:
        own += tables * _share((size // pipe, hidden), (hidden,), members) + hidden
    else:
        # A vocabulary that stages do not divide stays whole between steps, but for the members' share.
        own += tables * _share((size, hidden), (size, hidden), members) + hidden
    return StageParams(whole=whole, own=own)


def largest_matrix(model: ModelConfig) -> int:
    """Returns the parameters of a layer's largest matrix."""
    return max(map(math.prod, _layer_matrices(model)[0]))


def _share(dims: tuple[int, ...], free: tuple[int, ...], members: int) -> int:
    count = math.prod(dims)
    return count // members if any(dim % members == 0 for dim in free) else count


def _layer_matrices(model: ModelConfig) -> tuple[list[tuple[int, ...]], int]:
    """Returns the dims of a layer's matrices, and its other parameters: norms and biases."""
    hidden, head = model.hidden_size, model.head_dim
    matrices: list[tuple[int, ...]] = [(hidden, model.num_heads, head), (model.num_heads, head, hidden)]
    matrices += [(hidden, model.num_kv_heads, head)] * 2
    matrices += [(hidden, model.mlp_size)] * (3 if model.mlp == "swiglu" else 2)
    vectors = 2 * hidden + (2 * head if model.qk_norm else 0)
    if model.qkv_bias:
        # Biases of a head are a matrix to the rule of sharding, but too small to count as one.
        vectors += (model.num_heads + 2 * model.num_kv_heads) * head
    return matrices, vectors
