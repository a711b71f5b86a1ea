"""The text around needles: sentences of our own words, or a text of the user's; the first characters never change."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import numpy as np

from sppo_jax.files.paths import file_error, local_path

ADJECTIVES = (
    "amber bitter brave brisk broad calm clever cold cool crisp curly damp dark deep dusty early fair fine firm "
    "fresh gentle grand grey happy heavy hidden high humble keen kind large late light lively long loud mild narrow "
    "neat new old pale plain proud quick quiet rare red rough round royal rusty sharp shiny short silent silver "
    "simple slow small smooth soft steep strong sweet tall tame thick thin tidy tiny warm white wide wild wise "
    "young"
).split()
NOUNS = (
    "anchor apple arrow badge barn basket bell blanket boat bottle branch bread bridge brook bucket button cabin "
    "candle canvas carpet cart castle cellar chair chest cloud coat comb corner cottage cradle crane cup desk door "
    "drum farm feather fence ferry field flute forest fountain garden gate glove hammer harbor hat hedge hill horn "
    "island jacket kettle ladder lake lamp lantern leaf letter library lion market meadow mill mirror mountain "
    "needle nest oven paddle palace path pencil piano pillow plate pond rabbit ribbon river road roof rope saddle "
    "sail school shelf shell shore spoon stable stone street table tent thread tower train tree valley village "
    "violin wagon wall well"
).split()
_VERBS = (
    "admired carried cleaned covered crossed drew faced filled followed found guarded held hid joined kept left "
    "lifted lit marked met missed moved needed noticed opened passed painted pulled pushed reached repaired saw "
    "shaded shook sold touched visited washed watched wrapped"
).split()
_ENDS = (
    "after the rain;at dawn;at noon;before dinner;behind the house;beside the church;by the sea;during the storm;"
    "every morning;for a while;in spring;in the evening;in the fog;in the north;last winter;near the border;"
    "on the way home;once again;one summer;outside the town;under the bridge;with great care;without a sound"
).split(";")
_BLOCK = 512  # sentences that are drawn at once


class Haystack(Protocol):
    """A text without end."""

    def take(self, count: int) -> str:
        """Returns the first characters."""
        ...


class DrawnSentences:
    """Sentences of our own words; a draw is a function of the generator's state."""

    def __init__(self, rng: np.random.Generator) -> None:
        """Draws nothing yet."""
        self._rng, self._text = rng, ""

    def take(self, count: int) -> str:
        """See `Haystack`."""
        while len(self._text) < count:
            words = zip(*(self._drawn(of) for of in (ADJECTIVES, NOUNS, _VERBS, ADJECTIVES, NOUNS, _ENDS)), strict=True)
            self._text += "".join(f"The {a} {b} {verb} the {c} {d} {end}. " for a, b, verb, c, d, end in words)
        return self._text[:count]

    def _drawn(self, words: list[str]) -> list[str]:
        return [words[at] for at in self._rng.integers(len(words), size=_BLOCK)]


class GivenText:
    """A text of the user's from a drawn word on; its beginning follows its end."""

    def __init__(self, text: str, rng: np.random.Generator) -> None:
        """Draws the first word of a text that has one."""
        at = int(rng.integers(len(text)))
        begin = text.find(" ", at) + 1
        self._text = f"{text[begin:]} {text[:begin]}".strip() + " "

    def take(self, count: int) -> str:
        """See `Haystack`."""
        return (self._text * -(-count // len(self._text)))[:count]


def read_haystack(path: str) -> str:
    """Returns the text of a file, its words one space apart.

    Raises:
        ValueError: the file cannot be read, is not UTF-8, or has no words.
    """
    place, name = local_path(path, "data.needles.haystack"), "data.needles.haystack"
    try:
        text = Path(place).read_text(encoding="utf-8")
    except OSError as error:
        raise file_error(f"{name} must be a readable file", place, error, "name another file") from error
    except UnicodeDecodeError:
        raise ValueError(f"{name} must be UTF-8, got {place}; name another file") from None
    words = text.split()
    if not words:
        raise ValueError(f"{name} must hold text, got {place} without words; name another file")
    return " ".join(words)
