"""Where documents come from: files, directories and patterns of text and of tokens, and the standard library."""

from __future__ import annotations

import collections
import re
import sys
import sysconfig
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
from tqdm import tqdm

from sppo_jax.config.data import BYTES, DataConfig
from sppo_jax.data.cache import Writer, entry_of
from sppo_jax.data.corpus import Corpus, corpus_of, join
from sppo_jax.data.encoding import Encoder
from sppo_jax.data.folders import File, files_in, is_pattern, look_at
from sppo_jax.data.row_kinds import KINDS, kind_of
from sppo_jax.data.stitch import Stitcher
from sppo_jax.data.text import TEXT_SUFFIXES, read_pieces
from sppo_jax.data.token_files import TOKEN_SUFFIXES, load_tokens
from sppo_jax.data.token_rows import load_token_rows
from sppo_jax.paths import local_path

LIBRARY = "stdlib"
_NOT_LIBRARY = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
# The end of a file's name that says its kind, such as .json.gz.
_SUFFIX = re.compile(r"((\.[A-Za-z]+)?\.[A-Za-z0-9]+)?$")
_MOST_KINDS = 6
_BATCH_CHARS, _BATCH_PIECES = 1 << 22, 4096
_SHOWN_AFTER_S = 2.0


def load_corpus(
    config: DataConfig, source: str, encoder: Callable[[], Encoder], *, vocab_size: int, length: int = 0
) -> Corpus:
    """Opens the documents of a source, in the order of their files' names; text is tokenized if it never was.

    Args:
        config: how files are read, and where tokens are kept.
        source: a file, a directory, a pattern, or "stdlib".
        encoder: opens the encoder; called only if the source has text.
        vocab_size: tokens must lie in 0..vocab_size-1.
        length: tokens that a sequence holds, which decides what conversations are too long.

    Raises:
        ValueError: the source is unknown, unreadable or empty, or a token does not fit the vocabulary.
    """
    root, files = find_files(source)
    of = {kind: [file for file in files if kind_of(config, file) == kind] for kind in KINDS}
    corpora = [_text_corpus(config, root, of["text"], encoder())] if of["text"] else []
    corpora += [_chat_corpus(config, root, of["chat"], encoder(), length)] if of["chat"] else []
    rows = of["rows of tokens"]
    corpora += [load_token_rows(config, root, rows, vocab_size, length)] if rows else []
    corpora += load_tokens(config, source, of["tokens"], vocab_size)
    corpus = join(corpora)
    if not corpus.num_documents:
        raise ValueError(f"data.source must hold tokens, got none in {source}; choose another source")
    return corpus


def _chat_corpus(config: DataConfig, root: Path, files: list[File], encoder: Encoder, length: int) -> Corpus:
    """Opens conversations, which need a library that text does not."""
    try:
        from sppo_jax.data.chats import load_chats
    except ImportError:
        raise ValueError(
            "conversations need the jinja2 library, which is not installed; run pip install jinja2"
        ) from None
    return load_chats(config, root, files, encoder, length)


def find_files(source: str) -> tuple[Path, list[File]]:
    """Returns the directory of a source and its files, in the order of their names.

    Raises:
        ValueError: there is no file, or a file is of an unknown kind.
    """
    root, paths = _library() if source == LIBRARY else _find(source)
    if not paths:
        raise ValueError(
            f"data.source must name files that exist, got {source} with no {_kinds()}; choose another source"
        )
    files = [look_at(path, path.relative_to(root).as_posix()) for path in paths]
    for file in files:
        if source != LIBRARY and not _is_known(file.path):
            raise ValueError(f"data.source must be {LIBRARY} or {_kinds()}, got {file.path}; convert the file")
    return root, sorted(files, key=lambda file: file.name)


def _library() -> tuple[Path, list[Path]]:
    root = Path(sysconfig.get_path("stdlib"))
    return root, [path for path in root.rglob("*.py") if not _NOT_LIBRARY.intersection(path.relative_to(root).parts)]


def _find(source: str) -> tuple[Path, list[Path]]:
    """Returns the directory and the files of a source; of a directory those of kinds that can be read."""
    place = local_path(source, "data.source")
    if place.is_dir():
        root, paths = files_in(place)
        known = [path for path in paths if _is_known(path)]
        _tell_of_others(source, [path for path in paths if not _is_known(path)])
        return root, known
    return files_in(place) if is_pattern(place) else (place.parent, [place])


def _is_known(path: Path) -> bool:
    return path.name.endswith(TEXT_SUFFIXES + TOKEN_SUFFIXES)


def _kinds() -> str:
    *most, last = (*TEXT_SUFFIXES, *TOKEN_SUFFIXES)
    return f"{', '.join(most)} or {last} files"


def _tell_of_others(source: str, left_out: Iterable[Path]) -> None:
    """Warns of files in a directory that are of other kinds, with their number by suffix."""
    counts = collections.Counter(_suffix(path) or "without a suffix" for path in left_out)
    if counts:
        kinds = ", ".join(f"{count} {kind}" for kind, count in counts.most_common(_MOST_KINDS))
        more = f" and {len(counts) - _MOST_KINDS} more kinds" if len(counts) > _MOST_KINDS else ""
        warnings.warn(
            f"data.source={source} must hold {_kinds()}, got {counts.total()} of other kinds, which are left out "
            f"({kinds}{more}); convert them, or move them elsewhere",
            stacklevel=4,
        )


def _suffix(path: Path) -> str:
    found = _SUFFIX.search(path.name)
    return found[0].lower() if found else ""


def _text_corpus(config: DataConfig, root: Path, files: list[File], encoder: Encoder) -> Corpus:
    """Opens the documents of text files, which are tokenized once."""
    strict = config.tokenizer not in (None, BYTES)

    def fill(writer: Writer) -> None:
        writer.facts["documents"] = _tokenize(files, encoder, writer, config.text_key, strict)

    key = {
        "root": str(root.resolve()),
        "files": [file.key for file in files],
        "text_key": config.text_key,
        "encoder": encoder.key,
    }
    dtype = np.dtype(np.uint16 if encoder.num_ids <= 1 << 16 else np.uint32)
    cache = local_path(config.cache, "data.cache") if config.cache else None
    entry = entry_of(cache, key, fill, dtype=dtype)
    assert entry.tokens is not None
    return corpus_of(entry.tokens, entry.ends, [file.name for file in files], entry.facts["documents"])


def _tokenize(files: list[File], encoder: Encoder, writer: Writer, text_key: str, strict: bool) -> list[int]:
    """Writes the tokens of all files; returns the number of documents of each."""
    num_documents = [0] * len(files)
    total = sum(file.num_bytes for file in files)
    num_tokens, begins, stitcher = 0, True, Stitcher(encoder)
    interval_s = 0.2 if sys.stderr.isatty() else 60.0
    with tqdm(
        total=total, unit="B", unit_scale=True, desc="tokenizing", delay=_SHOWN_AFTER_S, mininterval=interval_s
    ) as progress:
        for batch in _batches(files, text_key, strict, progress):
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
    return num_documents


def _batches(files: list[File], text_key: str, strict: bool, progress: tqdm) -> Iterator[list[tuple[int, str, bool]]]:
    """Gives pieces of documents with the number of their file, some megabytes at a time."""
    batch: list[tuple[int, str, bool]] = []
    num_chars = done = 0
    for number, file in enumerate(files):
        for piece, is_last in read_pieces(file.path, text_key=text_key, strict=strict):
            batch.append((number, piece, is_last))
            num_chars += len(piece)
            # About one byte a character; a compressed file counts at most its own bytes.
            progress.update(max(0, min(len(piece), done + file.num_bytes - progress.n)))
            if num_chars >= _BATCH_CHARS or len(batch) >= _BATCH_PIECES:
                yield batch
                batch, num_chars = [], 0
        if look_at(file.path, file.name) != file:
            raise ValueError(
                f"data.source must not change while it is read, got a change of {file.path}; "
                "start again when the file is complete"
            )
        done += file.num_bytes
        progress.update(done - progress.n)
    if batch:
        yield batch
