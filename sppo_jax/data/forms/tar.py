"""Rows of tar files as WebDataset writes them: members that differ only in their suffix are one sample.

`KEY.json` is the row, and `KEY.txt` its text. Other members are left out.
"""

from __future__ import annotations

import io
import tarfile
import warnings
from collections import Counter
from typing import Any, BinaryIO

from sppo_jax.data.cache.left_out import Tally
from sppo_jax.data.forms.record import Rows, json_object, not_utf8, not_whole
from sppo_jax.data.storage.compressed import COMPRESSED_SUFFIXES, reading
from sppo_jax.data.storage.folders import Place

TAR_SUFFIXES = (".tar", *(f".tar{packed}" for packed in COMPRESSED_SUFFIXES))
_BLOCK_BYTES = 512
# The library copies what is left of what it read at every member.
_READ_BYTES = 1 << 15
_MEMBERS, _LINKS = "members of .tar files", "links"


def tar_rows(path: Place, text_key: str, left_out: Tally | None = None) -> Rows:
    """Yields the samples of a file in order; none is written to the disk.

    Args:
        path: a .tar file, which may be compressed.
        text_key: the key that the text of a `.txt` member gets, where the sample's JSON does not have it.
        left_out: takes the number of other members.

    Raises:
        ValueError: the file cannot be read, is not whole, or has members outside its folder.
    """
    number, others = 0, Counter[str]()
    with reading(path, lambda: number) as file:
        key, row, seen = "", dict[str, Any](), set[str]()
        tail: Any = _Tail(file)
        try:
            for name, content in _members(tail, path, others):
                number += 1
                stem, suffix = _parts(name)
                if stem != key or suffix in seen:
                    if seen:
                        yield f"{path} sample {key}", row
                    key, row, seen = stem, {}, set()
                seen.add(suffix)
                _add(row, suffix, content, text_key, f"{path} member {name}")
        except (tarfile.TarError, EOFError) as error:
            raise not_whole(".tar", f"{path} behind member {number}", error, "copy the file again") from error
        if not tail.ends_empty():
            problem = "it does not end with an empty block"
            raise not_whole(".tar", f"{path} behind member {number}", problem, "copy the file again")
        if seen:
            yield f"{path} sample {key}", row
    if left_out is not None:
        left_out.update({(_MEMBERS, _why(suffix)): count for suffix, count in others.items()})
    if others:
        shown = ", ".join(f"{count} {suffix}" for suffix, count in others.most_common(6))
        warnings.warn(f"{path}: members must be .json or .txt, got others, which are left out ({shown})", stacklevel=2)


def _members(file: BinaryIO, path: Place, others: Counter[str]) -> Any:
    """Yields the names and the bytes of the members that are read, and counts the others."""
    with tarfile.open(fileobj=file, mode="r|", bufsize=_READ_BYTES, encoding="utf-8") as tar:
        for member in tar:
            if member.name.startswith("/") or ".." in member.name.split("/"):
                raise ValueError(
                    f"a .tar file must have members within its folder, got {member.name!a} in {path}; write the file "
                    "again"
                )
            if member.isdir():
                continue
            suffix = _parts(member.name)[1]
            if not member.isfile() or suffix not in (".json", ".txt"):
                others[suffix if member.isfile() else _LINKS] += 1
                continue
            reader = tar.extractfile(member)
            content = reader.read() if reader else b""
            if len(content) != member.size:
                raise EOFError(f"{member.size - len(content):,} bytes of {member.name} are missing")
            yield member.name, content
            # Members that were read are not kept.
            tar.members = []  # type: ignore[attr-defined]


def _why(suffix: str) -> str:
    return "links are not followed" if suffix == _LINKS else f"{suffix or 'no suffix'} is neither .json nor .txt"


def _parts(name: str) -> tuple[str, str]:
    """Returns the key of a member and its suffix: a suffix begins at the first dot of the last name."""
    folder, slash, last = name.rpartition("/")
    stem, dot, suffix = last.partition(".")
    return f"{folder}{slash}{stem}", f"{dot}{suffix}".lower()


def _add(row: dict[str, Any], suffix: str, content: bytes, text_key: str, where: str) -> None:
    if suffix == ".json":
        row.update(json_object(content, "a .json member must hold one JSON object", where, "write the file again"))
        return
    try:
        row.setdefault(text_key, content.decode())
    except UnicodeDecodeError as error:
        raise not_utf8("the text of a .txt member", where, error, "convert the text") from error


class _Tail(io.RawIOBase):
    """A file that is read forward and knows whether the bytes that were read last are an empty block."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._last = file, b""

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        found = self._file.read(size)
        self._last = (self._last + found)[-_BLOCK_BYTES:] if len(found) < _BLOCK_BYTES else found[-_BLOCK_BYTES:]
        return found

    def ends_empty(self) -> bool:
        """Reads what is left, and returns whether the last block is empty."""
        while self.read(1 << 18):
            pass
        return self._last == bytes(_BLOCK_BYTES)
