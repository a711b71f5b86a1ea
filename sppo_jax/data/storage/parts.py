"""Parts of a source that are tokenized by several processes or machines, in any order, and joined by the run.

A part is a run of whole files. Its entry lies beside the whole one, in a directory or in a bucket, and counts once its
facts, which are written last, are there. A run takes the parts that are finished and tokenizes the others itself.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sppo_jax.config.data import DataConfig
from sppo_jax.data.cache.store import Entry, Writer, name_of, named_entry, read_entry, user_directory
from sppo_jax.data.storage.folders import File
from sppo_jax.data.storage.places import is_address, place_of
from sppo_jax.data.storage.progress import Progress
from sppo_jax.data.storage.remote import Remote, patiently
from sppo_jax.data.storage.room import check_cache
from sppo_jax.files.paths import local_path
from sppo_jax.files.whole import parse_json

_PART = re.compile(r"([0-9]+)/([0-9]+)")
_NAME = re.compile(r"\.part-([0-9]+)-of-([0-9]+)$")
_BLOCK_BYTES = 1 << 24
_OLDER = "older"  # a fact that entries of earlier versions lack
MADE_AGAIN = "are made again"  # of tokens: said once
_TOKENS, _BOUNDS, _FACTS = "tokens.bin", "bounds.bin", "facts.json"


@dataclass(frozen=True, kw_only=True)
class Job:
    """The tokens of some files, which are made once.

    Args:
        files: the files, in order.
        key: everything that the tokens depend on, as values that JSON can hold.
        dtype: of the tokens.
        tokenize: writes the tokens of some of the files, and facts: when parts are joined, numbers are added
            up, lists of numbers follow each other, lists of texts are united, and so are the values of objects.
        check: raises ValueError where the facts of all files leave nothing to train on.
        older: the keys under which earlier versions of this package kept the tokens of these files.
    """

    files: Sequence[File]
    key: dict[str, Any]
    dtype: np.dtype
    tokenize: Callable[[Sequence[File], Writer], None]
    check: Callable[[dict[str, Any]], None] = lambda facts: None
    older: Sequence[dict[str, Any]] = ()

    @property
    def name(self) -> str:
        return name_of(self.key, self.dtype)


@dataclass(frozen=True, kw_only=True)
class FilePart:
    """Part `number` of `count`, from 1."""

    number: int
    count: int


def parse_part(text: str) -> FilePart:
    """Returns the part that a text such as 3/64 names.

    Raises:
        ValueError: the text names no part.
    """
    found = _PART.fullmatch(text)
    part = FilePart(number=int(found[1]), count=int(found[2])) if found else FilePart(number=0, count=0)
    if not 1 <= part.number <= part.count:
        raise ValueError(f"--part must be a part and the number of parts, got {text}; write e.g. 3/64")
    return part


def cut(files: Sequence[File], count: int) -> list[list[File]]:
    """Cuts files into runs of about equal bytes, each of at least one file."""
    bounds, total = [0], sum(file.num_bytes for file in files)
    done = np.cumsum([file.num_bytes for file in files])
    for number in range(1, count):
        at = int(np.searchsorted(done, total * number / count, side="left")) + 1
        bounds.append(min(max(at, bounds[-1] + 1), len(files) - (count - number)))
    bounds.append(len(files))
    return [list(files[first:last]) for first, last in zip(bounds[:-1], bounds[1:], strict=True)]


def tokenized(config: DataConfig, job: Job) -> Entry:
    """Returns the tokens of a job from the cache, from finished parts, or made now.

    Raises:
        ValueError: the cache cannot be written, or whatever `job.tokenize` raises.
    """
    local, away = caches(config)

    def fill(writer: Writer) -> None:
        place = away or local or user_directory()
        finished = _finished(place, job.name)
        if not finished:
            _tell_of_older(job, local or user_directory())
            job.tokenize(job.files, writer)
        else:
            count = max(finished, key=lambda count: len(finished[count]))
            _join(job, writer, place, count, finished[count])
        job.check(writer.facts)
        writer.facts["crc"] = writer.crc
        writer.facts[_OLDER] = [name_of(key, job.dtype) for key in job.older]

    return named_entry(local, job.name, fill, dtype=job.dtype)


def _tell_of_older(job: Job, directory: Path) -> None:
    """Warns where an earlier version made the tokens, which this version reads by other rules."""
    for key in job.older:
        path = directory / name_of(key, job.dtype)
        found = read_entry(path, job.dtype)
        if found and _OLDER not in found.facts:
            warnings.warn(
                f"the tokens of {job.files[0].path}{' and other files' if len(job.files) > 1 else ''} {MADE_AGAIN}, "
                f"because an earlier version of sppo_jax made those in {path}; remove that folder if no older version "
                "reads it",
                stacklevel=2,
            )
            return


def write_part(config: DataConfig, job: Job, part: FilePart) -> str:
    """Tokenizes a part of a job into the cache; returns what was done, in words.

    Args:
        config: names the cache.
        job: the whole job.
        part: the part; there must be at least as many files as parts.

    Raises:
        ValueError: as `tokenized`.
    """
    files = cut(job.files, part.count)[part.number - 1]
    local, away = caches(config)
    name = _part_name(job.name, part.number, part.count)
    what = f"part {part.number} of {part.count}: {len(files):,} of {len(job.files):,} files"
    place = away or local or user_directory()
    if _facts(place / name, _folders(place, name).get(name, {})) is not None:
        return f"{what} were tokenized before"

    def fill(writer: Writer) -> None:
        job.tokenize(files, writer)

    if away:
        with tempfile.TemporaryDirectory(prefix="sppo-part-") as folder:
            named_entry(Path(folder), name, fill, dtype=job.dtype)
            _upload(Path(folder) / name, away / name)
    else:
        named_entry(local, name, fill, dtype=job.dtype)
    return f"{what} are tokenized in {place}"


def caches(config: DataConfig) -> tuple[Path | None, Remote | None]:
    """Returns the directory of the cache (None: the user's), and the bucket if data.cache names one."""
    if config.cache and is_address(config.cache):
        return None, place_of(config.cache, "data.cache")
    return (local_path(config.cache, "data.cache") if config.cache else None), None


def _part_name(name: str, number: int, count: int) -> str:
    return f"{name}.part-{number:05}-of-{count:05}"


def _finished(place: Path | Remote, name: str) -> dict[int, dict[int, dict[str, Any]]]:
    """Returns the facts of the finished parts, by how many parts there are and by their numbers."""
    found: dict[int, dict[int, dict[str, Any]]] = {}
    for folder, sizes in _folders(place, f"{name}.part-").items():
        match = _NAME.search(folder)
        facts = _facts(place / folder, sizes)
        if match and facts is not None:
            found.setdefault(int(match[2]), {})[int(match[1])] = facts
    return found


def _folders(place: Path | Remote, prefix: str) -> dict[str, dict[str, int]]:
    """Returns the folders of parts, each with the sizes of its files."""
    found: dict[str, dict[str, int]] = {}
    if isinstance(place, Path):
        for path in sorted(place.glob(f"{prefix}*/*")):
            found.setdefault(path.parent.name, {})[path.name] = path.stat().st_size
        return found
    from pyarrow import fs

    selector = fs.FileSelector(place.path, recursive=True, allow_not_found=True)
    for info in patiently(place, lambda: place.files.get_file_info(selector)):
        folder = info.path.split("/")[-2]
        if info.type == fs.FileType.File and folder.startswith(prefix):
            found.setdefault(folder, {})[info.base_name] = info.size
    return found


def _facts(folder: Path | Remote, sizes: dict[str, int]) -> dict[str, Any] | None:
    """Returns the facts of a part; None if it is not finished."""
    if _FACTS not in sizes:
        return None
    try:
        with (folder / _FACTS).open("rb") as file:
            facts: dict[str, Any] = parse_json(file.read())
        return facts if all(sizes.get(name) == size for name, size in facts["files"].items()) else None
    except (OSError, json.JSONDecodeError, KeyError):
        return None


def _join(job: Job, writer: Writer, place: Path | Remote, count: int, finished: dict[int, dict[str, Any]]) -> None:
    """Copies finished parts, and tokenizes those that are missing, in the order of the files."""
    missing = [number for number in range(1, count + 1) if number not in finished]
    if missing:
        named = ", ".join(map(str, missing[:8])) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
        warnings.warn(
            f"{place} has {count - len(missing)} of {count} parts of the tokens; parts {named} are tokenized here",
            stacklevel=2,
        )
    num_bytes = sum(size for facts in finished.values() for size in facts["files"].values())
    check_cache(place if isinstance(place, Path) else None, num_bytes)
    joined: dict[str, Any] = {}
    with Progress(num_bytes, "copying") as progress:
        for number, files in enumerate(cut(job.files, count), 1):
            writer.begin_part()
            writer.facts = {}
            if number in finished:
                _copy(place / _part_name(job.name, number, count), job.dtype, writer, progress)
                writer.facts = finished[number]
            else:
                job.tokenize(files, writer)
            joined = _sum(joined, writer.facts) if joined else writer.facts
    writer.facts = joined


def _copy(folder: Path | Remote, dtype: np.dtype, writer: Writer, progress: Progress) -> None:
    """Appends a part, some megabytes at a time."""
    with (folder / _TOKENS).open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            tokens = np.frombuffer(block, dtype)
            writer.add_tokens(tokens)
            progress.add_bytes(len(block))
            progress.add_tokens(len(tokens))
    with (folder / _BOUNDS).open("rb") as file:
        progress.add_bytes(len(file.read(8)))  # the bound 0 is there already
        while block := file.read(_BLOCK_BYTES):
            writer.add_ends(np.frombuffer(block, "<i8"))
            progress.add_bytes(len(block))


def _sum(left: Any, right: Any) -> Any:
    """Joins the facts of two parts."""
    if isinstance(left, dict) and isinstance(right, dict):
        return {key: _sum(left[key], right[key]) if key in left and key in right else (left | right)[key]
                for key in left | right}  # fmt: skip
    if isinstance(left, (list, tuple)) and all(isinstance(item, str) for item in (*left, *right)):
        return list(dict.fromkeys((*left, *right)))
    return list(left) + list(right) if isinstance(left, (list, tuple)) else left + right


def _upload(folder: Path, to: Remote) -> None:
    """Copies a finished entry into a bucket, its facts last."""
    for name in (_TOKENS, _BOUNDS, _FACTS):

        def write(name: str = name) -> None:
            with open(folder / name, "rb") as source:
                with to.files.open_output_stream((to / name).path, compression=None) as target:
                    shutil.copyfileobj(source, target, _BLOCK_BYTES)

        patiently(to / name, write)
