"""Characters to tokens: which tokens are learned, and where a conversation may be cut."""

from __future__ import annotations

import bisect
from collections.abc import Iterable

import numpy as np

from sppo_jax.data.chat.roles import Rendered
from sppo_jax.data.tokens.encoding import Located


def overlaps(located: Located, spans: Iterable[tuple[int, int]]) -> np.ndarray:
    """Returns which tokens share a character with a span, bool [num_tokens].

    The library gives the places of all tokens as a list, which costs as much as a tenth of tokenizing. A search by
    halves asks for the places of few.

    Args:
        located: the tokens, which rise.
        spans: first and one past the last character, rising, none empty.
    """
    count = len(located.tokens)
    learned, at = np.zeros(count, bool), 0
    for first, last in spans:
        begin = bisect.bisect_right(range(count), first, lo=at, key=lambda token: located.span(token)[1])
        at = bisect.bisect_left(range(count), last, lo=begin, key=lambda token: located.span(token)[0])
        learned[begin:at] = True
        # The next span may begin inside the last of these tokens.
        at = max(begin, at - 1)
    return learned


def whole_turns(rendered: Rendered, offsets: np.ndarray, learned: np.ndarray, length: int) -> int:
    """Returns the number of leading tokens, at most `length`, that end with a learned turn; 0: there is none."""
    ends = np.array([turn.last for turn in rendered.turns] + [last for _, last in rendered.trained], np.int64)
    counts = np.searchsorted(offsets[:, 0], np.sort(ends), side="left")
    counts = counts[(counts > 0) & (counts <= length)]
    counts = counts[learned[counts - 1]]
    return int(counts[-1]) if len(counts) else 0
