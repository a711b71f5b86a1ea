"""Linen and this package, both ways, through `flax.nnx.bridge`.

A Linen block trains in a `Decoder` as any layer does (`LinenLayer`); a `Decoder` is a Linen module with a Linen
parameter tree (`linen_decoder`), whose gradients the trainer gives (`params_from_linen`, `params_to_linen`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx
from flax.nnx import bridge

from sppo_jax.attention.mixer import mixer_of
from sppo_jax.config import ModelConfig
from sppo_jax.mixers.dense import mix_sequences
from sppo_jax.mixers.mixer import Operands
from sppo_jax.models.decoder import Decoder


class LinenLayer(nnx.Module):
    """A Linen module with `before_attention(x, positions)` and `after_attention(x, out)` as a layer of a decoder.

    Its class attribute `mixer`, if it has one, is the layer's. Its only collection is `params`: chunks and stages share
    nothing else.
    """

    def __init__(self, module: linen.Module, hidden_size: int, *, rngs: nnx.Rngs):
        """Creates the parameters.

        Args:
            module: the block; it makes its submodules in `setup`, for it has two methods.
            hidden_size: of the residual stream.
            rngs: source of random keys (stream `params`).

        Raises:
            ValueError: the module lacks one of the methods, or has state beside its parameters.
        """
        for name in ("before_attention", "after_attention"):
            if not callable(getattr(module, name, None)):
                raise ValueError(
                    f"a Linen layer must have the method {name}, got {type(module).__name__} without {name}; write "
                    "the method"
                )
        self.mixer = mixer_of(module)
        x, positions = jnp.zeros((1, hidden_size)), jnp.zeros((1,), jnp.int32)
        self.linen = bridge.ToNNX(module, rngs=rngs)
        bridge.lazy_init(self.linen, x, positions, method=_both)
        self.linen.to_nnx__rngs = None  # nothing is drawn after this
        _, _, others = nnx.split(self.linen, nnx.Param, ...)
        if jax.tree.leaves(others):
            names = ", ".join(sorted({str(path[0]) for path, _ in nnx.to_flat_state(others)}))
            raise ValueError(f"a Linen layer must hold parameters only, got state of {names} too; remove this state")

    def before_attention(self, x: jax.Array, positions: jax.Array) -> Any:
        """Returns q, k and v of the Linen module, or the operands of its mixer."""
        return self.linen(x, positions, method="before_attention")

    def after_attention(self, x: jax.Array, out: jax.Array) -> jax.Array:
        """Returns the input of the next layer, from the Linen module."""
        return self.linen(x, out, method="after_attention")


def _both(module: Any, x: jax.Array, positions: jax.Array) -> jax.Array:
    """Uses every parameter of a block; the output of attention has the shape of the queries."""
    operands = module.before_attention(x, positions)
    if isinstance(operands, Operands):
        whole = jax.tree.map(lambda a: a[None], operands.heads)
        out = mix_sequences(module.mixer, operands._replace(heads=whole), jnp.zeros_like(positions)[None])[0]
    else:
        out = operands[0]
    return module.after_attention(x, out)


def linen_layer(make_module: Callable[[ModelConfig], linen.Module]) -> Callable[..., LinenLayer]:
    """Returns the `layer` of `Decoder(config, rngs=..., layer=...)` for `make_module(config) -> module`."""

    def layer(config: ModelConfig, *, rngs: nnx.Rngs) -> LinenLayer:
        return LinenLayer(make_module(config), config.hidden_size, rngs=rngs)

    return layer


def linen_decoder(config: ModelConfig) -> linen.Module:
    """Returns the decoder as a Linen module: `init(key, tokens)`, `apply(variables, tokens)` gives logits."""
    return bridge.ToLinen(Decoder, args=(config,))


def params_from_linen(variables: Mapping[str, Any], like: nnx.State) -> nnx.State:
    """Returns the parameters of `linen_decoder(...).init` as `value_and_grad` takes them.

    Args:
        variables: {"params": ...}.
        like: `nnx.state(model, nnx.Param)` of the same decoder; gives the structure.

    Raises:
        ValueError: the two trees differ.
    """
    params = linen.unbox(variables["params"])
    want, got = jax.tree.structure(nnx.to_pure_dict(like)), jax.tree.structure(dict(params))
    if want != got:
        raise ValueError(
            f"Linen parameters must be those of the same decoder, {want}, got {got}; use one config for both"
        )
    return jax.tree.unflatten(jax.tree.structure(like), jax.tree.leaves(params))


def params_to_linen(params: nnx.State) -> dict[str, Any]:
    """Returns parameters or gradients in the form of Linen: {"params": ...}."""
    return {"params": nnx.to_pure_dict(params)}
