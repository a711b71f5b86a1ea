"""Rows of tokens from other tools: `input_ids`, with `labels` or a mask that says what is learned."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from sppo_jax.config.data import DataConfig
from sppo_jax.data.cache import Writer
from sppo_jax.data.chat_rows import rows_of
from sppo_jax.data.corpus import Corpus, corpus_of
from sppo_jax.data.folders import File, beginnings, unchanged
from sppo_jax.data.learned import Learned, count, learned_of, warn_of_dropped
from sppo_jax.data.left_out import NOTHING_LEARNED, Tally, as_facts, of_facts
from sppo_jax.data.mask_bit import join_words
from sppo_jax.data.parts import Job, tokenized
from sppo_jax.data.progress import Progress, total_bytes

IDS = ("input_ids", "token_ids")
# As long as the ids: labels are ids, or IGNORED where nothing is learned; masks are 1 where a token is learned.
LABELS, IGNORED = "labels", -100
MASKS = ("loss_mask", "labels_mask", "assistant_masks", "assistant_mask", "completion_mask")
_PADDING = "attention_mask"
_FORMAT = 2  # of the words in the cache
_BYTES_A_TOKEN = 4  # about, in the files


def load_token_rows(config: DataConfig, files: Sequence[File], vocab_size: int, length: int) -> Corpus:
    """Opens rows of tokens, which are looked through once.

    Args:
        config: gives the cache.
        files: files of rows.
        vocab_size: tokens must lie in 0..vocab_size-1.
        length: tokens that a sequence holds.

    Raises:
        ValueError: a row is wrong, or nothing is left to learn.
    """
    entry = tokenized(config, token_rows_job(files, vocab_size, length))
    assert entry.tokens is not None
    found = learned_of(entry.facts["learned"])
    warn_of_dropped(found, length)
    corpus = corpus_of(
        entry.tokens, entry.ends, [file.name for file in files], entry.facts["documents"], starts=entry.starts
    )
    return dataclasses.replace(
        corpus, digest=str(entry.facts["crc"]), learned=found, left_out=of_facts(entry.facts["left_out"])
    )


def token_rows_job(files: Sequence[File], vocab_size: int, length: int) -> Job:
    """Returns how rows of tokens become a corpus; see `load_token_rows`."""
    key = {
        "files": [file.key for file in files],
        "begins": beginnings(files),
        "rows of tokens": _FORMAT,
        "vocab_size": vocab_size,
        "length": length,
    }

    def tokenize(some: Sequence[File], writer: Writer) -> None:
        _fill(some, writer, vocab_size, length)

    def check(facts: dict[str, Any]) -> None:
        if not any(facts["documents"]):
            raise ValueError(
                f"data.source must hold rows of tokens with something to learn, got "
                f"{learned_of(facts['learned']).read:,} without; correct {LABELS} or the mask"
            )

    return Job(files=files, key=key, dtype=np.dtype(np.uint32), tokenize=tokenize, check=check)


def _fill(files: Sequence[File], writer: Writer, vocab_size: int, length: int) -> None:
    """Writes the words of all rows, and counts."""
    found, documents, end, left_out = Learned(), [0] * len(files), 0, Tally()
    with Progress(total_bytes(files), "reading tokens") as progress:
        for number, where, row in _rows(files, left_out, progress):
            tokens, learned, marks = tokens_of(row, vocab_size, where)
            progress.advance(_BYTES_A_TOKEN * len(tokens))
            progress.add_tokens(len(tokens))
            found += dataclasses.replace(count(learned, len(tokens), length), marks=(marks,))
            if not learned[1:].any():
                left_out["rows of tokens", NOTHING_LEARNED] += 1
                continue
            words = join_words(tokens, learned)
            end += len(words)
            documents[number] += 1
            writer.add_tokens(words)
            writer.add_ends(np.array([end], np.int64))
    writer.facts.update(documents=documents, learned=dataclasses.asdict(found), left_out=as_facts(left_out))


def _rows(files: Sequence[File], left_out: Tally, progress: Progress) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """Gives rows with the number of their file and their place."""
    for number, file in enumerate(files):
        with unchanged(file), progress.reading(file):
            for where, row in rows_of(file.path, left_out):
                yield number, where, row


def tokens_of(row: dict[str, Any], vocab_size: int, where: str) -> tuple[np.ndarray, np.ndarray, str]:
    """Returns the tokens of a row, int64 [num_tokens], which are learned, bool [num_tokens], and who says so.

    Raises:
        ValueError: the row has no ids, its arrays differ in length, or a label is another token.
    """
    key = next((key for key in IDS if key in row), "")
    if not key:
        raise ValueError(
            f"a row of tokens must have {IDS[0]}, got keys {', '.join(sorted(row)) or 'none'} in {where}; "
            "correct the row"
        )
    tokens = _integers(row, key, None, where)
    if len(tokens) and not 0 <= tokens.min() <= tokens.max() < vocab_size:
        wrong = tokens.min() if tokens.min() < 0 else tokens.max()
        raise ValueError(
            f"{key} must lie in 0..{vocab_size - 1} (model.vocab_size = {vocab_size}), got {wrong} in {where}; raise "
            "model.vocab_size, or correct the row"
        )
    learned, marks = np.ones(len(tokens), bool), f"no {LABELS}: all tokens"
    mask = next((key for key in MASKS if key in row), "")
    if LABELS in row:
        labels = _integers(row, LABELS, len(tokens), where)
        learned, marks = labels != IGNORED, LABELS
        if (labels != tokens)[learned].any():
            at = int(np.flatnonzero(learned & (labels != tokens))[0])
            raise ValueError(
                f"{LABELS} must be {IGNORED} or the token at the same place, got {labels[at]} for token {tokens[at]} "
                f"at place {at} in {where}; do not shift them"
            )
    elif mask:
        learned, marks = _integers(row, mask, len(tokens), where) != 0, mask
    if _PADDING in row:
        kept = _integers(row, _PADDING, len(tokens), where) != 0
        tokens, learned = tokens[kept], learned[kept]
    return tokens, learned, marks


def _integers(row: dict[str, Any], key: str, length: int | None, where: str) -> np.ndarray:
    try:
        found = np.array(row[key])
        whole = found.ndim == 1 and (not len(found) or found.dtype.kind in "iub")
    except ValueError:
        whole = False
    if not whole:
        raise ValueError(f"{key} must be a list of whole numbers, got another value in {where}; correct the row")
    if length is not None and len(found) != length:
        raise ValueError(
            f"{key} must be as long as the ids, got {len(found):,} and {length:,} in {where}; correct the row"
        )
    return found.astype(np.int64)
