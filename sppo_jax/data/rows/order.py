"""Shuffling without a table: a keyed permutation of 0..size-1, computed for one index at a time."""

from __future__ import annotations

import numpy as np

_WORD = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_NUM_ROUNDS = 6


def mix(value: int) -> int:
    """Returns 64 well-mixed bits of an integer (the finalizer of SplitMix64)."""
    value = (value + _GOLDEN) & _WORD
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _WORD
    return value ^ (value >> 31)


def mix_array(values: np.ndarray) -> np.ndarray:
    """Returns `mix` of every element, uint64."""
    values = values.astype(np.uint64) + np.uint64(_GOLDEN)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def key_of(*parts: int) -> int:
    """Returns a key that depends on each of the integers and on their order."""
    key = 0
    for part in parts:
        key = mix(key ^ mix(part & _WORD))
    return key


def permuted(index: int, size: int, key: int) -> int:
    """Returns the image of an index under a permutation of 0..size-1.

    A Feistel network permutes the numbers below the next power of four. A result of `size` or more goes through the
    network again. No table is kept, so an epoch of any size starts at once.

    Args:
        index: the index, in 0..size-1.
        size: the size of the permutation, at least 1.
        key: the key that selects the permutation.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for turn in range(_NUM_ROUNDS):
            left, right = right, left ^ (mix(key + right + (turn << 40)) & mask)
        index = left << half | right
        if index < size:
            return index
