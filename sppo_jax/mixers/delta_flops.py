"""The work of the gated delta rule, from shapes alone: counts, no jax."""


def delta_flops(key_heads: int, value_heads: int, key_size: int, value_size: int, taps: int) -> float:
    """Returns the FLOPs of a token in the forward of the recurrence and of the convolution before it.

    For each value head a state [key_size, value_size] decays, and is multiplied three times: by the key, for what it
    says of the token already; by the outer product that is added; by the query. What blocks of tokens need beyond this
    does not count, as recomputation does not.
    """
    channels = 2 * key_heads * key_size + value_heads * value_size
    return 7.0 * value_heads * key_size * value_size + 2.0 * taps * channels
