"""Which layers of a Hugging Face model are of which type; imports no jax."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sppo_jax.config.hf.rope import used_settings
from sppo_jax.config.layer_types import DELTA, FULL, layers_text

# Layers without rotation, layers with an MLP among those with experts, and layers with a window among others.
UNROTATED, DENSE, DENSE_DELTA, WINDOWED = "unrotated", "dense", "dense_delta", "local"
_NO_EXPERTS = {"experts": {"count": 0}}
# Keys that an export writes.
KEYS = (
    *("no_rope_layers", "no_rope_layer_interval", "layer_types", "mlp_only_layers", "decoder_sparse_step"),
    *("sliding_window_pattern", "_sliding_window_pattern", "full_attention_interval"),
)
# Families that have linear attention in some layers.
_HYBRIDS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
# Families whose windows `use_sliding_window` switches on, and those whose layers all have the same window, or none.
_SWITCHED = ("qwen2", "qwen3", "qwen3_moe", "smollm3")
_ALIKE = ("mistral", "qwen3_moe")


def layers_from_hf(config: Mapping[str, Any], windows: Sequence[int], rope: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns the `ModelConfig` fields `layers` and `layer_types`: null and none where all layers are alike.

    Args:
        config: content of the config.json.
        windows: of each layer, from `windows_from_hf`.
        rope: `RopeConfig` fields of layers with a window; None: those of all layers.

    Raises:
        ValueError: a key is of another length than the model, or layers differ in two ways.
    """
    if config["model_type"] == "qwen3_moe" and config.get("first_k_dense_replace"):
        raise ValueError(
            f"first_k_dense_replace must be 0 in a qwen3_moe, got {config['first_k_dense_replace']}; name the dense "
            "layers in mlp_only_layers"
        )
    if config["model_type"] in _HYBRIDS:
        return _hybrid_layers(config)
    names = [FULL] * config["num_hidden_layers"]
    layer_types: dict[str, Any] = {}
    if config["model_type"] == "smollm3":
        names = [FULL if rotates else UNROTATED for rotates in _rotations(config)]
        layer_types[UNROTATED] = {"rope": {"fraction": 0.0}}
    if config["model_type"] == "qwen3_moe":
        names = [DENSE if dense else FULL for dense in _dense_layers(config)]
        layer_types[DENSE] = _NO_EXPERTS
    if len(set(windows)) > 1:
        if set(names) != {FULL}:
            raise ValueError(
                f"layers with a window must not differ in another way, got windows and layers of type "
                f"{', '.join(sorted(set(names) - {FULL}))}; choose another model"
            )
        names = [WINDOWED if window else FULL for window in windows]
        layer_types[WINDOWED] = {"sliding_window": max(windows)} | (
            {} if rope is None else {"rope": used_settings(rope)}
        )
    return _fields_of(names, layer_types)


def _fields_of(names: Sequence[str], layer_types: Mapping[str, Any]) -> dict[str, Any]:
    used = {name: layer_type for name, layer_type in layer_types.items() if name in names}
    return (
        {"layers": layers_text(names), "layer_types": used}
        if used or DELTA in names
        else {"layers": None, "layer_types": {}}
    )


def _hybrid_layers(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what `layers_from_hf` returns of a model that has linear attention in some layers."""
    dense = _dense_layers(config) if config["model_type"] == "qwen3_next" else [False] * config["num_hidden_layers"]
    attends = [layer_type == "full_attention" for layer_type in _hybrid_types(config)]
    names = [
        (DENSE if whole else DENSE_DELTA) if has_mlp else (FULL if whole else DELTA)
        for whole, has_mlp in zip(attends, dense, strict=True)
    ]
    return _fields_of(names, {DENSE: _NO_EXPERTS, DENSE_DELTA: {"mixer": "delta"} | _NO_EXPERTS})


def windows_from_hf(config: Mapping[str, Any], default: int) -> list[int]:
    """Returns the tokens that a token attends to in each layer; 0: the whole sequence.

    Args:
        config: content of the config.json.
        default: of the family, where the key is left out.

    Raises:
        ValueError: a layer is of another type, or `layer_types` is of another length than the model.
    """
    window, count = config.get("sliding_window", default) or 0, config["num_hidden_layers"]
    layer_types, family = config.get("layer_types"), config["model_type"]
    if family == "llama" or family in _HYBRIDS:
        return [0] * count
    if family in _SWITCHED and not config.get("use_sliding_window", False):
        window = 0
    if family in _ALIKE:
        return _alike_windows(config, window)
    if layer_types is None and (every := _whole_every(config)) is not None:
        layer_types = ["sliding_attention" if (number + 1) % every else "full_attention" for number in range(count)]
    if layer_types is not None:
        _check_types(layer_types, count, "sliding_attention")
        _check_switched_on(config, layer_types, window)
        return [window if layer_type == "sliding_attention" else 0 for layer_type in layer_types]
    if family == "smollm3":
        return [0 if rotates else window for rotates in _rotations(config)]
    return [window if number >= config.get("max_window_layers", 28) else 0 for number in range(count)]


def _alike_windows(config: Mapping[str, Any], window: int) -> list[int]:
    """Returns the windows of a family whose layers all have the same: transformers reads no `layer_types` there."""
    count, layer_type = config["num_hidden_layers"], "sliding_attention" if window else "full_attention"
    others = sorted(set(config.get("layer_types") or ()) - {layer_type})
    if others:
        raise ValueError(
            f"layer_types must be {layer_type} for every layer of a {config['model_type']} with this sliding_window, "
            f"got {others[0]}, which transformers does not read; remove layer_types"
        )
    return [window] * count


def _check_switched_on(config: Mapping[str, Any], layer_types: Sequence[str], window: int) -> None:
    """Refuses layers with a window where the window is switched off, which transformers refuses or obeys by kernel."""
    if window or "sliding_attention" not in layer_types:
        return
    family, switch = config["model_type"], config.get("use_sliding_window", False)
    if family in _SWITCHED and not switch:
        raise ValueError(
            f"use_sliding_window must be true in a {family} whose layer_types have sliding_attention, got {switch}; "
            "correct one of the two keys"
        )
    raise ValueError(f"sliding_window must be at least 1 in a {family}, got {window}; correct the key")


def _check_types(layer_types: Sequence[str], count: int, other: str) -> None:
    """Refuses layer types other than full attention and one other, or too few of them."""
    unknown = sorted(set(layer_types) - {"full_attention", other})
    if unknown:
        raise ValueError(f"layer_types must be full_attention or {other}, got {unknown[0]!r}; choose another model")
    if len(layer_types) != count:
        raise ValueError(
            f"layer_types must have a name for each of the {count} layers, got {len(layer_types)}; correct the key"
        )


def _hybrid_types(config: Mapping[str, Any]) -> Sequence[str]:
    """Returns the type of each layer of a model that has linear attention in some."""
    count, every = config["num_hidden_layers"], config.get("full_attention_interval", 4)
    layer_types = config.get("layer_types")
    if layer_types is None:
        return ["linear_attention" if (number + 1) % every else "full_attention" for number in range(count)]
    _check_types(layer_types, count, "linear_attention")
    return layer_types


def _whole_every(config: Mapping[str, Any]) -> int | None:
    """Returns which layers see the whole sequence in a family that mixes layers: every so many; None: in others."""
    of_family = {"gpt_oss": 2, "olmo3": 4, "gemma3_text": config.get("sliding_window_pattern", 6)}
    return of_family.get(config["model_type"])


def _rotations(config: Mapping[str, Any]) -> list[bool]:
    """Returns of each layer whether it rotates: `no_rope_layers` has a 1 for those that do."""
    count, every = config["num_hidden_layers"], config.get("no_rope_layer_interval", 4)
    given = config.get("no_rope_layers")
    if given is None:
        return [bool((number + 1) % every) for number in range(count)]
    if len(given) != count:
        raise ValueError(
            f"no_rope_layers must have a number for each of the {count} layers, got {len(given)}; correct the key"
        )
    return [bool(rotates) for rotates in given]


def _dense_layers(config: Mapping[str, Any]) -> list[bool]:
    """Returns of each layer whether it has an MLP in place of experts."""
    plain, every = config.get("mlp_only_layers") or [], config.get("decoder_sparse_step") or 1
    return [number in plain or (number + 1) % every > 0 for number in range(config["num_hidden_layers"])]


def has_dense(layers: Mapping[str, Any]) -> bool:
    """Returns whether fields that `layers_from_hf` has made have a type with an MLP in place of experts."""
    return bool({DENSE, DENSE_DELTA} & set(layers["layer_types"]))
