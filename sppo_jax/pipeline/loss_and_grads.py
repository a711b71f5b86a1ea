"""The types of what `sppo_jax.value_and_grad` and `sppo_jax.token_loss` make."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
from flax import nnx


class TokenLossAndGrads(Protocol):
    """`f(params, batch) -> (loss, grads)`, and the compiler's options for a jit around it."""

    compiler_options: dict[str, Any] | None

    def __call__(self, params: nnx.State, batch: Mapping[str, Any]) -> tuple[jax.Array, nnx.State]:
        """Returns the loss, and gradients with the tree and the dtypes of params."""
        ...


class LossAndGrads(TokenLossAndGrads, Protocol):
    """The loss is in nats a target; the attributes are for a jit that keeps the stash on the host."""

    stash_shapes: Any
    with_stash: Callable[..., Any]
