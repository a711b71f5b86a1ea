"""Document lengths: corpora to sample from, and a user's own list.

Wikipedia's lengths are published: `wikipedia_lengths.csv` has 426 quantiles of the 1,000,000 lengths released with
FlexSP, and `wikipedia_documents.csv` has the first 26,112 of them in their order. The first line of each file names the
source. The lists of GitHub and CommonCrawl are not published. The corpora named
"github-assumed" and "commoncrawl-assumed" are log-normal guesses: both have longer documents than Wikipedia on average.
Nothing that is judged may depend on the two guesses.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from statistics import NormalDist

import numpy as np

RULE = "a lengths file has one whole number of at least 1 per line, or is a .npy file of such integers"


@dataclass(frozen=True, kw_only=True)
class Quantiles:
    """A distribution of document lengths.

    Args:
        shares: shares of the documents, increasing from 0 to 1.
        tokens: the length that each share of the documents does not exceed; lengths between two entries are linear.
        assumed: whether the distribution is a guess instead of a published one.
    """

    shares: tuple[float, ...]
    tokens: tuple[float, ...]
    assumed: bool


def wikipedia() -> Quantiles:
    """Returns the published distribution of Wikipedia's document lengths."""
    text = files("sppo_jax.flex").joinpath("wikipedia_lengths.csv").read_text(encoding="utf-8")
    rows = [line.split(",") for line in text.splitlines() if not line.startswith("#")]
    shares, tokens = zip(*((float(share), float(length)) for share, length in rows), strict=True)
    return Quantiles(shares=shares, tokens=tokens, assumed=False)


def wikipedia_documents() -> np.ndarray:
    """Returns the first 26,112 published lengths of Wikipedia's documents in their order, int64 [documents]."""
    text = files("sppo_jax.flex").joinpath("wikipedia_documents.csv").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if not line.startswith("#")]
    return np.array(",".join(rows).split(","), np.int64)


def log_normal(*, median: float, sigma: float) -> Quantiles:
    """Returns an assumed distribution whose logarithms are normal.

    Args:
        median: tokens of the middle document.
        sigma: standard deviation of the natural logarithm of the tokens.
    """
    normal, tail = NormalDist(), [1 - 10 ** (-number / 8) for number in range(19, 49)]
    shares = [number / 200 for number in range(1, 200)] + tail
    # Whole numbers, so that the last bit of exp cannot matter.
    tokens = [max(1.0, float(round(median * math.exp(sigma * normal.inv_cdf(share))))) for share in shares]
    return Quantiles(shares=(0.0, *shares, 1.0), tokens=(1.0, *tokens, tokens[-1]), assumed=True)


def corpora() -> dict[str, Quantiles]:
    """Returns the distributions by name; a name ends with "-assumed" if its distribution is a guess."""
    return {
        "wikipedia": wikipedia(),
        "github-assumed": log_normal(median=1100, sigma=1.45),
        "commoncrawl-assumed": log_normal(median=1200, sigma=1.25),
    }


def sample_lengths(
    quantiles: Quantiles, *, count: int, seed: int, longest: int | None = None, multiple: int = 1
) -> np.ndarray:
    """Draws document lengths; equal arguments give equal lengths on every machine.

    Args:
        quantiles: the distribution.
        count: number of lengths, at least 0.
        seed: selects the random numbers.
        longest: longest length to keep; longer documents are dropped and others are drawn. None keeps all.
        multiple: each length is rounded up to a multiple of this number.

    Returns:
        int64 [count].

    Raises:
        ValueError: if `longest` is shorter than every length of the distribution.
    """
    least = -(-int(quantiles.tokens[0]) // multiple) * multiple
    if longest is not None and longest < least:
        raise ValueError(f"longest must be at least {least}, the shortest length, got {longest}; give a larger one")
    # Not numpy's generator: a new version may draw other numbers. Python promises to keep those of random().
    numbers, kept = random.Random(seed), np.zeros(0, np.int64)
    while len(kept) < count:
        draws = [numbers.random() for _ in range(max(64, count))]
        lengths = np.interp(draws, quantiles.shares, quantiles.tokens).astype(np.int64)
        lengths = padded(np.maximum(1, lengths), multiple)
        kept = np.concatenate([kept, lengths if longest is None else lengths[lengths <= longest]])
    return kept[:count]


def padded(lengths: np.ndarray, multiple: int) -> np.ndarray:
    """Returns lengths rounded up to a multiple, int64 of the same shape."""
    return -(-lengths.astype(np.int64) // multiple) * multiple


def read_lengths(path: Path) -> np.ndarray:
    """Reads a user's document lengths.

    Args:
        path: a text file with one whole number a line (empty lines are skipped), or a .npy file of integers.

    Returns:
        int64 [number of documents], each at least 1.

    Raises:
        ValueError: if the file holds no length, or one that is no whole number of at least 1.
        OSError: if the file cannot be read.
    """
    if path.suffix == ".npy":
        return _checked_array(path)
    lines = path.read_bytes().decode("utf-8", errors="replace").splitlines()
    lengths = [_whole(line.strip(), f"{path}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not lengths:
        raise ValueError(f"{RULE}; got {path} without any; add the lengths")
    return np.array(lengths, np.int64)


def _whole(word: str, place: str) -> int:
    digits = word.removeprefix("+")
    # isdecimal alone admits digits of other scripts; 18 digits fit into int64.
    if not (digits.isascii() and digits.isdecimal() and len(digits) <= 18 and int(digits) >= 1):
        shown = word if len(word) <= 40 else word[:40] + "..."
        raise ValueError(f"{RULE}; got {shown!r} ({place}); replace or remove the line")
    return int(digits)


def _checked_array(path: Path) -> np.ndarray:
    try:
        found = np.load(path, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{RULE}; got {path}, which numpy cannot load; save it with numpy.save") from error
    if not isinstance(found, np.ndarray) or found.ndim != 1 or found.dtype.kind not in "iu":
        what = f"{found.dtype} of shape {found.shape}" if isinstance(found, np.ndarray) else "several arrays"
        raise ValueError(f"{RULE}; got {what} in {path}; save integers in one dimension")
    if not len(found):
        raise ValueError(f"{RULE}; got {path} without any; add the lengths")
    wrong: Sequence[int] = np.flatnonzero((found < 1) | (found > 10**18)).tolist()
    if wrong:
        raise ValueError(f"{RULE}; got {found[wrong[0]]} ({path}, index {wrong[0]}); replace or remove the entry")
    return found.astype(np.int64)
