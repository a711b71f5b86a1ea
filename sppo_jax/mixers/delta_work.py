"""The work of the gated delta rule and how a run of tokens is cut for it, from shapes alone; no jax."""

from typing import NamedTuple

# Tokens of a block: within one, all but the state is a product of matrices.
BLOCK = 64
# Elements of keys of all heads that are worked on at once: 32,768 tokens of 4 heads of 128.
_STRETCH_ELEMENTS = 2**24
# Parts of a stretch that are worked out side by side, and blocks from which on it is worth the second pass.
_SPANS, _SPANS_FROM = 8, 32


class Cut(NamedTuple):
    """How a run is worked on: stretches one after another, each of `tokens`, in `spans` side by side."""

    stretches: int
    spans: int
    tokens: int


def cut_of(length: int, elements: int) -> Cut:
    """Returns how a run is cut, so that what a stretch holds is bounded whatever the run.

    Args:
        length: tokens of the run.
        elements: of a token in keys, or values, of all value heads.
    """
    blocks = -(-length // BLOCK)
    stretches = -(-blocks // _most_blocks(elements))
    of_stretch = -(-blocks // stretches)
    spans = _spans_of(of_stretch)
    return Cut(stretches, spans, -(-of_stretch // spans) * spans * BLOCK)


def longest_stretch(length: int, elements: int) -> int:
    """Returns the most tokens of a stretch in a run of `length` tokens or less; arguments as `cut_of`."""
    blocks = min(-(-length // BLOCK), _most_blocks(elements))
    spans = _spans_of(blocks)
    return -(-blocks // spans) * spans * BLOCK


def _spans_of(blocks: int) -> int:
    return _SPANS if blocks >= _SPANS_FROM else 1


def _most_blocks(elements: int) -> int:
    return max(1, _STRETCH_ELEMENTS // (BLOCK * elements))


def delta_flops(key_heads: int, value_heads: int, key_size: int, value_size: int, taps: int) -> float:
    """Returns the FLOPs of a token in the forward of the recurrence and of the convolution before it.

    For each value head a state [key_size, value_size] decays, and is multiplied three times: by the key, for what it
    says of the token already; by the outer product that is added; by the query. What blocks of tokens need beyond this
    does not count, as recomputation does not.
    """
    channels = 2 * key_heads * key_size + value_heads * value_size
    return 7.0 * value_heads * key_size * value_size + 2.0 * taps * channels
