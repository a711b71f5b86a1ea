"""`sppo eval --tasks`: scores of a checkpoint and of a Hugging Face folder, kept by key; one line for wrong input."""

import json
import shutil

import pytest
from small_run import SETTINGS, write_checkpoint

from sppo_jax.cli import main
from sppo_jax.evaluation import score as score_module

pytestmark = pytest.mark.xdist_group("commands_eval_tasks")
NEEDLE = ["--tasks", "needle", "--samples", "3", "--lengths", "256"]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """Returns a run of a model of bytes on two devices."""
    before = {name: SETTINGS[name] for name in ("model", "data", "sequence")}
    SETTINGS["model"] = SETTINGS["model"] | {"vocab_size": 257}
    SETTINGS["data"] = {"source": "stdlib"}
    try:
        return write_checkpoint(tmp_path_factory.mktemp("scores") / "run").parent.parent
    finally:
        SETTINGS.update(before)


@pytest.fixture
def copy(run_dir, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = ({"prompt": "a", "answer": "b"}, {"prompt": "a", "choices": ["b", "c"], "answer": 0})
    for name, row in zip(("rows", "choices"), rows, strict=True):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    shutil.copytree(run_dir, tmp_path / "run")
    return tmp_path / "run"


def strip(entries):
    return [{name: value for name, value in entry.items() if name != "seconds"} for entry in entries]


def test_scores_are_kept_and_not_computed_again(copy, capsys, monkeypatch):
    assert main(["eval", "run", *NEEDLE, "rows.jsonl", "choices.jsonl"]) == 2  # no task stands behind --lengths
    words = ["eval", "run", "--samples", "3", "--lengths", "256", "--tasks", "needle", "rows.jsonl", "choices.jsonl"]
    capsys.readouterr()
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "needle at 256: 0 of 3 right" in out and "wrote run/scores.json" in out and "needle by depth" in out
    entries = json.loads((copy / "scores.json").read_text())["scores"]
    assert [entry["task"] for entry in entries] == ["needle", "rows.jsonl", "choices.jsonl"]
    assert all(entry["samples"] == samples for entry, samples in zip(entries, (3, 1, 1), strict=True))
    assert entries[0]["nats"] > 1 and "acc_norm" in entries[2] and entries[0]["step"] == 5

    passes = []
    monkeypatch.setattr(score_module, "place_batch", lambda *_: passes.append(0))
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == entries and not passes
    assert json.loads((copy / "scores.json").read_text())["scores"] == entries


def test_another_mesh_gives_the_same_scores(copy, capsys):
    found = []
    for devices in (1, 2):
        out = f"{devices}.json"
        assert main(["eval", "run", *NEEDLE, "--out", out, f"train.devices=cpu:{devices}"]) == 0
        found.append(strip(json.loads((copy.parent / out).read_text())["scores"]))
    (one,), (two,) = found
    assert not (copy / "scores.json").exists()
    assert one["nats"] == pytest.approx(two["nats"], rel=1e-4) and one["key"] == two["key"]
    assert [one[name] for name in ("hits", "depths")] == [two[name] for name in ("hits", "depths")]
    capsys.readouterr()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run", "--tasks", "needel"], "got needel; the nearest task is needle"),
        (["run", "--tasks", "needle", "--samples", "0"], "--samples must be at least 1, got 0"),
        (["run", "--tasks", "needle", "--lengths", "64"], "got 64 tokens where they alone have"),
        (["run", "--tasks", "needle", "--lengths", "4k"], "a whole number from 1 must be given"),
        (["run", "--tasks", "gone.jsonl"], "must be a readable file of JSON lines, got gone.jsonl"),
        (["run", "--tasks", "rows.jsonl", "--lengths", "2"], "rows.jsonl row 1: the answer alone must fit the length"),
        (["run", "sequence.length=64", "--tasks", "needle"], "must be given by --lengths, got sequence.length=64"),
        (["run", "model.hidden_size=32", "--tasks", "needle"], "model.hidden_size must be that of the checkpoint"),
        (["run", "data.source=recall", "--tasks", "needle"], "a task of text must have a tokenizer, got a model of"),
        (["run", "data.needles.haystack=no.txt", "--tasks", "needle"], "haystack must be a readable file, got"),
        (["run", "--tasks", "needle", "--out", "rows.jsonl"], "it holds something else, which would be lost"),
        (["run", "--raw"], "--raw must come with --tasks"),
        (["hf:folder"], "hf:folder must come with --tasks"),
        (["hf:folder", "--tasks", "needle"], "folder"),
        (["gone", "--tasks", "needle"], "must be a checkpoint or a run directory with a checkpoint, got gone"),
    ],
)
def test_wrong_input_is_one_line_and_writes_nothing(copy, capsys, words, said):
    files = sorted(copy.parent.rglob("*"))
    words = words if "--lengths" in words or "--tasks" not in words else [*words, "--lengths", "256"]
    assert main(["eval", *words]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
    assert sorted(copy.parent.rglob("*")) == files
