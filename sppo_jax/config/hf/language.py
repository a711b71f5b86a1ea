"""The language model of a multimodal Hugging Face folder; imports no jax."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Of each `model_type` that sees too: the `model_type` of its language model, and the beginning of its classes' names.
_MULTIMODAL = {
    "gemma3": ("gemma3_text", "Gemma3"),
    "qwen3_5": ("qwen3_5_text", "Qwen3_5"),
    "qwen3_5_moe": ("qwen3_5_moe_text", "Qwen3_5Moe"),
}
# Keys at the top of a multimodal config.json that are of the language model too.
_SHARED = ("bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype", "quantization_config")


def language_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config.json of the language model of a multimodal one; any other one as it is.

    Raises:
        ValueError: the two disagree about tied embeddings, or logits are capped.
    """
    text, model_type = config.get("text_config"), config.get("model_type")
    if model_type not in _MULTIMODAL or not isinstance(text, Mapping):
        return dict(config)
    of_text, name = _MULTIMODAL[model_type]
    tied = [part["tie_word_embeddings"] for part in (config, text) if part.get("tie_word_embeddings") is not None]
    if len(set(tied)) > 1:
        raise ValueError(
            f"tie_word_embeddings must be the same in every place, got {tied[0]} and in text_config {tied[1]}; correct "
            "one of the two"
        )
    if text.get("final_logit_softcapping"):
        raise ValueError(
            f"final_logit_softcapping must be null in a {model_type}, got {text['final_logit_softcapping']}, which "
            f"transformers reads in a {of_text} alone; choose another model"
        )
    names = [
        f"{name}ForCausalLM" if found == f"{name}ForConditionalGeneration" else found
        for found in config.get("architectures") or []
    ]
    shared = {key: config[key] for key in _SHARED if config.get(key) is not None}
    own = {"model_type": of_text, "architectures": names} | ({"tie_word_embeddings": tied[0]} if tied else {})
    return {**text, **shared, **own}
