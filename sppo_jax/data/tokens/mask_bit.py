"""Bit 31 of a token in a file: the token is not learned. So the mask goes where the token goes."""

from __future__ import annotations

import numpy as np

NO_LOSS = 1 << 31


def split_words(words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns tokens without the bit, and whether each is learned: int32 and bool [num_tokens].

    Args:
        words: what a corpus holds, integers [num_tokens]; only uint32 has the bit.
    """
    if words.dtype != np.uint32:
        return words.astype(np.int32), np.ones(len(words), bool)
    return (words & np.uint32(NO_LOSS - 1)).astype(np.int32), words < NO_LOSS


def join_words(tokens: np.ndarray, learned: np.ndarray) -> np.ndarray:
    """Returns tokens with the bit where they are not learned, uint32 [num_tokens]."""
    return tokens.astype(np.uint32) | np.where(learned, 0, NO_LOSS).astype(np.uint32)
