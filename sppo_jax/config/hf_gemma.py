"""What is special to a Gemma 3 in its config.json; imports no jax."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

GEMMA = "gemma3_text"
_MULTIMODAL, _OF_MULTIMODAL, _OF_TEXT = "gemma3", "Gemma3ForConditionalGeneration", "Gemma3ForCausalLM"
# Keys at the top of a multimodal config.json that are of the language model too.
_SHARED = ("bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype", "quantization_config")
_DEFAULT_SCALAR = 256


def language_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config.json of the language model of a multimodal Gemma 3; any other one as it is.

    Raises:
        ValueError: the two disagree about tied embeddings, or logits are capped.
    """
    text = config.get("text_config")
    if config.get("model_type") != _MULTIMODAL or not isinstance(text, Mapping):
        return dict(config)
    tied = [part["tie_word_embeddings"] for part in (config, text) if part.get("tie_word_embeddings") is not None]
    if len(set(tied)) > 1:
        raise ValueError(
            f"tie_word_embeddings must be the same in every place, got {tied[0]} and in text_config {tied[1]}; correct "
            "one of the two"
        )
    if text.get("final_logit_softcapping"):
        raise ValueError(
            f"final_logit_softcapping must be null in a {_MULTIMODAL}, got {text['final_logit_softcapping']}, which "
            f"transformers reads in a {GEMMA} alone; choose another model"
        )
    names = [_OF_TEXT if name == _OF_MULTIMODAL else name for name in config.get("architectures") or []]
    shared = {name: config[name] for name in _SHARED if config.get(name) is not None}
    own = {"model_type": GEMMA, "architectures": names} | ({"tie_word_embeddings": tied[0]} if tied else {})
    return {**text, **shared, **own}


def scales_from_hf(config: Mapping[str, Any]) -> dict[str, float]:
    """Returns the `ModelConfig` fields that scale embeddings and queries and cap logits.

    Raises:
        ValueError: the scores are capped, or attention is not causal.
    """
    if config["model_type"] != GEMMA:
        return {"embedding_scale": 1.0, "query_scale": 0.0, "logit_cap": 0.0}
    for name, must in (("attn_logit_softcapping", "null"), ("use_bidirectional_attention", "false")):
        if config.get(name):
            raise ValueError(f"{name} must be {must}, got {config[name]}; choose another model")
    scalar, cap = config.get("query_pre_attn_scalar", _DEFAULT_SCALAR), config.get("final_logit_softcapping")
    return {
        "embedding_scale": float(config["hidden_size"] ** 0.5),
        "query_scale": 0.0 if scalar == config.get("head_dim") else float(scalar**-0.5),
        "logit_cap": float(cap or 0.0),
    }
