"""Files that a command writes where the user says: each can be written, and replaces only what the command wrote."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from sppo_jax.config import Config
from sppo_jax.config.hf.families import CONFIG
from sppo_jax.files.paths import local_path

# What is looked at of a file to be replaced.
_HEAD_BYTES = 4096
# A text within the head of each file that commands write.
PAGE, TRACE, FLEX, FIGURES = "<!doctype html", '"traceEvents"', '"simulated"', '"matmul_flops_s"'
CHECKED = '"sppo_check"'


@dataclass(frozen=True, kw_only=True)
class Output:
    """A file to write.

    Args:
        option: the option that names the file, for errors.
        path: the file; None: the option is not given.
        head: a text within the head of each such file.
    """

    option: str
    path: Path | None
    head: str


def check_outputs(*outputs: Output, inputs: Iterable[Path | None]) -> None:
    """Checks, before anything is computed or written, that files can be written and that no other file is replaced.

    Args:
        outputs: the files, none of them named twice.
        inputs: files that the command reads; None for those that are not given.

    Raises:
        ValueError: a file cannot be written, or holds something else.
    """
    others = [path for path in inputs if path is not None]
    for output in outputs:
        if output.path is None:
            continue
        reason = _why_not(output.path, output.head, others)
        if reason:
            raise ValueError(
                f"{output.option} must name a file that can be written, got {output.path} ({reason}); name another file"
            )
        others.append(output.path)


def files_read(config: Config) -> list[Path | None]:
    """Returns the files that a config names by their own names; patterns and directories are left out."""
    model, data = config.model, config.data
    named = [config.hardware.measured, config.schedule.table, data.tokenizer]
    named += [*data.sources, *data.validation_sources, f"{model.hf}/{CONFIG}" if model.hf else None]
    return [_path(name) for name in named]


def _path(name: str | None) -> Path | None:
    """Returns the path that a config names; None if there is none on this machine."""
    with contextlib.suppress(ValueError):  # whatever reads the file says what is wrong
        return local_path(name, "a path") if name else None
    return None


def _why_not(path: Path, head: str, others: Iterable[Path]) -> str:
    """Returns why a file must not or cannot be written; "" if it can."""
    if path.is_dir():
        return "it is a directory"
    if not path.parent.is_dir():
        return f"there is no directory {path.parent}"
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        return "permission denied"
    if any(_is_same(path, other) for other in others):
        return "the command reads or writes it otherwise"
    if path.is_file() and not _begins_as(path, head):
        return "it holds something else, which would be lost"
    return ""


def _is_same(path: Path, other: Path) -> bool:
    if path.exists() and other.exists():
        return path.samefile(other) and path.is_file()
    return os.path.realpath(path) == os.path.realpath(other)


def _begins_as(path: Path, head: str) -> bool:
    """Returns whether a file is empty, or has a text within its head."""
    try:
        with path.open("rb") as file:
            begin = file.read(_HEAD_BYTES)
    except OSError:
        return False
    return not begin or head.lower() in begin.decode("utf-8", "replace").lower()
