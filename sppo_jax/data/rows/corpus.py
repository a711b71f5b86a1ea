"""Documents as spans of token arrays, most of them memory-mapped files."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import zlib
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from sppo_jax.data.cache.left_out import LeftOut, summed
from sppo_jax.data.rows.order import mix_array
from sppo_jax.data.tokens.learned import Learned
from sppo_jax.data.tokens.token_map import TokenMap

Tokens = np.ndarray | TokenMap
_BLOCK = 1 << 18


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Documents as spans of several token arrays, whose tokens are numbered as if the arrays were one.

    Args:
        parts: integers [num_tokens of the part], in memory or in a file; a document lies in one of them.
        starts: first token of each document, int64 [num_documents].
        ends: one past the last token of each document, above its start, int64 [num_documents].
        hashes: a number in [0, 1) for each document, from its name, float64 [num_documents]; none once documents are
            held out.
        digest: a text that differs between conversations that differ in what is learned; "": all tokens are learned.
        learned: counts of what is learned, before documents were chosen; None: all tokens are learned.
        left_out: what of the source is not among the documents.
    """

    parts: tuple[Tokens, ...]
    starts: np.ndarray
    ends: np.ndarray
    hashes: np.ndarray
    digest: str = ""
    learned: Learned | None = None
    left_out: tuple[LeftOut, ...] = ()

    @property
    def num_documents(self) -> int:
        return len(self.starts)

    @property
    def num_tokens(self) -> int:
        return int((self.ends - self.starts).sum())

    def read(self, begin: int, end: int) -> np.ndarray:
        """Returns tokens [begin, end) of one document; in uint32, bit 31 says that a token is not learned."""
        part = bisect.bisect_right(self._firsts, begin) - 1
        first = self._firsts[part]
        return self.parts[part][begin - first : end - first]

    @functools.cached_property
    def _firsts(self) -> list[int]:
        return [0, *itertools.accumulate(len(part) for part in self.parts)]

    def select(self, documents: np.ndarray) -> Corpus:
        """Returns the corpus of some documents, given as a mask or as indices."""
        chosen = {name: getattr(self, name)[documents] for name in ("starts", "ends", "hashes")}
        return dataclasses.replace(self, **chosen)


class DocumentSpans(NamedTuple):
    """Documents of some files, of which nothing but their places is known.

    Args:
        starts: first token of each document, int64 [num_documents].
        ends: one past the last token of each document, int64 [num_documents].
        names: the names of the files.
        num_documents: the number of documents of each file.
    """

    starts: np.ndarray
    ends: np.ndarray
    names: list[str]
    num_documents: list[int]


def corpus_of(
    tokens: Tokens, ends: np.ndarray, names: list[str], num_documents: list[int], *, starts: np.ndarray | None = None
) -> Corpus:
    """Returns documents that lie end to end in one array.

    Args:
        tokens: the array.
        ends: one past the last token of each document, int64 [num_documents].
        names: the names of the files that the documents come from.
        num_documents: the number of documents of each file.
        starts: first token of each document, int64 [num_documents]; None: computed from the ends.
    """
    if starts is None:
        starts = np.concatenate([np.zeros(min(1, len(ends)), np.int64), ends[:-1]])
    return Corpus(parts=(tokens,), starts=starts, ends=ends, hashes=_hashes(names, num_documents))


def _hashes(names: list[str], num_documents: list[int]) -> np.ndarray:
    """Returns a number in [0, 1) for every document, from its file's name and its number in the file."""
    found = np.empty(sum(num_documents), np.float64)
    at = 0
    for name, count in zip(names, num_documents, strict=True):
        seed = np.uint64(zlib.crc32(name.encode(errors="surrogateescape"))) << np.uint64(32)
        # In blocks, so that what is computed on the way takes little memory.
        for first in range(0, count, _BLOCK):
            numbers = np.arange(first, min(first + _BLOCK, count), dtype=np.uint64) + seed
            found[at : at + len(numbers)] = (mix_array(numbers) >> np.uint64(11)).astype(np.float64) / 2**53
            at += len(numbers)
    return found


def join(corpora: list[Corpus]) -> Corpus:
    """Returns all documents of some corpora, in their order."""
    if len(corpora) == 1:
        return corpora[0]
    sizes = [sum(len(part) for part in corpus.parts) for corpus in corpora]
    firsts = np.cumsum([0, *sizes])[:-1]
    counted = [corpus.learned for corpus in corpora if corpus.learned]
    return Corpus(
        parts=tuple(part for corpus in corpora for part in corpus.parts),
        starts=np.concatenate([corpus.starts + first for corpus, first in zip(corpora, firsts, strict=True)]),
        ends=np.concatenate([corpus.ends + first for corpus, first in zip(corpora, firsts, strict=True)]),
        hashes=np.concatenate([corpus.hashes for corpus in corpora]),
        digest=" ".join(corpus.digest for corpus in corpora if corpus.digest),
        learned=sum(counted, Learned()) if counted else None,
        left_out=summed(one for corpus in corpora for one in corpus.left_out),
    )


def within(corpus: Corpus, least: int, most: int | None) -> Corpus:
    """Returns the documents of `least` to `most` tokens; None: no limit."""
    if least <= 1 and most is None:
        return corpus
    sizes = corpus.ends - corpus.starts
    return corpus.select((sizes >= least) & (sizes <= (sizes if most is None else most)))


def split_corpus(corpus: Corpus, validation_fraction: float) -> tuple[Corpus, Corpus | None]:
    """Holds out whole documents by the hash of their name; of a single document, holds out the end.

    Args:
        corpus: all documents.
        validation_fraction: share of the documents to hold out; of a single document, share of its tokens.

    Returns:
        The training corpus, and the corpus held out: None if the fraction is 0, at least one document otherwise.

    Raises:
        ValueError: the only document is too short to be cut in two.
    """
    if not validation_fraction:
        return corpus, None
    if corpus.num_documents == 1:
        return _cut(corpus, validation_fraction)
    held_out = corpus.hashes < validation_fraction
    if not held_out.any():
        held_out[np.argmin(corpus.hashes)] = True
    elif held_out.all():
        held_out[np.argmax(corpus.hashes)] = False
    # Nothing is chosen by the hashes again.
    parts = (corpus.select(~held_out), corpus.select(held_out))
    return tuple(dataclasses.replace(part, hashes=np.zeros(0)) for part in parts)  # type: ignore[return-value]


def _cut(corpus: Corpus, fraction: float) -> tuple[Corpus, Corpus]:
    """Splits the only document in two."""
    if corpus.num_tokens < 2:
        raise ValueError(
            "data.source must hold at least two tokens where data.validation_fraction is above 0, got 1; give more data"
        )
    cut = corpus.ends - max(1, int(corpus.num_tokens * fraction))
    return dataclasses.replace(corpus, ends=cut), dataclasses.replace(corpus, starts=cut)
