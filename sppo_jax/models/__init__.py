"""Decoder models: Flax NNX modules, their named shapes and their parameter counts.

The modules that need jax are imported on first use, so that the planner can read shapes and counts without it.
"""

import importlib
from typing import TYPE_CHECKING, Any

from sppo_jax.config.presets import PRESETS, apply_preset
from sppo_jax.models.counts import layer_params, num_params

if TYPE_CHECKING:  # a type checker reads these lines
    from sppo_jax.models.build import build_model
    from sppo_jax.models.decoder import Decoder
    from sppo_jax.models.dense import dense_loss, dense_value_and_grad
    from sppo_jax.models.hf.read import from_hf, load_hf_params
    from sppo_jax.models.hf.write import to_hf
    from sppo_jax.models.layers import DecoderLayer, RMSNorm
    from sppo_jax.models.rotary import rotary_cos_sin, rotate

_LAZY = {
    "Decoder": "decoder",
    "DecoderLayer": "layers",
    "RMSNorm": "layers",
    "build_model": "build",
    "from_hf": "hf.read",
    "load_hf_params": "hf.read",
    "to_hf": "hf.write",
    "dense_loss": "dense",
    "dense_value_and_grad": "dense",
    "rotary_cos_sin": "rotary",
    "rotate": "rotary",
}

__all__ = [
    "PRESETS",
    "Decoder",
    "DecoderLayer",
    "RMSNorm",
    "apply_preset",
    "build_model",
    "dense_loss",
    "dense_value_and_grad",
    "from_hf",
    "layer_params",
    "load_hf_params",
    "num_params",
    "rotary_cos_sin",
    "rotate",
    "to_hf",
]


def __getattr__(name: str) -> Any:
    """Imports a jax-based public name when it is first asked for."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
