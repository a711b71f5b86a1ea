"""Tokens of documents that come in pieces: those of the whole text, whatever a tokenizer does at the ends of a text.

A tokenizer may begin each text with a token of its own, as Llama 2's does, or take characters on both sides of a cut as
one token. So each piece is encoded with the end of the text before it. Of this end there are two encodings: one knows
what comes before, and the other what comes after. They agree in the middle, and there one goes on for the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from sppo_jax.data.tokens.encoding import Encoder, Located

# Characters that are encoded twice, about.
_OVERLAP_CHARS = 4096

# A token, and the first and one past the last of its characters.
Span = tuple[int, int, int]


@dataclass(frozen=True, kw_only=True)
class _Held:
    """The end of the text so far, and the tokens in it, which wait for what comes after."""

    text: str
    spans: list[Span]


class Stitcher:
    """Encodes pieces of documents in order, one document after the other."""

    def __init__(self, encoder: Encoder) -> None:
        """Begins with the first piece of a document.

        Args:
            encoder: turns text into tokens.
        """
        self._encoder = encoder
        self._begins, self._held = True, _Held(text="", spans=[])

    def encode(self, pieces: Sequence[tuple[str, bool]]) -> list[np.ndarray]:
        """Encodes some pieces, each with whether its document ends with it.

        Returns:
            Tokens, integer, one array a piece. The last tokens of a piece come with the piece after it.
        """
        begins = [self._begins, *(is_last for _, is_last in pieces)]
        alone = [self._encoder.tokens_join or (begins[at] and pieces[at][1]) for at in range(len(pieces))]
        whole = iter(self._encoder.encode([text for at, (text, _) in enumerate(pieces) if alone[at]]))
        self._begins = begins[-1]
        return [next(whole) if alone[at] else self._next(*piece) for at, piece in enumerate(pieces)]

    def _next(self, text: str, is_last: bool) -> np.ndarray:
        held, text = self._held, self._held.text + text
        (found,) = self._encoder.locate([text])
        kept, first = _join(held, found)
        last = len(found.tokens)
        self._held = _Held(text="", spans=[])
        if not is_last:
            start = _overlap_start(text)
            while last > first and found.span(last - 1)[0] >= start:
                last -= 1
            spans = _spans(found, range(last, len(found.tokens)), start)
            self._held = _Held(text=text[start:], spans=spans)
        return np.concatenate([np.array(kept, np.int64), found.tokens[first:last]])


def _overlap_start(text: str) -> int:
    """Returns where the end of a text begins that is encoded twice: with a line, unless lines are long."""
    start = max(0, len(text) - _OVERLAP_CHARS)
    line = text.rfind("\n", max(0, start - _OVERLAP_CHARS), start) + 1
    return line or start


def _spans(found: Located, indices: Iterable[int], start: int = 0) -> list[Span]:
    places = ((at, *found.span(at)) for at in indices)
    return [(int(found.tokens[at]), first - start, last - start) for at, first, last in places]


def _join(held: _Held, found: Located) -> tuple[list[int], int]:
    """Returns the tokens to take of what was held, and the first token to take of what was found."""
    num_inside = 0
    while num_inside < len(found.tokens) and found.span(num_inside)[0] < len(held.text):
        num_inside += 1
    places = {key: at for at, key in enumerate(_keys(_spans(found, range(num_inside))))}
    best, run = 0, 0
    at_best, before = (len(held.spans), num_inside), -2  # where nothing agrees, the cut
    for number, key in enumerate(_keys(held.spans)):
        place = places.get(key, -2)
        run = run + 1 if place == before + 1 and place >= 0 else int(place >= 0)
        before = place
        if run > best:
            best, at_best = run, (number + 1 - run // 2, place + 1 - run // 2)
    return [token for token, _, _ in held.spans[: at_best[0]]], at_best[1]


def _keys(spans: Iterable[Span]) -> list[tuple[Span, int]]:
    """Returns keys that differ between tokens, also between equal tokens of the same characters."""
    counts: Counter[Span] = Counter()
    keys = []
    for span in spans:
        keys.append((span, counts[span]))
        counts[span] += 1
    return keys
