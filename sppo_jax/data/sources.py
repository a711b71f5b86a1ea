"""Where documents come from: the standard library's own source files, text files, and token files."""

from __future__ import annotations

import sysconfig
import zlib
from pathlib import Path

import numpy as np

from sppo_jax.config import DataConfig
from sppo_jax.data.corpus import Corpus

# Bytes are tokens 0..255; every document made of bytes begins with this one, so that its first byte is predicted too.
START_TOKEN = 256
_NOT_LIBRARY = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
_BLOCK_TOKENS = 1 << 24


def load_corpus(config: DataConfig, *, vocab_size: int) -> Corpus:
    """Read the documents of `config.source`.

    Args:
        config: the source, and the element type and separator of a token file.
        vocab_size: tokens must lie in 0..vocab_size-1.

    Raises:
        ValueError: the source is unknown, unreadable or empty, or a token does not fit the vocabulary.
    """
    path = Path(config.source)
    if config.source == "stdlib":
        corpus = _byte_corpus(_library_files())
    elif path.suffix == ".txt":
        corpus = _byte_corpus({path.name: _read_bytes(path)})
    elif path.suffix == ".npy":
        corpus = _token_corpus(_read_npy(path), config.separator)
    elif path.suffix == ".bin":
        corpus = _token_corpus(_read_bin(path, np.dtype(config.token_dtype)), config.separator)
    else:
        raise ValueError(f"data.source must be stdlib or a .txt, .npy or .bin file, got {config.source}; convert it")
    if not corpus.num_documents:
        raise ValueError(f"data.source must hold tokens, got none in {config.source}; give another")
    _check_tokens(corpus.parts[0], vocab_size, config.source)
    return corpus


def _library_files() -> dict[str, bytes]:
    """Read every source file of the running Python's standard library, in the order of their names."""
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted((path.relative_to(root) for path in root.rglob("*.py")), key=lambda name: name.as_posix())
    chosen = [name for name in files if not _NOT_LIBRARY.intersection(name.parts)]
    return {name.as_posix(): _read_bytes(root / name) for name in chosen}


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"data.source must be readable, got {path} ({error.strerror}); give another") from error


def _byte_corpus(files: dict[str, bytes]) -> Corpus:
    files = {name: text for name, text in files.items() if text}
    lengths = np.array([len(text) + 1 for text in files.values()], np.int64)
    ends = np.cumsum(lengths, dtype=np.int64)
    tokens = np.full(lengths.sum(), START_TOKEN, np.uint16)
    for text, end in zip(files.values(), ends, strict=True):
        tokens[end - len(text) : end] = np.frombuffer(text, np.uint8)
    return Corpus(parts=(tokens,), starts=ends - lengths, ends=ends, hashes=_hashes(list(files)))


def _hashes(names: list[str]) -> np.ndarray:
    return np.array([zlib.crc32(name.encode()) / 2**32 for name in names], np.float64)


def _read_npy(path: Path) -> np.ndarray:
    try:
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(f"data.source must be a readable .npy file, got {path} ({error}); write it anew") from error
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
        raise ValueError(
            f"data.source must hold a 1-D integer array, got {tokens.dtype} {list(tokens.shape)} in {path}; flatten it"
        )
    return tokens


def _read_bin(path: Path, dtype: np.dtype) -> np.ndarray:
    try:
        num_bytes = path.stat().st_size
        if num_bytes % dtype.itemsize:
            raise ValueError(
                f"data.source must hold whole {dtype} tokens, got {num_bytes} bytes in {path}; set data.token_dtype"
            )
        return np.memmap(path, dtype, "r") if num_bytes else np.zeros(0, dtype)
    except OSError as error:
        raise ValueError(f"data.source must be readable, got {path} ({error.strerror}); give another") from error


def _token_corpus(tokens: np.ndarray, separator: int | None) -> Corpus:
    """Cut a flat array behind every separator; a document keeps the separator that ends it."""
    cuts = [np.zeros(0, np.int64)]
    for first in range(0, len(tokens) if separator is not None else 0, _BLOCK_TOKENS):
        cuts.append(first + 1 + np.flatnonzero(tokens[first : first + _BLOCK_TOKENS] == separator).astype(np.int64))
    ends = np.concatenate(cuts)
    if len(tokens) and (not len(ends) or ends[-1] != len(tokens)):
        ends = np.append(ends, len(tokens))
    starts = np.concatenate([np.zeros(min(1, len(ends)), np.int64), ends[:-1]])
    return Corpus(parts=(tokens,), starts=starts, ends=ends, hashes=_hashes([str(index) for index in range(len(ends))]))


def _check_tokens(tokens: np.ndarray, vocab_size: int, source: str) -> None:
    for first in range(0, len(tokens), _BLOCK_TOKENS):
        block = tokens[first : first + _BLOCK_TOKENS]
        small, large = int(block.min()), int(block.max())
        if small < 0 or large >= vocab_size:
            need = f"raise model.vocab_size to at least {large + 1}" if small >= 0 else "write the file anew"
            raise ValueError(
                f"data.source must hold tokens in 0..{vocab_size - 1} (model.vocab_size = {vocab_size}), "
                f"got {small if small < 0 else large} in {source}; {need}"
            )
