"""`sppo init` writes a config that loads, plans and says what to change; it overwrites nothing."""

import json
from pathlib import Path

import pytest
from hf_configs import PUBLISHED, SMALL
from report_cases import gpus

from sppo_jax.cli import main
from sppo_jax.config import config_from_dict, load_config
from sppo_jax.hardware import parse_cluster
from sppo_jax.search.space.layouts import length_for
from sppo_jax.search.space.request import read_request


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


COUNTS = [*range(1, 33), 72]


def suited(capsys, words):
    """Runs init; if it is refused, once more with the options that it names. Returns the length."""
    if main(["init", *words, "--out", "my.yaml"]) == 2:
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and not Path("my.yaml").exists()
        named = error.rpartition("; use ")[2].split(" or ")[0].split()
        given = dict(zip(words[::2], words[1::2], strict=True)) | dict(zip(named[::2], named[1::2], strict=True))
        words = [word for pair in given.items() for word in pair]
        assert main(["init", *words, "--out", "my.yaml"]) in (0, 3), error
    config = load_config("my.yaml")
    Path("my.yaml").unlink()
    capsys.readouterr()
    return config.sequence.length


@pytest.mark.parametrize("count", COUNTS)
def test_every_number_of_devices_has_a_length_near_the_usual_one(folder, count, capsys):
    found = suited(capsys, ["--cluster", gpus(count)])
    assert 0.9 * 4096 < found <= 4096 and (found == 4096 or count % 3 == 0 or count > 4)
    assert 0.9 * 5000 < suited(capsys, ["--cluster", gpus(count), "--length", "5000"]) < 1.1 * 5000


def test_a_length_that_is_chosen_is_told(folder, capsys):
    assert main(["init", "--cluster", "h100:1x3", "--out", "my.yaml"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0] == "sequence.length is 4,080: no mesh of h100:1x3 suits the usual 4,096 tokens"
    assert main(["init", "--cluster", "h100:1x3", "--length", "4096", "--out", "other.yaml"]) == 2
    assert capsys.readouterr().err.endswith("; use --length 4080\n")


def test_a_model_keeps_within_its_own_length(folder, capsys):
    assert main(["init", "hf:llama", "--cluster", "h100:1x3", "--out", "my.yaml"]) == 0
    captured = capsys.readouterr()
    assert load_config("my.yaml").sequence.length == 8160
    assert "no mesh of h100:1x3 suits the usual 8,192 tokens" in captured.out and captured.err == ""


def test_where_no_length_suits_the_devices_clusters_are_named(folder, tmp_path, capsys):
    """A ring of seven divides no window of gpt-oss."""
    (tmp_path / "oss").mkdir()
    (tmp_path / "oss" / "config.json").write_text(json.dumps(PUBLISHED["gpt-oss-20b"]))
    words = ["init", "hf:oss", "--cluster", "h100:1x7", "--out", "my.yaml"]
    assert main(words) == 2
    named = capsys.readouterr().err.strip().rpartition("; use --cluster ")[2].split(" or ")
    assert named == ["h100:1x6", "h100:1x8"]
    assert all(length_for(read_request(config_of("oss"), parse_cluster(name))) for name in named)


def config_of(folder):
    return config_from_dict({"model": {"hf": folder}, "sequence": {"length": 131072}, "train": {"steps": 1}})


@pytest.mark.parametrize(("name", "length"), [("v5e:2x2", 4096), ("v5p:2x2x2", 4096), ("gb200:1x3", 4080)])
def test_other_devices_have_a_usual_length_too(folder, name, length, capsys):
    assert suited(capsys, ["--cluster", name]) == length


def test_a_short_length_is_refused_with_one_that_suits(folder, capsys):
    assert suited(capsys, ["--cluster", "h100:1x7", "--length", "17"]) == 112


def test_a_folder_with_a_colon_in_its_name_is_a_folder(folder, tmp_path, capsys):
    (tmp_path / folder).rename(tmp_path / "my:model")
    assert main(["init", "hf:my:model", "--cluster", "h100:1x1", "--out", "my.yaml"]) == 0
    assert Path(load_config("my.yaml").model.hf).name == "my:model" and main(["plan", "my.yaml"]) == 0
