"""Documents in files of tokens, and signs that a file is of another dtype or has a header."""

from __future__ import annotations

import dataclasses
import struct
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sppo_jax.config.data import DataConfig
from sppo_jax.data.cache.left_out import NO_TOKENS, Tally, as_facts, of_facts
from sppo_jax.data.cache.store import Writer, name_of, named_entry, read_entry, user_directory
from sppo_jax.data.forms.megatron import Index, document_ends, index_beside
from sppo_jax.data.rows.corpus import Corpus, DocumentSpans, corpus_of
from sppo_jax.data.storage.folders import File, Place, unchanged, unreadable
from sppo_jax.data.storage.parts import caches
from sppo_jax.data.storage.progress import Progress
from sppo_jax.data.storage.room import check_cache
from sppo_jax.data.tokens.token_map import TokenMap
from sppo_jax.data.vocabulary import VocabularyTooSmall
from sppo_jax.processes import distributed

TOKEN_SUFFIXES = (".bin", ".npy")
_LOOKED_AT_BYTES = 1 << 25  # of files whose documents were never found
_BLOCK_TOKENS = 1 << 20  # even, so that odd places of a block are odd places of the file
# How other files begin that have the suffix .bin too.
_BEGINNINGS = {
    b"\x93NUMPY": "a .npy file",
    b"PAR1": "a .parquet file",
    b"PK\x03\x04": "a .zip file, such as weights of PyTorch",
    b"\x28\xb5\x2f\xfd": "a .zst file",
    b"\x1f\x8b\x08\x00": "a .gz file",
    b"\x1f\x8b\x08\x08": "a .gz file",
    b"MMIDIDX\x00": "an index of Megatron",
    struct.pack("<i", 20240520): "a file with the header of llm.c",
    struct.pack("<i", 20240801): "a file with the header of llm.c",
}
# Tokens below which the places of zeros say nothing, and ids of special tokens that files of bytes leave out.
_FEWEST_TOKENS, _SPECIAL_TOKENS = 64, 64


def load_tokens(config: DataConfig, source: str, files: Sequence[File], vocab_size: int) -> list[Corpus]:
    """Opens the documents of files of tokens, each of which is scanned once, and warns of what looks wrong.

    Args:
        config: gives the dtype of .bin files, the separator and the cache.
        source: the name of the source, for warnings.
        files: files with one of TOKEN_SUFFIXES.
        vocab_size: tokens must lie in 0..vocab_size-1.

    Raises:
        ValueError: a file cannot be read, is of another kind, or has tokens beyond the vocabulary.
    """
    corpora: list[Corpus] = []
    doubts: dict[str, list[File]] = {}
    opened = [_opening(config, file) for file in files]
    with Progress(_check_room(config, opened), "copying") as progress:
        for file, opening in zip(files, opened, strict=True):
            corpus, found = _load(config, opening, vocab_size, progress)
            corpora.append(corpus)
            for doubt in found:
                doubts.setdefault(doubt, []).append(file)
    for doubt, doubtful in doubts.items():
        more = f" and {len(doubtful) - 1} more files" if len(doubtful) > 1 else ""
        warnings.warn(f"data.source={source}: {doubt} (seen in {doubtful[0].path}{more})", stacklevel=2)
    return corpora


def known_spans(config: DataConfig, files: Sequence[File]) -> list[DocumentSpans] | None:
    """Returns the documents of each file of tokens; of files that were never scanned, those at their beginnings.

    Args:
        config: as for `load_tokens`.
        files: files of this machine with one of TOKEN_SUFFIXES.

    Returns:
        None if a beginning has no whole document, or if an index is too large to be read here.

    Raises:
        ValueError: a file cannot be read, or is of another kind.
    """
    cache, found = caches(config)[0] or user_directory(), list[DocumentSpans]()
    for file in files:
        opening = _opening(config, file)
        entry = read_entry(cache / opening.name, opening.copied)
        ends = entry.ends if entry else _first_ends(opening, _LOOKED_AT_BYTES // len(files))
        if ends is None:
            return None
        starts = entry.starts if entry else np.concatenate([np.zeros(min(1, len(ends)), np.int64), ends[:-1]])
        found.append(DocumentSpans(starts, ends, [file.name], [len(ends)]))
    return found


def _first_ends(opening: _Opening, most_bytes: int) -> np.ndarray | None:
    """Returns the ends of the whole documents in the first bytes of a file; None if there are none."""
    file, layout = opening.file, opening.layout
    if layout.index:
        few = layout.index.file.num_bytes <= most_bytes
        return document_ends(layout.index, file.num_bytes)[0] if few else None
    if opening.separator is None:
        return np.full(min(1, layout.length), layout.length, np.int64)
    assert isinstance(file.path, Path)
    count = min(layout.length, most_bytes // layout.dtype.itemsize)
    block = _map(file, file.path, layout)[:count]
    ends = 1 + np.flatnonzero(block == opening.separator).astype(np.int64)
    if count == layout.length:
        return ends if not count or (len(ends) and ends[-1] == count) else np.append(ends, count)
    return ends if len(ends) else None


@dataclass(frozen=True, kw_only=True)
class _Layout:
    """Where the tokens of a file lie: their dtype, the bytes before them, their number, and Megatron's index if any."""

    dtype: np.dtype
    offset_bytes: int
    length: int
    index: Index | None = None


@dataclass(frozen=True, kw_only=True)
class _Opening:
    """A file before its tokens are read.

    Args:
        file: the file.
        layout: where its tokens lie.
        separator: the token that ends a document, if one does.
        name: the name of its entry in the cache.
    """

    file: File
    layout: _Layout
    separator: int | None
    name: str

    @property
    def is_plain(self) -> bool:
        """Whether nothing but the settings says what the tokens are."""
        return self.file.path.suffix == ".bin" and not self.layout.index

    @property
    def copied(self) -> np.dtype | None:
        """The dtype of the copy in the cache; None: the file is of this machine, and is not copied."""
        return None if isinstance(self.file.path, Path) else self.layout.dtype


def _opening(config: DataConfig, file: File) -> _Opening:
    is_bin = file.path.suffix == ".bin"
    layout = _bin_layout(file, np.dtype(config.token_dtype)) if is_bin else _npy_layout(file)
    separator = None if layout.index else config.separator
    _check_separator(separator, layout.dtype, file, is_bin and not layout.index)
    place = [str(file.path.resolve()) if isinstance(file.path, Path) else str(file.path), *file.key]
    place += layout.index.file.key if layout.index else []
    key = {"file": place, "dtype": layout.dtype.str, "separator": separator, "facts": sorted(_NO_FACTS)}
    name = name_of(key, None if isinstance(file.path, Path) else layout.dtype)
    return _Opening(file=file, layout=layout, separator=separator, name=name)


def _check_room(config: DataConfig, opened: Sequence[_Opening]) -> int:
    """Returns the bytes of the copies that are not there yet, after a check that the disk has room for them."""
    remote = [opening for opening in opened if opening.copied is not None]
    cache = (caches(config)[0] or user_directory()) if remote else Path()
    missing = [opening.layout for opening in remote if not read_entry(cache / opening.name, opening.copied)]
    num_bytes = sum(layout.length * layout.dtype.itemsize for layout in missing)
    if num_bytes:
        check_cache(cache, num_bytes)
    return num_bytes


def _load(config: DataConfig, opening: _Opening, vocab_size: int, progress: Progress) -> tuple[Corpus, list[str]]:
    """Opens one file; returns its documents, and what looks wrong."""
    file, layout, separator, is_plain = opening.file, opening.layout, opening.separator, opening.is_plain

    def fill(writer: Writer) -> None:
        with unchanged(file):
            blocks = _copied_blocks(file, layout, writer, progress) if mapped is None else _mapped_blocks(mapped)
            ends, num_empty = document_ends(layout.index, file.num_bytes) if layout.index else (None, 0)
            _look_through(blocks, separator, ends, writer)
            writer.facts["empty"] = num_empty

    mapped = _map(file, file.path, layout) if isinstance(file.path, Path) else None
    entry = named_entry(caches(config)[0], opening.name, fill, dtype=opening.copied)
    tokens = entry.tokens if mapped is None else mapped
    assert tokens is not None
    _check_range(entry.facts, vocab_size, file, is_plain)
    doubts = _doubts(entry.facts, tokens, vocab_size) if is_plain else []
    if separator is not None and len(tokens) and not entry.facts["separators"]:
        doubts.append(f"data.separator={separator} never occurs, so a file is one document")
    corpus = corpus_of(tokens, entry.ends, [file.name], [len(entry.ends)], starts=entry.starts)
    left_out = of_facts(as_facts(+Tally({NO_TOKENS: entry.facts["empty"]})))
    return dataclasses.replace(corpus, left_out=left_out), doubts


def _check_separator(separator: int | None, dtype: np.dtype, file: File, is_plain: bool) -> None:
    most = np.iinfo(dtype).max
    if separator is not None and separator > most:
        change = "set data.token_dtype to the dtype of the file" if is_plain else "write the file in a wider dtype"
        raise ValueError(
            f"data.separator must be a token that {dtype} can hold, at most {most}, got {separator} for "
            f"{file.path}; {change}, or name another separator"
        )


def _check_range(facts: dict[str, int], vocab_size: int, file: File, is_plain: bool) -> None:
    smallest, largest = facts["smallest"], facts["largest"]
    if smallest < 0 or largest >= vocab_size:
        must = f"data.source must hold tokens in 0..{vocab_size - 1} (model.vocab_size = {vocab_size})"
        other = ", or set data.token_dtype to the dtype of the file" if is_plain else ""
        if smallest >= 0:
            raise VocabularyTooSmall(must, f"{largest} in {file.path}", largest + 1, other)
        raise ValueError(f"{must}, got {smallest} in {file.path}; write the file again{other}")


def _doubts(facts: dict[str, int], tokens: TokenMap, vocab_size: int) -> list[str]:
    """Returns signs that a .bin file was written in a wider dtype than that in which it is read."""
    dtype, num_odd = tokens.dtype, len(tokens) // 2
    num_values = np.iinfo(dtype).max + 1
    if vocab_size > num_values + _SPECIAL_TOKENS:
        return [
            f"data.token_dtype={dtype} cannot hold every token of model.vocab_size={vocab_size}; set data.token_dtype "
            "to the dtype of the file"
        ]
    # Of a wider dtype every second number is the upper half of a token, which is small and mostly 0.
    upper_half = facts["largest_odd"] <= vocab_size // num_values and 2 * facts["zeros_odd"] >= num_odd
    if len(tokens) >= _FEWEST_TOKENS and upper_half and facts["zeros_odd"] > facts["zeros_even"]:
        return [
            f"every second token is 0 or nearly so, as if the tokens were wider than data.token_dtype={dtype}; set "
            "data.token_dtype to the dtype of the file"
        ]
    return []


_NO_FACTS = {
    "smallest": 0, "largest": 0, "largest_odd": 0, "zeros_odd": 0, "zeros_even": 0, "separators": 0, "empty": 0
}  # fmt: skip


def _look_through(blocks: Iterable[np.ndarray], separator: int | None, ends: np.ndarray | None, writer: Writer) -> None:
    """Writes the ends of documents (given, or after every separator), and facts about the tokens."""
    facts, end, first = dict(_NO_FACTS), 0, 0
    for block in blocks:
        odd = block[1::2]
        facts["smallest"] = min(facts["smallest"], int(block.min()))
        facts["largest"] = max(facts["largest"], int(block.max()))
        facts["largest_odd"] = max(facts["largest_odd"], int(odd.max(initial=0)))
        facts["zeros_odd"] += len(odd) - int(np.count_nonzero(odd))
        facts["zeros_even"] += len(block[::2]) - int(np.count_nonzero(block[::2]))
        if separator is not None:
            found = first + 1 + np.flatnonzero(block == separator).astype(np.int64)
            end = int(found[-1]) if len(found) else end
            facts["separators"] += len(found)
            writer.add_ends(found)
        first += len(block)
    if ends is not None:
        writer.add_ends(ends)
    elif end != first:
        writer.add_ends(np.array([first]))
    writer.facts |= facts


def _mapped_blocks(tokens: TokenMap) -> Iterator[np.ndarray]:
    listener = distributed.Listener()
    for first in range(0, len(tokens), _BLOCK_TOKENS):
        listener.check()
        yield tokens[first : first + _BLOCK_TOKENS]


def _copied_blocks(file: File, layout: _Layout, writer: Writer, progress: Progress) -> Iterator[np.ndarray]:
    """Yields the tokens of a remote file, which are copied into the cache as they come."""
    with file.path.open("rb") as content:
        content.seek(layout.offset_bytes)
        for first in range(0, layout.length, _BLOCK_TOKENS):
            count = min(_BLOCK_TOKENS, layout.length - first)
            block = np.frombuffer(content.read(count * layout.dtype.itemsize), layout.dtype)
            writer.add_tokens(block)
            progress.add_bytes(block.nbytes)
            progress.add_tokens(count)
            yield block


def _npy_layout(file: File) -> _Layout:
    try:
        with file.path.open("rb") as content:
            version = np.lib.format.read_magic(content)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, _, dtype = read(content)
            if dtype.hasobject:
                raise ValueError("it holds objects of Python")
            offset = content.tell()
    except (OSError, ValueError, EOFError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise unreadable(file.path, error) from error
        raise ValueError(
            f"data.source must be a readable .npy file, got {file.path} ({error}); write the file again, or "
            "name it .bin if it holds tokens without a header, as OLMo's files do"
        ) from error
    if len(shape) != 1 or not np.issubdtype(dtype, np.integer):
        raise ValueError(
            f"data.source must hold a 1-D integer array, got {dtype} {list(shape)} in {file.path}; "
            "convert the array with astype and ravel"
        )
    if file.num_bytes < offset + shape[0] * dtype.itemsize:
        raise ValueError(
            f"data.source must be a readable .npy file, got {file.path} ({file.num_bytes:,} bytes of "
            f"{offset + shape[0] * dtype.itemsize:,}); write the file again"
        )
    return _Layout(dtype=dtype, offset_bytes=offset, length=shape[0])


def _bin_layout(file: File, dtype: np.dtype) -> _Layout:
    index = index_beside(file.path)
    if index:
        return _Layout(dtype=index.dtype, offset_bytes=0, length=file.num_bytes // index.dtype.itemsize, index=index)
    start = _first_bytes(file.path)
    header = next((header for beginning, header in _BEGINNINGS.items() if start.startswith(beginning)), "")
    if header:
        raise ValueError(
            f"a .bin file must hold tokens and no header, got {header} in {file.path}; write the tokens alone, or name "
            "the file by what it is"
        )
    if file.num_bytes % dtype.itemsize:
        raise ValueError(
            f"data.source must hold whole {dtype} tokens, got {file.num_bytes} bytes in {file.path}; "
            "set data.token_dtype to the dtype of the file"
        )
    return _Layout(dtype=dtype, offset_bytes=0, length=file.num_bytes // dtype.itemsize)


def _map(file: File, path: Path, layout: _Layout) -> TokenMap:
    return TokenMap(
        path=path,
        dtype=layout.dtype,
        offset_bytes=layout.offset_bytes,
        length=layout.length,
        changed_ns=file.changed_ns,
    )


def _first_bytes(path: Place) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(32).ljust(32, b"\0")
    except OSError as error:
        raise unreadable(path, error) from error
