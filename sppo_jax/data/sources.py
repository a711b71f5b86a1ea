"""Where documents come from: files, directories and patterns of text and of tokens, and the standard library."""

from __future__ import annotations

import glob
import os
import sys
import sysconfig
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from sppo_jax.config.data import DataConfig
from sppo_jax.data.cache import Entry, Writer, entry_of
from sppo_jax.data.corpus import Corpus, join
from sppo_jax.data.encoding import Encoder
from sppo_jax.data.order import mix_array
from sppo_jax.data.text import TEXT_SUFFIXES, read_pieces, unreadable

TOKEN_SUFFIXES = (".bin", ".npy")
LIBRARY = "stdlib"
_NOT_LIBRARY = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
_BLOCK_TOKENS = 1 << 24
_BATCH_CHARS, _BATCH_PIECES = 1 << 22, 4096
_SHOWN_AFTER_S = 2.0


@dataclass(frozen=True, kw_only=True)
class File:
    """A file of a source: its path, its name within the source, and its size and time when the run began."""

    path: Path
    name: str
    num_bytes: int
    changed_ns: int

    @property
    def key(self) -> list[str | int]:
        return [self.name, self.num_bytes, self.changed_ns]


def load_corpus(config: DataConfig, source: str, encoder: Callable[[], Encoder], *, vocab_size: int) -> Corpus:
    """Opens the documents of a source, in the order of their files' names; text is tokenized if it never was.

    Args:
        config: how files are read, and where tokens are kept.
        source: a file, a directory, a pattern, or "stdlib".
        encoder: opens the encoder; called only if the source has text.
        vocab_size: tokens must lie in 0..vocab_size-1.

    Raises:
        ValueError: the source is unknown, unreadable or empty, or a token does not fit the vocabulary.
    """
    root, files = find_files(source)
    text = [file for file in files if not file.name.endswith(TOKEN_SUFFIXES)]
    corpora = [_text_corpus(config, root, text, encoder())] if text else []
    for file in files:
        if file.name.endswith(TOKEN_SUFFIXES):
            corpora.append(_token_corpus(config, file, vocab_size))
    corpus = join(corpora)
    if not corpus.num_documents:
        raise ValueError(f"data.source must hold tokens, got none in {source}; choose another source")
    return corpus


def find_files(source: str) -> tuple[Path, list[File]]:
    """Returns the directory of a source and its files, in the order of their names.

    Raises:
        ValueError: there is no file, or a file is of an unknown kind.
    """
    place = os.path.expanduser(source)
    if source == LIBRARY:
        root = Path(sysconfig.get_path("stdlib"))
        paths = [path for path in root.rglob("*.py") if not _NOT_LIBRARY.intersection(path.relative_to(root).parts)]
    elif os.path.isdir(place):
        root = Path(place)
        paths = [path for path in root.rglob("*") if _is_visible(path.relative_to(root)) and path.is_file()]
    elif glob.has_magic(place) and not os.path.exists(place):
        parts = Path(place).parts
        root = Path(*parts[: next(at for at, part in enumerate(parts) if glob.has_magic(part))])
        paths = [Path(path) for path in glob.glob(place, recursive=True) if os.path.isfile(path)]
    else:
        root, paths = Path(place).parent, [Path(place)]
    if not paths:
        raise ValueError(
            f"data.source must name files that exist, got {source} with no {_kinds()}; choose another source"
        )
    files = [_file(path, path.relative_to(root).as_posix()) for path in paths]
    for file in files:
        if source != LIBRARY and not file.name.endswith(TEXT_SUFFIXES + TOKEN_SUFFIXES):
            raise ValueError(f"data.source must be {LIBRARY} or {_kinds()}, got {file.path}; convert the file")
    return root, sorted(files, key=lambda file: file.name)


def _is_visible(name: Path) -> bool:
    return name.name.endswith(TEXT_SUFFIXES + TOKEN_SUFFIXES) and not any(part.startswith(".") for part in name.parts)


def _kinds() -> str:
    *most, last = (*TEXT_SUFFIXES, *TOKEN_SUFFIXES)
    return f"{', '.join(most)} or {last} files"


def _file(path: Path, name: str) -> File:
    try:
        stat = path.stat()
    except OSError as error:
        raise unreadable(path, error) from error
    return File(path=path, name=name, num_bytes=stat.st_size, changed_ns=stat.st_mtime_ns)


def _cache(config: DataConfig) -> Path | None:
    return Path(config.cache).expanduser() if config.cache else None


def _text_corpus(config: DataConfig, root: Path, files: list[File], encoder: Encoder) -> Corpus:
    """Opens the documents of text files, which are tokenized once."""
    strict = config.tokenizer is not None

    def fill(writer: Writer) -> None:
        writer.facts["documents"] = _tokenize(files, encoder, writer, config.text_key, strict)

    key = {
        "root": str(root.resolve()),
        "files": [file.key for file in files],
        "text_key": config.text_key,
        "encoder": encoder.key,
    }
    dtype = np.dtype(np.uint16 if encoder.num_ids <= 1 << 16 else np.uint32)
    entry = entry_of(_cache(config), key, fill, dtype=dtype)
    assert entry.tokens is not None
    return _corpus(entry.tokens, entry, [file.name for file in files], entry.facts["documents"])


def _corpus(tokens: np.ndarray, entry: Entry, names: list[str], num_documents: list[int]) -> Corpus:
    starts = np.concatenate([np.zeros(min(1, len(entry.ends)), np.int64), entry.ends[:-1]])
    return Corpus(parts=(tokens,), starts=starts, ends=np.asarray(entry.ends), hashes=_hashes(names, num_documents))


def _hashes(names: list[str], num_documents: list[int]) -> np.ndarray:
    """Returns a number in [0, 1) for every document, from its file's name and its number in the file."""
    counts = np.array(num_documents, np.int64)
    seeds = np.array([zlib.crc32(name.encode(errors="surrogateescape")) for name in names], np.uint64)
    number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    mixed = mix_array(np.repeat(seeds << np.uint64(32), counts) + number.astype(np.uint64))
    return (mixed >> np.uint64(11)).astype(np.float64) / 2**53


def _tokenize(files: list[File], encoder: Encoder, writer: Writer, text_key: str, strict: bool) -> list[int]:
    """Writes the tokens of all files; returns the number of documents of each."""
    num_documents = [0] * len(files)
    total = sum(file.num_bytes for file in files)
    num_tokens, begins = 0, True
    interval_s = 0.2 if sys.stderr.isatty() else 60.0
    with tqdm(
        total=total, unit="B", unit_scale=True, desc="tokenizing", delay=_SHOWN_AFTER_S, mininterval=interval_s
    ) as progress:
        for batch in _batches(files, text_key, strict, progress):
            encoded = encoder.encode([piece for _, piece, _ in batch])
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
        if _file(file.path, file.name) != file:
            raise ValueError(
                f"data.source must not change while it is read, got a change of {file.path}; "
                "start again when the file is complete"
            )
        done += file.num_bytes
        progress.update(done - progress.n)
    if batch:
        yield batch


def _token_corpus(config: DataConfig, file: File, vocab_size: int) -> Corpus:
    """Opens the documents of a file of tokens, which is scanned once."""
    path = file.path
    tokens = _read_npy(path) if path.suffix == ".npy" else _read_bin(file, np.dtype(config.token_dtype))

    def fill(writer: Writer) -> None:
        _look_through(tokens, config.separator, writer)

    key = {"file": [str(path.resolve()), *file.key], "dtype": tokens.dtype.str, "separator": config.separator}
    entry = entry_of(_cache(config), key, fill, dtype=None)
    smallest, largest = entry.facts["smallest"], entry.facts["largest"]
    if smallest < 0 or largest >= vocab_size:
        need = f"raise model.vocab_size to at least {largest + 1}" if smallest >= 0 else "write the file again"
        need += ", or set data.token_dtype to the dtype of the file" if path.suffix == ".bin" else ""
        raise ValueError(
            f"data.source must hold tokens in 0..{vocab_size - 1} (model.vocab_size = {vocab_size}), "
            f"got {smallest if smallest < 0 else largest} in {path}; {need}"
        )
    return _corpus(tokens, entry, [file.name], [len(entry.ends)])


def _look_through(tokens: np.ndarray, separator: int | None, writer: Writer) -> None:
    """Writes the ends of documents (after every separator), and the smallest and the largest token."""
    smallest = largest = end = 0
    for first in range(0, len(tokens), _BLOCK_TOKENS):
        block = tokens[first : first + _BLOCK_TOKENS]
        smallest, largest = min(smallest, int(block.min())), max(largest, int(block.max()))
        if separator is not None:
            ends = first + 1 + np.flatnonzero(block == separator).astype(np.int64)
            end = int(ends[-1]) if len(ends) else end
            writer.add_ends(ends)
    if end != len(tokens):
        writer.add_ends(np.array([len(tokens)]))
    writer.facts |= {"smallest": smallest, "largest": largest}


def _read_npy(path: Path) -> np.ndarray:
    try:
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(
            f"data.source must be a readable .npy file, got {path} ({error}); write the file again"
        ) from error
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
        raise ValueError(
            f"data.source must hold a 1-D integer array, got {tokens.dtype} {list(tokens.shape)} in {path}; "
            "convert the array with astype and ravel"
        )
    return tokens


def _read_bin(file: File, dtype: np.dtype) -> np.ndarray:
    if file.num_bytes % dtype.itemsize:
        raise ValueError(
            f"data.source must hold whole {dtype} tokens, got {file.num_bytes} bytes in {file.path}; "
            "set data.token_dtype to the dtype of the file"
        )
    try:
        return np.memmap(file.path, dtype, "r") if file.num_bytes else np.zeros(0, dtype)
    except OSError as error:
        raise unreadable(file.path, error) from error
