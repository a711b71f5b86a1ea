"""Rows of a prompt and its completion, both text: joined as they are, and the completion alone is learned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from sppo_jax.config.data import DataConfig
from sppo_jax.data.cache.left_out import SAYS_SO, Tally
from sppo_jax.data.cache.store import Writer
from sppo_jax.data.chat.spans import overlaps
from sppo_jax.data.content.conversations import rows_of
from sppo_jax.data.content.documents import encodable
from sppo_jax.data.content.loss_keys import ignored_key
from sppo_jax.data.content.row_forms import COMPLETION, PROMPT, looked_at
from sppo_jax.data.rows.corpus import Corpus
from sppo_jax.data.sources.masked import Masked, open_masked, write_masked
from sppo_jax.data.storage.folders import File, beginnings, unchanged
from sppo_jax.data.storage.parts import Job
from sppo_jax.data.storage.progress import Progress, total_bytes
from sppo_jax.data.tokens.encoding import Encoder, Located, end_after
from sppo_jax.data.tokens.learned import learned_of

_BATCH = 64
_FORMAT = 1  # of the words in the cache
_WHAT = "prompts with completions"


def load_prompts(config: DataConfig, files: Sequence[File], encoder: Encoder, length: int) -> Corpus:
    """Opens prompts with their completions, which are tokenized once.

    Args:
        config: gives the cache, and the keys that are ignored.
        files: files of rows.
        encoder: turns text into tokens, and says how a text begins and ends.
        length: tokens that a sequence holds.

    Raises:
        ValueError: a row is wrong, or nothing is left to learn.
    """
    return open_masked(config, prompts_job(config, files, encoder, length), length)


def prompts_job(config: DataConfig, files: Sequence[File], encoder: Encoder, length: int) -> Job:
    """Returns how prompts with completions become tokens; see `load_prompts`."""
    key = {
        "files": [file.key for file in files],
        "begins": beginnings(files),
        "encoder": encoder.key,
        "prompts": _FORMAT,
        "length": length,
        **ignored_key(config),
    }

    def tokenize(some: Sequence[File], writer: Writer) -> None:
        left_out = Tally()
        with Progress(total_bytes(some)) as progress:
            found = _documents(config, some, encoder, left_out, progress)
            write_masked(found, _WHAT, some, writer, length, left_out, progress)

    def check(facts: dict[str, Any]) -> None:
        if not any(facts["documents"]):
            raise ValueError(
                f"data.source must hold completions with something to learn, got {learned_of(facts['learned']).read:,} "
                "without; correct the rows"
            )

    return Job(files=files, key=key, dtype=np.dtype(np.uint32), tokenize=tokenize, check=check)


def _documents(
    config: DataConfig, files: Sequence[File], encoder: Encoder, left_out: Tally, progress: Progress
) -> Iterator[Masked]:
    for batch in _batches(files, config, left_out, progress):
        encoded = encoder.locate([prompt + completion for _, prompt, completion in batch])
        for (number, prompt, completion), located in zip(batch, encoded, strict=True):
            tokens, learned = _with_ends(encoder, located, len(prompt), len(prompt) + len(completion))
            yield Masked(file=number, tokens=tokens, learned=learned, marks=("completions of prompts",))


def _with_ends(encoder: Encoder, located: Located, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the tokens of a text that begins and ends as texts do, and which are learned: from character first on."""
    learned = overlaps(located, [(first, last)] if first < last else [])
    start, end = np.array(encoder.start, np.int64), np.array(end_after(encoder, located.tokens), np.int64)
    tokens = np.concatenate([start, located.tokens, end])
    return tokens, np.concatenate([np.zeros(len(start), bool), learned, np.ones(len(end), bool)])


def _batches(
    files: Sequence[File], config: DataConfig, left_out: Tally, progress: Progress
) -> Iterator[list[tuple[int, str, str]]]:
    """Gives prompts and completions with the number of their file."""
    batch: list[tuple[int, str, str]] = []
    for number, file in enumerate(files):
        with unchanged(file), progress.reading(file):
            for where, found in rows_of(file.path, left_out):
                row = looked_at(found, config, where)
                if row is None:
                    left_out[_WHAT, SAYS_SO] += 1
                    continue
                batch.append((number, _text(row, PROMPT, where), _text(row, COMPLETION, where)))
                progress.advance(len(batch[-1][1]) + len(batch[-1][2]))
                if len(batch) == _BATCH:
                    yield batch
                    batch = []
    if batch:
        yield batch


def _text(row: dict[str, Any], key: str, where: str) -> str:
    if not isinstance(row.get(key), str):
        got = f"a value of type {type(row[key]).__name__}" if key in row else "none"
        raise ValueError(
            f"{PROMPT} and {COMPLETION} must both be text in each row of a file (or both lists of messages), got {got} "
            f"for {key} in {where}; correct the row, or write it to another file"
        )
    return encodable(row[key])
