"""A conversation of a run's data with what is learned, and lengths of documents by percentile."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sppo_jax.data.open import Data
from sppo_jax.data.rows.corpus import Corpus
from sppo_jax.data.rows.order import key_of, permuted
from sppo_jax.data.tokens.mask_bit import split_words

PERCENTILES = (10, 50, 90, 99, 100)


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Text of consecutive tokens, all of which are learned, or none."""

    text: str
    learned: bool


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """A document: its source, what it is, its number of tokens, and its text in parts."""

    where: str
    noun: str
    tokens: int
    parts: tuple[Segment, ...]


def percentiles(data: Data) -> tuple[tuple[int, int], ...]:
    """Returns the lengths of the documents to train on by percentile, in tokens."""
    sizes = np.concatenate([corpus.ends - corpus.starts for _, corpus in training_corpora(data)])
    found = np.percentile(sizes, PERCENTILES, method="inverted_cdf")
    return tuple((percent, int(size)) for percent, size in zip(PERCENTILES, found, strict=True))


def conversation_of(data: Data, seed: int) -> Conversation | None:
    """Returns a document of the first source that has tokens which are not learned; None: there is no such source."""
    for name, corpus in training_corpora(data):
        if corpus.learned is None:
            continue
        # Other documents of the source may be text, all of which is learned.
        for number in range(min(64, corpus.num_documents)):
            document = permuted(number, corpus.num_documents, key_of(seed))
            tokens, learned = split_words(corpus.read(int(corpus.starts[document]), int(corpus.ends[document])))
            if not learned.all():
                noun = "row" if corpus.learned.kinds == ("rows",) else "conversation"
                return Conversation(where=name, noun=noun, tokens=len(tokens), parts=_parts(data, tokens, learned))
    return None


def _parts(data: Data, tokens: np.ndarray, learned: np.ndarray) -> tuple[Segment, ...]:
    cuts = np.flatnonzero(np.diff(learned.astype(np.int8))) + 1
    runs = zip(np.split(tokens, cuts), np.split(learned, cuts), strict=True)
    return tuple(Segment(text=data.decode(run.astype(np.int64)), learned=bool(learns[0])) for run, learns in runs)


def training_corpora(data: Data) -> list[tuple[str, Corpus]]:
    """Returns the documents for training of each source that has some, with the source's name."""
    return [(source.name, source.training.corpus) for source in data.sources if source.training]
