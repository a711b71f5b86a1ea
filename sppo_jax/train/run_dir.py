"""The directory of a run: claimed once, never written over."""

from __future__ import annotations

from pathlib import Path

from sppo_jax.config import Config, to_yaml
from sppo_jax.planner.plan import Plan


def check_run_dir(path: Path) -> None:
    """Refuse a directory that holds a run, or cannot be one; writes nothing.

    Raises:
        ValueError: the directory holds metrics.jsonl, or the path is a file.
    """
    if path.exists() and not path.is_dir():
        raise ValueError(f"the run directory must be a directory, got the file {path}; choose another --run-dir")
    if (path / "metrics.jsonl").exists():
        raise ValueError(f"the run directory must hold no other run, got {path} with metrics.jsonl; choose another")


def create_run_dir(path: Path, config: Config, plan: Plan) -> None:
    """Make the directory and write config.yaml (every setting) and plan.json.

    Raises:
        ValueError: as `check_run_dir`, or the directory cannot be written.
    """
    check_run_dir(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
        (path / "plan.json").write_text(plan.to_json() + "\n", encoding="utf-8")
    except OSError as error:
        raise ValueError(
            f"the run directory must be writable, got {path} ({error.strerror}); choose another"
        ) from error
