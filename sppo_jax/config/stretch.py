"""What a model needs for sequences beyond its positions: another scaling, another base, or nothing; imports no jax."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sppo_jax.config.hf.families import read_config, read_num_positions, read_shape
from sppo_jax.config.hf.positions import PRESET_POSITIONS, trained_length
from sppo_jax.config.hf.rope import scaled_length
from sppo_jax.config.presets import PRESETS
from sppo_jax.config.rope import RopeConfig
from sppo_jax.files.paths import local_path

if TYPE_CHECKING:
    from sppo_jax.config.model import ModelConfig
    from sppo_jax.config.sections import Config


@dataclass(frozen=True, kw_only=True)
class Published:
    """What is published of the positions of a model.

    Args:
        name: of the model: its folder, or its preset.
        rope: rotary settings of its layers without a window.
        num_positions: its `max_position_embeddings`, in tokens.
        trained: tokens of the sequences of its pre-training.
    """

    name: str
    rope: RopeConfig
    num_positions: int
    trained: int


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """What sequences beyond the positions of a model need.

    Args:
        known: tokens of the longest sequence for which the model is meant as it is set.
        name: of the model.
        settings: settings of `model.rope` to change; none where the sequences need nothing.
        why: a sentence.
    """

    known: int
    name: str
    settings: Mapping[str, Any]
    why: str

    @property
    def overrides(self) -> str:
        """The settings as words of a command."""
        return " ".join(f"model.rope.{name}={_text(value)}" for name, value in self.settings.items())


def warn_beyond_length(config: Config) -> None:
    """Warns if the sequences are longer than the model's positions, and names the settings that would do.

    A base that differs from the published one is another way to train on longer sequences, so it ends the warning. A
    run that continues without its folder is not warned.

    Args:
        config: all settings.
    """
    needed = stretch(config)
    if needed is None or not needed.settings:
        return
    other = "" if "theta" in needed.settings else ", or raise model.rope.theta"
    warnings.warn(
        f"sequence.length should be at most {needed.known}, the positions of {needed.name} with "
        f"model.rope.scaling={config.model.rope.scaling}, got {config.sequence.length}; set {needed.overrides}{other}",
        stacklevel=2,
    )


def stretch(config: Config) -> Stretch | None:
    """Returns what the sequences need; None where the model's positions suffice, or are not known.

    Args:
        config: all settings.
    """
    published, now, length = _published(config.model), config.model.rope, config.sequence.length
    if published is None or now.theta != published.rope.theta:
        return None
    known = _known(published, now)
    if length <= known:
        return None
    settings, why = _needed(config.model, published, length, known)
    return Stretch(known=known, name=published.name, settings=settings, why=why)


def _published(model: ModelConfig) -> Published | None:
    if model.hf is not None:
        try:
            folder = local_path(model.hf, "model.hf")
            rope, num_positions = RopeConfig(**read_shape(folder)["rope"]), read_num_positions(folder)
            model_type = read_config(folder)["model_type"]
        except ValueError:
            return None
        name = str(folder)
    elif model.preset in PRESET_POSITIONS:
        model_type, num_positions = PRESET_POSITIONS[str(model.preset)]
        name, rope = f"preset {model.preset}", RopeConfig(**PRESETS[str(model.preset)]["rope"])
    else:
        return None
    return Published(
        name=name, rope=rope, num_positions=num_positions, trained=trained_length(model_type, num_positions)
    )


def _known(published: Published, now: RopeConfig) -> int:
    """Returns the longest sequence for which a model is meant with the scaling that is set, in tokens."""
    if published.rope.scaling == now.scaling:
        known = int(published.num_positions * now.factor / published.rope.factor)
        # A file's positions may be those before the scaling.
        return max(known, scaled_length(now)) if now.scaling == "yarn" else known
    scaled = scaled_length(now) if now.scaling == "yarn" else int(published.trained * now.factor)
    return max(published.num_positions, scaled)


def _needed(model: ModelConfig, published: Published, length: int, known: int) -> tuple[dict[str, Any], str]:
    """Returns the settings of `model.rope` that sequences beyond the known length need, and why."""
    now, trained = model.rope, published.trained
    layer_types = [model.of_type(name) for name in dict.fromkeys(model.type_names)]
    rotating = [one for one in layer_types if one.mixer == "attention" and one.rope.fraction > 0]
    if all(layer_type.sliding_window for layer_type in rotating):
        return {}, "rope is not scaled: every layer that rotates has a window, so no distance is beyond the positions"
    beyond = f"{length:,} tokens are beyond the {known:,} for which the model is meant"
    if now.scaling != "none":
        factor = math.ceil(now.factor * length / known)
        return {"scaling": now.scaling, "factor": factor}, (
            f"rope keeps the model's scaling {now.scaling}, with factor {factor} in place of {now.factor:g}: {beyond}"
        )
    factor = math.ceil(length / trained)
    if any(layer_type.sliding_window and layer_type.rope == now for layer_type in rotating):
        theta = _raised(now.theta, factor, int(model.head_dim * now.fraction))
        return {"theta": theta}, (
            f"rope.theta is raised: {beyond}, and yarn would also stretch the layers with a window, which rotate alike"
        )
    return {"scaling": "yarn", "factor": factor, "original_length": trained}, (
        f"rope has yarn with factor {factor}: {beyond}, and its pre-training had {trained:,}"
    )


def _raised(theta: float, factor: int, num_rotated: int) -> float:
    """Returns the base with which the slowest of the rotations is slower by a factor."""
    return float(f"{theta * factor ** (num_rotated / max(num_rotated - 2, 1)):.3g}")


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
