"""Characters to tokens: which tokens are learned, and where a conversation may be cut."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from sppo_jax.data.chat import Rendered


def overlaps(offsets: np.ndarray, spans: Iterable[tuple[int, int]]) -> np.ndarray:
    """Returns which tokens share a character with a span, bool [num_tokens].

    Args:
        offsets: first and one past the last character of each token, int64 [num_tokens, 2].
        spans: first and one past the last character, rising, none empty.
    """
    found = np.array(list(spans), np.int64).reshape(-1, 2)
    if not len(found):
        return np.zeros(len(offsets), bool)
    at = np.searchsorted(found[:, 1], offsets[:, 0], side="right")
    begins = found[np.minimum(at, len(found) - 1), 0]
    return (at < len(found)) & (begins < offsets[:, 1]) & (offsets[:, 0] < offsets[:, 1])


def whole_turns(rendered: Rendered, offsets: np.ndarray, learned: np.ndarray, length: int) -> int:
    """Returns the number of leading tokens, at most `length`, that end with a learned turn; 0: there is none."""
    ends = np.array([turn.last for turn in rendered.turns] + [last for _, last in rendered.trained], np.int64)
    counts = np.searchsorted(offsets[:, 0], np.sort(ends), side="left")
    counts = counts[(counts > 0) & (counts <= length)]
    counts = counts[learned[counts - 1]]
    return int(counts[-1]) if len(counts) else 0
