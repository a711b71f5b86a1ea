"""Builds the model that a config describes."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax
from flax import nnx

from sppo_jax.arrays.dtypes import compute_dtype
from sppo_jax.models.decoder import Decoder

if TYPE_CHECKING:
    from sppo_jax.config import Config


def build_model(config: Config, seed: int | None = None, *, abstract: bool = False) -> Decoder:
    """Creates the decoder of `config.model`, its compute dtype resolved for the devices at hand.

    Args:
        config: the whole configuration; only `model` and `train.seed` are read.
        seed: seed of the initial parameters; `config.train.seed` if left out.
        abstract: give shapes and dtypes instead of arrays, for models too big to hold here.

    Returns:
        The decoder; `model(tokens)` is the dense reference.

    Raises:
        ValueError: float64 without jax's 64-bit mode.
    """
    dtype = compute_dtype(config.model.compute_dtype)
    if dtype == "float64" and not jax.config.jax_enable_x64:
        raise ValueError(
            "model.compute_dtype=float64 must have jax's 64-bit mode, got the mode off; set JAX_ENABLE_X64=1, or use "
            "float32"
        )
    shape = dataclasses.replace(config.model, compute_dtype=dtype.name)
    seed = config.train.seed if seed is None else seed

    def create() -> Decoder:
        return Decoder(shape, rngs=nnx.Rngs(params=seed))

    return nnx.eval_shape(create) if abstract else create()
