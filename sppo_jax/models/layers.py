"""The decoder layer: everything around attention, local to a token.

`before_attention` and `after_attention` are the whole protocol between a layer and the trainer: attention itself is
not theirs. Both accept any leading dimensions and must not mix tokens or communicate.

Where a layer has a mixer with a state in place of attention, `before_attention` returns this mixer's operands
(`mixers.mixer`); `models.delta_layer` is such a layer.

The attribute `mixer` of a layer says how far its attention reaches (`attention.mixer.Attention`). A layer with sinks
(`attention.sinks`) returns their scores as the fourth result of `before_attention`.

A layer that chooses, such as one with experts, has a third method: `choose(x, out)` returns integers of each token,
which `after_attention(x, out, choices)` gets again in the backward. A layer may return shares beside its output, which
the trainer adds up over tokens; the layer's attribute `penalty` is the loss of these sums (`Penalty` of
`models.moe.balance`).

Shape letters: T tokens, D hidden size, N query heads, K key and value heads, H head size, F MLP size, k experts of a
token.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx

from sppo_jax.arrays.dtypes import accumulator, compute_dtype
from sppo_jax.attention.mixer import Attention
from sppo_jax.models.moe.balance import Balance
from sppo_jax.models.moe.experts import ACTIVATIONS, ExpertsMLP
from sppo_jax.models.moe.router import Shares
from sppo_jax.models.rotary import rotary_cos_sin, rotate, rotated_size

if TYPE_CHECKING:
    from sppo_jax.config.model import ModelConfig


def normal_param(rngs: nnx.Rngs, shape: tuple[int, ...], scale: float, dtype: jnp.dtype) -> nnx.Param:
    """Draws a parameter of `shape` from a normal distribution with standard deviation `scale`."""
    return nnx.Param(scale * jax.random.normal(rngs.params(), shape, dtype))


class RMSNorm(nnx.Module):
    """Divide the last axis by its root mean square and multiply it by a learnt scale, or by 1 plus this scale."""

    def __init__(self, size: int, *, eps: float, dtype: jnp.dtype, unit: bool = False):
        """Creates the scale.

        Args:
            size: length of the normalised axis.
            eps: added to the mean square.
            dtype: dtype of the scale parameter.
            unit: whether 1 is added to the scale, which then starts at 0.
        """
        self.eps, self.unit = eps, unit
        self.scale = nnx.Param(jnp.zeros((size,), dtype) if unit else jnp.ones((size,), dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalises the last axis, with statistics in at least float32; the result has the dtype of `x`."""
        wide = x.astype(accumulator(x.dtype))
        mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
        scale = self.scale[...].astype(wide.dtype)
        scale = 1 + scale if self.unit else scale
        return (wide * jax.lax.rsqrt(mean_square + self.eps) * scale).astype(x.dtype)


def norm_of(config: ModelConfig, size: int) -> RMSNorm:
    """Returns a norm of so many elements with the settings of a model."""
    stored = accumulator(compute_dtype(config.compute_dtype))
    return RMSNorm(size, eps=config.norm_eps, dtype=stored, unit=config.unit_norm)


class DecoderLayer(nnx.Module):
    """A layer with grouped-query attention, rotary positions and an MLP, each with a norm before, behind, or both."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        """Creates the parameters of one layer.

        Args:
            config: the model's shape.
            rngs: source of random keys (stream `params`).
        """
        self.config = config
        self.dtype = compute_dtype(config.compute_dtype)
        # Each layer adds twice to the residual stream; this keeps its variance independent of depth.
        residual_scale = config.init_scale / math.sqrt(2 * config.num_layers)
        if config.norms != "behind":
            self.attention_norm = norm_of(config, config.hidden_size)
        self._create_mixer(residual_scale, rngs)
        if config.norms != "before":
            self.attention_out_norm = norm_of(config, config.hidden_size)
            self.mlp_out_norm = norm_of(config, config.hidden_size)
        if config.norms != "behind":
            self.mlp_norm = norm_of(config, config.hidden_size)
        self._create_mlp(residual_scale, rngs)

    def _create_mixer(self, residual_scale: float, rngs: nnx.Rngs) -> None:
        config, stored, scale = self.config, accumulator(self.dtype), self.config.init_scale
        hidden, size = config.hidden_size, config.head_dim
        self.mixer = Attention(window=config.sliding_window or 0)
        self.query = normal_param(rngs, (hidden, config.num_heads, size), scale, stored)
        self.key = normal_param(rngs, (hidden, config.num_kv_heads, size), scale, stored)
        self.value = normal_param(rngs, (hidden, config.num_kv_heads, size), scale, stored)
        self.output = normal_param(rngs, (config.num_heads, size, hidden), residual_scale, stored)
        if config.output_gate:
            self.output_gate = normal_param(rngs, (hidden, config.num_heads, size), scale, stored)
        if config.qkv_bias:
            self.query_bias = nnx.Param(jnp.zeros((config.num_heads, size), stored))
            self.key_bias = nnx.Param(jnp.zeros((config.num_kv_heads, size), stored))
            self.value_bias = nnx.Param(jnp.zeros((config.num_kv_heads, size), stored))
        if config.output_bias:
            self.output_bias = nnx.Param(jnp.zeros((hidden,), stored))
        if config.sinks:
            self.sinks = normal_param(rngs, (config.num_heads,), scale, stored)
        if config.qk_norm:
            of_query, of_key = (config.num_heads, config.num_kv_heads) if config.qk_norm_over_heads else (1, 1)
            self.query_norm, self.key_norm = norm_of(config, of_query * size), norm_of(config, of_key * size)

    def _create_mlp(self, residual_scale: float, rngs: nnx.Rngs) -> None:
        config, stored = self.config, accumulator(self.dtype)
        shape = (config.hidden_size, config.mlp_size)
        if config.mlp != "gelu":
            self.gate = normal_param(rngs, shape, config.init_scale, stored)
        self.up = normal_param(rngs, shape, config.init_scale, stored)
        self.down = normal_param(rngs, shape[::-1], residual_scale, stored)

    def _cast(self, param: nnx.Param) -> jax.Array:
        return param[...].astype(self.dtype)

    def _attention_input(self, x_TD: jax.Array) -> jax.Array:
        h_TD = x_TD.astype(self.dtype)
        return h_TD if self.config.norms == "behind" else self.attention_norm(h_TD)

    def before_attention(self, x_TD: jax.Array, positions_T: jax.Array) -> Any:
        """Projects tokens to rotated queries and keys, and to values.

        Args:
            x_TD: the residual stream.
            positions_T: integer positions within each document.

        Returns:
            q_TNH, k_TKH and v_TKH in the compute dtype; with sinks also their scores sinks_N, as they are stored.
        """
        h_TD = self._attention_input(x_TD)
        q_TNH = jnp.einsum("...td,dnh->...tnh", h_TD, self._cast(self.query))
        k_TKH = jnp.einsum("...td,dkh->...tkh", h_TD, self._cast(self.key))
        v_TKH = jnp.einsum("...td,dkh->...tkh", h_TD, self._cast(self.value))
        if self.config.qkv_bias:
            q_TNH = q_TNH + self._cast(self.query_bias)
            k_TKH = k_TKH + self._cast(self.key_bias)
            v_TKH = v_TKH + self._cast(self.value_bias)
        if self.config.qk_norm:
            q_TNH, k_TKH = self._normalized(self.query_norm, q_TNH), self._normalized(self.key_norm, k_TKH)
        if self.config.query_scale is not None:
            # Kernels divide by the root of the head size. A factor in the compute dtype would be rounded.
            factor = self.config.query_scale * math.sqrt(self.config.head_dim)
            q_TNH = (q_TNH.astype(accumulator(self.dtype)) * factor).astype(self.dtype)
        if size := rotated_size(self.config.rope, q_TNH.shape[-1]):
            cos_TR, sin_TR = rotary_cos_sin(positions_T, self.config.rope, size, self.dtype)
            q_TNH, k_TKH = rotate(q_TNH, cos_TR, sin_TR), rotate(k_TKH, cos_TR, sin_TR)
        return (q_TNH, k_TKH, v_TKH, self.sinks[...]) if self.config.sinks else (q_TNH, k_TKH, v_TKH)

    def _normalized(self, norm: RMSNorm, x_TNH: jax.Array) -> jax.Array:
        """Normalizes heads, each by itself or all of a token together."""
        if not self.config.qk_norm_over_heads:
            return norm(x_TNH)
        return norm(x_TNH.reshape(*x_TNH.shape[:-2], -1)).reshape(x_TNH.shape)

    def after_attention(self, x_TD: jax.Array, out_TNH: jax.Array) -> jax.Array:
        """Adds the projected attention output and the MLP to the residual stream.

        Args:
            x_TD: what `before_attention` was given.
            out_TNH: the attention output.

        Returns:
            y_TD, the next layer's input, in the compute dtype.
        """
        x_TD = self._add_attention(x_TD, out_TNH)
        return self._add_mlp(x_TD, self._mlp(self._mlp_input(x_TD)))

    def _add_attention(self, x_TD: jax.Array, out_TNH: jax.Array) -> jax.Array:
        gated_TNH = self._gated(x_TD, out_TNH.astype(self.dtype))
        attended_TD = jnp.einsum("...tnh,nhd->...td", gated_TNH, self._cast(self.output))
        if self.config.output_bias:
            attended_TD = attended_TD + self._cast(self.output_bias)
        if self.config.norms != "before":
            attended_TD = self.attention_out_norm(attended_TD)
        return x_TD.astype(self.dtype) + attended_TD

    def _gated(self, x_TD: jax.Array, out_TNH: jax.Array) -> jax.Array:
        if not self.config.output_gate:
            return out_TNH
        # Not in `before_attention`: the gates would have to wait for the output.
        gate_TNH = jnp.einsum("...td,dnh->...tnh", self._attention_input(x_TD), self._cast(self.output_gate))
        return out_TNH * jax.nn.sigmoid(gate_TNH)

    def _mlp_input(self, x_TD: jax.Array) -> jax.Array:
        return x_TD if self.config.norms == "behind" else self.mlp_norm(x_TD)

    def _add_mlp(self, x_TD: jax.Array, y_TD: jax.Array) -> jax.Array:
        return x_TD + (y_TD if self.config.norms == "before" else self.mlp_out_norm(y_TD))

    def _mlp(self, h_TD: jax.Array) -> jax.Array:
        up_TF = jnp.einsum("...td,df->...tf", h_TD, self._cast(self.up))
        if self.config.mlp == "gelu":
            inner_TF = jax.nn.gelu(up_TF, approximate=True)
        else:
            gate_TF = jnp.einsum("...td,df->...tf", h_TD, self._cast(self.gate))
            inner_TF = ACTIVATIONS[self.config.mlp](gate_TF, up_TF)
        return jnp.einsum("...tf,fd->...td", inner_TF, self._cast(self.down))


class ExpertsLayer(DecoderLayer):
    """A decoder layer with a mixture of experts in place of its MLP."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        """Creates the parameters of one layer; arguments as `DecoderLayer`."""
        super().__init__(config, rngs=rngs)
        self.penalty = Balance.of(config.experts)

    def _create_mlp(self, residual_scale: float, rngs: nnx.Rngs) -> None:
        self.experts = ExpertsMLP(self.config, residual_scale, rngs=rngs)

    def choose(self, x_TD: jax.Array, out_TNH: jax.Array) -> jax.Array:
        """Returns the experts of each token, chosen_Tk, as integers.

        Args:
            x_TD: what `before_attention` was given.
            out_TNH: the attention output.
        """
        h_TD = self._mlp_input(self._add_attention(x_TD, out_TNH))
        return self.experts.choose(h_TD.reshape(-1, h_TD.shape[-1])).reshape(*h_TD.shape[:-1], -1)

    def after_attention(self, x_TD: jax.Array, out_TNH: jax.Array, chosen_Tk: jax.Array) -> tuple[jax.Array, Shares]:
        """Adds the projected attention output and the experts' outputs to the residual stream.

        Args:
            x_TD: what `before_attention` was given.
            out_TNH: the attention output.
            chosen_Tk: from `choose`.

        Returns:
            y_TD, the next layer's input, in the compute dtype; and each token's shares of the layer's sums.
        """
        x_TD = self._add_attention(x_TD, out_TNH)
        lead, hidden = x_TD.shape[:-1], x_TD.shape[-1]
        h_TD, chosen_Tk = self._mlp_input(x_TD).reshape(-1, hidden), chosen_Tk.reshape(-1, chosen_Tk.shape[-1])
        y, shares = self.experts(h_TD, chosen_Tk)
        y_TD = self._add_mlp(x_TD, y.reshape(x_TD.shape))
        return y_TD, jax.tree.map(lambda a: a.reshape(*lead, *a.shape[1:]), shares)
