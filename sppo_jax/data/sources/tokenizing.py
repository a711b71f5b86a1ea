"""The tokens of text files, made once and kept in the cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from sppo_jax.config.data import DataConfig
from sppo_jax.data.cache.left_out import NO_TOKENS, Tally, as_facts
from sppo_jax.data.cache.store import Writer
from sppo_jax.data.content.documents import read_pieces
from sppo_jax.data.storage.folders import File, unchanged
from sppo_jax.data.storage.progress import Progress, total_bytes
from sppo_jax.data.tokens.encoding import Encoder, end_after
from sppo_jax.data.tokens.stitch import Stitcher

_BATCH_CHARS, _BATCH_PIECES = 1 << 22, 4096


def tokenize(files: Sequence[File], encoder: Encoder, writer: Writer, *, config: DataConfig, strict: bool) -> None:
    """Writes the tokens of all documents of some files, and as facts the documents of each file and what is left out.

    Args:
        files: files of text.
        encoder: turns text into tokens.
        writer: takes tokens, ends and facts.
        config: gives the key of the text in a row, and what rows are looked at for.
        strict: whether text must be UTF-8.

    Raises:
        ValueError: a file cannot be read, or changes meanwhile.
    """
    num_documents = [0] * len(files)
    num_tokens = last_end = 0
    begins, stitcher, left_out = True, Stitcher(encoder), Tally()
    with Progress(total_bytes(files)) as progress:
        for batch in _batches(files, config, strict, progress, left_out):
            encoded = stitcher.encode([(piece, is_last) for _, piece, is_last in batch])
            parts, ends, before = [], [], num_tokens
            for (number, _, is_last), tokens in zip(batch, encoded, strict=True):
                around = (encoder.start if begins else ()), (end_after(encoder, tokens) if is_last else ())
                parts += [np.array(around[0], np.int64), tokens, np.array(around[1], np.int64)]
                num_tokens += len(tokens) + len(around[0]) + len(around[1])
                begins = is_last
                if is_last and num_tokens == last_end:
                    left_out[NO_TOKENS] += 1
                elif is_last:
                    ends.append(last_end := num_tokens)
                    num_documents[number] += 1
            writer.add_tokens(np.concatenate(parts))
            writer.add_ends(np.array(ends, np.int64))
            progress.add_tokens(num_tokens - before)
    writer.facts.update(documents=num_documents, left_out=as_facts(left_out))


def _batches(
    files: Sequence[File], config: DataConfig, strict: bool, progress: Progress, left_out: Tally
) -> Iterator[list[tuple[int, str, bool]]]:
    """Gives pieces of documents with the number of their file, some megabytes at a time."""
    batch: list[tuple[int, str, bool]] = []
    num_chars = 0
    for number, file in enumerate(files):
        with unchanged(file), progress.reading(file):
            for piece, is_last in read_pieces(
                file.path, text_key=config.text_key, strict=strict, left_out=left_out, config=config
            ):
                batch.append((number, piece, is_last))
                num_chars += len(piece)
                progress.advance(len(piece))
                if num_chars >= _BATCH_CHARS or len(batch) >= _BATCH_PIECES:
                    yield batch
                    batch, num_chars = [], 0
    if batch:
        yield batch
