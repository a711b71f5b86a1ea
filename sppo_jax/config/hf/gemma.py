"""What is special to a Gemma 3 in its config.json; imports no jax."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

GEMMA = "gemma3_text"
_DEFAULT_SCALAR = 256


def scales_from_hf(config: Mapping[str, Any]) -> dict[str, float | None]:
    """Returns the `ModelConfig` fields that scale embeddings and queries and cap logits.

    Raises:
        ValueError: the scores are capped, or attention is not causal.
    """
    if config["model_type"] != GEMMA:
        return {"embedding_scale": 1.0, "query_scale": None, "logit_cap": None}
    for name, must in (("attn_logit_softcapping", "null"), ("use_bidirectional_attention", "false")):
        if config.get(name):
            raise ValueError(f"{name} must be {must}, got {config[name]}; choose another model")
    scalar, cap = config.get("query_pre_attn_scalar", _DEFAULT_SCALAR), config.get("final_logit_softcapping")
    return {
        "embedding_scale": float(config["hidden_size"] ** 0.5),
        "query_scale": None if scalar == config.get("head_dim") else float(scalar**-0.5),
        "logit_cap": float(cap) if cap else None,
    }
