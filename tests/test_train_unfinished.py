"""Which run a command without --run-dir may go on with."""

import fcntl

import pytest
from small_run import write_config

from sppo_jax.config import load_config, to_yaml
from sppo_jax.train.checkpoints.unfinished import newest_unfinished


@pytest.fixture
def config(tmp_path):
    return load_config(write_config(tmp_path / "mine.yaml"))


def write_run(runs, name, config, *, step=5):
    """Writes what a run leaves behind that was stopped after a save."""
    (runs / name).mkdir(parents=True)
    (runs / name / "config.yaml").write_text(to_yaml(config))
    (runs / name / "lock").touch()
    if step:
        for item in ("state", "run"):
            (runs / name / "checkpoints" / str(step) / item).mkdir(parents=True)
    return runs / name


def test_the_newest_run_that_can_go_on_is_found(tmp_path, config):
    runs = tmp_path / "runs"
    assert newest_unfinished(runs, "mine", config) is None
    older = write_run(runs, "mine-20260102-030405", config)
    assert newest_unfinished(runs, "mine", config) == older
    newer = write_run(runs, "mine-20260203-030405", config)
    write_run(runs, "mine-20260404-030405", config, step=0)
    write_run(runs, "mine-too-20260404-030405", config)
    write_run(runs, "other-20260404-030405", config)
    assert newest_unfinished(runs, "mine", config) == newer
    with (newer / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert newest_unfinished(runs, "mine", config) == older
    (newer / "finished").touch()
    assert newest_unfinished(runs, "mine", config) == older


def test_a_name_with_brackets_is_no_pattern(tmp_path, config):
    run_dir = write_run(tmp_path / "runs", "mine[8b]-20260102-030405", config)
    assert newest_unfinished(tmp_path / "runs", "mine[8b]", config) == run_dir
    write_run(tmp_path / "runs", "mineb-20260102-030405", config)
    assert newest_unfinished(tmp_path / "runs", "mine[ab]", config) is None


@pytest.mark.parametrize("written", ["{}/saved", "$PLACE/saved"])
def test_checkpoints_may_lie_elsewhere(tmp_path, monkeypatch, written):
    monkeypatch.setenv("PLACE", str(tmp_path))
    config = load_config(write_config(tmp_path / "mine.yaml"), [f"checkpoint.dir={written.format(tmp_path)}"])
    run_dir = write_run(tmp_path / "runs", "mine-20260102-030405", config, step=0)
    (run_dir / "plan.json").touch()
    assert newest_unfinished(tmp_path / "runs", "mine", config) is None
    for item in ("state", "run"):
        (tmp_path / "saved" / "5" / item).mkdir(parents=True)
    assert newest_unfinished(tmp_path / "runs", "mine", config) == run_dir


def test_a_run_of_another_model_is_passed_over(tmp_path, config):
    write_run(tmp_path / "runs", "mine-20260102-030405", config)
    wider = load_config(tmp_path / "mine.yaml", ["model.mlp_size=48"])
    assert newest_unfinished(tmp_path / "runs", "mine", wider) is None
    longer = load_config(tmp_path / "mine.yaml", ["train.steps=50"])
    assert newest_unfinished(tmp_path / "runs", "mine", longer) is not None


def test_a_command_says_so_and_goes_on_only_if_asked(tmp_path, config, monkeypatch, capfd):
    from sppo_jax.cli import main

    monkeypatch.chdir(tmp_path)
    command = ["train", "mine.yaml", "--resume"]
    assert main(command) == 2
    assert "--resume must find an unfinished run of mine.yaml in runs, got none" in capfd.readouterr().err
    assert main([*command, "--run-dir", "runs/a"]) == 2 and "without --run-dir" in capfd.readouterr().err
    write_run(tmp_path / "runs", "mine-20260102-030405", config)
    assert main(["train", "mine.yaml", "--plan", "nowhere.json"]) == 2
    told = "an unfinished run of this config is in runs/mine-20260102-030405; add --resume to continue it"
    assert told in capfd.readouterr().out


@pytest.mark.parametrize("words", [[], ["--resume"]])
def test_the_run_that_is_taken(tmp_path, config, monkeypatch, words):
    from sppo_jax.cli import main
    from sppo_jax.commands import train

    monkeypatch.chdir(tmp_path)
    run_dir = write_run(tmp_path / "runs", "mine-20260102-030405", config)
    taken = []
    monkeypatch.setattr(train, "_train", lambda args, config, run_dir, stack: taken.append(run_dir) or 0)
    assert main(["train", "mine.yaml", *words]) == 0
    assert (taken[0].absolute() == run_dir) == bool(words)
