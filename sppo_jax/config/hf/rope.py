"""Rotary settings of a Hugging Face config.json, both ways; imports no jax.

transformers 5 keeps all of them in `rope_parameters`, for all layers or for each layer type. Earlier versions keep
the base in `rope_theta` and the rest in `rope_scaling`. A file that has both places must say the same in both.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from sppo_jax.config.hf.gemma import GEMMA
from sppo_jax.config.hf.positions import trained_length
from sppo_jax.config.rope import RopeConfig

# Hugging Face's name of each scaling: our name. Our name of each setting: Hugging Face's name.
_SCALINGS = {"default": "none", "linear": "linear", "llama3": "llama3", "yarn": "yarn"}
_SETTINGS = {
    "factor": "factor",
    "original_length": "original_max_position_embeddings",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "truncate": "truncate",
}
# Spellings within a section of rotary settings: transformers' name of today. A setting at the top has one spelling.
_SPELLINGS = {
    "rope_type": "rope_type",
    "type": "rope_type",
    **{
        name: name
        for name in (
            *("rope_theta", "partial_rotary_factor", *_SETTINGS.values()),
            *("attention_factor", "mscale", "mscale_all_dim"),
        )
    },
}
_AT_THE_TOP = ("rope_type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
_LAYER_TYPES = ("full_attention", "sliding_attention")
_USED = {
    "none": (),
    "linear": ("factor",),
    "llama3": ("factor", "original_length", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "original_length", "beta_fast", "beta_slow", "truncate"),
}


def ropes_from_hf(
    config: Mapping[str, Any],
    max_length: int,
    theta: float,
    section: Mapping[str, Any] | None,
    local_theta: float,
    fraction: float = 1.0,
) -> dict[str, dict[str, Any]]:
    """Reads the rotary settings of a config.json by layer type.

    Args:
        config: the content of the config.json.
        max_length: the `max_position_embeddings` of the config.json, in tokens.
        theta: base of the frequencies if the key is left out.
        section: as in `rope_from_hf`.
        local_theta: base of windowed layers if the key is left out, in a family with rotary settings by layer type; 0:
            in the family all layers rotate alike.
        fraction: as in `rope_from_hf`.

    Returns:
        What `rope_from_hf` returns, for each layer type.

    Raises:
        ValueError: as `rope_from_hf`; or settings are for all layers that are by layer type in the family.
    """
    if not local_theta:
        return dict.fromkeys(_LAYER_TYPES, rope_from_hf(config, max_length, theta, section, fraction))
    everywhere = set(config.get("rope_parameters") or {}) - set(_LAYER_TYPES)
    if everywhere:
        raise ValueError(
            f"rope_parameters must have settings for {' and '.join(_LAYER_TYPES)} in a {config['model_type']}, got "
            f"{sorted(everywhere)[0]} for all layers, which transformers does not read; write it for each layer type"
        )
    full, local = _LAYER_TYPES
    # As transformers does: what is not by layer type is for layers without a window.
    places = ((place, config.get(place) or {}) for place in ("rope_parameters", "rope_scaling"))
    own: dict[str, Any] = {place: {local: settings[local]} for place, settings in places if local in settings}
    base = config.get("rope_local_base_freq") if config["model_type"] == GEMMA else None  # a key of Gemma 3 alone
    own |= {"rope_theta": base, "layer_types": [local]}
    part = {"partial_rotary_factor": config.get("partial_rotary_factor")}
    return {
        full: rope_from_hf({**config, "layer_types": [full]}, max_length, theta),
        local: rope_from_hf(own | part, max_length, local_theta),
    }


def used_settings(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the `RopeConfig` fields that a rotation depends on."""
    return {name: rope[name] for name in dict.fromkeys(("theta", "scaling", "factor", *_USED[rope["scaling"]]))}


def rope_from_hf(
    config: Mapping[str, Any],
    max_length: int,
    theta: float = 10000.0,
    section: Mapping[str, Any] | None = None,
    fraction: float = 1.0,
) -> dict[str, Any]:
    """Reads the rotary settings of a config.json.

    Args:
        config: the content of the config.json.
        max_length: the `max_position_embeddings` of the config.json, in tokens.
        theta: base of the frequencies if the key is left out.
        section: the rotary settings if the file has no section of them; None: an unscaled rotation's.
        fraction: share of a head that is rotated if the key is left out; 1: in the family it is always the whole head.

    Returns:
        Every field of `RopeConfig`; `original_length` is the length of pre-training if the file gives no other length,
        so that a scaling can be added.

    Raises:
        ValueError: a setting, which the message names, is not supported.
    """
    if section and config.get("rope_parameters") is None and not config.get("rope_scaling"):
        config = {**config, "rope_parameters": section}
    settings = rope_settings(config)
    rope_type = settings.get("rope_type", "default")
    if rope_type not in _SCALINGS:
        raise ValueError(
            f"the rotary scaling must be one of {', '.join(_SCALINGS)}, got rope_type={rope_type!r}; use another model"
        )
    scaling = _SCALINGS[rope_type]
    original = settings.get("original_max_position_embeddings")
    trained = trained_length(config.get("model_type"), max_length)
    rope: dict[str, Any] = {
        "theta": settings.get("rope_theta", theta),
        "fraction": settings.get("partial_rotary_factor", fraction) if fraction < 1 else 1.0,
        "scaling": scaling,
        "factor": 1.0,
        "original_length": original if original and "original_length" in _USED[scaling] else trained or None,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": True,
    }
    for ours in _USED[scaling]:
        given = settings.get(_SETTINGS[ours])
        if given is not None and ours != "original_length":
            rope[ours] = given
    if scaling == "yarn" and settings.get("factor") is None:
        rope["factor"] = max_length / rope["original_length"]
    _check_representable(settings, scaling, rope)
    return rope


def rope_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Reads the rotary settings of a config.json from every place and in every spelling that transformers reads.

    Versions of transformers differ in which place wins, so places that disagree are refused.

    Args:
        config: the content of the config.json.

    Returns:
        The settings that are given, by transformers' name of today.

    Raises:
        ValueError: two places disagree.
    """
    found: dict[str, tuple[Any, str]] = {}
    for name, value, place in _given(config):
        before = found.setdefault(name, (value, place))
        if not _same(before[0], value):
            raise ValueError(
                f"the rotary setting {name} must be the same in every place, got {before[0]!r} in {before[1]} and "
                f"{value!r} in {place}; correct one of the two"
            )
    return {name: value for name, (value, _) in found.items()}


def _given(config: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """Yields every rotary setting that is given: name, value, place."""
    for name in _AT_THE_TOP:
        if config.get(name) is not None:
            yield name, config[name], name
    for place, settings in _sections(config):
        named = [spelling for spelling in _SPELLINGS if settings.get(spelling) is not None]
        for spelling in named:
            yield _SPELLINGS[spelling], settings[spelling], f"{place}.{spelling}"
        if not any(_SPELLINGS[spelling] == "rope_type" for spelling in named):
            yield "rope_type", "default", f"{place} without rope_type"


def _sections(config: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields the sections of rotary settings: one for all layers, or one for each layer type of the model."""
    layer_types = set(config.get("layer_types") or _LAYER_TYPES)
    for place in ("rope_parameters", "rope_scaling"):
        settings = config.get(place) or {}
        nested = {layer_type: settings[layer_type] for layer_type in _LAYER_TYPES if layer_type in settings}
        if not nested and settings:
            yield place, settings
        for layer_type, section in nested.items():
            if layer_type in layer_types and not section:
                raise ValueError(
                    f"{place}.{layer_type} must give rotary settings, got {section!r}; choose another model"
                )
            if layer_type in layer_types:
                shared = {name: value for name, value in settings.items() if name not in nested}
                yield f"{place}.{layer_type}", {**shared, **section}


def _same(first: Any, second: Any) -> bool:
    numbers = all(isinstance(value, int | float) for value in (first, second))
    return math.isclose(first, second, rel_tol=1e-9) if numbers else bool(first == second)


def _check_representable(settings: Mapping[str, Any], scaling: str, rope: Mapping[str, Any]) -> None:
    """Refuses settings that change the rotation and for which `RopeConfig` has no field, or the family no use."""
    factor, fraction = rope["factor"], rope["fraction"]
    partial = settings.get("partial_rotary_factor", fraction)
    wanted: dict[str, tuple[Any, Any]] = {"partial_rotary_factor": (fraction, partial)}
    if scaling == "none":  # a factor without its type, which some versions of transformers refuse and others drop
        wanted["factor"] = (1.0, settings.get("factor", 1.0))
    if scaling == "yarn":
        default = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
        wanted["attention_factor"] = (default, _yarn_amplitude(settings, factor, default))
    for name, (must, got) in wanted.items():
        if not math.isclose(must, got, rel_tol=1e-6):
            raise ValueError(f"the rotary setting {name} must be {must:g}, got {got:g}; choose a model with this value")


def _yarn_amplitude(settings: Mapping[str, Any], factor: float, default: float) -> float:
    """Returns the factor on cos and sin that a config asks for."""
    if settings.get("attention_factor") is not None:
        return settings["attention_factor"]
    over, under = settings.get("mscale"), settings.get("mscale_all_dim")
    if over and under and factor > 1:
        return (0.1 * over * math.log(factor) + 1.0) / (0.1 * under * math.log(factor) + 1.0)
    return default


def rope_to_hf(rope: RopeConfig, *, is_partial: bool = False) -> dict[str, Any]:
    """Returns rotary settings in the new place and in the old places, so that every version of transformers reads them.

    Args:
        rope: the rotary settings of the model.
        is_partial: whether a model of the family rotates a part of a head where the key is left out.

    Returns:
        The keys `rope_parameters`, `rope_theta` and `rope_scaling` of a config.json, and `partial_rotary_factor` where
        a part of a head is rotated, or would be without it.
    """
    rope_type = next(name for name, ours in _SCALINGS.items() if ours == rope.scaling)
    scaling = {"rope_type": rope_type} | {_SETTINGS[ours]: getattr(rope, ours) for ours in _USED[rope.scaling]}
    if rope.truncate:  # which earlier versions do not know by name
        scaling.pop("truncate", None)
    partial = {"partial_rotary_factor": rope.fraction} if rope.fraction < 1 or is_partial else {}
    return {
        "rope_parameters": {"rope_theta": rope.theta, **partial, **scaling},
        "rope_theta": rope.theta,
        **partial,
        "rope_scaling": scaling if rope.scaling != "none" else None,
    }


def ropes_to_hf(full: RopeConfig, local: RopeConfig, *, has_local_theta: bool) -> dict[str, Any]:
    """Returns rotary settings by layer type in the new place, and in the old places what these have room for.

    Args:
        full: of layers without a window.
        local: of layers with a window.
        has_local_theta: whether the family has a key for the base of the latter.
    """
    keys, own = rope_to_hf(full), rope_to_hf(local)
    by_type = dict(zip(_LAYER_TYPES, (keys["rope_parameters"], own["rope_parameters"]), strict=True))
    return {**keys, "rope_parameters": by_type, **({"rope_local_base_freq": local.theta} if has_local_theta else {})}


def scaled_length(rope: RopeConfig) -> int:
    """Returns the length in tokens for which the scaling is intended; 0 if the length is not known."""
    # For a linear scaling the imported original length is the length after scaling: the file gives no other length.
    return int((rope.original_length or 0) * (rope.factor if "original_length" in _USED[rope.scaling] else 1.0))
