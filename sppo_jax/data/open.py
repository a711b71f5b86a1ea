"""Opens the data that a config names."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sppo_jax.config import Config
from sppo_jax.config.data import DRAWN, DataConfig, SourceConfig, Sources
from sppo_jax.data.cache.left_out import LeftOut, summed
from sppo_jax.data.rows.corpus import Corpus, split_corpus, within
from sppo_jax.data.rows.mixture import Mixture
from sppo_jax.data.rows.needles import NEEDLES, NeedleRows
from sppo_jax.data.rows.packing import PackedRows
from sppo_jax.data.rows.protocol import Rows
from sppo_jax.data.rows.recall import RECALL, TRAINING, VALIDATION, RecallRows
from sppo_jax.data.sources.open_source import jobs_of, load_corpus
from sppo_jax.data.storage.parts import FilePart, Job, write_part
from sppo_jax.data.tasks.haystack import read_haystack
from sppo_jax.data.tasks.prompts import Prompter, chat_template
from sppo_jax.data.tokens.encoding import Encoder, open_encoder
from sppo_jax.data.vocabulary import knows_the_model

# The largest share of a source's tokens that is held out without a warning, if the config asks for less.
_MOST_HELD_OUT = 0.5


@dataclass(frozen=True, kw_only=True)
class Source:
    """A source of documents, at least one of them to train on or held out.

    Args:
        name: the name in the config.
        weight: share of the training sequences, in (0, 1]; of the validation sequences if the source has no others.
        training: the sequences to train on; None if all are held out.
        validation: the sequences held out; None if none are.
    """

    name: str
    weight: float
    training: PackedRows | None
    validation: PackedRows | None


@dataclass(frozen=True, kw_only=True)
class Data:
    """What a run reads.

    Args:
        training: the sequences to train on.
        validation: the sequences held out; None if none are.
        decode: returns the text of tokens, integer [num_tokens].
        sources: the sources of the sequences; empty where sequences are drawn.
        fingerprint: a text that differs between data whose sequences differ.
    """

    training: Rows
    validation: Rows | None
    decode: Callable[[np.ndarray], str]
    sources: tuple[Source, ...]
    fingerprint: str

    @property
    def has_one_document(self) -> bool:
        """Whether each sequence, to train on or held out, holds one document; those that are drawn do."""
        rows = [rows for source in self.sources for rows in (source.training, source.validation) if rows]
        return all(each.has_one_document for each in rows)


@knows_the_model
def prepare_data(config: Config) -> Data:
    """Opens the sources of a config, and makes first what is not there yet, which may take hours and much room.

    Files behind addresses are downloaded, and text is tokenized into the cache. `open_data` is the same function.

    Raises:
        ValueError: a source is unknown, unreadable or empty, or does not fit the model's vocabulary.
    """
    if config.data.source == RECALL:
        return _open_recall(config)
    if config.data.source == NEEDLES:
        return _open_needles(config)
    data, vocab_size = with_tokenizer(config), config.model.vocab_size
    encoder = functools.cache(lambda: open_encoder(data, vocab_size=vocab_size))

    room = max(1, int(config.sequence.length * data.fill))

    def corpora(given: str | Sources, weights: Mapping[str, float]) -> Iterator[tuple[str, float, Corpus]]:
        for name, weight in weights.items():
            own = data.settings_of(name, given)
            load = functools.partial(load_corpus, data.with_settings(own), name, encoder)
            # Not kept here while documents are packed.
            yield name, weight / sum(weights.values()), _within(name, load(vocab_size=vocab_size, length=room), own)

    sources: list[Source] = []
    fraction = 0.0 if data.validation_sources else data.validation_fraction
    for name, weight, corpus in corpora(data.source, data.sources):
        parts = split_corpus(corpus, fraction)
        _check_held_out(name, corpus, parts[1], fraction)
        del corpus
        training, held_out = (pack_corpus(config, len(sources), part) for part in parts)
        sources.append(Source(name=name, weight=weight, training=training, validation=held_out))
    for name, weight, corpus in corpora(data.validation_source or {}, data.validation_sources):
        held_out = pack_corpus(config, len(sources), corpus)
        sources.append(Source(name=name, weight=weight, training=None, validation=held_out))
    # The tokens of a token file can be decoded if a tokenizer is given, if a source was text, or by that of the model.
    readable = config.data.tokenizer is not None or encoder.cache_info().currsize
    others = functools.partial(_words_or_numbers, encoder) if data.tokenizer is not None else _write_numbers
    validation = [(source.validation, source.weight) for source in sources if source.validation]
    return Data(
        training=mixed([(source.training, source.weight) for source in sources if source.training]),
        validation=mixed(validation) if validation else None,
        decode=encoder().decode if readable else others,
        sources=tuple(sources),
        fingerprint=_fingerprint(config, sources),
    )


open_data = prepare_data


@knows_the_model
def write_parts(config: Config, part: FilePart) -> list[str]:
    """Tokenizes one part of every source into the cache; returns a line for each.

    A source of fewer files than parts has as many parts as files.

    Raises:
        ValueError: no source has so many files, none is tokenized, or as `prepare_data`.
    """
    data, vocab_size = with_tokenizer(config), config.model.vocab_size
    encoder = functools.cache(lambda: open_encoder(data, vocab_size=vocab_size))
    room = max(1, int(config.sequence.length * data.fill))
    jobs: list[tuple[str, DataConfig, Job]] = []
    for given, weights in ((data.source, data.sources), (data.validation_source or {}, data.validation_sources)):
        for name in weights:
            own = data.with_settings(data.settings_of(name, given))
            found = jobs_of(own, name, encoder, vocab_size=vocab_size, length=room) if name not in DRAWN else []
            jobs += [(name, own, job) for job in found]
    most = max((len(job.files) for _, _, job in jobs), default=0)
    if part.count > most:
        raise ValueError(
            f"--part must name at most as many parts as the largest source has files to tokenize, {most:,}, got "
            f"{part.number}/{part.count}; use fewer parts, or cut the files"
        )
    lines = []
    for name, own, job in jobs:
        count = min(part.count, len(job.files))
        if part.number <= count:
            lines.append(f"{name}: {write_part(own, job, FilePart(number=part.number, count=count))}")
    return lines or [f"part {part.number} of {part.count}: nothing is left to tokenize"]


def _within(name: str, corpus: Corpus, own: SourceConfig) -> Corpus:
    """Leaves out the documents that a source's own settings exclude, and says how many."""
    found = within(corpus, own.min_tokens, own.max_tokens)
    left_out = corpus.num_documents - found.num_documents
    limits = f"{own.min_tokens:,} to {own.max_tokens:,}" if own.max_tokens else f"at least {own.min_tokens:,}"
    if not found.num_documents:
        raise ValueError(
            f"data.source={name} must hold documents of {limits} tokens, got none among {corpus.num_documents:,}; "
            "change min_tokens or max_tokens"
        )
    if left_out:
        warnings.warn(
            f"data.source={name}: {left_out:,} of {corpus.num_documents:,} documents do not have {limits} tokens and "
            "are left out, as min_tokens and max_tokens say",
            stacklevel=4,
        )
    why = LeftOut(what="documents", why=f"they do not have {limits} tokens", count=left_out)
    return dataclasses.replace(found, left_out=summed((*corpus.left_out, why)))


def _check_held_out(name: str, corpus: Corpus, held_out: Corpus | None, fraction: float) -> None:
    """Warns if a source has so few documents that most of its tokens are held out."""
    share = held_out.num_tokens / corpus.num_tokens if held_out else 0.0
    if held_out and share > max(_MOST_HELD_OUT, 2 * fraction):
        warnings.warn(
            f"data.validation_fraction={fraction} holds out whole documents of data.source={name}, got "
            f"{held_out.num_documents} of {corpus.num_documents} documents with {share:.1%} of the tokens; give more "
            "documents, name documents to validate on with data.validation_source, or set data.validation_fraction=0",
            stacklevel=3,
        )


def _open_recall(config: Config) -> Data:
    data, length, vocab_size = config.data, config.sequence.length, config.model.vocab_size
    training, validation = (
        RecallRows(data.recall, length=length, vocab_size=vocab_size, seed=data.seed, stream=stream)
        for stream in (TRAINING, VALIDATION)
    )
    drawn = repr((data.recall, length, vocab_size, data.seed))
    return Data(
        training=training,
        validation=validation,
        decode=training.decode,
        sources=(),
        fingerprint=hashlib.sha256(drawn.encode()).hexdigest()[:16],
    )


def _open_needles(config: Config) -> Data:
    data, length = with_tokenizer(config), config.sequence.length
    encoder = open_encoder(data, vocab_size=config.model.vocab_size)
    prompter = Prompter(encoder=encoder, template=chat_template(data))
    training, validation = (
        NeedleRows(data, prompter, length=length, stream=stream) for stream in (TRAINING, VALIDATION)
    )
    template = prompter.template and prompter.template.prompt([{"role": "user", "content": ""}])
    haystack = data.needles.haystack and read_haystack(data.needles.haystack)
    drawn = repr((data.needles.tasks, haystack, length, encoder.key, template, data.seed))
    return Data(
        training=training,
        validation=validation,
        decode=encoder.decode,
        sources=(),
        fingerprint=hashlib.sha256(drawn.encode()).hexdigest()[:16],
    )


def with_tokenizer(config: Config) -> DataConfig:
    """Returns the settings; without a tokenizer, adds that of the model that training starts from."""
    data, imported = config.data, config.model.hf
    return dataclasses.replace(data, tokenizer=imported) if imported and data.tokenizer is None else data


def pack_corpus(config: Config, number: int, corpus: Corpus | None) -> PackedRows | None:
    """Lays out the documents of the source of a number; of no documents returns None."""
    data = config.data
    if corpus is None:
        return None
    seed = data.seed << 16 | number
    return PackedRows(corpus, length=config.sequence.length, pack=data.pack, seed=seed, fill=data.fill)


def mixed(sources: Sequence[tuple[PackedRows, float]]) -> Rows:
    """Mixes the sequences of some sources by their weights."""
    return sources[0][0] if len(sources) == 1 else Mixture(*zip(*sources, strict=True))


def _fingerprint(config: Config, sources: Sequence[Source]) -> str:
    """Hashes everything that decides the tokens of each sequence, without reading all tokens."""
    data = config.data
    digest = hashlib.sha256(repr((data.pack, data.seed, config.sequence.length)).encode())
    for source in sources:
        for rows in (source.training, source.validation):
            if rows:
                layout = rows.layout
                digest.update(f"{source.weight:.9g} {layout.num_rows}".encode())
                for array in (layout.begins, layout.sizes, layout.firsts):
                    digest.update(zlib.crc32(np.ascontiguousarray(array).data).to_bytes(4, "little"))
                digest.update(rows.read(0)["tokens"].tobytes())
                digest.update(rows.corpus.digest.encode())
    return digest.hexdigest()[:16]


def _words_or_numbers(encoder: Callable[[], Encoder], tokens: np.ndarray) -> str:
    """Returns the text of tokens by the tokenizer of the model's folder, or their numbers where it has none."""
    try:
        return encoder().decode(tokens)
    except ValueError:
        return _write_numbers(tokens)


def _write_numbers(tokens: np.ndarray) -> str:
    return " ".join(map(str, tokens.tolist()))
