"""A short causal convolution of each channel over the tokens of a document.

Letters: T tokens, N heads, C channels of a head, W taps.
"""

import jax
import jax.numpy as jnp
from jax import lax

from sppo_jax.arrays.dtypes import accumulator
from sppo_jax.mixers.mixer import TokenRun


def convolve(
    x_TNC: jax.Array, tail_NWC: jax.Array, taps_NCW: jax.Array, place: TokenRun
) -> tuple[jax.Array, jax.Array]:
    """Sums each channel of a token and of the W - 1 tokens before it; tokens of another document count as zeros.

    Args:
        x_TNC: the run.
        tail_NWC: the W - 1 tokens before it, [N, W - 1, C].
        taps_NCW: of each channel; the last tap is the token's own.
        place: of the run; it tells the documents of at least W - 1 tokens before.

    Returns:
        The sums in at least float32, zero for padding; and the last W - 1 real tokens.
    """
    reach, size = taps_NCW.shape[-1] - 1, x_TNC.shape[0]
    wide_TNC = jnp.concatenate([jnp.moveaxis(tail_NWC, 1, 0).astype(x_TNC.dtype), x_TNC])
    told = place.before_W.shape[0]
    of_T = jnp.concatenate([place.before_W[told - reach :], place.documents_T])
    is_real_T, sums_TNC = place.documents_T >= 0, jnp.zeros((), accumulator(x_TNC.dtype))
    for tap in range(reach + 1):
        seen_T = (of_T[tap : tap + size] == place.documents_T) & is_real_T
        at_TNC = jnp.where(seen_T[:, None, None], wide_TNC[tap : tap + size], 0)
        sums_TNC = sums_TNC + at_TNC.astype(sums_TNC.dtype) * taps_NCW[..., tap].astype(sums_TNC.dtype)
    tail_TNC = lax.dynamic_slice_in_dim(wide_TNC, place.num_real, reach)
    return sums_TNC, jnp.moveaxis(tail_TNC, 0, 1)
