"""The documents of a config's data where their lengths are known before anything is tokenized or downloaded."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable

import numpy as np

from sppo_jax.config import Config
from sppo_jax.config.data import DRAWN, DataConfig
from sppo_jax.data.open import mixed, pack_corpus, with_tokenizer
from sppo_jax.data.rows.corpus import Corpus, DocumentSpans, corpus_of, split_corpus, within
from sppo_jax.data.rows.packing import PackedRows
from sppo_jax.data.rows.protocol import Rows
from sppo_jax.data.sources.open_source import LIBRARY, known_spans, load_corpus
from sppo_jax.data.storage.parts import MADE_AGAIN
from sppo_jax.data.storage.places import is_address
from sppo_jax.data.summary.fill import Fill, fill_of
from sppo_jax.data.tokens.encoding import Encoder, open_encoder
from sppo_jax.data.vocabulary import knows_the_model
from sppo_jax.plan.plan import Plan
from sppo_jax.predict.seconds.documents import Documents, Packed, documents_of
from sppo_jax.search.space.request import plans_for_documents

# What is looked at of more documents: so many of them, in blocks that lie together in the file, and so many pieces.
_MOST_DOCUMENTS, _BLOCK, _MOST_PIECES = 1 << 16, 1 << 10, 1 << 17


def known_documents(config: Config) -> Documents | None:
    """Returns how the documents of `data.source` lie in sequences, where their lengths are known; else None.

    The lengths are known of files of tokens, and of text, conversations and rows of tokens in the cache. Nothing is
    tokenized, no address is asked, and at most some tens of megabytes are read: of more documents a sample counts.
    """
    packed = _known_packed(config)
    return None if packed is None else _documents(config, packed)


def known_rows(config: Config) -> Rows | None:
    """Returns sequences with the documents of `known_documents`; their tokens cannot be read."""
    packed = _known_packed(config)
    return None if packed is None else mixed([(rows, weight) for weight, rows in packed])


def _known_packed(config: Config) -> list[tuple[float, PackedRows]] | None:
    if config.data.is_drawn:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return _packed(config, lambda encoder, name, data: _known_corpus(config, encoder, name, data))
        except (ValueError, OSError):
            # Whoever opens the data says what is wrong with the data.
            return None


def known_fill(config: Config) -> Fill | None:
    """Returns how full sequences are where every document has its own and lengths are known, as `known_documents`."""
    if config.data.is_drawn or config.data.pack != "none":
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            corpora = _corpora(config, lambda encoder, name, data: _known_corpus(config, encoder, name, data))
        except (ValueError, OSError):
            return None
    few = [(weight, _few_pieces(corpus, _room(config))) for weight, corpus in corpora or ()]
    return fill_of(config, few) if few else None


def documents_to_plan_for(config: Config) -> Documents | None:
    """Returns the documents whose step a plan is to make short; None: full ones, each as long as a sequence.

    The standard library is the source of a config that names none. Its lengths say nothing about those of a user.
    """
    return known_documents(config) if plans_for_lengths(config) else None


@knows_the_model
def made_known(config: Config) -> Documents | None:
    """Returns what `known_documents` returns once text is tokenized, which is done where it never was.

    Of a source behind an address, too, whose lengths are known only while it is open.

    Raises:
        ValueError: as `prepare_data`.
    """

    def opened(encoder: Callable[[], Encoder], name: str, data: DataConfig) -> Corpus:
        vocab_size, room = config.model.vocab_size, _room(config)
        return load_corpus(data, name, encoder, vocab_size=vocab_size, length=room)

    if (found := known_documents(config)) is None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # who opens the data warns
            warnings.filterwarnings("default", message=f".* {MADE_AGAIN}, ")  # whoever opens them later finds new ones
            packed = _packed(config, opened)
            found = None if packed is None else _documents(config, packed)
            # A cache that holds all of it now is what later plans read.
            found = known_documents(config) or found
    return found


def plans_for_lengths(config: Config) -> bool:
    """Returns whether a config has documents that a plan is for once their lengths are known."""
    return plans_for_documents(config) and not set(config.data.sources) <= {*DRAWN, LIBRARY}


def planned_for(config: Config, plan: Plan) -> str:
    """Says that a plan is for full documents where it could be for those of `data.source`; empty otherwise."""
    if plan.planned_for.documents == "known" or not plans_for_lengths(config):
        return ""
    if any(map(is_address, config.data.sources)):
        return "planned for full documents; behind an address lengths are known in a run alone"
    return "planned for full documents; `sppo data CONFIG` makes the lengths known"


def _room(config: Config) -> int:
    return max(1, int(config.sequence.length * config.data.fill))


def _documents(config: Config, packed: list[tuple[float, PackedRows]]) -> Documents:
    of_sources = [Packed(weight, rows.layout.sizes, rows.layout.firsts) for weight, rows in packed]
    return documents_of(of_sources, config.model, config.sequence.length)


def _packed(config: Config, open_source: Callable[..., Corpus | None]) -> list[tuple[float, PackedRows]] | None:
    """Returns the share and the sequences of each source that `open_source` opens; None where some are not known.

    Args:
        config: names the sources.
        open_source: returns the documents of a source, given an encoder, a name and settings.
    """
    corpora = _corpora(config, open_source)
    if corpora is None:
        return None
    fraction, packed = 0.0 if config.data.validation_sources else config.data.validation_fraction, []
    for number, (weight, corpus) in enumerate(corpora):
        rows = pack_corpus(config, number, split_corpus(_few_pieces(corpus, _room(config)), fraction)[0])
        assert rows is not None
        packed.append((weight, rows))
    return packed


def _corpora(config: Config, open_source: Callable[..., Corpus | None]) -> list[tuple[float, Corpus]] | None:
    """Returns the share and the documents of each source; None where some are not known."""
    data, vocab_size = with_tokenizer(config), config.model.vocab_size
    encoder = functools.cache(lambda: open_encoder(data, vocab_size=vocab_size))
    total, found = sum(data.sources.values()), []
    for name, weight in data.sources.items():
        own = data.settings_of(name, data.source)
        opened = open_source(encoder, name, data.with_settings(own))
        corpus = within(opened, own.min_tokens, own.max_tokens) if opened is not None else None
        if corpus is None or not corpus.num_documents:
            return None
        found.append((weight / total, corpus))
    return found


def _known_corpus(config: Config, encoder: Callable[[], Encoder], name: str, data: DataConfig) -> Corpus | None:
    spans = known_spans(data, name, encoder, vocab_size=config.model.vocab_size, length=_room(config))
    return None if spans is None else _corpus(spans)


def _corpus(all_spans: list[DocumentSpans]) -> Corpus:
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
