"""Rotary angles and scalings against formulas written out per pair."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from sppo_jax.config import RopeConfig
from sppo_jax.models.rotary import rotary_cos_sin, rotary_frequencies, rotate

HEAD_DIM = 16


def llama3_pair(base, rope):
    wavelength = 2 * math.pi / base
    if wavelength < rope.original_length / rope.high_freq_factor:
        return base
    if wavelength > rope.original_length / rope.low_freq_factor:
        return base / rope.factor
    smooth = (rope.original_length / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    return (1 - smooth) * base / rope.factor + smooth * base


def yarn_pair(pair, base, rope, head_dim):
    def pair_with(turns):
        return head_dim * math.log(rope.original_length / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    rounded = (math.floor, math.ceil) if rope.truncate else (float, float)
    low = max(rounded[0](pair_with(rope.beta_fast)), 0)
    high = min(rounded[1](pair_with(rope.beta_slow)), head_dim - 1)
    ramp = min(max((pair - low) / (high - low), 0.0), 1.0)
    return base / rope.factor * ramp + base * (1 - ramp)


def expected_frequency(pair, rope, head_dim):
    base = 1.0 / rope.theta ** (2 * pair / head_dim)
    if rope.scaling == "linear":
        return base / rope.factor
    if rope.scaling == "llama3":
        return llama3_pair(base, rope)
    if rope.scaling == "yarn":
        return yarn_pair(pair, base, rope, head_dim)
    return base


SCALINGS = {
    "none": RopeConfig(),
    "linear": RopeConfig(scaling="linear", factor=4.0),
    "llama3": RopeConfig(theta=500000.0, scaling="llama3", factor=8.0, original_length=8192),
    "yarn": RopeConfig(theta=1000000.0, scaling="yarn", factor=4.0, original_length=32768),
    "yarn-untruncated": RopeConfig(theta=150000.0, scaling="yarn", factor=4.0, original_length=4096, truncate=False),
}


@pytest.mark.parametrize("head_dim", [HEAD_DIM, 128])
@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_follow_the_written_formula(name, head_dim):
    rope = SCALINGS[name]
    frequency, amplitude = rotary_frequencies(rope, head_dim)
    expected = [expected_frequency(pair, rope, head_dim) for pair in range(head_dim // 2)]
    np.testing.assert_allclose(frequency, expected, rtol=1e-12)
    assert amplitude == pytest.approx(0.1 * math.log(4.0) + 1.0 if "yarn" in name else 1.0)


def test_scalings_differ_where_they_should():
    plain, _ = rotary_frequencies(RopeConfig(theta=500000.0), 128)
    scaled, _ = rotary_frequencies(SCALINGS["llama3"], 128)
    assert scaled[0] == plain[0]
    assert scaled[-1] == pytest.approx(plain[-1] / 8.0)
    between = (scaled < plain * 0.999) & (scaled > plain / 8.0 * 1.001)
    assert between.any()


@pytest.mark.parametrize("name", SCALINGS)
def test_angles_stay_accurate_at_millions_of_tokens(name):
    rope = SCALINGS[name]
    positions = np.array([0, 1, 4095, 4096, 131071, 1_000_003, 4_194_303], np.int32)
    frequency, amplitude = rotary_frequencies(rope, 128)
    angle = positions[:, None].astype(np.float64) * frequency
    cos, sin = rotary_cos_sin(jnp.asarray(positions), rope, 128, jnp.dtype(jnp.bfloat16))
    assert cos.dtype == sin.dtype == jnp.float32
    np.testing.assert_allclose(cos, amplitude * np.cos(angle), atol=1e-3)
    np.testing.assert_allclose(sin, amplitude * np.sin(angle), atol=1e-3)


def test_float64_angles_are_exact(x64):
    positions = np.array([3, 4_194_303], np.int32)
    frequency, _ = rotary_frequencies(RopeConfig(), HEAD_DIM)
    cos, _ = rotary_cos_sin(jnp.asarray(positions), RopeConfig(), HEAD_DIM, jnp.dtype(jnp.float64))
    assert cos.dtype == jnp.float64
    np.testing.assert_allclose(cos, np.cos(positions[:, None] * frequency), atol=1e-8)


def test_rotation_pairs_the_two_halves():
    angle = 0.7
    x = jnp.arange(8, dtype=jnp.float32).reshape(1, 2, 4)
    cos, sin = jnp.full((1, 2), math.cos(angle)), jnp.full((1, 2), math.sin(angle))
    first, second = np.asarray(x)[..., :2], np.asarray(x)[..., 2:]
    expected = np.concatenate(
        [first * math.cos(angle) - second * math.sin(angle), second * math.cos(angle) + first * math.sin(angle)], -1
    )
    np.testing.assert_allclose(rotate(x, cos, sin), expected, rtol=1e-6)


def test_scores_depend_on_distance_only():
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.normal(size=(1, 1, HEAD_DIM)), jnp.float32) for _ in range(2))

    def score(q_position, k_position):
        rotated = [
            rotate(x, *rotary_cos_sin(jnp.array([p], jnp.int32), RopeConfig(), HEAD_DIM, jnp.dtype(jnp.float32)))
            for x, p in ((q, q_position), (k, k_position))
        ]
        return float(jnp.sum(rotated[0] * rotated[1]))

    assert score(9, 4) == pytest.approx(score(1_000_005, 1_000_000), abs=1e-3)
