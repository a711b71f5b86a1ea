"""The plan of a run: for the documents of its data, made known first; the same when the run goes on."""

import json
from dataclasses import replace

import pytest
from tiny_runs import at_batch, losses_of, make_config, one_layer, write_documents

from sppo_jax.hardware import DEVICES, make_cluster
from sppo_jax.plan.plan import Plan
from sppo_jax.train import planned
from sppo_jax.train.checkpoints.run_dir import write_run
from sppo_jax.train.planned import plan_of_run

SMALL = make_cluster(replace(DEVICES["cpu"], hbm_bytes=1000), 4)


@pytest.fixture
def texts(tmp_path):
    """A folder of short texts, and an empty cache."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(20):
        (folder / f"{number}.txt").write_text("word " * (number + 3))
    return {"source": str(folder), "cache": str(tmp_path / "cache"), "separator": None}


def text_config(texts, **groups):
    """Returns a config of the texts, whose bytes are their tokens."""
    model = {"vocab_size": 300} | groups.pop("model", {})
    data = texts | {"tokenizer": "bytes"}
    return make_config(None, **{**groups, "model": model, "data": data})


def begun(config, run_dir, cluster=None):
    """Returns the plan of a new run, which is written: its own is shown, or the one for full documents before it."""
    lines, shown = [], []
    plan, problem = plan_of_run(config, cluster, run_dir, lines.append, shown.append)
    assert not problem and len(shown) == 1 and len(lines) <= 1
    assert shown[0].plan == plan or shown[0].plan.planned_for.documents == "full"
    run_dir.mkdir()
    write_run(run_dir, config, plan)
    return plan


def test_lengths_are_made_known_before_a_run_is_planned(texts, tmp_path):
    plan = begun(text_config(texts), tmp_path / "run")
    assert plan.planned_for.documents == "known" and 0 < plan.planned_for.attended < 1
    assert 0 < plan.predicted.documents_step_s < plan.predicted.step_s
    full = text_config(texts, sequence={"plan_for": "full"})
    assert plan_of_run(full, None, tmp_path / "full", print, print)[0].planned_for.documents == "full"


def test_a_run_keeps_its_plan(texts, tmp_path):
    plan = begun(text_config(texts), tmp_path / "run")
    again = text_config(texts, train={"steps": 99}, optimizer={"lr": 0.5}, checkpoint={"every_steps": 3})
    shown = []
    assert plan_of_run(again, None, tmp_path / "run", pytest.fail, shown.append) == (plan, "")
    assert [(found.plan, found.fits) for found in shown] == [(plan, True)] and shown[0].memory.hbm


@pytest.mark.parametrize(
    ("groups", "devices", "why"),
    [
        ({"sequence": {"plan_for": "full"}}, None, "sequence.plan_for changed since the run began"),
        ({"mesh": {"data": 1}}, None, "mesh.data changed since the run began"),
        ({"stash": {"inputs": "keep"}}, None, "stash.inputs changed since the run began"),
        ({}, make_cluster(DEVICES["h100"], 4), "the run was planned for cpu:1x4, and is on h100:1x4"),
    ],
)
def test_with_other_settings_or_devices_a_run_is_planned_again(texts, tmp_path, groups, devices, why):
    plan, lines = begun(text_config(texts), tmp_path / "run"), []
    again, problem = plan_of_run(text_config(texts, **groups), devices, tmp_path / "run", lines.append, print)
    assert not problem and again != plan and lines == [f"plans again, because {why}"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "the plan of the run cannot be followed: plan.json must hold JSON text"),
        ("old", "the run was planned for devices that its plan does not name, and is on cpu:1x4"),
    ],
)
def test_a_plan_that_cannot_be_followed_is_made_again(texts, tmp_path, text, why):
    plan, lines = begun(text_config(texts), tmp_path / "run"), []
    if text == "old":
        text = json.dumps({**older(plan.to_dict()), "schema_version": 12})
        assert Plan.from_json(text).planned_for.documents == "full"
    (tmp_path / "run" / "plan.json").write_text(text)
    again, _ = plan_of_run(text_config(texts), None, tmp_path / "run", lines.append, print)
    assert again == plan and len(lines) == 1 and lines[0].startswith(f"plans again, because {why}")


def older(values):
    """Returns a plan as it was written before it said what it is for."""
    del values["planned_for"], values["cluster"], values["predicted"]["documents_step_s"]
    return values


def test_where_no_plan_fits_no_data_are_read(texts, tmp_path, monkeypatch):
    monkeypatch.setattr(planned, "made_known", lambda config: pytest.fail("no plan fits anyway"))
    _, problem = plan_of_run(text_config(texts), SMALL, tmp_path / "run", print, print)
    assert "over HBM by" in problem and "\n" not in problem and not (tmp_path / "cache").exists()


def test_data_that_cannot_be_read_are_one_line(texts, tmp_path):
    (tmp_path / "none").mkdir()
    with pytest.raises(ValueError, match=r"data\.source must ") as error:
        plan_of_run(text_config(texts | {"source": str(tmp_path / "none")}), None, tmp_path / "run", print, print)
    assert "\n" not in str(error.value)


@pytest.mark.usefixtures("compiled_once")
def test_a_killed_run_goes_on_with_its_plan_bit_for_bit(tmp_path, monkeypatch):
    from sppo_jax.commands import train as command
    from sppo_jax.config import to_yaml
    from sppo_jax.train import setup

    source = write_documents(tmp_path / "tokens.npy")
    config = make_config(source, **one_layer(checkpoint={"every_steps": 2}))
    (tmp_path / "tiny.yaml").write_text(to_yaml(config))

    def trained(name):
        return command.run([str(tmp_path / "tiny.yaml"), "--run-dir", str(tmp_path / name)])

    class Killed(BaseException):
        pass

    def kill():
        raise Killed

    assert trained("whole") == 0
    with monkeypatch.context() as patch:
        prepare = setup.prepare
        patch.setattr(setup, "prepare", lambda *given: at_batch(6, kill)(prepare(*given)))
        with pytest.raises(Killed):
            trained("killed")
    before = (tmp_path / "killed" / "plan.json").read_bytes()
    assert trained("killed") == 0
    assert (tmp_path / "killed" / "plan.json").read_bytes() == before
    assert before == (tmp_path / "whole" / "plan.json").read_bytes()
    assert Plan.from_json(before.decode()).planned_for.documents == "known"
    assert losses_of(tmp_path / "killed") == losses_of(tmp_path / "whole") and len(losses_of(tmp_path / "whole")) == 10
