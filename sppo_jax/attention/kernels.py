"""What ring, teams and chunks ask of the attention kernel of one device, and which kernel reads a mask.

Keys pass a kernel part by part. The result so far is a state, in the kernel's own layout: what a kernel of XLA's or
cuDNN's returns is merged with the state outside of it; the kernel for TPUs takes the state in.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from sppo_jax.arrays.dtypes import accumulator
from sppo_jax.attention import blockwise, flash
from sppo_jax.attention.blockwise import merge
from sppo_jax.attention.intervals import Meets
from sppo_jax.attention.operands import Cotangent, Gradients, Mask, Prefix
from sppo_jax.attention.spans import Spans
from sppo_jax.attention.tpu.pallas import PallasKernel


class Kernel(Protocol):
    """A kernel of one device. `lags`: results leave one hop late, so that every hop of a ring runs beside a kernel."""

    lags: bool

    def queries(self, q_TNH: jax.Array, prefix: Prefix) -> jax.Array:
        """Returns the queries in the kernel's layout."""

    def nothing(self, q: jax.Array) -> Any:
        """Returns the state of queries, in the kernel's layout, that have seen no keys."""

    def attend(self, q: jax.Array, prefix: Prefix, mask: Mask, state: Any = None) -> Any:
        """Adds the keys of a prefix to a state; None for no other keys."""

    def result(self, state: Any) -> tuple[jax.Array, jax.Array]:
        """Returns out_TNH and lse_TN, both in at least float32; zeros and -inf for a query that saw nothing."""

    def rows(self, cotangent: Cotangent, q: jax.Array) -> Any:
        """Returns what the backward needs of each query, in the kernel's layout."""

    def no_gradient(self, q: jax.Array, meets: Any) -> jax.Array:
        """Returns the sum of no parts of dQ; `meets` is any mask's."""

    def differentiate(
        self, q: jax.Array, prefix: Prefix, mask: Mask, rows: Any, gradients: Gradients, dq: jax.Array | None = None
    ) -> tuple[jax.Array, Gradients]:
        """Adds a prefix's part to dQ, None for no other part, and the queries' part to dK and dV."""

    def gradient(self, dq: jax.Array) -> jax.Array:
        """Returns dq_TNH in at least float32."""


class MergedKernel:
    """A kernel that returns its result for one prefix; results are merged outside of it."""

    lags = False

    def __init__(self, module: ModuleType):
        """Takes a module whose `forward` and `backward` are those of `blockwise`."""
        self.module = module

    def queries(self, q_TNH, prefix):
        """See `Kernel`."""
        return q_TNH

    def nothing(self, q):
        """See `Kernel`."""
        acc = accumulator(q.dtype)
        return jnp.zeros(q.shape, acc), jnp.full(q.shape[:2], -jnp.inf, acc)

    def attend(self, q, prefix, mask, state=None):
        """See `Kernel`."""
        found = self.module.forward(q, prefix, mask)
        return found if state is None else merge(*state, *found)

    def result(self, state):
        """See `Kernel`."""
        return state

    def rows(self, cotangent, q):
        """See `Kernel`."""
        return cotangent

    def no_gradient(self, q, meets):
        """See `Kernel`."""
        return jnp.zeros(q.shape, accumulator(q.dtype))

    def differentiate(self, q, prefix, mask, rows, gradients, dq=None):
        """See `Kernel`."""
        more, gradients = self.module.backward(q, prefix, mask, rows, gradients)
        return more if dq is None else dq + more, gradients

    def gradient(self, dq):
        """See `Kernel`."""
        return dq


def kernel_of(meets) -> Kernel:
    """Returns the kernel that reads this description of where queries and keys meet."""
    if isinstance(meets, Meets):
        return PallasKernel()
    return MergedKernel(flash if isinstance(meets, Spans) else blockwise)
