"""Rows of tokens from other tools, of one document or several, with `labels` or masks that say what is learned."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from sppo_jax.config.data import DataConfig
from sppo_jax.data.cache.left_out import SAYS_SO, Tally
from sppo_jax.data.cache.store import Writer
from sppo_jax.data.content.conversations import rows_of
from sppo_jax.data.content.loss_keys import ignored_key, is_list, names_of, row_trains, way_out, without
from sppo_jax.data.content.row_documents import STARTS, documents_of, numbers
from sppo_jax.data.content.row_forms import IDS, check_form
from sppo_jax.data.rows.corpus import Corpus
from sppo_jax.data.sources.masked import Masked, open_masked, write_masked
from sppo_jax.data.storage.folders import File, beginnings, unchanged
from sppo_jax.data.storage.parts import Job
from sppo_jax.data.storage.progress import Progress, total_bytes
from sppo_jax.data.tokens.learned import learned_of
from sppo_jax.data.vocabulary import VocabularyTooSmall

# As long as the ids: labels are ids, or IGNORED where nothing is learned; masks are 1 where a token is learned.
LABELS, IGNORED = "labels", -100
_FORMAT, _OLDER_FORMAT = 3, 2  # of the words in the cache
# Beside the starts of documents, as NeMo writes both, an entry says whether the token after it is learned.
_SHIFTED = "loss_mask"
_WHAT = "rows of tokens"
_BYTES_A_TOKEN = 4  # about, in the files


def load_token_rows(config: DataConfig, files: Sequence[File], vocab_size: int, length: int) -> Corpus:
    """Opens rows of tokens, which are looked through once.

    Args:
        config: gives the cache, and the keys that are ignored.
        files: files of rows.
        vocab_size: tokens must lie in 0..vocab_size-1.
        length: tokens that a sequence holds.

    Raises:
        ValueError: a row is wrong, or nothing is left to learn.
    """
    return open_masked(config, token_rows_job(config, files, vocab_size, length), length)


def token_rows_job(config: DataConfig, files: Sequence[File], vocab_size: int, length: int) -> Job:
    """Returns how rows of tokens become a corpus; see `load_token_rows`."""
    key = {
        "files": [file.key for file in files],
        "begins": beginnings(files),
        _WHAT: _FORMAT,
        "vocab_size": vocab_size,
        "length": length,
    }
    older = key | {_WHAT: _OLDER_FORMAT}
    key |= ignored_key(config)

    def tokenize(some: Sequence[File], writer: Writer) -> None:
        left_out = Tally()
        with Progress(total_bytes(some), "reading tokens") as progress:
            found = _documents(config, some, vocab_size, left_out, progress)
            write_masked(found, _WHAT, some, writer, length, left_out, progress)

    def check(facts: dict[str, Any]) -> None:
        if not any(facts["documents"]):
            raise ValueError(
                f"data.source must hold rows of tokens with something to learn, got "
                f"{learned_of(facts['learned']).read:,} without; correct {LABELS} or the mask"
            )

    return Job(files=files, key=key, dtype=np.dtype(np.uint32), tokenize=tokenize, check=check, older=[older])


def _documents(
    config: DataConfig, files: Sequence[File], vocab_size: int, left_out: Tally, progress: Progress
) -> Iterator[Masked]:
    for number, file in enumerate(files):
        with unchanged(file), progress.reading(file):
            for where, row in rows_of(file.path, left_out):
                row = without(row, config.ignore_keys)
                check_form(row, config, where)
                documents, marks = tokens_of(row, vocab_size, where)
                if not documents:
                    left_out[_WHAT, SAYS_SO] += 1
                for tokens, learned in documents:
                    progress.advance(_BYTES_A_TOKEN * len(tokens))
                    yield Masked(file=number, tokens=tokens, learned=learned, marks=marks)


def tokens_of(
    row: dict[str, Any], vocab_size: int, where: str
) -> tuple[list[tuple[np.ndarray, np.ndarray]], tuple[str, ...]]:
    """Returns the documents of a row, and who says what of them is learned.

    Args:
        row: the row, without nulls.
        vocab_size: tokens must lie in 0..vocab_size-1.
        where: its place, for messages.

    Returns:
        Of each document the tokens, int64 [num_tokens], and whether each is learned, bool [num_tokens]; and the keys.
        There are no documents where the row itself says that it is not trained.

    Raises:
        ValueError: the row has no ids, its arrays differ in length, or a label is another token.
    """
    key = next((key for key in IDS if key in row), "")
    if not key:
        raise ValueError(
            f"a row of tokens must have {IDS[0]}, got keys {', '.join(sorted(row)) or 'none'} in {where}; "
            "correct the row"
        )
    tokens = numbers(row[key], key, where)
    if len(tokens) and not 0 <= tokens.min() <= tokens.max() < vocab_size:
        must = f"{key} must lie in 0..{vocab_size - 1} (model.vocab_size = {vocab_size})"
        if tokens.min() < 0:
            raise ValueError(f"{must}, got {tokens.min()} in {where}; correct the row")
        raise VocabularyTooSmall(must, f"{tokens.max()} in {where}", int(tokens.max()) + 1, ", or correct the row")
    if not row_trains(row, where, "tokens", length=len(tokens)):
        return [], ()
    learned, marks = _learned(row, tokens, where)
    kept, firsts = documents_of(row, len(tokens), where)
    if kept is not None:
        tokens, learned = tokens[kept], learned[kept]
    if len(firsts) < 2:
        return [(tokens, learned)], marks
    pieces = list(zip(np.split(tokens, firsts[1:]), np.split(learned, firsts[1:]), strict=True))
    # One token alone among documents, such as padding whose position is 0, has nothing to learn.
    return [piece for piece in pieces if len(piece[0]) > 1] or pieces[:1], marks


def _learned(row: dict[str, Any], tokens: np.ndarray, where: str) -> tuple[np.ndarray, tuple[str, ...]]:
    """Returns which tokens all labels and masks of a row let learn, bool [num_tokens], and the names of these."""
    found: dict[str, np.ndarray] = {}
    if LABELS in row:
        labels = numbers(row[LABELS], LABELS, where, len(tokens))
        learned = found[LABELS] = labels != IGNORED
        if (labels != tokens)[learned].any():
            at = int(np.flatnonzero(learned & (labels != tokens))[0])
            raise ValueError(
                f"{LABELS} must be {IGNORED} or the token at the same place, got {labels[at]} for token {tokens[at]} "
                f"at place {at} in {where}; do not shift them"
            )
    for key in _masks(tuple(row)):
        if not is_list(row[key]) and key in names_of("row", "flag"):
            continue  # of the whole row
        mask = _mask(row[key], key, len(tokens), where)
        if key == _SHIFTED and STARTS[0] in row:
            found[f"{key} of the token after its place"] = np.append(False, mask[:-1])
        else:
            found[key] = mask
    if not found:
        return np.ones(len(tokens), bool), (f"no {LABELS}: all tokens",)
    return functools.reduce(np.logical_and, found.values()), tuple(found)


@functools.lru_cache(1 << 12)
def _masks(keys: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(key for key in names_of("tokens", "mask") if key in keys)


def _mask(value: Any, key: str, length: int, where: str) -> np.ndarray:
    """Returns a mask of 0 and 1, bool [length]."""
    mask = numbers(value, key, where, length, numpy_kinds="iubf")
    learned = mask == 1
    wrong = mask[~learned & (mask != 0)]
    if len(wrong):
        raise ValueError(
            f"{key} must hold 0 and 1 (a weight of its own for each token is not supported), got {wrong[0]} in "
            f"{where}; {way_out(key)}"
        )
    return learned
