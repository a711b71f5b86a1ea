"""`sppo plan` writes a trace, and shows on a terminal, and nowhere else, that a search takes long."""

import json
import sys
import time

import pytest
import yaml
from hf_configs import SMALL

from sppo_jax.cli import main
from sppo_jax.commands import plan
from sppo_jax.predict.holders import MOMENTS

SETTINGS = {
    "model": {"vocab_size": 256, "hidden_size": 64, "num_layers": 4, "num_heads": 4, "mlp_size": 256},
    "mesh": {"pipe": 2},
    "sequence": {"length": 4096, "chunks": 4},
    "train": {"steps": 1},
    "hardware": {"cluster": "h100:1x2"},
}


@pytest.fixture
def config(tmp_path, monkeypatch):
    """A config in an empty working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(SETTINGS))
    return "small.yaml"


def shown(monkeypatch, capsys, *, is_terminal, search_s):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    monkeypatch.setattr(plan, "_MOMENT_S", 0.1)
    with plan._seconds_shown():
        time.sleep(search_s)
    captured = capsys.readouterr()
    assert not captured.out
    return captured.err


def test_a_long_search_shows_its_seconds_on_a_terminal(monkeypatch, capsys):
    assert shown(monkeypatch, capsys, is_terminal=True, search_s=0.5) == "\rsearching for a plan: 0 s\r\033[K"


@pytest.mark.parametrize(("is_terminal", "search_s"), [(False, 0.3), (True, 0.0)])
def test_nothing_is_shown_elsewhere_nor_for_a_moment(monkeypatch, capsys, is_terminal, search_s):
    assert shown(monkeypatch, capsys, is_terminal=is_terminal, search_s=search_s) == ""


def test_the_line_ends_where_a_search_fails(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(plan, "_MOMENT_S", 0.05)
    with pytest.raises(ValueError), plan._seconds_shown():
        time.sleep(0.3)
        raise ValueError
    assert capsys.readouterr().err.endswith("\r\033[K")


@pytest.mark.parametrize(("overrides", "code"), [((), 0), (("hardware.hbm_bytes=65536", "schedule.interleave=1"), 3)])
def test_a_trace_is_written_beside_the_text(config, tmp_path, capsys, overrides, code):
    assert main(["plan", config, *overrides, "--verbose", "--trace", "trace.json"]) == code
    assert "F0.0" in capsys.readouterr().out
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert sum(event.get("cat") == "forward" for event in events) == 2 * 4


@pytest.mark.parametrize(("file", "reason"), [(".", "it is a directory"), ("none/t.json", "there is no directory")])
def test_a_trace_that_cannot_be_written_is_one_line(config, tmp_path, capsys, monkeypatch, file, reason):
    monkeypatch.setattr(plan, "search", lambda _: pytest.fail("the file is checked first"))
    assert main(["plan", config, "--trace", file]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("--trace must name a file that can be written, got ") and reason in captured.err
    assert captured.err.count("\n") == 1 and captured.out == ""
    assert [path.name for path in tmp_path.iterdir()] == ["small.yaml"]


@pytest.fixture
def folder(tmp_path):
    """A Hugging Face folder with nothing but a config.json."""
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "config.json").write_text(json.dumps(SMALL))
    return tmp_path / "llama"


def test_the_answer_leads_and_details_are_on_request(config, capsys):
    assert main(["plan", config, "train.steps=1000"]) == 0
    brief = capsys.readouterr().out
    labels = [line.split()[0] for line in brief.split("\n\n")[0].splitlines()[1:]]
    assert labels == ["verdict", "step", "speed", "run", "memory"] and "for 1,000 steps" in brief
    assert "host share" not in brief and "Timeline" not in brief and len(brief.splitlines()) < 45
    assert main(["plan", config, "train.steps=1000", "--verbose"]) == 0
    details = capsys.readouterr().out
    assert brief.split("\n\n")[0] == details.split("\n\n")[0]
    for title in ("Considered", "Where the", "Memory of a device", "Stages:", "Timeline to scale"):
        assert title in details and title not in brief


def test_holders_of_memory_are_shown_by_moments(config, capsys):
    assert main(["plan", config, "--memory"]) == 0
    text = capsys.readouterr().out.split("\n\n")[-1]
    rows = {line[:20].strip(): line.split() for line in text.splitlines()}
    header, total = text.splitlines()[1].split(), rows["total"][1:]
    assert header == list(MOMENTS) and len(total) == len(header)
    peak = text.splitlines()[0].rpartition(" ")[2]
    assert float(total[header.index(peak)]) == max(map(float, total))
    assert main(["plan", config, "--json"]) == 0
    memory = json.loads(capsys.readouterr().out)["memory"]
    assert memory["moments"][peak] == memory["hbm"]


def test_what_does_not_fit_has_no_step(config, capsys):
    assert main(["plan", config, "hardware.hbm_bytes=65536", "schedule.interleave=1"]) == 3
    captured = capsys.readouterr()
    assert captured.out.splitlines()[1].split()[:4] == ["verdict", "DOES", "NOT", "FIT;"]
    assert "tokens/s" not in captured.out and captured.err.startswith("no plan fits: ")


def test_a_folder_is_planned_from_its_config_alone(folder, capsys):
    assert main(["plan", f"hf:{folder}", "--length", "16K", "--cluster", "h100:1x2"]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("llama, 16,384 tokens per step, on h100:1x2 (2 devices)")
    assert "sequence.length should be at most 8192" in captured.err
    assert main(["plan", f"hf:{folder}", "--cluster", "h100:1x2"]) == 0
    captured = capsys.readouterr()
    assert "8,192 tokens per step" in captured.out and captured.err == ""  # the length that the model knows


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["hf:none"], "a Hugging Face model must be a local folder with config.json, got none "),
        (["llama"], "a config must be a YAML file, got the folder llama; write hf:llama to plan for the model in it"),
        (["hf:llama", "--length", "0"], "sppo plan: argument --length: a whole number from 1 must be given"),
        (["hf:llama", "--cluster", "h10:1x8"], "name one of the devices h100, h20, a10"),
        (["hf:llama", "--cluster", "a100:1x8"], "name one of the devices a100-40g, a100-80g, "),
        (["."], "write hf:. to plan for the model in it"),
        (["hf:.", "--length", "512"], "must be a local folder with config.json, got ."),
        (["small.yaml", "--cluster", "H100:1x8"], "name one of the devices h100,"),
    ],
)
def test_wrong_words_are_one_line(config, folder, words, line, capsys):
    assert main(["plan", *words]) == 2
    captured = capsys.readouterr()
    assert line in captured.err and captured.err.count("\n") == 1 and captured.out == ""


@pytest.mark.parametrize(
    ("overrides", "told"),
    [((), True), (("train.devices=cpu:2",), False), (("hardware.cluster=cpu:1x2",), False)],
)
def test_a_plan_for_the_cpu_says_so(tmp_path, monkeypatch, capsys, overrides, told):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("XLA_FLAGS", "")
    settings = {key: value for key, value in SETTINGS.items() if key not in ("hardware", "mesh")}
    (tmp_path / "any.yaml").write_text(yaml.safe_dump(settings))
    assert main(["plan", str(tmp_path / "any.yaml"), *overrides]) == 0
    note = "no GPU or TPU was found, so this plan is for this CPU (cpu:1x1); add --cluster h100:1x8"
    assert (note in capsys.readouterr().err) == told


FREE = ["mesh.pipe=auto", "--cluster", "h100:1x3", "hardware.hbm_bytes=1073741824"]


def test_a_size_that_is_asked_for_is_not_checked_first(config, tmp_path, capsys):
    """The config's own length, 4096, has no mesh of three devices."""
    assert main(["plan", config, *FREE]) == 2
    assert "must divide sequence.length=4096" in capsys.readouterr().err
    assert main(["plan", config, *FREE, "--max-length"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("Longest sequence on h100:1x3: ") and "tokens" in text
    assert main(["plan", config, *FREE, "--max-length", "--json", "--html", "plan.html", "--memory"]) == 0
    told = json.loads(capsys.readouterr().out)
    # What else is shown is of the answer.
    assert f"{told['max_length']['value']:,} tokens" in text
    assert sum(told["chunk_lengths"]) == told["max_length"]["value"] and (tmp_path / "plan.html").exists()
    assert main(["plan", config, *FREE, "--min-devices", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["min_devices"]["value"] == 1 and sum(told["chunk_lengths"]) == 4096


def test_what_has_no_plan_of_any_size_is_one_line(config, capsys):
    words = ["plan", config, "mesh.pipe=3", "--cluster", "h100:1x3"]
    for asked in (["--max-length"], ["--min-devices"], ["--max-length", "--min-devices", "--json"]):
        assert main([*words, *asked]) == 2
        captured = capsys.readouterr()
        assert "; use mesh.pipe=" in captured.err and captured.err.count("\n") == 1 and captured.out == ""


def test_a_slice_that_does_not_exist_is_one_line(config, capsys):
    assert main(["plan", config, "--cluster", "v5e:3x3"]) == 2
    captured = capsys.readouterr()
    assert captured.err == "a TPU slice must have a shape that exists, got v5e:3x3, 9 chips; name v5e:2x4 or v5e:4x4\n"
    assert captured.out == ""


def test_a_plan_of_an_evaluation_says_seconds_and_memory(config, capsys):
    words = ["plan", config, "--eval", "--cluster", "h100:1x4", "mesh.seq=2"]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert text.startswith("109k-parameter") or "evaluation of rows of 4,096 tokens, on h100:1x4 (4 devices)" in text
    assert "verdict         fits" in text and "x seq 2" in text and "rows take" in text
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] and found["plan"]["mesh"]["seq"] == 2
    assert found["hbm_bytes"] == sum(found["memory"].values()) < found["usable_bytes"]
    assert found["evaluation_s"] == found["batch_s"] * -(-found["rows"] // found["rows_per_batch"])


def test_an_evaluation_that_does_not_fit_ends_with_3(config, capsys):
    assert main(["plan", config, "--eval", "hardware.hbm_bytes=1e6"]) == 3
    assert "the smallest evaluation must fit in" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("schedule.interleave=2",), "remove schedule.interleave"),
        (("sequence.chunks=2",), "remove sequence.chunks"),
        (("--max-length",), "remove --max-length or --eval"),
        (("--trace", "t.json"), "remove --trace or --eval"),
    ],
)
def test_what_only_a_step_has_is_refused_beside_eval(config, capsys, words, told):
    assert main(["plan", config, "--eval", *words]) == 2
    assert told in capsys.readouterr().err
