"""The gated delta rule of a model in a Hugging Face config.json, both ways; imports no jax."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from sppo_jax.config.delta import DeltaConfig

# The key of each setting, and its value where the key is left out.
_KEYS = {
    "value_heads": ("linear_num_value_heads", 32),
    "key_heads": ("linear_num_key_heads", 16),
    "key_size": ("linear_key_head_dim", 128),
    "value_size": ("linear_value_head_dim", 128),
    "taps": ("linear_conv_kernel_dim", 4),
}
# Fields of `DeltaConfig`, all of which the weights decide.
WEIGHT_FIELDS = tuple(field.name for field in fields(DeltaConfig))
# Keys of what is left out: layers that predict more tokens than the next.
LEFT_OUT_KEYS = ("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")


def delta_from_hf(config: Mapping[str, Any]) -> dict[str, Any]:
    """Maps the content of a config.json to `DeltaConfig` fields.

    Raises:
        ValueError: attention has no output gate, or some layers of a Qwen3.5 have no experts.
    """
    if not config.get("attn_output_gate", True):
        raise ValueError(
            f"attn_output_gate must be true in a {config['model_type']}, got {config['attn_output_gate']}; choose "
            "another model"
        )
    for name, plain in (("mlp_only_layers", ([], None)), ("decoder_sparse_step", (1, None))):
        # Only Qwen3-Next has layers without experts.
        if config["model_type"] != "qwen3_next" and config.get(name) not in plain:
            raise ValueError(
                f"{name} must be {plain[0]} in a {config['model_type']}, got {config[name]}; choose a model whose "
                "layers all have experts"
            )
    return {ours: config.get(theirs, default) for ours, (theirs, default) in _KEYS.items()}


def delta_to_hf(delta: DeltaConfig) -> dict[str, int]:
    """Returns the keys of a config.json that speak of the gated delta rule."""
    return {theirs: getattr(delta, ours) for ours, (theirs, _) in _KEYS.items()}
