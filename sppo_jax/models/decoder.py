"""The decoder: embedding, stacked layers, final norm and head; called, it is the dense single-device reference.

Shape letters: B sequences, S tokens of a sequence, V vocabulary, D hidden size, L layers.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from sppo_jax.arrays.dtypes import accumulator, compute_dtype
from sppo_jax.attention.dense import dense_attention
from sppo_jax.attention.mixer import mixer_of
from sppo_jax.mixers.dense import mix_sequences
from sppo_jax.mixers.mixer import Operands
from sppo_jax.models.layer_classes import layer_of
from sppo_jax.models.layers import norm_of, normal_param
from sppo_jax.models.stacks import LayerStacks, scan_layers, stack_names, stacks_of

if TYPE_CHECKING:
    from sppo_jax.config.model import ModelConfig


class LayerFactory(Protocol):
    """What makes one layer: a module class with `before_attention` and `after_attention`."""

    def __call__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> nnx.Module: ...


def sum_real(x: jax.Array, is_real: jax.Array) -> jax.Array:
    """Returns the sum of [..., T, ...] over the tokens T that `is_real` [..., T] marks, in at least float32."""
    mask = is_real.reshape(*is_real.shape, *[1] * (x.ndim - is_real.ndim))
    return jnp.sum(jnp.where(mask, x, 0), axis=is_real.ndim - 1, dtype=accumulator(x.dtype))


def scaled(x_TD: jax.Array, scale: float) -> jax.Array:
    """Returns embeddings times a number, which is rounded to their dtype."""
    return x_TD if scale == 1 else x_TD * jnp.asarray(scale, x_TD.dtype)


def capped(logits_TV: jax.Array, cap: float) -> jax.Array:
    """Returns logits that come no further from zero than a cap; 0: none."""
    return cap * jnp.tanh(logits_TV / cap) if cap else logits_TV


def stack_layers(config: ModelConfig, num_layers: int, *, rngs: nnx.Rngs, layer: LayerFactory) -> nnx.Module:
    """Creates so many layers as one module whose parameters have a leading axis L."""

    @nnx.split_rngs(splits=num_layers)
    @nnx.vmap(in_axes=0, out_axes=0)
    def create(rngs: nnx.Rngs) -> nnx.Module:
        return layer(config, rngs=rngs)

    return create(rngs)


def create_layers(config: ModelConfig, *, rngs: nnx.Rngs, layer: LayerFactory | None) -> nnx.Module:
    """Creates all layers: one stack where they are of one type, else `LayerStacks`."""
    names, of_types = config.type_names, {}
    for name in dict.fromkeys(names):
        of_type = config.of_type(name)
        of_types[name] = stack_layers(of_type, names.count(name), rngs=rngs, layer=layer or layer_of(of_type))
    if len(of_types) == 1:
        return of_types.popitem()[1]
    stacks = {name: {one: of_types[one] for one in layer_types} for name, layer_types in config.stacks.items()}
    return LayerStacks(stacks, names)


class Decoder(nnx.Module):
    """A decoder-only language model over any layer that keeps the two-method protocol.

    Attributes:
        embedding: [V, D].
        layers: one module, its parameters stacked to [L, ...]; where layers are of several types, a stack of each.
        final_norm: the norm before the head.
        head: [D, V], or None where the embedding serves as head too.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, layer: LayerFactory | None = None):
        """Creates all parameters, float32 unless the compute dtype is float64.

        Args:
            config: the model's shape.
            rngs: source of random keys (stream `params`).
            layer: makes one layer, `layer(config, rngs=rngs)`, where `config` is that of the layer's type; None: the
                layer of the config.
        """
        self.config = config
        self.dtype = compute_dtype(config.compute_dtype)
        stored = accumulator(self.dtype)
        self.embedding = normal_param(rngs, (config.vocab_size, config.hidden_size), config.init_scale, stored)
        self.layers = create_layers(config, rngs=rngs, layer=layer)
        self.final_norm = norm_of(config, config.hidden_size)
        if config.tied_embeddings:
            self.head = None
        else:
            self.head = normal_param(rngs, (config.hidden_size, config.vocab_size), config.init_scale, stored)

    def hidden_states(
        self,
        tokens_BS: jax.Array,
        positions_BS: jax.Array,
        document_ids_BS: jax.Array,
        *,
        checkpoint_layers: bool = False,
    ) -> jax.Array:
        """Runs embedding and layers, without the final norm; arguments as `hidden_states_and_sums`.

        Returns:
            x_BSD, the residual stream after the last layer, in the compute dtype.
        """
        return self.hidden_states_and_sums(
            tokens_BS, positions_BS, document_ids_BS, checkpoint_layers=checkpoint_layers
        )[0]

    def hidden_states_and_sums(
        self,
        tokens_BS: jax.Array,
        positions_BS: jax.Array,
        document_ids_BS: jax.Array,
        *,
        checkpoint_layers: bool = False,
    ) -> tuple[jax.Array, Any]:
        """Runs embedding and layers, and adds up the shares that layers return for each token.

        Args:
            tokens_BS: token ids.
            positions_BS: positions within each document.
            document_ids_BS: documents, non-decreasing along a sequence; -1 is padding.
            checkpoint_layers: keep only each layer's input for the backward pass and recompute the rest.

        Returns:
            x_BSD, the residual stream after the last layer, in the compute dtype; and the sums over the real tokens of
            each sequence, a tree of arrays [L, B, ...], or None where layers return no shares. Of several types the
            layers that return shares are in the order of their stacks.
        """
        stacks = {layer_type: nnx.split(stack) for layer_type, stack in stacks_of(self.layers).items()}
        is_real_BS = document_ids_BS >= 0

        def run_layer(layer_type: str | None, x_BSD: jax.Array, state: nnx.State) -> tuple[jax.Array, Any]:
            layer = nnx.merge(stacks[layer_type][0], state)
            projected = layer.before_attention(x_BSD, positions_BS)
            if isinstance(projected, Operands):
                out = mix_sequences(layer.mixer, projected, document_ids_BS)
            else:
                q, k, v, *sinks = projected
                how = dict(window=mixer_of(layer).window, sinks_N=sinks[0] if sinks else None)
                out = dense_attention(q, k, v, positions_BS, document_ids_BS, **how)
            choices = (layer.choose(x_BSD, out),) if hasattr(layer, "choose") else ()
            result = layer.after_attention(x_BSD, out, *choices)
            y_BSD, shares = result if isinstance(result, tuple) else (result, None)
            return y_BSD, jax.tree.map(lambda x: sum_real(x, is_real_BS), shares)

        if checkpoint_layers:
            # Inside a scan the barrier against common subexpressions is not needed, and it hinders fusion.
            run_layer = jax.checkpoint(run_layer, prevent_cse=False, static_argnums=0)
        x_BSD = scaled(self.embedding[...][tokens_BS].astype(self.dtype), self.config.embedding_scale)
        if None in stacks:
            return jax.lax.scan(partial(run_layer, None), x_BSD, stacks[None][1])
        names = stack_names(self.layers)
        states = {names[layer_type]: state for layer_type, (_, state) in stacks.items()}
        x_BSD, sums = scan_layers(self.config.type_names, states, names, run_layer, x_BSD)
        shared = [of_stack for of_stack in sums.values() if jax.tree.leaves(of_stack)]
        return x_BSD, jax.tree.map(lambda *xs: jnp.concatenate(xs), *shared) if shared else None

    def head_matrix(self) -> jax.Array:
        """Returns the [D, V] matrix of the head: its own parameter, or the transposed embedding."""
        return self.embedding[...].T if self.head is None else self.head[...]

    def logits(self, x_BSD: jax.Array) -> jax.Array:
        """Applies final norm, head and cap; the products are summed in, and returned in, at least float32."""
        logits_BSV = jnp.einsum(
            "...d,dv->...v",
            self.final_norm(x_BSD.astype(self.dtype)),
            self.head_matrix().astype(self.dtype),
            preferred_element_type=accumulator(self.dtype),
        )
        return capped(logits_BSV, self.config.logit_cap or 0.0)

    def __call__(
        self,
        tokens_BS: jax.Array | np.ndarray,
        positions: jax.Array | np.ndarray | None = None,
        document_ids: jax.Array | np.ndarray | None = None,
    ) -> jax.Array:
        """Computes the logits of whole sequences on one device.

        Args:
            tokens_BS: token ids.
            positions: positions within each document; 0, 1, ... if left out.
            document_ids: documents; one document if left out.

        Returns:
            logits_BSV in at least float32.
        """
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(tokens_BS.shape[-1], dtype=jnp.int32), tokens_BS.shape)
        if document_ids is None:
            document_ids = jnp.zeros(tokens_BS.shape, jnp.int32)
        return self.logits(self.hidden_states(tokens_BS, positions, document_ids))
