"""A mixture of experts in place of a layer's MLP, local to a token.

Letters: T tokens, D hidden size, E experts, k experts of a token, F size of an expert, S size of the shared expert.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx

from sppo_jax.arrays.dtypes import accumulator, compute_dtype
from sppo_jax.models.moe import grouped, router

if TYPE_CHECKING:
    from sppo_jax.config.model import ModelConfig

# gpt-oss's constants.
_LIMIT, _SLOPE = 7.0, 1.702


def _swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    return jax.nn.silu(gate) * up


def _geglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    return jax.nn.gelu(gate, approximate=True) * up


def _clamped(gate: jax.Array, up: jax.Array) -> jax.Array:
    gate, up = jnp.minimum(gate, _LIMIT), jnp.clip(up, -_LIMIT, _LIMIT)
    return (up + 1) * gate * jax.nn.sigmoid(_SLOPE * gate)


ACTIVATIONS = {"swiglu": _swiglu, "geglu": _geglu, "clamped": _clamped}


class ExpertsMLP(nnx.Module):
    """A router, its experts, and an expert that every token passes if there is one."""

    def __init__(self, config: ModelConfig, residual_scale: float, *, rngs: nnx.Rngs):
        """Creates the parameters of one layer's experts.

        Args:
            config: the model's shape.
            residual_scale: standard deviation of the matrices whose products are added to the residual stream.
            rngs: source of random keys (stream `params`).
        """
        self.config = experts = config.experts
        self.dtype = compute_dtype(config.compute_dtype)
        stored = accumulator(self.dtype)
        hidden, count, size = config.hidden_size, experts.count, experts.size

        def normal(shape: tuple[int, ...], scale: float = config.init_scale) -> nnx.Param:
            return nnx.Param(scale * jax.random.normal(rngs.params(), shape, stored))

        def zeros(*shape: int) -> nnx.Param:
            return nnx.Param(jnp.zeros(shape, stored))

        self.router = normal((hidden, count))
        self.gate = normal((count, hidden, size))
        self.up = normal((count, hidden, size))
        self.down = normal((count, size, hidden), residual_scale)
        if experts.bias:
            self.router_bias, self.down_bias = zeros(count), zeros(count, hidden)
            self.gate_bias, self.up_bias = zeros(count, size), zeros(count, size)
        if experts.choice_bias:
            self.choice_bias = zeros(count)
        if experts.shared_size is not None:
            self.shared_gate = normal((hidden, experts.shared_size))
            self.shared_up = normal((hidden, experts.shared_size))
            self.shared_down = normal((experts.shared_size, hidden), residual_scale)
            if experts.shared_gate:
                self.shared_router = normal((hidden,))

    def _cast(self, param: nnx.Param) -> jax.Array:
        return param[...].astype(self.dtype)

    def _logits(self, h_TD: jax.Array) -> jax.Array:
        wide = accumulator(self.dtype)
        logits_TE = jnp.einsum("td,de->te", h_TD, self._cast(self.router), preferred_element_type=wide)
        return logits_TE + self.router_bias[...].astype(wide) if self.config.bias else logits_TE

    def choose(self, h_TD: jax.Array) -> jax.Array:
        """Returns the experts of each token, [T, k]."""
        bias_E = self.choice_bias[...] if self.config.choice_bias else None
        return router.choose(self._logits(h_TD), bias_E, self.config)

    def __call__(self, h_TD: jax.Array, chosen_Tk: jax.Array) -> tuple[jax.Array, router.Shares]:
        """Returns the experts' weighted outputs, and each token's shares of the layer's sums.

        Args:
            h_TD: normalized tokens.
            chosen_Tk: from `choose`.
        """
        logits_TE = self._logits(h_TD)
        weights_Tk = router.weigh(logits_TE, chosen_Tk, self.config)
        y_TD = grouped.mix(ACTIVATIONS[self.config.mlp], h_TD, weights_Tk, chosen_Tk, self._experts())
        if self.config.shared_size is not None:
            y_TD = y_TD + self._shared(h_TD)
        return y_TD, router.shares_of(logits_TE, chosen_Tk, self.config)

    def _experts(self) -> grouped.Experts:
        names = ("gate", "up", "down", *(("gate_bias", "up_bias", "down_bias") if self.config.bias else ()))
        return grouped.Experts(*(self._cast(getattr(self, name)) for name in names))

    def _shared(self, h_TD: jax.Array) -> jax.Array:
        gate_TS, up_TS = (h_TD @ self._cast(param) for param in (self.shared_gate, self.shared_up))
        out_TD = ACTIVATIONS[self.config.mlp](gate_TS, up_TS) @ self._cast(self.shared_down)
        if not self.config.shared_gate:
            return out_TD
        share_T = jnp.einsum(
            "td,d->t", h_TD, self._cast(self.shared_router), preferred_element_type=accumulator(self.dtype)
        )
        return out_TD * jax.nn.sigmoid(share_T)[:, None].astype(self.dtype)
