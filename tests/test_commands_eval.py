"""`sppo eval`: the same losses on any mesh, a table or JSON, and one line for wrong input."""

import dataclasses
import json
import math
import shutil

import pytest
from small_run import SETTINGS, write_checkpoint

from sppo_jax.cli import main
from sppo_jax.commands import eval as eval_command
from sppo_jax.data.positions import Bucket
from sppo_jax.evaluation.validate import Recall, Validation
from sppo_jax.train import evaluate_saved

pytestmark = pytest.mark.xdist_group("commands_eval")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("eval") / "run")


@pytest.fixture(scope="module")
def as_in_the_run(checkpoint):
    assert main(["eval", str(checkpoint.parent.parent)]) == 0
    return json.loads((checkpoint.parent.parent / "eval-5-data1-pipe2-seq1-len128.json").read_text())


def test_it_has_loss_by_position_and_recall_by_distance(as_in_the_run):
    assert as_in_the_run["mesh"] == {"data": 1, "pipe": 2, "seq": 1} and as_in_the_run["step"] == 5
    buckets = as_in_the_run["validation_loss_by_position"]
    assert buckets[-1]["last"] == 127 and sum(b["num_targets"] for b in buckets) == as_in_the_run["num_targets"] == 16
    recall = as_in_the_run["recall_by_distance"]
    assert [entry["distance"] for entry in recall] == [8, 32]
    assert sum(entry["num_targets"] for entry in recall) == 16 and all(0 <= e["accuracy"] <= 1 for e in recall)


def test_another_mesh_gives_the_same_losses(as_in_the_run, checkpoint, tmp_path, capsys):
    copy = tmp_path / "run" / "checkpoints" / "5"
    shutil.copytree(checkpoint, copy)
    capsys.readouterr()
    assert main(["eval", str(copy), "train.devices=cpu:1", "--json"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert "evaluates at most 4 sequences of 128 tokens: 4 batches of" in err and "s besides compiling" in err
    assert found == json.loads((tmp_path / "run" / "eval-5-data1-pipe1-seq1-len128.json").read_text())
    assert found["mesh"] == {"data": 1, "pipe": 1, "seq": 1}
    assert found["validation_loss"] == pytest.approx(as_in_the_run["validation_loss"], rel=1e-5)
    for key in ("validation_loss_by_position", "recall_by_distance"):
        for mine, other in zip(found[key], as_in_the_run[key], strict=True):
            assert mine == pytest.approx(other, rel=1e-5)


def test_the_gain_by_context_comes_beside_the_same_losses(as_in_the_run, checkpoint, tmp_path, capsys):
    copy = tmp_path / "run" / "checkpoints" / "5"
    shutil.copytree(checkpoint, copy)
    assert main(["eval", str(copy), "--context"]) == 0
    out, err = capsys.readouterr()
    assert "context beyond" in out and "6 batches of" in err
    found = json.loads((tmp_path / "run" / "eval-5-data1-pipe2-seq1-len128.json").read_text())
    assert found["validation_loss"] == pytest.approx(as_in_the_run["validation_loss"], rel=1e-5)
    (gain,) = found["gain_by_context"]
    assert gain["beyond"] == 64 and gain["gain"] == gain["cut"] - gain["whole"]
    assert 0 < gain["num_targets"] < found["num_targets"] and "gain_by_context" not in as_in_the_run


def test_every_evaluation_is_kept(as_in_the_run, tmp_path):
    checkpoint, stem = tmp_path / "run" / "checkpoints" / "5", "eval-5-data1-pipe2-seq1-len128"
    checkpoint.mkdir(parents=True)
    (tmp_path / "run" / f"{stem}-2.json").write_text("of somebody else")
    slower, other = as_in_the_run | {"validation_s": 99.0}, as_in_the_run | {"overrides": ["train.eval_sequences=2"]}
    longer = as_in_the_run | {"sequence_length": 256}
    written = [eval_command._write(checkpoint, entry) for entry in (as_in_the_run, other, slower, other, longer)]
    # What only took longer is the same result.
    names = [f"{stem}.json", f"{stem}-3.json", f"{stem}.json", f"{stem}-3.json", "eval-5-data1-pipe2-seq1-len256.json"]
    assert written == [tmp_path / "run" / name for name in names]
    assert [json.loads(path.read_text()) for path in written[2:]] == [slower, other, longer]
    assert (tmp_path / "run" / f"{stem}-2.json").read_text() == "of somebody else"


def test_the_table_is_for_people(as_in_the_run, checkpoint, capsys, tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("os.replace", refuse)
    assert main(["eval", str(checkpoint)]) == 0
    captured = capsys.readouterr()
    assert f"validation loss {as_in_the_run['validation_loss']:.4f} nats per token" in captured.out
    assert "recall at distance" in captured.out and "##" in captured.out and "wrote" not in captured.out
    assert "the result is not stored" in captured.err and "Read-only" in captured.err


def strictly(text):
    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    return json.loads(text, parse_constant=refuse)


def validation_with(name, bad):
    """Returns a validation of which one figure is not finite, or all losses are."""
    losses = (bad, bad) if name == "loss" else (2.0, bad) if name == "bucket" else (2.0, 1.0)
    whole = Validation(
        loss=bad if name in ("loss", "bucket") else 1.5,
        num_targets=8,
        num_sequences=2,
        num_held_out=3,
        buckets=tuple(
            Bucket(first=64 * i, last=64 * i + 63, num_targets=4, loss=loss) for i, loss in enumerate(losses)
        ),
        recall=(Recall(distance=8, num_targets=4, accuracy=bad if name == "accuracy" else 0.5),),
    )
    return dataclasses.replace(whole, **({name: bad} if name in ("seconds", "compile_s") else {}))


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("loss", math.nan),
        ("loss", math.inf),
        ("loss", -math.inf),
        ("bucket", math.nan),
        ("bucket", math.inf),
        ("accuracy", math.nan),
        ("seconds", math.inf),
        ("compile_s", math.nan),
    ],
)
def test_a_figure_that_is_not_finite_is_null_and_a_loss_fails(checkpoint, tmp_path, monkeypatch, capsys, name, bad):
    copy = tmp_path / "run" / "checkpoints" / "5"
    shutil.copytree(checkpoint / "run", copy / "run")
    (copy / "state").mkdir()
    monkeypatch.setattr(evaluate_saved, "evaluate_saved", lambda *_: validation_with(name, bad))
    failed = name in ("loss", "bucket")
    assert main(["eval", str(copy)]) == failed
    captured = capsys.readouterr()
    (written,) = (tmp_path / "run").glob("eval-*.json")
    entry = strictly(written.read_text())
    assert main(["eval", str(copy), "--json"]) == failed
    assert strictly(capsys.readouterr().out) == entry
    assert (
        "nan" not in captured.out and " inf" not in captured.out and "over 8 tokens in 2 of 3 sequences" in captured.out
    )
    assert "Traceback" not in captured.err
    if failed:
        assert entry["validation_loss"] is None and "validation loss not finite nats" in captured.out
        assert "HIGHER" not in captured.out and "lower than" not in captured.out
        assert "the validation loss of a checkpoint must be finite, got not finite for" in captured.err
        assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["gone"], "must be a checkpoint or a run directory with a checkpoint, got gone;"),
        (
            ["run", "train.eval_sequence=4"],
            "train.eval_sequence is not a setting; the nearest setting is train.eval_sequences",
        ),
        (["run", "model.hidden_size=32"], "model.hidden_size must be that of the checkpoint, 16, got 32"),
        (["run", "novalue"], "an override must read section.key=value"),
        (["run", "train.devices=gpu"], "train.devices must be auto or cpu:N"),
        (["run", "data.source=gone.txt"], "gone.txt"),
        (["bare"], "a checkpoint must hold the config of the run, got no config"),
        (["torn"], "a checkpoint must say which run wrote"),
        ([], "sppo eval: the following arguments are required: RUN_OR_CHECKPOINT"),
    ],
)
def test_wrong_input_is_one_line(checkpoint, tmp_path, monkeypatch, capsys, words, said):
    for name, text in (("run", None), ("bare", json.dumps({"plan": {}})), ("torn", '{"plan"')):
        run_item = tmp_path / name / "checkpoints" / "5" / "run"
        shutil.copytree(checkpoint / "run", run_item)
        (run_item.parent / "state").mkdir()
        if text is not None:
            (run_item / "metadata").write_text(text)
    monkeypatch.chdir(tmp_path)
    assert main(["eval", *words]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_nothing_held_out_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(SETTINGS, "data", {"source": "stdlib", "validation_fraction": 0.0})
    monkeypatch.setitem(SETTINGS, "model", {**SETTINGS["model"], "vocab_size": 257})
    checkpoint = write_checkpoint(tmp_path / "run")
    for words in ([], ["--context"]):
        assert main(["eval", str(checkpoint), *words]) == 2
        error = capsys.readouterr().err
        assert "must have held-out documents, got data.validation_fraction=0.0" in error and error.count("\n") == 1
