"""A mixer with a state over whole sequences on one device: the reference.

Letters: B sequences, S tokens of a sequence, N heads, V size of a head's output.
"""

from typing import Any

import jax
import jax.numpy as jnp

from sppo_jax.mixers.mixer import Operands, StateMixer, TokenRun


def mix_sequences(mixer: StateMixer, operands: Operands, documents_BS: jax.Array) -> jax.Array:
    """Mixes whole sequences, each by itself.

    Args:
        mixer: the layer's mixer.
        operands: heads [B, S, N_i, ...], and constants [N_i, ...] that all sequences have in common.
        documents_BS: the document of each token, non-decreasing; -1 is padding, behind all other tokens.

    Returns:
        out_BSNV.
    """
    before_W = jnp.full((mixer.reach,), -1, documents_BS.dtype)

    def mix(heads: Any, documents_S: jax.Array) -> jax.Array:
        own = Operands(heads, operands.constants)
        place = TokenRun(documents_S, before_W, jnp.sum(documents_S >= 0, dtype=jnp.int32))
        return mixer.mix(own, mixer.empty_state(own), place)[0]

    return jax.vmap(mix)(operands.heads, documents_BS)
