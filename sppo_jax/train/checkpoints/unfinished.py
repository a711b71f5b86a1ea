"""Finds the run that a command without `--run-dir` may go on with."""

from __future__ import annotations

import glob
from pathlib import Path

from sppo_jax.config import Config
from sppo_jax.files.locks import try_lock
from sppo_jax.train.begun import as_begun
from sppo_jax.train.checkpoints.read import checkpoint_steps
from sppo_jax.train.checkpoints.run_dir import changes_since, checkpoint_directory


def newest_unfinished(folder: Path, stem: str, config: Config, *, leaves_balance: bool = False) -> Path | None:
    """Returns the newest run of a config that has a checkpoint, is not finished, and is not held by a process.

    Args:
        folder: of run directories.
        stem: with which the names of the config's runs begin; a date and a time follow.
        config: with which the run would go on; a run of another model or other data is passed over.
        leaves_balance: whether the config leaves the balance of experts to the run; see `begun.as_begun`.
    """
    for run_dir in sorted(folder.glob(f"{glob.escape(stem)}-????????-??????"), reverse=True):
        if checkpoint_steps(checkpoint_directory(config, run_dir)) and _can_go_on(run_dir, config, leaves_balance):
            return run_dir
    return None


def _can_go_on(run_dir: Path, config: Config, leaves_balance: bool) -> bool:
    if (run_dir / "finished").exists() or _is_held(run_dir / "lock"):
        return False
    try:
        changes_since(run_dir, as_begun(config, run_dir) if leaves_balance else config)
    except ValueError:
        return False
    return (run_dir / "config.yaml").exists()


def _is_held(lock: Path) -> bool:
    try:
        with lock.open("rb") as file:
            return try_lock(file, shared=True) is False
    except OSError:
        return False
