"""What a layer with a state gives to its mixer, and what a mixer must have.

Letters: T tokens, N heads, V size of a head's output, W tokens before a run whose documents a mixer needs.
"""

from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax


class Operands(NamedTuple):
    """What `before_attention` returns for a mixer with a state.

    Args:
        heads: tree of arrays [T, N_i, ...]; the heads of one array may be a divisor of those of another.
        constants: tree of arrays [N_i, ...] that have no tokens, such as the taps of a convolution.
    """

    heads: Any
    constants: Any


class TokenRun(NamedTuple):
    """Where a run of tokens lies.

    Args:
        documents_T: the document of each token; they do not decrease, and -1 is padding, behind all other tokens.
        before_W: documents of the last W tokens before the run; -1 where the sequence has no such token.
        num_real: tokens of the run that are no padding.
    """

    documents_T: jax.Array
    before_W: jax.Array
    num_real: jax.Array


Place = TokenRun  # its name before version 0.2, which layers of users have


@runtime_checkable
class StateMixer(Protocol):
    """A layer's mixer with a state: the class attribute, or an attribute, `mixer` of a layer.

    `mix` is a pure function on one device, for any share of the heads, that `jax.vjp` can differentiate. A run in two
    parts gives what it gives as a whole: mix(a ++ b, state) is mix(a, state), then mix(b, state behind a). Tokens of
    another document see nothing of the state, and padding changes nothing.

    Attributes:
        reach: how many tokens before a run must have their documents told, 0 or more.
    """

    reach: int

    def empty_state(self, operands: Operands) -> Any:
        """Returns the state before a sequence: a tree of arrays [N, ...]; only shapes of `operands` are read."""
        ...

    def mix(self, operands: Operands, state: Any, place: TokenRun) -> tuple[jax.Array, Any]:
        """Returns out_TNV, zero for padding, and the state behind the run."""
        ...

    def flops_per_token(self, operands: Operands) -> float:
        """Returns the floating-point operations of a token's forward; only shapes of `operands` are read."""
        ...
