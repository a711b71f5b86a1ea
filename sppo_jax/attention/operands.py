"""What the kernels take: keys and values, masks, cotangents, and the buffers that gather gradients.

Letters: T query tokens, S key tokens of a buffer, N query heads, K key/value heads, H head dim, E elements of a head in
a buffer, of which the first H count; X leading dims of a buffer (slot, layer).
"""

from typing import NamedTuple

import jax

from sppo_jax.attention.intervals import Meets
from sppo_jax.attention.spans import Spans
from sppo_jax.attention.tags import BlockRange, Tags


class Prefix(NamedTuple):
    """Keys and values of a sequence so far: buffers [X..., K, S, E], and the sequence's index in X.

    `grad_index` is the sequence's index in the buffers that gather the gradients, where these have an X of their own.
    """

    k: jax.Array
    v: jax.Array
    index: tuple
    grad_index: tuple | None = None

    @property
    def grads_at(self) -> tuple:
        """The sequence's index in the buffers that gather the gradients."""
        return self.index if self.grad_index is None else self.grad_index


class Mask(NamedTuple):
    """Which of S keys each of T queries sees: tags of both, and where queries and keys meet.

    `meets` is a range of key blocks for the blockwise kernel, spans for cuDNN's, intervals and steps for that of TPUs.
    `window`: how many positions a query sees, its own among them, or with spans how many of a member's keys; 0: all
    before it. Intervals have it in them.
    """

    queries: Tags
    keys: Tags
    meets: BlockRange | Spans | Meets
    window: int = 0


class Cotangent(NamedTuple):
    """What a backward needs about the global output: its cotangent, the GLOBAL LSE, and a summary of the output.

    cuDNN's kernel needs all of out_TNH as the summary; the others need only delta_TN = sum(out * dout).
    """

    dout_TNH: jax.Array
    lse_TN: jax.Array
    summary: jax.Array


class Gradients(NamedTuple):
    """Buffers [X..., K, S, E] that gather dK and dV of a prefix, at its `grads_at` in X."""

    dk: jax.Array
    dv: jax.Array
