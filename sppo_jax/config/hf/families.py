"""The shape of a model in a Hugging Face config.json, both ways; imports no jax."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from sppo_jax.config.hf.delta import delta_from_hf
from sppo_jax.config.hf.experts import DEQUANTIZE, experts_from_hf
from sppo_jax.config.hf.gemma import scales_from_hf
from sppo_jax.config.hf.hub import folder_of_config, is_name, refuse_address
from sppo_jax.config.hf.language import language_config
from sppo_jax.config.hf.layers import has_dense, layers_from_hf, windows_from_hf
from sppo_jax.config.hf.rope import ropes_from_hf
from sppo_jax.files.paths import local_path
from sppo_jax.files.whole import parse_json

CONFIG = "config.json"


@dataclass(frozen=True, kw_only=True)
class Family:
    """What is special to a family of models, and the defaults of keys that its config.json may leave out.

    Args:
        models: the published models that it holds, as pages name them.
        architecture: the name of the class in transformers.
        qkv_bias: whether queries, keys and values have biases.
        output_bias: whether the attention output projection has a bias.
        output_gate: whether a gate multiplies the attention output.
        qk_norm: whether queries and keys are normalised.
        qk_norm_over_heads: whether over all heads together; else head by head.
        norms: where a layer normalises.
        unit_norm: whether norms multiply by 1 + scale.
        mlp: kind of MLP.
        sinks: whether each query head has a sink.
        num_kv_heads: heads of keys and values if the key is left out; 0: as many as query heads.
        head_dim: elements of a head if the key is left out; 0: the hidden size divided by the heads.
        max_length: number of positions if the key is left out.
        sliding_window: attention span in tokens if the key is left out; 0: the whole sequence.
        fused_experts: where one tensor holds the gates and ups of all experts of a layer, how they share a dim of the
            tensor; "" where the family has no experts.
        delta: how tensors hold the projections of layers with the gated delta rule, each apart or joined by key head;
            "" where the family has no such layers.
        sizes: sizes, by their keys, that may be left out.
        tied_embeddings: whether the head is the embedding if the key is left out.
        norm_eps: term of RMSNorm if the key is left out.
        rope_theta: base of the rotation frequencies if the key is left out.
        rope_fraction: share of a head that is rotated if the key is left out; 1: always the whole head.
        local_theta: base of windowed layers if the key is left out, where rotary settings are by layer type; 0: all
            layers rotate alike.
        rope: rotary settings if the file has no section of them; None: those of an unscaled rotation.
    """

    models: str
    architecture: str
    qkv_bias: bool = False
    output_bias: bool = False
    output_gate: bool = False
    qk_norm: bool = False
    qk_norm_over_heads: bool = False
    norms: Literal["before", "behind", "both"] = "before"
    unit_norm: bool = False
    mlp: Literal["swiglu", "geglu"] = "swiglu"
    sinks: bool = False
    num_kv_heads: int = 0
    head_dim: int = 0
    max_length: int
    sliding_window: int = 0
    fused_experts: Literal["", "halves", "interleaved"] = ""
    delta: Literal["", "apart", "joined"] = ""
    sizes: Mapping[str, int] = field(default_factory=dict)
    tied_embeddings: bool = False
    norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_fraction: float = 1.0
    local_theta: float = 0.0
    rope: Mapping[str, Any] | None = None


_HYBRID: Mapping[str, Any] = dict(
    qk_norm=True, unit_norm=True, output_gate=True, head_dim=256, max_length=32768, rope_fraction=0.25
)
FAMILIES: Mapping[str, Family] = {
    "llama": Family(
        models="Llama 2 to 3.2",
        architecture="LlamaForCausalLM", max_length=2048
    ),
    "mistral": Family(
        models="Mistral",
        architecture="MistralForCausalLM", num_kv_heads=8, max_length=131072, sliding_window=4096
    ),
    "qwen2": Family(
        models="Qwen 2 and 2.5",
        architecture="Qwen2ForCausalLM", qkv_bias=True, num_kv_heads=32, max_length=32768
    ),
    "qwen3": Family(
        models="Qwen 3",
        architecture="Qwen3ForCausalLM", qk_norm=True, num_kv_heads=32, head_dim=128, max_length=32768
    ),
    "qwen3_moe": Family(
        models="Qwen 3",
        architecture="Qwen3MoeForCausalLM", qk_norm=True, num_kv_heads=4, max_length=32768, sliding_window=4096,
        fused_experts="halves",
    ),
    "smollm3": Family(
        models="SmolLM3",
        architecture="SmolLM3ForCausalLM", num_kv_heads=4, max_length=32768, tied_embeddings=True, rope_theta=2e6
    ),
    "gemma3_text": Family(
        models="Gemma 3",
        architecture="Gemma3ForCausalLM", qk_norm=True, norms="both", unit_norm=True, mlp="geglu", num_kv_heads=4,
        head_dim=256, max_length=131072, sliding_window=4096, tied_embeddings=True, rope_theta=1e6, local_theta=1e4,
        sizes={
            "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
            "num_attention_heads": 8,
        },
    ),
    "olmo3": Family(
        models="OLMo 3",
        architecture="Olmo3ForCausalLM", qk_norm=True, qk_norm_over_heads=True, norms="behind", max_length=2048,
        sliding_window=4096, norm_eps=1e-5, rope_theta=5e5, local_theta=5e5,
    ),
    "gpt_oss": Family(
        models="gpt-oss",
        architecture="GptOssForCausalLM", qkv_bias=True, output_bias=True, sinks=True, num_kv_heads=8, head_dim=64,
        max_length=131072, sliding_window=128, fused_experts="interleaved", norm_eps=1e-5, rope_theta=150000.0,
        rope={"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False},
    ),
    "qwen3_5_text": Family(
        models="Qwen 3.5 and 3.6",
        architecture="Qwen3_5ForCausalLM", num_kv_heads=4, delta="apart", **_HYBRID
    ),
    "qwen3_5_moe_text": Family(
        models="Qwen 3.5 and 3.6",
        architecture="Qwen3_5MoeForCausalLM", num_kv_heads=2, fused_experts="halves", delta="apart", **_HYBRID
    ),
    "qwen3_next": Family(
        models="Qwen3-Next",
        architecture="Qwen3NextForCausalLM", num_kv_heads=2, fused_experts="halves", delta="joined", **_HYBRID
    ),
}  # fmt: skip
# Families that are refused by name: the beginning of `model_type`, and why.
_REFUSED = {
    "gemma2": "whose attention has soft caps",
    "gemma4": "whose heads have 512 elements and whose layers share keys and values",
    "llama4": "whose attention stays within chunks of tokens",
    "qwen4": "whose layers have several residual streams",
    "olmo_hybrid": "whose gated delta rule writes twice as much as here",
    "kimi": "whose linear layers are KDA, with a decay of each channel",
    "bailing_hybrid": "whose linear layers are KDA, with a decay of each channel",
    "nemotron_h": "whose linear layers are Mamba",
    "falcon_h1": "whose linear layers are Mamba",
    "jamba": "whose linear layers are Mamba",
    "granitemoehybrid": "whose linear layers are Mamba",
    "mamba": "whose layers are Mamba",
}
# Fields that the weights decide: a config may repeat them but not change them.
WEIGHT_FIELDS = (
    "vocab_size",
    "hidden_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "mlp_size",
    "mlp",
    "norms",
    "unit_norm",
    "qk_norm",
    "qk_norm_over_heads",
    "qkv_bias",
    "output_bias",
    "output_gate",
    "mixer",
    "sinks",
    "tied_embeddings",
    "embedding_scale",
    "query_scale",
    "logit_cap",
)
FREE_FIELDS = ("norm_eps", "sliding_window", "rope")
# Files of peft, which transformers looks for beside the weights.
_ADAPTERS = ("adapter_config.json", "adapter_model*")


def model_folder(text: str) -> Path:
    """Returns the folder of a model that a user names, with its config.json: a local one, or that of the hub's cache.

    Args:
        text: a path, or OWNER/NAME of the hub where there is no such folder.

    Raises:
        ValueError: the path is an address, or the hub does not give the model.
    """
    if is_name(text):
        return folder_of_config(text)
    refuse_address(text)
    return local_path(text, "the folder")


def read_config(folder: Path) -> dict[str, Any]:
    """Reads a folder's config.json, of a multimodal model that of its language model.

    Raises:
        ValueError: the file is missing, or does not hold a JSON object.
    """
    path = folder / CONFIG
    try:
        config = parse_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(
            f"a Hugging Face model must be a local folder with {CONFIG}, got {folder} ({error.strerror}); "
            f"name another folder, or a model of the hub as hf:OWNER/NAME"
        ) from None
    except ValueError as error:
        raise ValueError(
            f"{path} must be JSON, got a file that is not JSON ({error}); download the file again"
        ) from None
    if not isinstance(config, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(config).__name__}; download the file again")
    return language_config(config)


def read_shape(folder: Path) -> dict[str, Any]:
    """Reads the shape of the model in a folder.

    Args:
        folder: a folder with config.json.

    Returns:
        `ModelConfig` fields, those of `WEIGHT_FIELDS` and `FREE_FIELDS`; `rope` is a dict of `RopeConfig` fields,
        `experts` of `ExpertsConfig` fields and `delta` of `DeltaConfig` fields.

    Raises:
        ValueError: the file cannot be read, or a setting of the model, which the message names, is not supported.
    """
    _check_no_adapter(folder)
    try:
        return shape_from_hf(read_config(folder))
    except KeyError as error:
        raise ValueError(
            f"{folder / CONFIG} must have the key {error.args[0]}, got none; download the file again"
        ) from None
    except (TypeError, AttributeError, ArithmeticError) as error:
        raise ValueError(
            f"{folder / CONFIG} must hold values of the right types, got others ({error}); correct the file"
        ) from None


def _check_no_adapter(folder: Path) -> None:
    """Refuses an adapter, which transformers would add to the weights and which is not read here."""
    names = sorted(path.name for pattern in _ADAPTERS for path in folder.glob(pattern))
    if names:
        raise ValueError(
            f"a Hugging Face model must be whole weights, got the adapter {names[0]} in {folder}; merge the adapter "
            "into the weights first (merge_and_unload and save_pretrained of peft), or move its files elsewhere"
        )


def read_num_positions(folder: Path) -> int:
    """Returns the `max_position_embeddings` of the model in a folder, in tokens.

    Raises:
        ValueError: the file cannot be read, or is of another kind of model.
    """
    config = read_config(folder)
    return _num_positions(config, _family(config))


def _num_positions(config: Mapping[str, Any], family: Family) -> int:
    return config.get("max_position_embeddings") or family.max_length


def shape_from_hf(config: Mapping[str, Any]) -> dict[str, Any]:
    """Maps the content of a config.json to `ModelConfig` fields.

    Raises:
        ValueError: a setting of the model is not supported.
        KeyError: a size is missing.
    """
    family = _family(config)
    config = {**family.sizes, **config, "head_dim": config.get("head_dim") or family.head_dim or None}
    _check_representable(config)
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    windows = windows_from_hf(config, family.sliding_window)
    defaults = (family.rope_theta, family.rope, family.local_theta, family.rope_fraction)
    ropes = ropes_from_hf(config, _num_positions(config, family), *defaults)
    kv_heads = config.get("num_key_value_heads", family.num_kv_heads) or heads
    _check_rotated(config["head_dim"] or hidden // heads, ropes["full_attention"]["fraction"])
    return {
        "vocab_size": config["vocab_size"],
        "hidden_size": hidden,
        "num_layers": config["num_hidden_layers"],
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": config["head_dim"] or hidden // heads,
        **(layers := layers_from_hf(config, windows, ropes["sliding_attention"] if family.local_theta else None)),
        "mixer": "attention",
        "delta": delta_from_hf(config) if family.delta else {},
        # Of a model whose layers all have experts no layer has this size.
        "mlp_size": None if family.fused_experts and not has_dense(layers) else config["intermediate_size"],
        "mlp": family.mlp,
        "experts": experts_from_hf(config) if family.fused_experts else {"count": 0},
        "norms": family.norms,
        "unit_norm": family.unit_norm,
        "qk_norm": family.qk_norm,
        "qk_norm_over_heads": family.qk_norm_over_heads,
        "qkv_bias": family.qkv_bias,
        "output_bias": family.output_bias,
        "output_gate": family.output_gate,
        "sinks": family.sinks,
        "tied_embeddings": bool(config.get("tie_word_embeddings", family.tied_embeddings)),
        **scales_from_hf(config),
        "norm_eps": config.get("rms_norm_eps", family.norm_eps),
        "sliding_window": windows[0] or None if len(set(windows)) == 1 else None,
        "rope": ropes["sliding_attention" if all(windows) else "full_attention"],
    }


def _check_rotated(head_dim: int, fraction: float) -> None:
    """Refuses an odd number of rotated elements, of which transformers rotates one more."""
    if fraction < 1 and int(head_dim * fraction) % 2:
        raise ValueError(
            f"partial_rotary_factor must rotate an even number of elements of a head, got {int(head_dim * fraction)} "
            f"of {head_dim}; choose another model"
        )


def _family(config: Mapping[str, Any]) -> Family:
    model_type, architectures = config.get("model_type"), config.get("architectures") or []
    family = FAMILIES.get(str(model_type))
    if family is None:
        why = "".join(f", {why}" for name, why in _REFUSED.items() if str(model_type).startswith(name))
        raise ValueError(
            f"model_type must be one of {', '.join(FAMILIES)}, got {model_type!r}{why}; choose a model of such a type"
        )
    if architectures and family.architecture not in architectures:
        raise ValueError(
            f"a {model_type} model must be a language model ({family.architecture}), got "
            f"{', '.join(map(str, architectures))}; use the language model that this model was made from"
        )
    return family


_SILU = ("hidden_act", ("silu", "swish"))


def _check_representable(config: Mapping[str, Any]) -> None:
    """Refuses, by name, settings that the decoder does not support."""
    family = FAMILIES[config["model_type"]]
    if family.output_bias and not config.get("attention_bias", True):
        raise ValueError(
            f"attention_bias must be true in a {config['model_type']}, got {config['attention_bias']}; choose a model "
            "with these biases"
        )
    # No version of transformers reads attention_bias for Qwen2, which has biases of q, k and v.
    biases = ("mlp_bias",) if family.qkv_bias else ("attention_bias", "mlp_bias")
    for name in biases:
        if config.get(name):
            raise ValueError(f"{name} must be false, got {config[name]}; choose a model without these biases")
    key, names = ("hidden_activation", ("gelu_pytorch_tanh",)) if family.mlp == "geglu" else _SILU
    if config.get(key, names[0]) not in names:
        raise ValueError(f"{key} must be {names[0]}, got {config[key]!r}; choose a model with {names[0]}")
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown")
        fix = DEQUANTIZE if method == "mxfp4" else "convert the unquantized model"
        raise ValueError(f"quantization_config must be absent, got quant_method={method!r}; {fix}")
    if config.get("attention_dropout"):
        raise ValueError(f"attention_dropout must be 0, got {config['attention_dropout']}; set 0 (no dropout here)")
