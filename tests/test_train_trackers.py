"""Trackers: what they are given, how they resume, and that none can stop a run."""

import sys
import warnings
from pathlib import Path

import pytest

from sppo_jax.config import Config, ConfigError, load_config
from sppo_jax.train.metrics.trackers import Trackers, check_trackers, open_trackers, scalars_of

CONFIG = Path(__file__).parent.parent / "configs" / "quickstart.yaml"


def config(*overrides: str) -> Config:
    return load_config(CONFIG, overrides)


class Recorder:
    def __init__(self, fails_at: int | None = None):
        self.steps: list[int] = []
        self.scalars: list[dict] = []
        self.closed, self.fails_at = 0, fails_at

    def log(self, step, scalars):
        if step == self.fails_at:
            raise OSError("no space left\non device")
        self.steps.append(step)
        self.scalars.append(dict(scalars))

    def close(self):
        self.closed += 1


def test_scalars_are_the_finite_numbers_and_the_buckets_by_where_they_begin():
    scalars = scalars_of(
        {
            "step": 7,
            "loss": 2.5,
            "spike": True,
            "mfu": None,
            "grad_norm": float("nan"),
            "note": "text",
            "validation_loss_by_position": [{"first": 0, "last": 255, "num_targets": 9, "loss": 3.0}],
            "recall_by_distance": [{"distance": 512, "num_targets": 4, "accuracy": 0.75}],
        }
    )
    assert scalars == {
        "loss": 2.5,
        "spike": 1.0,
        "validation_loss_by_position/0000000-0000255": 3.0,
        "recall_by_distance/0000512": 0.75,
    }


def test_a_tracker_that_fails_is_named_once_and_the_others_go_on():
    bad, good = Recorder(fails_at=2), Recorder()
    trackers = Trackers([bad, good])
    trackers.log({"step": 1, "loss": 1.0})
    with pytest.warns(
        UserWarning, match="Recorder failed to log, and the run continues without this tracker.*no space left on device"
    ) as found:
        trackers.log({"step": 2, "loss": 1.0})
    assert len(found) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trackers.log({"step": 3, "loss": 1.0})
        trackers.close()
        trackers.close()
    assert (bad.steps, bad.closed, good.steps, good.closed) == ([1], 0, [1, 2, 3], 1)


def test_none_configured_does_nothing(tmp_path):
    trackers = open_trackers(config(), tmp_path, step=0)
    trackers.log({"step": 1, "loss": 1.0})
    trackers.close()
    assert not list(tmp_path.iterdir())


def test_tensorboard_resumes_without_the_steps_that_are_done_again(tmp_path):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for done, losses in ((0, {1: 10.0, 2: 20.0, 3: 30.0, 4: 40.0}), (2, {3: 31.0})):
        trackers = open_trackers(config("metrics.tensorboard=true"), tmp_path, step=done)
        for step, loss in losses.items():
            trackers.log({"step": step, "loss": loss})
        trackers.close()
    events = reader.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 10.0), (2, 20.0), (3, 31.0)]


def test_wandb_offline_keeps_its_id(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    for done in (0, 1):
        trackers = open_trackers(config("metrics.wandb=long-context"), tmp_path, step=done)
        trackers.log({"step": done + 1, "loss": 1.0})
        trackers.close()
    name = (tmp_path / "wandb_id").read_text().strip()
    runs = list((tmp_path / "wandb").glob("offline-run-*"))
    assert name and runs and all(f"-{name}" in run.name and list(run.glob("*.wandb")) for run in runs)


@pytest.mark.parametrize(
    ("override", "package"), [("metrics.tensorboard=true", "tensorboardX"), ("metrics.wandb=p", "wandb")]
)
def test_a_missing_package_is_one_line_that_says_what_to_install(tmp_path, monkeypatch, override, package):
    monkeypatch.setitem(sys.modules, package, None)
    for call in (check_trackers, lambda config: open_trackers(config, tmp_path, step=0)):
        with pytest.raises(ValueError, match=rf"{override} needs.*{package}.*run pip install {package}, or") as error:
            call(config(override))
        assert "\n" not in str(error.value)


def test_a_server_that_is_down_costs_the_tracker_and_not_the_run(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")

    def init(**_):
        raise wandb.errors.CommError("timed out")

    monkeypatch.setattr(wandb, "init", init)
    with pytest.warns(
        UserWarning, match="Wandb could not be opened, and the run continues without this tracker: CommError"
    ):
        open_trackers(config("metrics.wandb=p"), tmp_path, step=0).log({"step": 1, "loss": 1.0})


def test_no_login_is_the_users_to_mend(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")

    def refuse(**_):
        raise wandb.errors.UsageError("No API key configured.")

    monkeypatch.setattr(wandb, "init", refuse)
    monkeypatch.setattr(wandb, "login", refuse)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    for call in (check_trackers, lambda config: open_trackers(config, tmp_path, step=0)):
        with pytest.raises(ValueError, match="must have a login.*No API key.*WANDB_MODE=offline"):
            call(config("metrics.wandb=p"))
    monkeypatch.setenv("WANDB_MODE", "offline")
    check_trackers(config("metrics.wandb=p", "metrics.tensorboard=true"))


@pytest.mark.parametrize(
    "name, rule", [("''", "text"), ("a/b", "a project's name"), ("'  '", "text"), ("x?y", "a project's name")]
)
def test_a_projects_name_is_checked_before_the_run(name, rule):
    with pytest.raises(ConfigError, match=f"metrics.wandb must be {rule}"):
        config(f"metrics.wandb={name}")
