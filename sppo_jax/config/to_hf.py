"""The config.json of an exported model; imports no jax."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from sppo_jax.config.hf.delta import LEFT_OUT_KEYS, delta_to_hf
from sppo_jax.config.hf.experts import KEYS, experts_to_hf
from sppo_jax.config.hf.families import FAMILIES, Family
from sppo_jax.config.hf.gemma import GEMMA
from sppo_jax.config.hf.layers import KEYS as KEYS_OF_LAYERS
from sppo_jax.config.hf.rope import rope_to_hf, ropes_to_hf, scaled_length
from sppo_jax.config.model import ModelConfig


def shape_to_hf(model: ModelConfig, *, like: Mapping[str, Any], length: int, dtype: str) -> dict[str, Any]:
    """Writes the config.json of a model.

    Args:
        model: the shape of the model.
        like: content of the config.json that the model was imported from, for special tokens and the name of the
            family; may be empty.
        length: tokens of the longest sequence that the model was trained on; 0: not known.
        dtype: dtype of the tensors, by transformers' name.

    Raises:
        ValueError: no family has such a model; the message names the setting.
    """
    family = _family_of_types(model, like.get("model_type")) or _family_name(model, like.get("model_type"))
    experts = experts_to_hf(model.experts, like, family) if model.experts.count else {}
    kept = {key: value for key, value in like.items() if key not in _NOT_KEPT}
    max_length = max(scaled_length(model.rope), length, like.get("max_position_embeddings") or 0)
    config = kept | {
        "architectures": [FAMILIES[family].architecture],
        "model_type": family,
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "intermediate_size": model.mlp_size or 0,
        **({"hidden_activation": "gelu_pytorch_tanh"} if family == GEMMA else {"hidden_act": "silu"}),
        "tie_word_embeddings": model.tied_embeddings,
        "rms_norm_eps": model.norm_eps,
        "max_position_embeddings": max_length or FAMILIES[family].max_length,
        "torch_dtype": dtype,
        **_ropes_to_hf(model, family),
        **_scales_to_hf(model, family),
        **experts,
        **_delta_to_hf(model, family),
        **_layers_to_hf(model, family),
    }
    if family in _HAVE_DENSE and model.mlp_size:
        config["intermediate_size"] = model.mlp_size
    if family != "qwen2":
        config["attention_bias"] = FAMILIES[family].output_bias
    if family == "llama":
        return config | {"mlp_bias": False}
    window = model.sliding_window
    if family == "mistral":
        return config | {"sliding_window": window}
    if "layer_types" in config:
        return config
    slides = {"use_sliding_window": window is not None, "sliding_window": window}
    return config | slides | ({"max_window_layers": 0} if window else {})


# Families whose layers may have an MLP among layers with experts.
_HAVE_DENSE = ("qwen3_moe", "qwen3_next")
# Keys of an imported config.json that are not copied: an export writes them, or they were true of that file alone.
_NOT_KEPT = (
    *KEYS,
    *KEYS_OF_LAYERS,
    *LEFT_OUT_KEYS,
    "partial_rotary_factor",
    "_name_or_path",
    "dtype",
    "hidden_act",
    "hidden_activation",
    "mlp_bias",
    "attention_bias",
    "max_window_layers",
    "original_max_position_embeddings",
    "quantization_config",
    "rope_local_base_freq",
    "rope_type",
    "sliding_window",
    "transformers_version",
    "use_sliding_window",
)


# Parts of a layer that all layers of a family have, or none.
_PARTS = ("qkv_bias", "output_bias", "output_gate", "qk_norm", "qk_norm_over_heads", "unit_norm", "sinks")


def _parts(owner: ModelConfig | Family) -> tuple[str, ...]:
    norms = [] if owner.norms == "before" else [f"norms={owner.norms}"]
    return (*(name for name in _PARTS if getattr(owner, name)), *norms)


def _delta_types(model: ModelConfig) -> list[ModelConfig]:
    """Returns the model of each layer type that has the gated delta rule."""
    return [layer_type for layer_type, _ in model.counts(model.num_layers) if layer_type.mixer == "delta"]


def _family_name(model: ModelConfig, preferred: str | None) -> str:
    """Returns a family that has this model: the preferred family if possible."""
    has_experts, has_delta = model.experts.count > 0, bool(_delta_types(model))
    alike = {
        name: family
        for name, family in FAMILIES.items()
        if bool(family.fused_experts) == has_experts and bool(family.delta) == has_delta
    }
    possible = [name for name, family in alike.items() if _parts(family) == _parts(model)]
    mlps = {FAMILIES[name].mlp for name in possible}
    if mlps and model.mlp not in mlps and not has_experts:
        raise ValueError(
            f"a Hugging Face model of type {possible[0]} must have model.mlp={mlps.pop()}, got {model.mlp}; export "
            "only models with this MLP"
        )
    if not possible:
        of_families = dict.fromkeys(f"{', '.join(_parts(family)) or 'none'}" for family in alike.values())
        raise ValueError(
            f"a Hugging Face model {'with' if has_experts else 'without'} experts"
            f"{' and with the gated delta rule' * has_delta} must have, of "
            f"{', '.join(f'model.{name}' for name in (*_PARTS, 'norms'))}, those of a family "
            f"({'; or '.join(of_families)}), got {', '.join(_parts(model)) or 'none'}; export only models of such a "
            "family"
        )
    # transformers refuses a Llama whose heads do not divide the hidden size, and a Llama has no sliding window.
    if model.hidden_size % model.num_heads or model.sliding_window:
        possible = [name for name in possible if name != "llama"]
    return preferred if preferred in possible else possible[0]


def _layers_to_hf(model: ModelConfig, family: str) -> dict[str, Any]:
    """Writes the keys of a config.json that say which layer is of which type.

    Args:
        model: the shape of the model.
        family: its `model_type`.

    Raises:
        ValueError: the family has no such types; the message names them.
    """
    if FAMILIES[family].delta:
        mixers = [model.of_type(name).mixer for name in model.type_names]
        layer_types = ["full_attention" if mixer == "attention" else "linear_attention" for mixer in mixers]
        return {"layer_types": layer_types} | (_dense_to_hf(model) if family in _HAVE_DENSE else {})
    if family == "smollm3":
        rotates = [int(model.of_type(name).rope.fraction > 0) for name in model.type_names]
        return {"no_rope_layers": rotates}
    windows = [model.of_type(name).sliding_window or 0 for name in model.type_names]
    layer_types = ["sliding_attention" if window else "full_attention" for window in windows]
    if family == "gpt_oss" or FAMILIES[family].local_theta:
        return {"sliding_window": max(windows) or FAMILIES[family].sliding_window, "layer_types": layer_types}
    if len(set(windows)) > 1:
        return {"use_sliding_window": True, "sliding_window": max(windows), "layer_types": layer_types}
    return _dense_to_hf(model) if family in _HAVE_DENSE else {}


def _dense_to_hf(model: ModelConfig) -> dict[str, Any]:
    """Writes the keys of a config.json that say which layers have no experts."""
    dense = [number for number, name in enumerate(model.type_names) if not model.of_type(name).experts.count]
    return {"mlp_only_layers": dense, "decoder_sparse_step": 1}


# What layers with a window may have in place of the model's settings.
_OF_WINDOWS = ("sliding_window", "rope")


def _ropes_to_hf(model: ModelConfig, family: str) -> dict[str, Any]:
    """Writes the rotary settings of a config.json, by layer type if the family has them so.

    Raises:
        ValueError: a part of a head is rotated, and in the family always the whole head is.
    """
    if model.rope.fraction < 1 and FAMILIES[family].rope_fraction == 1:
        raise ValueError(
            f"a Hugging Face model of type {family} must have model.rope.fraction=1, got {model.rope.fraction:g}; "
            "export only models that rotate whole heads"
        )
    if not FAMILIES[family].local_theta:
        return rope_to_hf(model.rope, is_partial=FAMILIES[family].rope_fraction < 1)
    layer_types = [model.of_type(name) for name in dict.fromkeys(model.type_names)]
    local = next((layer_type.rope for layer_type in layer_types if layer_type.sliding_window), model.rope)
    return ropes_to_hf(model.rope, local, has_local_theta=family == GEMMA)


def _family_of_types(model: ModelConfig, preferred: str | None) -> str | None:
    """Returns the family that has a model's layer types, the preferred one if possible; None where all are alike.

    Raises:
        ValueError: no family has them.
    """
    names = set(model.type_names)
    if len(names) == 1:
        return None
    changed = [model.layer_types[name].replaced() for name in names if name in model.layer_types]
    has_delta = bool(_delta_types(model))
    if has_delta and all(set(layer_type) <= {"mixer"} for layer_type in changed):
        return _family_name(model, preferred)
    of_experts = [layer_type.get("experts", {"count": 0}) == {"count": 0} for layer_type in changed]
    if has_delta and model.experts.count and all(of_experts) and _fields(changed) <= {"mixer", "experts"}:
        return _family_name(model, "qwen3_next")
    changed = [] if has_delta else changed
    if changed and all(_is(layer_type, "rope", {"fraction": 0.0}) for layer_type in changed):
        return "smollm3"
    if changed and all(_is(layer_type, "experts", {"count": 0}) for layer_type in changed) and model.experts.count:
        return "qwen3_moe"
    if not model.sliding_window and len(changed) == 1 and {"sliding_window"} <= set(changed[0]) <= {*_OF_WINDOWS}:
        window = changed[0]["sliding_window"]
        family = _family_name(replace(model, layers=None, layer_types={}, sliding_window=window), preferred)
        if FAMILIES[family].local_theta or family in ("qwen2", "qwen3", "gpt_oss") and len(changed[0]) == 1:
            return family
    raise ValueError(
        "a Hugging Face model must have layer types that a family has (rope.fraction=0, experts.count=0, "
        f"mixer=delta, or one sliding_window), got {', '.join(sorted(names))}; export only models with such types"
    )


def _fields(layer_types: Sequence[Mapping[str, Any]]) -> set[str]:
    return {name for layer_type in layer_types for name in layer_type}


def _is(layer_type: Mapping[str, Any], name: str, settings: Mapping[str, Any]) -> bool:
    return set(layer_type) == {name} and dict(layer_type[name]) == settings


def _delta_to_hf(model: ModelConfig, family: str) -> dict[str, Any]:
    """Writes the keys of a config.json that speak of the gated delta rule: none in another family."""
    if not FAMILIES[family].delta:
        return {}
    return delta_to_hf(_delta_types(model)[0].delta) | {"attn_output_gate": True}


def _scales_to_hf(model: ModelConfig, family: str) -> dict[str, Any]:
    """Writes the keys of a config.json that scale embeddings and queries and cap logits.

    Args:
        model: the shape of the model.
        family: its `model_type`.

    Raises:
        ValueError: the family has no such scales; the message names the setting.
    """
    is_gemma, wanted = family == GEMMA, {"embedding_scale": 1.0, "query_scale": model.query_scale, "logit_cap": None}
    scalar = model.query_scale**-2 if model.query_scale else model.head_dim
    if is_gemma:
        wanted |= {"embedding_scale": model.hidden_size**0.5, "logit_cap": model.logit_cap}
    wanted["query_scale"] = round(scalar) ** -0.5 if is_gemma and model.query_scale else None
    for name, must in wanted.items():
        value = getattr(model, name)
        if value != must and not (value and must and math.isclose(value, must, rel_tol=1e-9)):
            wanted_text, got = ("null" if each is None else f"{each:g}" for each in (must, value))
            raise ValueError(
                f"a Hugging Face model of type {family} must have model.{name}={wanted_text}, got {got}; export only "
                "models with this setting"
            )
    if not is_gemma:
        return {}
    return {
        "query_pre_attn_scalar": round(scalar),
        "final_logit_softcapping": model.logit_cap,
        "attn_logit_softcapping": None,
        "use_bidirectional_attention": False,
    }
