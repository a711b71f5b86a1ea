"""The directory of a run: written by one run at a time, whole at every moment, and continued under its name."""

from __future__ import annotations

import dataclasses
import os
import socket
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from sppo_jax.config import Config, load_config, to_yaml
from sppo_jax.files.locks import try_lock
from sppo_jax.files.paths import file_error, local_path
from sppo_jax.files.whole import check_encoding, file_system_of, parse_json, write_whole
from sppo_jax.plan.plan import Plan

# What else a directory holds if a run wrote its config.yaml.
_OF_RUNS = ("plan.json", "metrics.jsonl", "events.jsonl", "checkpoints")
# Where the documents and their tokenizer lie, and how texts end: these may change, and the fingerprint of the data says
# if the documents are the same.
_PLACES = ("source", "validation_source", "tokenizer", "end_token")
# Sections that must not change when a run continues, because weights or data depend on them, with the exceptions.
_FIXED_SECTIONS = {
    "model": ("kernel", "check_kernels", "compute_dtype", "preset", "hf", "init_scale"),
    # What a run reads under another format, or without some keys, is compared by its fingerprint.
    "data": ("cache", "format", "ignore_keys", *_PLACES),
}


def checkpoint_directory(config: Config, run_dir: Path) -> Path:
    """Returns the directory of a run's checkpoints."""
    directory = config.checkpoint.dir
    return local_path(directory, "checkpoint.dir") if directory else run_dir / "checkpoints"


@contextmanager
def claimed(path: Path, what: str = "the run directory", setting: str = "--run-dir") -> Iterator[None]:
    """Locks a run's directory for as long as the run lasts; creates the directory if needed.

    The system releases the lock when the process ends for any reason.

    Args:
        path: the directory.
        what: name of the directory in errors.
        setting: the setting that names the directory, for errors.

    Raises:
        ValueError: it cannot be written, its file system takes no appends or renames, or another run holds it.
    """
    if path.exists() and not path.is_dir():
        raise ValueError(f"{what} must be a directory, got the file {path}; choose another {setting}")
    check_encoding(path, what)
    made = not path.exists()
    try:
        path.mkdir(parents=True, exist_ok=True)
        _probe(path, what, setting)
        lock = (path / "lock").open("a+", encoding="utf-8")
    except OSError as error:
        raise file_error(f"{what} must be writable", path, error, f"choose another {setting}") from error
    with lock:
        locked = try_lock(lock)
        if locked is None:
            warnings.warn(
                f"{what} should be on a file system with locks, got {path} on {file_system_of(path)} without; start no "
                f"second run with this directory, or choose another {setting}",
                stacklevel=3,
            )
        lock.seek(0)
        if locked is False:
            holder = lock.read().strip() or "another process"
            raise ValueError(
                f"{what} must have one run at a time, got {path} held by {holder}; stop that run, or choose another "
                f"{setting}"
            )
        lock.truncate()
        lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        lock.flush()
        try:
            yield
        finally:
            with suppress(OSError):
                if made and os.listdir(path) == ["lock"]:  # refused before there was a run
                    (path / "lock").unlink()
                    path.rmdir()


def _probe(path: Path, what: str, setting: str) -> None:
    """Writes, appends to, renames and removes a small file, so that nothing is compiled for a disk that refuses it.

    Raises:
        OSError: it cannot be written.
        ValueError: it cannot be appended to or renamed, as in a bucket that is mounted.
    """
    probe, moved = (path / f".probe-{os.getpid()}{end}" for end in ("", "-moved"))
    try:
        probe.write_bytes(b"0" * 4096)
        try:
            with probe.open("ab") as file:
                file.write(b"1")
            probe.replace(moved)
            got = f"a file of {moved.stat().st_size} bytes in place of 4097"
        except OSError as error:
            got = error.strerror
        if not moved.exists() or moved.stat().st_size != 4097:
            raise ValueError(
                f"{what} must be on a file system with appends and renames, got {path} on {file_system_of(path)} "
                f"({got}); choose another {setting}, on a volume or a disk and not in a mounted bucket"
            )
    finally:
        probe.unlink(missing_ok=True)
        moved.unlink(missing_ok=True)


def changes_since(path: Path, config: Config) -> list[str]:
    """Checks that a config can continue the run in a directory, if there is one.

    Returns:
        The settings that changed, as `section.key: old -> new`.

    Raises:
        ValueError: the directory holds a run of another model or other data, or files of another program.
    """
    try:
        is_run, has_metrics = (path / "config.yaml").exists(), (path / "metrics.jsonl").exists()
    except OSError as error:
        raise ValueError(
            f"the run directory must be readable, got {path} ({error.strerror}); choose another --run-dir"
        ) from None
    if not is_run:
        if has_metrics:
            raise ValueError(
                f"the run directory must hold no other run, got {path} with metrics.jsonl and no config.yaml; "
                "choose another --run-dir"
            )
        return []
    if not any((path / name).exists() for name in _OF_RUNS):
        raise ValueError(
            f"the run directory must hold no file that the run replaces, got {path} with a config.yaml and no run; "
            "choose another --run-dir"
        )
    changes = changed_settings(path, config)
    for name, old, new in changes:
        section, _, key = name.partition(".")
        fixed = section in _FIXED_SECTIONS and key not in _FIXED_SECTIONS[section]
        if fixed or name == "sequence.length":
            raise ValueError(
                f"{name} must stay {old}, the value in {path / 'config.yaml'}, got {new}; set {name}={old}, or "
                "choose another --run-dir"
            )
    return [f"{name}: {old} -> {new}" for name, old, new in changes]


def changed_settings(path: Path, config: Config) -> list[tuple[str, Any, Any]]:
    """Returns the settings in which a config differs from that of the run in a directory: name, old and new value.

    Raises:
        ValueError: the run's config.yaml cannot be read.
    """
    before, after = (_settings(each) for each in (load_config(path / "config.yaml"), config))
    return list(_changes(before, after, ""))


def _settings(config: Config) -> dict[str, Any]:
    """Returns all settings; a default that follows from others has its value, which may have been given before."""
    settings, rules = dataclasses.asdict(config), config.data.too_long_rules()
    if len(rules) == 1:
        settings["data"]["chat"]["too_long"] = rules[0]
    return settings


def _changes(before: Any, after: Any, name: str) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(before, Mapping) and isinstance(after, Mapping) and set(before) == set(after):
        for key in before:
            yield from _changes(before[key], after[key], f"{name}.{key}" if name else key)
    elif before != after:
        yield name, before, after


def write_run(path: Path, config: Config, plan: Plan) -> None:
    """Writes config.yaml (every setting) and plan.json, each whole or not at all.

    Raises:
        ValueError: they cannot be written.
    """
    try:
        write_whole(path / "plan.json", plan.to_json() + "\n")
        write_whole(path / "config.yaml", to_yaml(config))
    except OSError as error:
        raise ValueError(
            f"the run directory must be writable, got {path} ({error.strerror}); choose another --run-dir"
        ) from error


def forget_after(path: Path, step: float) -> int:
    """Drops the lines of a .jsonl file about steps that the run will repeat, and lines that are torn.

    Args:
        path: a JSON object with `step` a line; need not exist.
        step: the last one that counts; infinite to drop torn lines only.

    Returns:
        How many lines were dropped.
    """
    if not path.exists():
        return 0
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    kept = [line for line in lines if (at := _step_of(line)) is not None and at <= step]
    if len(kept) < len(lines):
        write_whole(path, "".join(f"{line}\n" for line in kept))
    return len(lines) - len(kept)


def _step_of(line: str) -> int | None:
    try:
        return int(parse_json(line)["step"])
    except (ValueError, KeyError, TypeError):
        return None
