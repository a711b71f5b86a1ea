"""Where metrics go besides metrics.jsonl: TensorBoard, Weights & Biases, or any object with `log` and `close`."""

from __future__ import annotations

import dataclasses
import math
import os
import secrets
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from sppo_jax.config import Config, to_yaml

# Seconds that the end of a run waits for an upload: a run that is told to stop has little time left.
_FINISH_S = 20.0


class Tracker(Protocol):
    """Keeps the scalars of steps somewhere."""

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Keeps the scalars of a step."""

    def close(self) -> None:
        """Writes the remaining scalars and closes the tracker."""


class Trackers:
    """Several trackers behind one; a tracker that fails is reported once and left out from then on."""

    def __init__(self, trackers: Sequence[Tracker] = ()):
        """Takes open trackers."""
        self._trackers = list(trackers)

    def log(self, metrics: Mapping[str, Any]) -> None:
        """Gives all trackers the numbers of one line of metrics.jsonl."""
        if self._trackers:
            scalars = scalars_of(metrics)
            self._each("log", lambda tracker: tracker.log(metrics["step"], scalars))

    def close(self) -> None:
        """Closes all trackers; a second call does nothing."""
        self._each("close", lambda tracker: tracker.close())
        self._trackers = []

    def _each(self, what: str, call: Callable[[Tracker], None]) -> None:
        for tracker in list(self._trackers):
            try:
                call(tracker)
            except Exception as error:  # a failing tracker must not end a run
                self._trackers.remove(tracker)
                _warn(f"{type(tracker).__name__} failed to {what}, and the run continues without this tracker", error)


def check_trackers(config: Config) -> None:
    """Checks, before anything is compiled, that what `metrics` asks for is installed and has a login.

    Raises:
        ValueError: a package is not installed, or has no login.
    """
    if config.metrics.tensorboard:
        _summary_writer()
    if config.metrics.wandb and os.environ.get("WANDB_MODE", "online") == "online":
        wandb = _wandb(config)
        try:
            wandb.login(verify=False)
        except wandb.errors.UsageError as error:
            raise _no_login(config, error) from None
    elif config.metrics.wandb:
        _wandb(config)


def open_trackers(config: Config, run_dir: Path, *, step: int) -> Trackers:
    """Opens the trackers that `metrics` asks for; a run that continues extends its own curves.

    Args:
        config: all settings; `metrics.tensorboard` and `metrics.wandb` choose the trackers.
        run_dir: the run's directory, which exists.
        step: number of steps done, 0 for a new run; entries of later steps become void.

    Raises:
        ValueError: a tracker's package is not installed, or wandb has no login.
    """
    makers: list[Callable[[Config, Path, int], Tracker]] = []
    makers += [TensorBoard] if config.metrics.tensorboard else []
    makers += [Wandb] if config.metrics.wandb else []
    opened: list[Tracker] = []
    for make in makers:
        try:
            opened.append(make(config, run_dir, step))
        except ValueError:
            Trackers(opened).close()
            raise
        except Exception as error:  # a server that is down must not stop a run from being resumed
            _warn(
                f"{getattr(make, '__name__', 'a tracker')} could not be opened, and the run continues without this "
                "tracker",
                error,
            )
    return Trackers(opened)


def scalars_of(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Returns the finite numbers of a line of metrics.jsonl by name, with one number for each bucket of a list.

    Args:
        metrics: `validation_loss_by_position` and `recall_by_distance` are lists of buckets; the others are scalars.
    """
    scalars: dict[str, Any] = {name: value for name, value in metrics.items() if name != "step"}
    for bucket in scalars.pop("validation_loss_by_position", None) or ():
        scalars[f"validation_loss_by_position/{bucket['first']:07d}-{bucket['last']:07d}"] = bucket["loss"]
    for bucket in scalars.pop("recall_by_distance", None) or ():
        scalars[f"recall_by_distance/{bucket['distance']:07d}"] = bucket["accuracy"]
    return {
        name: float(value) for name, value in scalars.items() if isinstance(value, int | float) and math.isfinite(value)
    }


class TensorBoard:
    """Event files in `run_dir/tensorboard`."""

    def __init__(self, config: Config, run_dir: Path, step: int):
        """Opens a new event file, which voids the steps after `step` in those before it."""
        # Files are named by the second, which two starts may share; a purge begins with the step it is given.
        self._writer = _summary_writer()(
            str(run_dir / "tensorboard"), purge_step=step + 1 if step else None, filename_suffix=f".{step}"
        )
        if not step:
            indented = "\n".join(f"    {line}" for line in to_yaml(config).splitlines())
            self._writer.add_text("config", indented, 0)

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Adds a step to the event file."""
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Writes the event file out."""
        self._writer.close()


class Wandb:
    """A run at Weights & Biases, whose id is kept in `run_dir/wandb_id`, so that a resumed run is the same there."""

    def __init__(self, config: Config, run_dir: Path, step: int):
        """Starts the run at wandb or continues it."""
        wandb = _wandb(config)
        try:
            self._run = wandb.init(
                project=config.metrics.wandb,
                id=_wandb_id(run_dir),
                name=run_dir.resolve().name,
                dir=str(run_dir),
                config=dataclasses.asdict(config),
                resume="allow",
                reinit="create_new",
                settings=wandb.Settings(
                    silent=True, console="off", init_timeout=60, finish_timeout=_FINISH_S, finish_timeout_raises=False
                ),
            )
        except (wandb.errors.UsageError, wandb.errors.AuthenticationError) as error:
            raise _no_login(config, error) from None
        # Steps as a number of ours: wandb's own counter drops the steps that a resumed run does again.
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Adds a step to the run."""
        self._run.log({**scalars, "step": step})

    def close(self) -> None:
        """Ends the run; an upload that hangs is left to `wandb sync`."""
        self._run.finish()


def _wandb_id(run_dir: Path) -> str:
    """Returns the run's id; the first call makes and stores it."""
    path = run_dir / "wandb_id"
    found = path.read_text(encoding="utf-8").strip() if path.exists() else ""
    if not found:
        found = secrets.token_hex(4)
        path.write_text(found + "\n", encoding="utf-8")
    return found


def _summary_writer() -> Any:
    try:
        from tensorboardX import SummaryWriter
    except ImportError:
        raise _missing("metrics.tensorboard=true", "tensorboardX", "metrics.tensorboard=false") from None
    return SummaryWriter


def _wandb(config: Config) -> Any:
    try:
        import wandb
    except ImportError:
        raise _missing(f"metrics.wandb={config.metrics.wandb}", "wandb", "metrics.wandb=null") from None
    return wandb


def _no_login(config: Config, error: Exception) -> ValueError:
    return ValueError(
        f"metrics.wandb={config.metrics.wandb} must have a login at Weights & Biases, got no login that works "
        f"({_one_line(error)}); run `wandb login`, set WANDB_MODE=offline, or set metrics.wandb=null"
    )


def _missing(setting: str, package: str, without: str) -> ValueError:
    return ValueError(
        f"{setting} needs the package {package}, which is not installed; run pip install {package}, or set {without}"
    )


def _warn(what: str, error: Exception) -> None:
    warnings.warn(f"{what}: {_one_line(error)}", stacklevel=3)


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
