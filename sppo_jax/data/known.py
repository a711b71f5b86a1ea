"""The documents of a config's data where their lengths are known before anything is tokenized or downloaded."""

from __future__ import annotations

import dataclasses
import functools
import warnings

import numpy as np

from sppo_jax.config import Config, ModelConfig
from sppo_jax.data.corpus import Corpus, Spans, corpus_of, split_corpus, within
from sppo_jax.data.encoding import open_encoder
from sppo_jax.data.open import pack_corpus, with_tokenizer
from sppo_jax.data.packing import PackedRows
from sppo_jax.data.recall import RECALL
from sppo_jax.data.sources import known_spans
from sppo_jax.models.counts import layer_costs
from sppo_jax.predict.documents import Documents

# What is looked at of more documents: so many of them, in blocks that lie together in the file, and so many pieces.
_MOST_DOCUMENTS, _BLOCK, _MOST_PIECES = 1 << 16, 1 << 10, 1 << 17


def known_documents(config: Config) -> Documents | None:
    """Returns how the documents of `data.source` lie in sequences, where their lengths are known; else None.

    The lengths are known of files of tokens, and of text, conversations and rows of tokens in the cache. Nothing is
    tokenized, no address is asked, and at most some tens of megabytes are read: of more documents a sample counts.
    """
    if config.data.source == RECALL:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return _documents(config)
        except (ValueError, OSError):
            # Whoever opens the data says what is wrong with the data.
            return None


def _documents(config: Config) -> Documents | None:
    data, vocab_size, length = with_tokenizer(config), config.model.vocab_size, config.sequence.length
    encoder = functools.cache(lambda: open_encoder(data, vocab_size=vocab_size))
    fraction = 0.0 if data.validation_sources else data.validation_fraction
    room, total = max(1, int(length * data.fill)), sum(data.sources.values())
    reaches, sums = _reaches(config.model, length), np.zeros(3)
    for number, (name, weight) in enumerate(data.sources.items()):
        own = data.settings_of(name, data.source)
        spans = known_spans(data.with_settings(own), name, encoder, vocab_size=vocab_size, length=room)
        if spans is None:
            return None
        corpus = within(_corpus(spans), own.min_tokens, own.max_tokens)
        if not corpus.num_documents:
            return None
        rows = pack_corpus(config, number, split_corpus(_few_pieces(corpus, room), fraction)[0])
        assert rows is not None
        sums += weight / total * _of_row(rows, reaches)
    tokens, pieces, pairs = sums.tolist()
    whole = _pairs(np.array([length], float), reaches).item()
    # A model without attention has no pairs.
    return Documents(mean_tokens=tokens / pieces, attended=pairs / whole if whole else 1.0)


def _reaches(model: ModelConfig, length: int) -> list[tuple[float, int]]:
    """Returns the tokens that a token attends to at most in layers of each kind, and FLOPs of a pair in all of them."""
    kinds = model.counts(model.num_layers)
    return [(count * layer_costs(kind).pair_flops, kind.window_within(length) or length) for kind, count in kinds]


def _of_row(rows: PackedRows, reaches: list[tuple[float, int]]) -> np.ndarray:
    """Returns the tokens, the pieces and the pairs of a query and a key of a sequence, in the mean of an epoch: [3]."""
    sizes = rows.layout.sizes.astype(np.float64)
    return np.array([sizes.sum(), len(sizes), _pairs(sizes, reaches).sum()]) / rows.layout.num_rows


def _pairs(sizes: np.ndarray, reaches: list[tuple[float, int]]) -> np.ndarray:
    """Returns the pairs of documents of some sizes over all layers, each pair times its FLOPs."""
    total = np.zeros(len(sizes))
    for flops, reach in reaches:
        growing = np.minimum(sizes, reach)
        total += flops * (growing * (growing + 1) / 2 + (sizes - growing) * growing)
    return total


def _corpus(all_spans: list[Spans]) -> Corpus:
    """Returns the documents of all files, or the same share of each file's where there are too many."""
    total, before = sum(len(spans.ends) for spans in all_spans), 0
    if total <= _MOST_DOCUMENTS:
        whole = [np.concatenate(bounds) for bounds in zip(*(spans[:2] for spans in all_spans), strict=True)]
        names = [name for spans in all_spans for name in spans.names]
        counts = [count for spans in all_spans for count in spans.num_documents]
        return corpus_of(np.zeros(0), whole[1], names, counts, starts=whole[0])
    firsts = np.arange(0, total, _BLOCK * -(-total // _MOST_DOCUMENTS))
    places = (firsts[:, None] + np.arange(_BLOCK)).ravel()
    starts, ends = [], []
    for spans in all_spans:
        own = places[slice(*np.searchsorted(places, (before, before + len(spans.ends))))] - before
        starts.append(spans.starts[own])
        ends.append(spans.ends[own])
        before += len(spans.ends)
    found = np.concatenate(ends)
    return corpus_of(np.zeros(0), found, ["sample"], [len(found)], starts=np.concatenate(starts))


def _few_pieces(corpus: Corpus, room: int) -> Corpus:
    """Returns so many of the documents, and so much of each, that few pieces are packed."""
    num_pieces = int((-(-(corpus.ends - corpus.starts) // room)).sum())
    if num_pieces <= _MOST_PIECES:
        return corpus
    few = corpus.select(np.arange(0, corpus.num_documents, -(-num_pieces // _MOST_PIECES)))
    return dataclasses.replace(few, ends=np.minimum(few.ends, few.starts + _MOST_PIECES * room))
