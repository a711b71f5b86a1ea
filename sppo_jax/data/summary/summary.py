"""The data of a run in numbers and samples."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

from sppo_jax.config import Config
from sppo_jax.data.cache.left_out import LeftOut
from sppo_jax.data.open import Data, Source
from sppo_jax.data.rows.corpus import Corpus
from sppo_jax.data.rows.mixture import Mixture
from sppo_jax.data.rows.order import key_of, permuted
from sppo_jax.data.summary.chats import Conversation, conversation_of, percentiles, training_corpora
from sppo_jax.data.tokens.learned import Learned
from sppo_jax.data.tokens.mask_bit import split_words

_NUM_DOCUMENTS, _NUM_PIECES, _SAMPLE_TOKENS, _NUM_ROWS = 4, 6, 100, 16


@dataclass(frozen=True, kw_only=True)
class SourceSummary:
    """A source in numbers.

    Args:
        name: the name in the config.
        weight: share of the training sequences; 0: the whole source is held out, and all figures of training are 0.
        documents: number of documents to train on.
        tokens: number of tokens of these documents.
        held_out_documents: number of documents for validation.
        held_out_tokens: number of tokens of these documents.
        sequences: number of sequences of one epoch of the source.
        filled: share of the places of these sequences that are not padding.
        split: number of documents that are cut into pieces.
        run_epochs: number of times that the run reads the source.
        learned: counts of what is learned, of documents held out too; None: all tokens are learned.
        left_out: what of the source is not read, and why.
    """

    name: str
    weight: float
    documents: int
    tokens: int
    held_out_documents: int
    held_out_tokens: int
    sequences: int
    filled: float
    split: int
    run_epochs: float
    learned: Learned | None
    left_out: tuple[LeftOut, ...]


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Training documents of first..last tokens."""

    first: int
    last: int
    documents: int
    tokens: int


@dataclass(frozen=True, kw_only=True)
class Sample:
    """The start or the end of a piece of text: its place, its number of tokens, and its first or last characters."""

    where: str
    tokens: int
    text: str


@dataclass(frozen=True, kw_only=True)
class Summary:
    """A run's data in numbers and samples.

    Args:
        length: tokens of a sequence.
        pack: how documents fill sequences.
        num_sequences: sequences of a step.
        run_steps: steps of the run.
        sources: each source in numbers.
        epoch_sequences: sequences of an epoch, which ends when every source has been read whole.
        filled: share of the places of these sequences that are not padding.
        histogram: documents by length, shortest first.
        percentiles: percent, and the tokens that as many percent of the documents do not exceed.
        conversation: a document with tokens that are not learned; None: there is none.
        documents: the beginnings of some documents.
        ends: the ends of the same documents.
        sequence: number of the sequence, among the first few, that holds the most pieces.
        pieces: the beginnings of the pieces of this sequence.
        num_pieces: number of pieces of this sequence.
        fingerprint: fingerprint of the order of all tokens.
    """

    length: int
    pack: str
    num_sequences: int
    run_steps: int
    sources: tuple[SourceSummary, ...]
    epoch_sequences: int
    filled: float
    histogram: tuple[Bucket, ...]
    percentiles: tuple[tuple[int, int], ...]
    conversation: Conversation | None
    documents: tuple[Sample, ...]
    ends: tuple[Sample, ...]
    sequence: int
    pieces: tuple[Sample, ...]
    num_pieces: int
    fingerprint: str

    @property
    def epoch_steps(self) -> float:
        return self.epoch_sequences / self.num_sequences

    @property
    def run_epochs(self) -> float:
        return self.run_steps / self.epoch_steps


def summarize(config: Config, data: Data) -> Summary:
    """Counts and samples the data that a run reads.

    Args:
        config: the config of the run.
        data: data from `prepare_data`.
    """
    run_sequences = config.train.steps * config.num_sequences
    rows = data.training
    drawn, epoch_drawn = (
        rows.num_drawn(count) if isinstance(rows, Mixture) else [count] for count in (run_sequences, len(rows))
    )
    # Sources to validate on come after sources to train on, and training draws nothing from them.
    drawn += [0] * (len(data.sources) - len(drawn))
    sources = tuple(_source(*each) for each in zip(data.sources, drawn, strict=True))
    filled = sum(count * source.filled for count, source in zip(epoch_drawn, sources, strict=False)) / len(rows)
    sequence, pieces, num_pieces = _pieces(data)
    documents, ends = _documents(data, config.data.seed)
    return Summary(
        length=config.sequence.length,
        pack=config.data.pack,
        num_sequences=config.num_sequences,
        run_steps=config.train.steps,
        sources=sources,
        epoch_sequences=len(rows),
        filled=filled,
        histogram=_histogram(data),
        percentiles=percentiles(data),
        conversation=conversation_of(data, config.data.seed),
        documents=documents,
        ends=ends,
        sequence=sequence,
        pieces=pieces,
        num_pieces=num_pieces,
        fingerprint=data.fingerprint,
    )


def drawn(config: Config, data: Data) -> Summary:
    """Samples sequences that are drawn at random, such as those of the recall task.

    Args:
        config: the config of the run.
        data: data from `prepare_data`, without sources.
    """
    sequence, pieces, num_pieces = _pieces(data)
    return Summary(
        length=config.sequence.length,
        pack="none",
        num_sequences=config.num_sequences,
        run_steps=config.train.steps,
        sources=(),
        epoch_sequences=len(data.training),
        filled=1.0,
        histogram=(),
        percentiles=(),
        conversation=None,
        documents=(),
        ends=(),
        sequence=sequence,
        pieces=pieces,
        num_pieces=num_pieces,
        fingerprint=data.fingerprint,
    )


def as_dict(summary: Summary) -> dict[str, Any]:
    """Returns all figures, for JSON."""
    return dataclasses.asdict(summary) | {"epoch_steps": summary.epoch_steps, "run_epochs": summary.run_epochs}


def _source(source: Source, drawn: int) -> SourceSummary:
    rows, held_out = source.training, source.validation
    either = rows or held_out
    return SourceSummary(
        name=source.name,
        weight=source.weight if rows else 0.0,
        documents=rows.corpus.num_documents if rows else 0,
        tokens=rows.corpus.num_tokens if rows else 0,
        held_out_documents=held_out.corpus.num_documents if held_out else 0,
        held_out_tokens=held_out.corpus.num_tokens if held_out else 0,
        sequences=len(rows) if rows else 0,
        filled=rows.corpus.num_tokens / (len(rows) * rows.length) if rows else 0.0,
        split=rows.layout.num_split if rows else 0,
        run_epochs=drawn / len(rows) if rows else 0.0,
        learned=either.corpus.learned if either else None,
        left_out=either.corpus.left_out if either else (),
    )


def _histogram(data: Data) -> tuple[Bucket, ...]:
    """Counts documents by length in powers of two, from the shortest to the longest document."""
    sizes = np.concatenate([corpus.ends - corpus.starts for _, corpus in training_corpora(data)])
    bits = np.frexp(sizes.astype(np.float64))[1] - 1
    counts, tokens = np.bincount(bits), np.bincount(bits, weights=sizes)
    return tuple(
        Bucket(first=1 << bit, last=(2 << bit) - 1, documents=int(counts[bit]), tokens=int(tokens[bit]))
        for bit in range(int(bits.min()), len(counts))
    )


def _documents(data: Data, seed: int) -> tuple[tuple[Sample, ...], tuple[Sample, ...]]:
    """Samples the beginnings, and the ends, of documents of all sources in turn."""
    beginnings, ends, sources = [], [], training_corpora(data)
    for turn in range(max(_NUM_DOCUMENTS, len(sources))):
        number, at = divmod(turn, len(sources))
        name, corpus = sources[at]
        if number < corpus.num_documents:
            document = permuted(number, corpus.num_documents, key_of(seed))
            start, end = int(corpus.starts[document]), int(corpus.ends[document])
            beginnings.append(_sample(data, name, corpus, (start, end), (start, min(end, start + _SAMPLE_TOKENS))))
            ends.append(_sample(data, name, corpus, (start, end), (max(start, end - _SAMPLE_TOKENS), end)))
    return tuple(beginnings), tuple(ends)


def _sample(data: Data, name: str, corpus: Corpus, document: tuple[int, int], part: tuple[int, int]) -> Sample:
    text = data.decode(split_words(corpus.read(*part))[0].astype(np.int64))
    return Sample(where=name, tokens=document[1] - document[0], text=text)


def _pieces(data: Data) -> tuple[int, tuple[Sample, ...], int]:
    """Samples the pieces of a sequence; of many pieces, the first and the last."""
    rows = [data.training[index] for index in range(min(_NUM_ROWS, len(data.training)))]
    counts = [int(row["document_ids"].max()) + 1 for row in rows]
    count = max(counts)
    row, ids = rows[counts.index(count)], rows[counts.index(count)]["document_ids"]
    half = _NUM_PIECES // 2
    samples = []
    for piece in range(count) if count <= _NUM_PIECES else [*range(half), *range(count - half, count)]:
        places = np.flatnonzero(ids == piece)
        text = data.decode(row["tokens"][places[:_SAMPLE_TOKENS]])
        samples.append(Sample(where=f"{places[0]:,}..{places[-1]:,}", tokens=len(places), text=text))
    return counts.index(count), tuple(samples), count
