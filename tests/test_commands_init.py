"""`sppo init` writes a config that loads, plans and says what to change; it overwrites nothing."""

import json
from pathlib import Path

import pytest
from hf_configs import SMALL

from sppo_jax.cli import main
from sppo_jax.config import load_config


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A Hugging Face folder with nothing but a config.json, beside an empty working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "config.json").write_text(json.dumps(SMALL))
    return "llama"


def test_the_config_is_for_the_model_and_the_devices(folder, tmp_path, capsys):
    assert main(["init", f"hf:{folder}", "--length", "4096", "--cluster", "h100:1x2", "--out", "my.yaml"]) == 0
    assert "next: sppo plan my.yaml" in capsys.readouterr().out
    config = load_config("my.yaml")
    assert (Path(config.model.hf).name, config.sequence.length, config.hardware.cluster) == (folder, 4096, "h100:1x2")
    assert config.optimizer.lr == 1e-5
    head = [line for line in (tmp_path / "my.yaml").read_text().splitlines() if line.startswith("#")]
    step = next(line.split("step", 1)[1].split() for line in head if line.startswith("#   step"))
    assert main(["plan", "my.yaml"]) == 0
    shown = capsys.readouterr().out
    assert " ".join(step) in " ".join(shown.split())  # the head says what the plan says


def test_without_words_it_is_a_small_run_at_once(folder, capsys, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert main(["init", "--out", "small.yaml"]) == 0
    config = load_config("small.yaml")
    assert config.data.source == "stdlib" and config.hardware.cluster is None and config.model.vocab_size == 257


def test_what_does_not_fit_is_written_and_said(folder, capsys):
    assert main(["init", f"hf:{folder}", "--length", "1024M", "--cluster", "rtx-3090:1x1", "--out", "my.yaml"]) == 3
    assert load_config("my.yaml").sequence.length == 2**30
    assert "no plan fits" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--out", "there.yaml"], "--out must name a new file, got there.yaml, which exists"),
        (["--out", "none/my.yaml"], "--out must name a file that can be written, got none/my.yaml"),
        (["llama", "--out", "my.yaml"], "a model must be hf:FOLDER, got 'llama'; write hf:llama"),
        (["hf:none", "--out", "my.yaml"], "a Hugging Face model must be a local folder with config.json, got none "),
        (["--cluster", "h10:1x1", "--out", "my.yaml"], "name one of the devices h100, h20"),
        ([], "required: --out"),
    ],
)
def test_wrong_words_are_one_line_and_write_nothing(folder, tmp_path, words, line, capsys):
    (tmp_path / "there.yaml").write_text("mine")
    assert main(["init", *words]) == 2
    captured = capsys.readouterr()
    assert line in captured.err and captured.err.count("\n") == 1 and captured.out == ""
    assert (tmp_path / "there.yaml").read_text() == "mine" and not (tmp_path / "my.yaml").exists()
