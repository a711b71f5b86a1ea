"""Where documents come from: files, directories and patterns of text and of tokens, and the standard library."""

from __future__ import annotations

import collections
import dataclasses
import re
import sysconfig
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sppo_jax.config.data import BYTES, DataConfig
from sppo_jax.data.cache.left_out import LeftOut, of_facts, summed
from sppo_jax.data.cache.store import Writer, read_entry, user_directory
from sppo_jax.data.content import token_files
from sppo_jax.data.content.content import CONTENTS, FileContent, content_of, speaks_of_loss
from sppo_jax.data.content.documents import TEXT_SUFFIXES
from sppo_jax.data.content.loss_keys import ignored_key
from sppo_jax.data.content.token_files import TOKEN_SUFFIXES, load_tokens
from sppo_jax.data.rows.corpus import Corpus, DocumentSpans, corpus_of, join
from sppo_jax.data.sources.prompts import load_prompts, prompts_job
from sppo_jax.data.sources.token_rows import load_token_rows, token_rows_job
from sppo_jax.data.sources.tokenizing import tokenize
from sppo_jax.data.storage.folders import EVERYTHING, File, Place, beginnings, files_in, is_pattern, look_at
from sppo_jax.data.storage.parts import Job, caches, tokenized
from sppo_jax.data.storage.places import is_address, place_of, remote_files
from sppo_jax.data.storage.remote import Remote
from sppo_jax.data.storage.saved import in_order
from sppo_jax.data.tokens.encoding import Encoder
from sppo_jax.files.paths import local_path

LIBRARY = "stdlib"
_NOT_LIBRARY = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
# The end of a file's name that says what it is, such as .json.gz.
_SUFFIX = re.compile(r"((\.[A-Za-z]+)?\.[A-Za-z0-9]+)?$")
_MOST_SHOWN = 6
_FORMAT = 3  # of the facts in the cache


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
    of, left_out = _by_content(config, source)
    corpora = [_text_corpus(config, of["text"], encoder())] if of["text"] else []
    corpora += [_chats().load_chats(config, of["chat"], encoder(), length)] if of["chat"] else []
    rows = of["rows of tokens"]
    corpora += [load_token_rows(config, rows, vocab_size, length)] if rows else []
    corpora += [load_prompts(config, of["prompts"], encoder(), length)] if of["prompts"] else []
    corpora += load_tokens(config, source, of["tokens"], vocab_size)
    corpus = join(corpora)
    if not corpus.num_documents:
        raise ValueError(f"data.source must hold tokens, got none in {source}; choose another source")
    return dataclasses.replace(corpus, left_out=summed((*left_out, *corpus.left_out)))


def jobs_of(
    config: DataConfig, source: str, encoder: Callable[[], Encoder], *, vocab_size: int, length: int
) -> list[Job]:
    """Returns what of a source is tokenized, which parts may do; the arguments are those of `load_corpus`."""
    return _jobs(config, _by_content(config, source)[0], encoder, vocab_size, length)


def known_spans(
    config: DataConfig, source: str, encoder: Callable[[], Encoder], *, vocab_size: int, length: int
) -> list[DocumentSpans] | None:
    """Returns the documents of each part of a source that `load_corpus` joins, where their places are known already.

    Args:
        config, source, encoder, vocab_size, length: as for `load_corpus`.

    Returns:
        None if text is not in the cache, if the source is behind an address, or as `token_files.known_spans`.

    Raises:
        ValueError: the source is unknown or unreadable.
    """
    cache = caches(config)[0] or user_directory()
    if is_address(source):
        return None
    of, _ = _by_content(config, source)
    if len(of["tokens"]) < sum(map(len, of.values())) and not (cache.is_dir() and any(cache.iterdir())):
        return None
    found: list[DocumentSpans] = []
    for job in _jobs(config, of, encoder, vocab_size, length):
        entry = read_entry(cache / job.name, job.dtype)
        if entry is None:
            return None
        found.append(
            DocumentSpans(entry.starts, entry.ends, [file.name for file in job.files], entry.facts["documents"])
        )
    tokens = token_files.known_spans(config, of["tokens"])
    return None if tokens is None else found + tokens


def _jobs(
    config: DataConfig, of: dict[FileContent, list[File]], encoder: Callable[[], Encoder], vocab_size: int, length: int
) -> list[Job]:
    jobs = [_text_job(config, of["text"], encoder())] if of["text"] else []
    jobs += [_chats().chat_job(config, of["chat"], encoder(), length)] if of["chat"] else []
    rows = of["rows of tokens"]
    jobs += [token_rows_job(config, rows, vocab_size, length)] if rows else []
    return jobs + ([prompts_job(config, of["prompts"], encoder(), length)] if of["prompts"] else [])


def _by_content(config: DataConfig, source: str) -> tuple[dict[FileContent, list[File]], list[LeftOut]]:
    of: dict[FileContent, list[File]] = {content: [] for content in CONTENTS}
    files, left_out = find_files(source)
    for file in files:
        of[content_of(config, file)].append(file)
    return of, left_out


def _chats() -> Any:
    """Returns what opens conversations, which needs a library that text does not."""
    try:
        from sppo_jax.data.sources import chats
    except ImportError:
        raise ValueError(
            "conversations need the jinja2 library, which is not installed; run pip install jinja2"
        ) from None
    return chats


def find_files(source: str) -> tuple[list[File], list[LeftOut]]:
    """Returns the files of a source, in the order of their names within it, and those that are left out.

    Raises:
        ValueError: there is no file, or a file has an unknown suffix.
    """
    if source == LIBRARY:
        root, paths = _library()
        found = (look_at(path, path.relative_to(root).as_posix()) for path in paths)
        return sorted(found, key=lambda file: file.name), []
    is_folder, files, unlisted = _found(source)
    left_out = [_left_out(file, "is not named by state.json or index.json") for file in unlisted]
    if unlisted:
        warnings.warn(
            f"data.source={source} must hold files that state.json or index.json name, got {len(unlisted)} others, "
            f"which are left out ({_counted(unlisted)}); name them alone to read them",
            stacklevel=3,
        )
    if is_folder:
        others = [file for file in files if not _is_known(file.name)]
        files = [file for file in files if _is_known(file.name)]
        left_out += [_left_out(file, "is of another kind") for file in others]
        _tell_of_others(source, others)
    for file in files:
        if not _is_known(file.name):
            raise ValueError(f"data.source must be {LIBRARY} or {_suffixes()}, got {file.path}; convert the file")
    if not files:
        raise ValueError(
            f"data.source must name files that exist, got {source} with no {_suffixes()}; choose another source"
        )
    return files, list(summed(left_out))


def _left_out(file: File, why: str) -> LeftOut:
    return LeftOut(what="files", why=f"{_suffix(file.name) or 'no suffix'} {why}", count=1)


def _found(source: str) -> tuple[bool, list[File], list[File]]:
    """Returns whether a source is a folder, its files in order, and those that a folder's own list leaves out."""
    root: Place
    if is_address(source):
        place = place_of(source, "data.source")
        root, found = remote_files(place, EVERYTHING)
        files = [_remote_file(root, path, size, changed_ns) for path, size, changed_ns in found]
        is_folder = root.path == place.path
    else:
        local = local_path(source, "data.source")
        is_folder = local.is_dir()
        root, paths = files_in(local) if is_folder or is_pattern(local) else (local.parent, [local])
        files = [look_at(path, path.relative_to(root).as_posix()) for path in paths]
        if not is_folder and not is_pattern(local):
            return False, files, []
    return is_folder, *in_order(root, files)


def _remote_file(root: Remote, path: Remote, num_bytes: int, changed_ns: int) -> File:
    name = path.path.removeprefix(root.path).lstrip("/")
    return File(path=path, name=name, num_bytes=num_bytes, changed_ns=changed_ns, version=path.version)


def _library() -> tuple[Path, list[Path]]:
    root = Path(sysconfig.get_path("stdlib"))
    return root, [path for path in root.rglob("*.py") if not _NOT_LIBRARY.intersection(path.relative_to(root).parts)]


def _is_known(name: str) -> bool:
    return name.endswith(TEXT_SUFFIXES + TOKEN_SUFFIXES)


def _suffixes() -> str:
    suffixes = (suffix for suffix in TEXT_SUFFIXES + TOKEN_SUFFIXES if suffix.count(".") == 1)
    *most, last = (suffix for suffix in suffixes)
    return f"{', '.join(most)} or {last} files"


def _tell_of_others(source: str, left_out: Sequence[File]) -> None:
    """Warns of files in a directory that are of other kinds, with their number by suffix."""
    if left_out:
        warnings.warn(
            f"data.source={source} must hold {_suffixes()}, got {len(left_out)} of other kinds, which are left out "
            f"({_counted(left_out)}); convert them, or move them elsewhere",
            stacklevel=4,
        )


def _counted(files: Sequence[File]) -> str:
    """Returns the suffixes of files with their numbers, the most frequent first."""
    counts = collections.Counter(_suffix(file.name) or "without a suffix" for file in files)
    more = f" and {len(counts) - _MOST_SHOWN} more kinds" if len(counts) > _MOST_SHOWN else ""
    return ", ".join(f"{count} {suffix}" for suffix, count in counts.most_common(_MOST_SHOWN)) + more


def _suffix(name: str) -> str:
    found = _SUFFIX.search(name.rpartition("/")[2])
    return found[0].lower() if found else ""


def _text_corpus(config: DataConfig, files: list[File], encoder: Encoder) -> Corpus:
    """Opens the documents of text files, which are tokenized once."""
    entry = tokenized(config, _text_job(config, files, encoder))
    assert entry.tokens is not None
    corpus = corpus_of(
        entry.tokens, entry.ends, [file.name for file in files], entry.facts["documents"], starts=entry.starts
    )
    return dataclasses.replace(corpus, left_out=of_facts(entry.facts["left_out"]))


def _text_job(config: DataConfig, files: list[File], encoder: Encoder) -> Job:
    strict = config.tokenizer not in (None, BYTES)
    key: dict[str, Any] = {
        "files": [file.key for file in files],
        "begins": beginnings(files),
        "text_key": config.text_key,
        "encoder": encoder.key,
        "format": _FORMAT,
    }
    older = key | {"encoder": encoder.older_key}
    key |= {
        **ignored_key(config),
        # Text whose rows speak of the loss is tokenized again, as versions before did not look at these keys.
        **({"rows": "looked at"} if speaks_of_loss(config, files[0]) else {}),
    }

    def write(some: Sequence[File], writer: Writer) -> None:
        tokenize(some, encoder, writer, config=config, strict=strict)

    dtype = np.dtype(np.uint16 if encoder.num_ids <= 1 << 16 else np.uint32)
    return Job(files=files, key=key, dtype=dtype, tokenize=write, older=[older])
