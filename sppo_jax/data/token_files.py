"""Documents in files of tokens, and signs that a file is of another dtype or has a header."""

from __future__ import annotations

import struct
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from sppo_jax.config.data import DataConfig
from sppo_jax.data.cache import Writer, entry_of
from sppo_jax.data.corpus import Corpus, corpus_of
from sppo_jax.data.folders import File, unreadable
from sppo_jax.data.token_map import TokenMap
from sppo_jax.paths import local_path

TOKEN_SUFFIXES = (".bin", ".npy")
_BLOCK_TOKENS = 1 << 24  # even, so that odd places of a block are odd places of the file
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
# Megatron's index beside a .bin: how it begins, and the dtypes of tokens by their number, from 1.
_INDEX_START = struct.pack("<9sQ", b"MMIDIDX\x00\x00", 1)
_INDEX_DTYPES = ("uint8", "int8", "int16", "int32", "int64", "float64", "float32", "uint16")
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
    for file in files:
        corpus, found = _load(config, file, vocab_size)
        corpora.append(corpus)
        for doubt in found:
            doubts.setdefault(doubt, []).append(file)
    for doubt, doubtful in doubts.items():
        more = f" and {len(doubtful) - 1} more files" if len(doubtful) > 1 else ""
        warnings.warn(f"data.source={source}: {doubt} (seen in {doubtful[0].path}{more})", stacklevel=2)
    return corpora


def _load(config: DataConfig, file: File, vocab_size: int) -> tuple[Corpus, list[str]]:
    """Opens one file; returns its documents, and what looks wrong."""
    is_plain = file.path.suffix == ".bin"
    tokens = _read_bin(file, np.dtype(config.token_dtype)) if is_plain else _read_npy(file)
    most = np.iinfo(tokens.dtype).max
    if config.separator is not None and config.separator > most:
        change = "set data.token_dtype to the dtype of the file" if is_plain else "write the file in a wider dtype"
        raise ValueError(
            f"data.separator must be a token that {tokens.dtype} can hold, at most {most}, got {config.separator} for "
            f"{file.path}; {change}, or name another separator"
        )

    def fill(writer: Writer) -> None:
        _look_through(tokens, config.separator, writer)

    key = {"file": [str(file.path.resolve()), *file.key], "dtype": tokens.dtype.str, "separator": config.separator}
    cache = local_path(config.cache, "data.cache") if config.cache else None
    entry = entry_of(cache, key | {"facts": sorted(_NO_FACTS)}, fill, dtype=None)
    smallest, largest = entry.facts["smallest"], entry.facts["largest"]
    if smallest < 0 or largest >= vocab_size:
        need = f"raise model.vocab_size to at least {largest + 1}" if smallest >= 0 else "write the file again"
        need += ", or set data.token_dtype to the dtype of the file" if is_plain else ""
        raise ValueError(
            f"data.source must hold tokens in 0..{vocab_size - 1} (model.vocab_size = {vocab_size}), "
            f"got {smallest if smallest < 0 else largest} in {file.path}; {need}"
        )
    doubts = _doubts(entry.facts, tokens, vocab_size) if is_plain else []
    if config.separator is not None and len(tokens) and not entry.facts["separators"]:
        doubts.append(f"data.separator={config.separator} never occurs, so a file is one document")
    return corpus_of(tokens, entry.ends, [file.name], [len(entry.ends)]), doubts


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


_NO_FACTS = {"smallest": 0, "largest": 0, "largest_odd": 0, "zeros_odd": 0, "zeros_even": 0, "separators": 0}


def _look_through(tokens: TokenMap, separator: int | None, writer: Writer) -> None:
    """Writes the ends of documents (after every separator), and facts about the tokens."""
    facts, end = dict(_NO_FACTS), 0
    for first in range(0, len(tokens), _BLOCK_TOKENS):
        block = tokens[first : first + _BLOCK_TOKENS]
        odd = block[1::2]
        facts["smallest"] = min(facts["smallest"], int(block.min()))
        facts["largest"] = max(facts["largest"], int(block.max()))
        facts["largest_odd"] = max(facts["largest_odd"], int(odd.max(initial=0)))
        facts["zeros_odd"] += len(odd) - int(np.count_nonzero(odd))
        facts["zeros_even"] += len(block[::2]) - int(np.count_nonzero(block[::2]))
        if separator is not None:
            ends = first + 1 + np.flatnonzero(block == separator).astype(np.int64)
            end = int(ends[-1]) if len(ends) else end
            facts["separators"] += len(ends)
            writer.add_ends(ends)
    if end != len(tokens):
        writer.add_ends(np.array([len(tokens)]))
    writer.facts |= facts


def _read_npy(file: File) -> TokenMap:
    try:
        tokens = np.load(file.path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise unreadable(file.path, error) from error
        raise ValueError(
            f"data.source must be a readable .npy file, got {file.path} ({error}); write the file again"
        ) from error
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
        raise ValueError(
            f"data.source must hold a 1-D integer array, got {tokens.dtype} {list(tokens.shape)} in {file.path}; "
            "convert the array with astype and ravel"
        )
    return _map(file, tokens.dtype, tokens.offset, len(tokens))


def _read_bin(file: File, dtype: np.dtype) -> TokenMap:
    start = _first_bytes(file.path)
    kind = next((kind for beginning, kind in _BEGINNINGS.items() if start.startswith(beginning)), "")
    if kind:
        raise ValueError(
            f"a .bin file must hold tokens and no header, got {kind} in {file.path}; write the tokens alone, or name "
            "the file by what it is"
        )
    if file.num_bytes % dtype.itemsize:
        raise ValueError(
            f"data.source must hold whole {dtype} tokens, got {file.num_bytes} bytes in {file.path}; "
            "set data.token_dtype to the dtype of the file"
        )
    stored = _dtype_of_index(file.path.with_suffix(".idx"))
    if stored is not None and (stored.kind not in "iu" or stored.itemsize != dtype.itemsize):
        raise ValueError(
            f"data.token_dtype must be {stored}, as the index beside {file.path} says, got {dtype}; set "
            "data.token_dtype, or write the tokens in a dtype that can be set"
        )
    return _map(file, dtype, 0, file.num_bytes // dtype.itemsize)


def _dtype_of_index(path: Path) -> np.dtype | None:
    """Returns the dtype of tokens that an index of Megatron gives; None if there is no such index."""
    index = _first_bytes(path, missing_ok=True)
    at = len(_INDEX_START)
    if not index.startswith(_INDEX_START) or not 0 < index[at] <= len(_INDEX_DTYPES):
        return None
    return np.dtype(_INDEX_DTYPES[index[at] - 1])


def _map(file: File, dtype: np.dtype, offset_bytes: int, length: int) -> TokenMap:
    return TokenMap(path=file.path, dtype=dtype, offset_bytes=offset_bytes, length=length, changed_ns=file.changed_ns)


def _first_bytes(path: Path, *, missing_ok: bool = False) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(32).ljust(32, b"\0")
    except OSError as error:
        if missing_ok:
            return b""
        raise unreadable(path, error) from error
