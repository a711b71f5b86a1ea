"""What a preset or a Hugging Face folder adds to the model settings that a user gives; imports no jax."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Set
from pathlib import Path
from typing import Any

from sppo_jax.config.delta import DeltaConfig
from sppo_jax.config.experts import ExpertsConfig
from sppo_jax.config.hf.delta import WEIGHT_FIELDS as DELTA_FIELDS
from sppo_jax.config.hf.experts import BALANCE_OFF
from sppo_jax.config.hf.experts import WEIGHT_FIELDS as EXPERT_FIELDS
from sppo_jax.config.hf.families import FREE_FIELDS, WEIGHT_FIELDS, model_folder, read_shape
from sppo_jax.config.presets import apply_preset
from sppo_jax.config.section import ConfigError

# Settings of a section that runs from before do not have.
_NEWER = {
    *("fraction", "sinks", "output_bias", "truncate", "norms", "unit_norm", "qk_norm_over_heads"),
    *("embedding_scale", "query_scale", "logit_cap", "output_gate", "mixer"),
}
# Fields that the weights decide, and that a complete config may be without.
_LAYERS = ("layers", "layer_types")


def expand_model(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Writes `model: hf:PATH` as a section of settings.

    Args:
        settings: the settings of a whole config.
    """
    model = settings.get("model")
    if isinstance(model, str) and model.startswith("hf:"):
        return {**settings, "model": {"hf": model.removeprefix("hf:")}}
    return settings


def complete_model(settings: Mapping[str, Any], *, rope_fields: Set[str]) -> Mapping[str, Any]:
    """Fills in the settings that the user did not give, from `preset` or from `hf`.

    Args:
        settings: the settings of the section `model`.
        rope_fields: the names of all settings of `model.rope`.

    Raises:
        ConfigError: there is no such preset or folder, or a setting contradicts the folder's weights.
    """
    preset, hf = settings.get("preset"), settings.get("hf")
    if hf is not None:
        if preset is not None:
            raise ConfigError(
                f"model must have either preset or hf, got both, {preset} and {hf}; remove one of the two"
            )
        return _with_hf(settings, rope_fields)
    if preset is None:
        return settings
    try:
        return _fill(settings, apply_preset(str(preset)))
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _with_hf(settings: Mapping[str, Any], rope_fields: Set[str]) -> Mapping[str, Any]:
    """Fills in settings from a folder's config.json; settings written by a run are complete and need no folder."""
    if not isinstance(settings["hf"], str) or not settings["hf"]:
        raise ConfigError(
            f"model.hf must be the folder of a Hugging Face model, got {settings['hf']!r}; give the path of the folder"
        )
    rope, experts, delta = (settings.get(name) for name in ("rope", "experts", "delta"))
    complete = (
        isinstance(rope, Mapping)
        and rope_fields - _NEWER <= set(rope)
        and {*FREE_FIELDS, *WEIGHT_FIELDS} - _NEWER <= set(settings)
    )
    # Runs from before there were experts have no such section.
    if complete and (experts is None or isinstance(experts, Mapping) and set(EXPERT_FIELDS) <= set(experts)):
        return settings
    try:
        folder = model_folder(settings["hf"]).absolute()
        base = read_shape(folder)
    except ValueError as error:
        raise ConfigError(f"model.hf: {error}") from error
    _check_weight_fields("model.", (*WEIGHT_FIELDS, *_LAYERS), settings, base, folder)
    if isinstance(delta, Mapping):
        plain = {name: getattr(DeltaConfig(), name) for name in DELTA_FIELDS}
        _check_weight_fields("model.delta.", DELTA_FIELDS, delta, plain | base["delta"], folder)
    if isinstance(experts, Mapping):
        of_weights = {**{name: getattr(ExpertsConfig(), name) for name in EXPERT_FIELDS}, **base["experts"]}
        _check_weight_fields("model.experts.", EXPERT_FIELDS, experts, of_weights, folder)
    is_given = isinstance(experts, Mapping) and "balance" in experts
    if base["experts"]["count"] and not base["experts"]["balance"] and not is_given:
        warnings.warn(BALANCE_OFF, stacklevel=2)
    return {**_fill(settings, base), "hf": str(folder)}


def _check_weight_fields(
    section: str, names: Iterable[str], settings: Mapping[str, Any], base: Mapping[str, Any], folder: Path
) -> None:
    """Refuses settings of a section that are not as in the weights of a folder."""
    for name in names:
        if name in settings and settings[name] != base[name]:
            raise ConfigError(
                f"{section}{name} must be {base[name]}, as in the weights of {folder}, got {settings[name]}; "
                f"remove {section}{name}"
            )


def _fill(settings: Mapping[str, Any], base: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns `settings` with the fields that it leaves out, also within the sections `rope`, `experts` and `delta`."""
    merged = {**base, **settings}
    for name in ("rope", "experts", "delta"):
        own, given = base.get(name), settings.get(name)
        if own is not None and given is None:
            merged[name] = own
        elif own is not None and isinstance(given, Mapping):
            merged[name] = {**own, **given}
    return merged
