"""How far reading has come: bytes of the files, tokens a second, and the time left."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Sequence

from tqdm import tqdm

from sppo_jax.data.storage.compressed import COMPRESSED_SUFFIXES
from sppo_jax.data.storage.folders import File
from sppo_jax.processes import distributed

_SHOWN_AFTER_S = 2.0
# What is guessed of compressed files until one of them is read whole.
_PACKED_RATIO = 4.0


class Progress:
    """A line for people, shown once reading takes seconds; a context manager around reading."""

    def __init__(self, num_bytes: int, what: str = "tokenizing") -> None:
        """Begins at 0.

        Args:
            num_bytes: bytes of everything that is to be read.
            what: what is done, in a word.
        """
        self._bar = tqdm(
            total=num_bytes,
            disable=not num_bytes,
            unit="B",
            unit_scale=True,
            desc=what,
            delay=_SHOWN_AFTER_S,
            mininterval=0.2 if sys.stderr.isatty() else 60.0,
        )
        self._tokens, self._start_s = 0, time.monotonic()
        self._chars, self._chars_a_byte = 0, dict[str, float]()
        self._file: File | None = None
        self._listener = distributed.Listener()
        self._done = 0

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    @contextlib.contextmanager
    def reading(self, file: File) -> Iterator[None]:
        """Counts what `advance` is told as a share of a file, and the whole file at the end."""
        self._file, self._chars = file, 0
        yield
        if self._chars and file.num_bytes:
            self._chars_a_byte[file.path.suffix] = self._chars / file.num_bytes
        self._done += file.num_bytes
        self._show(self._done)

    def advance(self, num_chars: int) -> None:
        """Counts characters of the file that is read; how many a byte gives is known from the last file of its kind."""
        assert self._file is not None
        self._chars += num_chars
        suffix = self._file.path.suffix
        guess = self._chars_a_byte.get(suffix) or (_PACKED_RATIO if suffix in COMPRESSED_SUFFIXES else 1.0)
        self._show(self._done + min(self._file.num_bytes, int(self._chars / guess)))

    def add_bytes(self, count: int) -> None:
        """Counts bytes that are copied as they are; gives up where the run is told to stop."""
        self._listener.check()
        self._done += count
        self._show(self._done)

    def add_tokens(self, count: int) -> None:
        """Counts tokens, for their number a second; gives up where the run is told to stop."""
        self._listener.check()
        self._tokens += count
        rate = self._tokens / max(time.monotonic() - self._start_s, 1e-9)
        self._bar.set_postfix_str(f"{tqdm.format_sizeof(rate)} tokens/s", refresh=False)

    def _show(self, num_bytes: int) -> None:
        self._bar.update(max(0, num_bytes - self._bar.n))


def total_bytes(files: Sequence[File]) -> int:
    """Returns the bytes of some files."""
    return sum(file.num_bytes for file in files)
