"""Which class a model's layers are of."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sppo_jax.models.delta_layer import DeltaExpertsLayer, DeltaLayer
from sppo_jax.models.layers import DecoderLayer, ExpertsLayer

if TYPE_CHECKING:
    from sppo_jax.config.model import ModelConfig


def layer_of(config: ModelConfig) -> type[DecoderLayer]:
    """Returns the class of the layers of a model whose layers are alike."""
    if config.mixer == "delta":
        return DeltaExpertsLayer if config.experts.count else DeltaLayer
    return ExpertsLayer if config.experts.count else DecoderLayer
