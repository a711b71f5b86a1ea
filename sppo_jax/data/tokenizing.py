"""The tokens of text files, made once and kept in the cache."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence

import numpy as np
from tqdm import tqdm

from sppo_jax.data.cache import Writer
from sppo_jax.data.encoding import Encoder
from sppo_jax.data.folders import File, unchanged
from sppo_jax.data.left_out import Tally, as_facts
from sppo_jax.data.stitch import Stitcher
from sppo_jax.data.text import read_pieces

_BATCH_CHARS, _BATCH_PIECES = 1 << 22, 4096
_SHOWN_AFTER_S = 2.0


def tokenize(files: Sequence[File], encoder: Encoder, writer: Writer, *, text_key: str, strict: bool) -> None:
    """Writes the tokens of all documents of some files, and as facts the documents of each file and what is left out.

    Args:
        files: files of text.
        encoder: turns text into tokens.
        writer: takes tokens, ends and facts.
        text_key: key of the text in a row.
        strict: whether text must be UTF-8.

    Raises:
        ValueError: a file cannot be read, or changes meanwhile.
    """
    num_documents = [0] * len(files)
    num_tokens, begins, stitcher, start_s = 0, True, Stitcher(encoder), time.monotonic()
    left_out = Tally()
    with _progress(files) as progress:
        for batch in _batches(files, text_key, strict, progress, left_out):
            encoded = stitcher.encode([(piece, is_last) for _, piece, is_last in batch])
            parts, ends = [], []
            for (number, _, is_last), tokens in zip(batch, encoded, strict=True):
                around = (encoder.start if begins else ()), (encoder.end if is_last else ())
                parts += [np.array(around[0], np.int64), tokens, np.array(around[1], np.int64)]
                num_tokens += len(tokens) + len(around[0]) + len(around[1])
                begins = is_last
                if is_last:
                    ends.append(num_tokens)
                    num_documents[number] += 1
            writer.add_tokens(np.concatenate(parts))
            writer.add_ends(np.array(ends, np.int64))
            rate = num_tokens / max(time.monotonic() - start_s, 1e-9)
            progress.set_postfix_str(f"{tqdm.format_sizeof(rate)} tokens/s", refresh=False)
    writer.facts.update(documents=num_documents, left_out=as_facts(left_out))


def _progress(files: Sequence[File]) -> tqdm:
    return tqdm(
        total=sum(file.num_bytes for file in files),
        unit="B",
        unit_scale=True,
        desc="tokenizing",
        delay=_SHOWN_AFTER_S,
        mininterval=0.2 if sys.stderr.isatty() else 60.0,
    )


def _batches(
    files: Sequence[File], text_key: str, strict: bool, progress: tqdm, left_out: Tally
) -> Iterator[list[tuple[int, str, bool]]]:
    """Gives pieces of documents with the number of their file, some megabytes at a time."""
    batch: list[tuple[int, str, bool]] = []
    num_chars = done = 0
    for number, file in enumerate(files):
        with unchanged(file):
            for piece, is_last in read_pieces(file.path, text_key=text_key, strict=strict, left_out=left_out):
                batch.append((number, piece, is_last))
                num_chars += len(piece)
                # About one byte a character; a compressed file counts at most its own bytes.
                progress.update(max(0, min(len(piece), done + file.num_bytes - progress.n)))
                if num_chars >= _BATCH_CHARS or len(batch) >= _BATCH_PIECES:
                    yield batch
                    batch, num_chars = [], 0
        done += file.num_bytes
        progress.update(done - progress.n)
    if batch:
        yield batch
