"""Parameter counts of a decoder from its shape alone; imports no jax.

Shape letters: V vocabulary, D hidden size, L layers, N query heads, K key and value heads, H head size, F MLP size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sppo_jax.config.model import ModelConfig


def layer_params(config: ModelConfig) -> int:
    """Count the parameters of one decoder layer.

    Args:
        config: the model's shape.

    Returns:
        Number of scalar parameters of one layer.
    """
    size = config.head_dim
    heads_out = (config.num_heads + 2 * config.num_kv_heads) * size
    attention = config.hidden_size * heads_out + config.num_heads * size * config.hidden_size
    bias = heads_out if config.qkv_bias else 0
    head_norms = 2 * size if config.qk_norm else 0
    mlp = (3 if config.mlp == "swiglu" else 2) * config.hidden_size * config.mlp_size
    return attention + bias + head_norms + mlp + 2 * config.hidden_size


def vocabulary_params(config: ModelConfig) -> int:
    """Count the parameters of the embedding and, where it is not tied to it, of the output head."""
    return (1 if config.tied_embeddings else 2) * config.vocab_size * config.hidden_size


def num_params(config: ModelConfig) -> int:
    """Count all parameters of the decoder that `config` describes.

    Args:
        config: the model's shape.

    Returns:
        Number of scalar parameters, a tied embedding counted once.
    """
    return config.num_layers * layer_params(config) + vocabulary_params(config) + config.hidden_size
