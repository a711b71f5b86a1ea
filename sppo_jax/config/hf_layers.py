"""Which layers of a Hugging Face model are of which kind; imports no jax."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sppo_jax.config.kinds import FULL, layers_text

# Layers without rotation, and layers with an MLP among those with experts.
UNROTATED, DENSE = "unrotated", "dense"
# Keys that an export writes.
KEYS = ("no_rope_layers", "no_rope_layer_interval", "layer_types", "mlp_only_layers", "decoder_sparse_step")


def layers_from_hf(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the `ModelConfig` fields `layers` and `kinds`: null and none where all layers are alike.

    Args:
        config: content of the config.json.

    Raises:
        ValueError: a key is of another length than the model.
    """
    if config["model_type"] == "qwen3_moe" and config.get("first_k_dense_replace"):
        raise ValueError(
            f"first_k_dense_replace must be 0 in a qwen3_moe, got {config['first_k_dense_replace']}; name the dense "
            "layers in mlp_only_layers"
        )
    names = [FULL] * config["num_hidden_layers"]
    kinds: dict[str, Any] = {}
    if config["model_type"] == "smollm3":
        names = [FULL if rotates else UNROTATED for rotates in _rotations(config)]
        kinds[UNROTATED] = {"rope": {"fraction": 0.0}}
    if config["model_type"] == "qwen3_moe":
        names = [DENSE if dense else FULL for dense in _dense_layers(config)]
        kinds[DENSE] = {"experts": {"count": 0}}
    used = {name: kind for name, kind in kinds.items() if name in names}
    return {"layers": layers_text(names), "kinds": used} if used else {"layers": None, "kinds": {}}


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
    plain, every = config.get("mlp_only_layers") or [], config.get("decoder_sparse_step", 1)
    return [number in plain or (number + 1) % every > 0 for number in range(config["num_hidden_layers"])]
