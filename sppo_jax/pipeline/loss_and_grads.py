"""The type of what `sppo_jax.value_and_grad` makes."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
from flax import nnx


class LossAndGrads(Protocol):
    """`f(params, batch) -> (loss, grads)`, and what a jit around it needs."""

    compiler_options: dict[str, Any] | None
    stash_shapes: Any
    with_stash: Callable[..., Any]

    def __call__(self, params: nnx.State, batch: Mapping[str, Any]) -> tuple[jax.Array, nnx.State]:
        """Returns the loss in nats a target, and gradients with the tree and the dtypes of params."""
        ...
