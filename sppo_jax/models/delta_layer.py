"""A decoder layer with the gated delta rule in place of attention.

Shape letters: T tokens, D hidden size, G key heads, N value heads, K key size, V value size, W taps.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import nnx

from sppo_jax.arrays.dtypes import accumulator
from sppo_jax.mixers.delta import GatedDelta, Heads, Taps
from sppo_jax.mixers.mixer import Operands
from sppo_jax.models.layers import DecoderLayer, ExpertsLayer, RMSNorm, normal_param

# Initial decays as in Mamba 2: rates up to 16, times steps between these two.
_RATE, _STEPS = 16.0, (0.001, 0.1)


class DeltaLayer(DecoderLayer):
    """A decoder layer with the gated delta rule, whose output is normalised head by head and gated."""

    def _create_mixer(self, residual_scale: float, rngs: nnx.Rngs) -> None:
        config, delta = self.config, self.config.delta
        hidden, scale, stored = config.hidden_size, config.init_scale, accumulator(self.dtype)
        keys, values = (delta.key_heads, delta.key_size), (delta.value_heads, delta.value_size)
        self.mixer = GatedDelta(reach=max(1, delta.taps - 1))
        self.query = normal_param(rngs, (hidden, *keys), scale, stored)
        self.key = normal_param(rngs, (hidden, *keys), scale, stored)
        self.value = normal_param(rngs, (hidden, *values), scale, stored)
        self.output_gate = normal_param(rngs, (hidden, *values), scale, stored)
        self.output = normal_param(rngs, (*values, hidden), residual_scale, stored)
        self.write = normal_param(rngs, (hidden, delta.value_heads), scale, stored)
        self.decay = normal_param(rngs, (hidden, delta.value_heads), scale, stored)
        self.decay_log, self.decay_bias = _decays(rngs, delta.value_heads, stored)
        for name, of in (("query_taps", keys), ("key_taps", keys), ("value_taps", values)):
            setattr(self, name, _uniform(rngs, (*of, delta.taps), delta.taps**-0.5, stored))
        if config.output_bias:
            self.output_bias = nnx.Param(jnp.zeros((hidden,), stored))
        # Its scale is one at first, also where the model's norms multiply by 1 + scale.
        self.delta_norm = RMSNorm(delta.value_size, eps=config.norm_eps, dtype=stored)

    def before_attention(self, x_TD: jax.Array, positions_T: jax.Array) -> Operands:
        """Projects tokens to what the mixer takes.

        Args:
            x_TD: the residual stream.
            positions_T: not read: the rule knows the order of tokens.

        Returns:
            `Heads` and, as constants, `Taps`: decays in at least float32, all else in the compute dtype.
        """
        h_TD, wide = self._attention_input(x_TD), accumulator(self.dtype)
        q_TGK, k_TGK, v_TNV = (
            jnp.einsum("...td,dnh->...tnh", h_TD, self._cast(param)) for param in (self.query, self.key, self.value)
        )
        step_TN, write_TN = (
            jnp.einsum("...td,dn->...tn", h_TD, self._cast(param), preferred_element_type=wide)
            for param in (self.decay, self.write)
        )
        rate_N, bias_N = (param[...].astype(wide) for param in (self.decay_log, self.decay_bias))
        g_TN = -jnp.exp(rate_N) * jax.nn.softplus(step_TN + bias_N)
        taps = Taps(*(self._cast(param) for param in (self.query_taps, self.key_taps, self.value_taps)))
        return Operands(Heads(q_TGK, k_TGK, v_TNV, g_TN, jax.nn.sigmoid(write_TN)), taps)

    def _gated(self, x_TD: jax.Array, out_TNV: jax.Array) -> jax.Array:
        wide = accumulator(self.dtype)
        gate_TNV = jnp.einsum("...td,dnv->...tnv", self._attention_input(x_TD), self._cast(self.output_gate))
        normed_TNV = self.delta_norm(out_TNV.astype(wide))
        return (normed_TNV * jax.nn.silu(gate_TNV.astype(wide))).astype(self.dtype)


class DeltaExpertsLayer(ExpertsLayer, DeltaLayer):
    """A layer with the gated delta rule and a mixture of experts."""


def _uniform(rngs: nnx.Rngs, shape: tuple[int, ...], limit: float, dtype: jnp.dtype) -> nnx.Param:
    return nnx.Param(jax.random.uniform(rngs.params(), shape, dtype, -limit, limit))


def _decays(rngs: nnx.Rngs, heads: int, dtype: jnp.dtype) -> tuple[nnx.Param, nnx.Param]:
    """Draws the logarithms of decay rates, and the biases of steps, whose softplus is a step."""
    rate_N = jax.random.uniform(rngs.params(), (heads,), dtype, 1.0, _RATE)
    low, high = (math.log(step) for step in _STEPS)
    step_N = jnp.exp(jax.random.uniform(rngs.params(), (heads,), dtype, low, high))
    return nnx.Param(jnp.log(rate_N)), nnx.Param(step_N + jnp.log(-jnp.expm1(-step_N)))
