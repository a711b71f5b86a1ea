"""Rotary position embedding in the half-split convention, with the scalings of long-context checkpoints.

Shape letters: T tokens, N heads, H head size, R rotated pairs: H / 2, or fewer where a part of a head is rotated.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from sppo_jax.arrays.dtypes import accumulator

if TYPE_CHECKING:
    from sppo_jax.config.rope import RopeConfig

# Positions are split at this period: 4096 times a frequency still has a fraction of a milliradian of error in float32.
_PERIOD_TOKENS = 4096


def _llama3_frequencies(rope: RopeConfig, frequency_R: np.ndarray) -> np.ndarray:
    """Divides slow frequencies by `factor`, keeps fast frequencies, and blends those between (Llama 3.1's rule)."""
    turns_R = rope.original_length * frequency_R / (2.0 * np.pi)
    blend_R = (turns_R - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend_R = np.clip(blend_R, 0.0, 1.0)
    return frequency_R * (blend_R + (1.0 - blend_R) / rope.factor)


def _yarn_frequencies(rope: RopeConfig, frequency_R: np.ndarray) -> np.ndarray:
    """Divides frequencies by `factor` along a ramp over the pair index (YaRN, arXiv 2309.00071, section 3.2)."""
    head_dim = 2 * frequency_R.size

    def pair_turning(turns: float) -> float:
        length = rope.original_length / (turns * 2.0 * math.pi)
        return head_dim * math.log(length) / (2.0 * math.log(rope.theta))

    low, high = pair_turning(rope.beta_fast), pair_turning(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    # The checkpoints' reference code avoids a ramp of no width by this amount.
    width = high - low if high != low else 0.001
    ramp_R = np.clip((np.arange(frequency_R.size) - low) / width, 0.0, 1.0)
    return frequency_R * (1.0 - ramp_R + ramp_R / rope.factor)


def rotated_size(rope: RopeConfig, head_dim: int) -> int:
    """Returns the elements of a head that are rotated, an even number."""
    return int(head_dim * rope.fraction) // 2 * 2


def rotary_frequencies(rope: RopeConfig, head_dim: int) -> tuple[np.ndarray, float]:
    """Computes the angular frequency of every rotated pair and the amplitude of the rotation.

    Args:
        rope: base, scaling and its parameters.
        head_dim: elements that are rotated, even.

    Returns:
        frequency_R in radians a token, float64; and the factor on cos and sin (1 except for YaRN).
    """
    frequency_R = rope.theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if rope.scaling == "none":
        return frequency_R, 1.0
    if rope.scaling == "linear":
        return frequency_R / rope.factor, 1.0
    if rope.scaling == "llama3":
        return _llama3_frequencies(rope, frequency_R), 1.0
    amplitude = 0.1 * math.log(rope.factor) + 1.0
    return _yarn_frequencies(rope, frequency_R), amplitude


def rotary_cos_sin(
    positions_T: jax.Array, rope: RopeConfig, head_dim: int, dtype: jnp.dtype
) -> tuple[jax.Array, jax.Array]:
    """Computes cos and sin of the rotation angle of every token and pair.

    Args:
        positions_T: integer positions, any leading dimensions.
        rope: base and scaling.
        head_dim: elements of a head that are rotated.
        dtype: the compute dtype; angles are formed in float64 if it is float64, else in float32.

    Returns:
        cos_TR and sin_TR in at least float32.
    """
    frequency_R, amplitude = rotary_frequencies(rope, head_dim)
    wide = accumulator(dtype)
    # In float32 the product of a position of millions with a frequency near one is off by a tenth of a radian. Split
    # the position, and take whole turns out of the coarse step while it is still a float64 constant.
    coarse_R = np.remainder(_PERIOD_TOKENS * frequency_R + np.pi, 2.0 * np.pi) - np.pi
    coarse_T1 = (positions_T // _PERIOD_TOKENS).astype(wide)[..., None]
    fine_T1 = (positions_T % _PERIOD_TOKENS).astype(wide)[..., None]
    angle_TR = coarse_T1 * jnp.asarray(coarse_R, wide) + fine_T1 * jnp.asarray(frequency_R, wide)
    return amplitude * jnp.cos(angle_TR), amplitude * jnp.sin(angle_TR)


def rotate(x_TNH: jax.Array, cos_TR: jax.Array, sin_TR: jax.Array) -> jax.Array:
    """Rotates pair r, made of elements r and r + R of every head, by the angle of the token; leaves what is behind.

    Args:
        x_TNH: queries or keys, any leading dimensions.
        cos_TR: cosines in at least float32.
        sin_TR: sines, likewise.

    Returns:
        The rotated heads in the dtype of `x_TNH`.
    """
    size = 2 * cos_TR.shape[-1]
    if size < x_TNH.shape[-1]:
        return jnp.concatenate([rotate(x_TNH[..., :size], cos_TR, sin_TR), x_TNH[..., size:]], axis=-1)
    cos_T1R, sin_T1R = cos_TR[..., None, :], sin_TR[..., None, :]
    first_TNR, second_TNR = jnp.split(x_TNH.astype(cos_TR.dtype), 2, axis=-1)
    rotated_TNH = jnp.concatenate(
        [first_TNR * cos_T1R - second_TNR * sin_T1R, second_TNR * cos_T1R + first_TNR * sin_T1R], axis=-1
    )
    return rotated_TNH.astype(x_TNH.dtype)
