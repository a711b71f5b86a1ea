"""The command line: exit codes, one-line errors, nothing half-written, jax only where it is needed."""

import json
import os
import re
import signal
import subprocess
import sys

import numpy as np
import pytest
import yaml
from quick_flags import QUICK_XLA_FLAGS

from sppo_jax.cli import main
from sppo_jax.plan.json_format import REPORT_KEYS
from sppo_jax.plan.plan import Plan

SETTINGS = {
    "model": {"vocab_size": 24, "hidden_size": 16, "num_layers": 4, "num_heads": 2, "mlp_size": 32},
    "data": {"source": "tokens.npy", "validation_fraction": 0.2},
    "mesh": {"pipe": 2},
    "sequence": {"length": 64, "chunks": 4},
    "train": {"steps": 2, "devices": "cpu:2"},
}


@pytest.fixture
def config(tmp_path, monkeypatch):
    """A config beside its data, in an empty working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAX_PLATFORMS", os.environ["JAX_PLATFORMS"])
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"])
    np.save("tokens.npy", (np.arange(1000) % 23).astype(np.uint16))
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(SETTINGS))
    return "tiny.yaml"


def test_plan_prints_text_or_json(config, capsys):
    assert main(["plan", config, "--verbose"]) == 0
    text = capsys.readouterr().out
    assert "F0.0" in text and "mesh" in text
    assert main(["plan", config, "--json", "sequence.chunks=8"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["chunk_lengths"] == [8] * 8 and plan["mesh"] == {"data": 1, "pipe": 2, "seq": 1}
    assert {"sequence_kind", "schedule", "stash", "predicted", "reasons"} <= set(plan)
    assert (
        plan["fits"] and len(plan["stages"]) == 2 and {"considered", "seconds", "fastest_step_s"} == set(plan["search"])
    )
    assert all({"why", "step_s", "mesh", "chunks", "schedule", "stash"} == set(item) for item in plan["rejected"])


def test_a_printed_plan_can_be_read_back(config, capsys):
    """Keys of the report are left aside, others still refused."""
    main(["plan", config, "--json", "--max-length"])
    text = capsys.readouterr().out
    values = json.loads(text)
    plan = Plan.from_json(text)
    assert plan.to_dict() == {key: value for key, value in values.items() if key not in REPORT_KEYS}
    with pytest.raises(ValueError, match="got fit too; plan again$"):
        Plan.from_dict(values | {"fit": True})


def test_plan_for_another_cluster(config, capsys):
    assert main(["plan", config, "--cluster", "h100:1x2", "train.devices=auto", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["stages"][0]["hbm_bytes"] < 79 * 2**30


def test_plan_writes_a_page(config, tmp_path, capsys):
    assert main(["plan", config, "--html", "plan.html"]) == 0
    page = (tmp_path / "plan.html").read_text()
    assert page.startswith("<!DOCTYPE html>") and "<svg" in page and "verdict" in capsys.readouterr().out


def test_plan_finds_the_longest_sequence_and_the_smallest_cluster(config, capsys):
    words = ["plan", config, "--cluster", "h100:1x2", "train.devices=auto", "sequence.chunks=auto", "mesh.pipe=auto"]
    small = ["hardware.hbm_bytes=67108864", "stash.inputs=keep", "stash.attention=keep"]
    assert main([*words, *small, "--max-length", "--min-devices"]) == 0
    text = capsys.readouterr().out
    assert "Longest sequence on h100:1x2: " in text and "Smallest cluster for 64 tokens: 1 device, h100:1x1" in text
    assert main([*words, *small, "--max-length", "--min-devices", "--json"]) == 0
    answers = json.loads(capsys.readouterr().out)
    assert f"{answers['max_length']['value']:,} tokens" in text and answers["min_devices"]["value"] == 1


def test_what_does_not_fit_is_exit_code_3(config, capsys):
    """The least bad plan is printed all the same, and one line says what stops it."""
    # The smallest plan of all is breadth-first, with one chunk.
    words = ["plan", config, "hardware.hbm_bytes=65536", "schedule.name=sppo"]
    assert main(words) == 3
    captured = capsys.readouterr()
    assert "DOES NOT FIT" in captured.out and "chunks" in captured.out
    assert captured.err.count("\n") == 1 and "HBM" in captured.err
    assert main([*words, "--json"]) == 3
    captured = capsys.readouterr()
    values = json.loads(captured.out)
    assert not values["fits"] and values["problem"] == captured.err.strip()
    assert main([*words, "--max-length"]) == 3
    assert "No sequence fits" in capsys.readouterr().out


def test_a_pin_that_stops_every_plan_is_named(tmp_path, capsys):
    """The exit code is that of any plan that does not fit; the line names the bytes and the setting."""
    model = {"vocab_size": 256, "hidden_size": 64, "num_layers": 4, "num_heads": 4, "mlp_size": 256}
    path = tmp_path / "pinned.yaml"
    settings = {"model": model, "sequence": {"length": 16384}, "train": {"steps": 1}}
    path.write_text(yaml.safe_dump(settings))
    words = ["plan", str(path), "hardware.hbm_bytes=80000000", "hardware.cluster=cpu:1x1"]
    assert main([*words, "--json"]) == 0
    capsys.readouterr()
    assert main([*words, "sequence.chunks=1"]) == 3
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "over HBM by" in error and "change sequence.chunks=1: a plan of " in error


def test_a_plan_changed_by_hand_is_exit_code_2(config, tmp_path, capsys):
    main(["plan", config, "--json"])
    values = json.loads(capsys.readouterr().out)
    for changes, words in (
        (
            {"model": {**values["model"], "num_layers": 8}},
            "--plan plan.json: the plan must agree with model.num_layers",
        ),
        ({"kv_slots": 7}, "--plan plan.json: kv_slots of a plan must be 1 for the schedule, got 7"),
        ({"chunk_lengths": [32]}, "--plan plan.json: sequence.chunks must add up to sequence.length=64"),
    ):
        (tmp_path / "plan.json").write_text(json.dumps({**values, **changes}))
        assert main(["train", config, "--plan", "plan.json"]) == 2
        error = capsys.readouterr().err
        assert error.startswith(words) and error.count("\n") == 1


def test_plan_imports_no_jax(config):
    words = ["plan", config, "--html", "plan.html", "--max-length", "--json"]
    code = f"import sys; from sppo_jax.cli import main; sys.exit(main({words}) or 'jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode == 0


def test_a_reader_may_stop_reading(config):
    code = "import sys; from sppo_jax.cli import main; [main(sys.argv[1:]) for _ in range(20)]"
    command = f"{sys.executable} -c '{code}' plan {config} | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert done.stdout.count("\n") == 1 and "Traceback" not in done.stderr


def test_output_that_cannot_be_written_is_a_line_or_a_quiet_end(config):
    command = [sys.executable, "-m", "sppo_jax.cli", "plan", config]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2
    assert done.stderr == "standard output must be writable, got: No space left on device; send the output elsewhere\n"
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([*command, "--help"], stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


def test_a_run_goes_on_without_its_output(config, tmp_path, monkeypatch, capfd):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        monkeypatch.setattr(sys, "stderr", os.fdopen(os.dup(2), "w"))
        small = ["model.num_layers=1", "mesh.data=2", "mesh.pipe=1", "sequence.chunks=1"]
        assert main(["train", config, "--run-dir", "run", "data.validation_fraction=0", *small]) == 0
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert [event["kind"] for event in events].count("warning") == 1
    told = "standard output is lost (No space left on device): its lines are dropped, the run continues\n"
    assert capfd.readouterr().err == told
    assert (tmp_path / "run" / "finished").exists()


@pytest.mark.parametrize(
    "command, number",
    [("train", signal.SIGHUP), ("plan", signal.SIGINT), ("data", signal.SIGTERM), ("fit", signal.SIGINT)],
)
def test_a_signal_before_there_is_anything_to_save_is_one_line(tmp_path, command, number):
    """The config is a pipe that nobody writes to, so the command waits for it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # tests in the background ignore it
    os.mkfifo(tmp_path / "config.yaml")
    process = subprocess.Popen(
        [sys.executable, "-m", "sppo_jax.cli", command, "config.yaml"], cwd=tmp_path, stderr=subprocess.PIPE, text=True
    )
    signal.signal(signal.SIGINT, before)
    with (tmp_path / "config.yaml").open("w"):  # opens when the command reads
        process.send_signal(number)
        _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (130, f"stopped by {number.name}\n")
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


WRONG = {
    "no command": ([], "sppo: the following arguments are required: COMMAND; see sppo --help"),
    "unknown command": (["trian"], "sppo: a command must be one of plan, init, configs"),
    "no config": (["train"], "sppo train: the following arguments are required: CONFIG.yaml"),
    "unknown option": (["plan", "tiny.yaml", "--jsn"], "sppo plan: unrecognized arguments: --jsn"),
    "no such file": (
        ["train", "none.yaml"],
        "a config must be a YAML file or the name of a shipped one, got none.yaml",
    ),
    "unknown key": (
        ["train", "tiny.yaml", "train.step=3"],
        "train.step is not a setting; the nearest setting is train.steps",
    ),
    "wrong value": (["plan", "tiny.yaml", "mesh.seq=two"], "mesh.seq must be auto, or a whole number, got 'two'"),
    "unknown cluster": (["plan", "tiny.yaml", "--cluster", "a100:1x8"], "a cluster must read NAME:HOSTSxDEVICES"),
    "no devices": (["plan", "tiny.yaml", "--cluster", "a100-80g:0x8"], "a cluster must read NAME:HOSTSxDEVICES"),
    "no page": (["plan", "tiny.yaml", "--html", "none/plan.html"], "--html must name a file that can be written"),
    "page is a directory": (["plan", "tiny.yaml", "--html", "."], "--html must name a file that can be written"),
    "pinned chunks and longest": (
        ["plan", "tiny.yaml", "--max-length", "sequence.chunks=[32, 32]"],
        "sequence.chunks must be auto or one number for --max-length",
    ),
    "pinned mesh and fewest": (
        ["plan", "tiny.yaml", "--min-devices", "mesh.data=1", "mesh.seq=1"],
        "one axis of the mesh must be auto for --min-devices",
    ),
    "contradictory pins": (
        ["plan", "tiny.yaml", "stash.inputs=recompute", "stash.attention=keep"],
        "stash.attention and stash.rest must be recompute where stash.inputs=recompute",
    ),
    "indivisible layers": (["plan", "tiny.yaml", "model.num_layers=5"], ""),
    "too few devices": (
        ["train", "tiny.yaml", "train.devices=auto", "mesh.data=64"],
        "mesh.data * mesh.pipe * mesh.seq = 64",
    ),
    "no data": (["train", "tiny.yaml", "data.source=none.txt"], "data.source must be readable, got none.txt"),
    "small vocabulary": (["train", "tiny.yaml", "model.vocab_size=9"], "data.source must hold tokens in 0..8"),
    "no plan": (["train", "tiny.yaml", "--plan", "none.json"], "--plan must be a readable plan.json, got none.json"),
    "no JSON": (["train", "tiny.yaml", "--plan", "tiny.yaml"], "--plan tiny.yaml: plan.json must hold JSON text"),
    "run directory is a file": (["train", "tiny.yaml", "--run-dir", "tiny.yaml"], "the run directory must be a"),
}
# A run begins with the text of its plan, before its data, devices and directory are looked at.
PLANNED_FIRST = {
    WRONG[name][1] for name in ("too few devices", "no data", "small vocabulary", "run directory is a file")
}


@pytest.mark.parametrize(("words", "message"), WRONG.values(), ids=WRONG)
def test_wrong_input_is_one_line_and_writes_nothing(config, tmp_path, capsys, words, message):
    before = sorted(tmp_path.rglob("*"))
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(message) and captured.err.count("\n") == 1
    assert captured.out.startswith("4 layers, 16 wide") if message in PLANNED_FIRST else captured.out == ""
    assert sorted(tmp_path.rglob("*")) == before


def test_a_run_that_is_there_is_refused(config, tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").touch()
    assert main(["train", config, "--run-dir", "run"]) == 2
    assert "must hold no other run" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["metrics.jsonl"]


def test_a_fault_of_ours_is_no_wrong_input(config, monkeypatch):
    """A ValueError from within training keeps its traceback."""

    def broken(experiment, run_dir, start):
        raise ValueError("shapes do not match")

    monkeypatch.setattr("sppo_jax.train.loop.train", broken)
    with pytest.raises(RuntimeError, match="passed all checks"):
        main(["train", config, "--run-dir", "run"])


def test_a_plan_of_another_shape_is_refused(config, tmp_path, capsys):
    main(["plan", config, "--json"])
    (tmp_path / "plan.json").write_text(capsys.readouterr().out)
    assert main(["train", config, "--plan", "plan.json", "sequence.length=128"]) == 2
    assert "--plan plan.json: the plan must agree with sequence.length = 128, got 64" in capsys.readouterr().err


HAND_EDITED = {
    "a word for a number": (
        lambda plan: plan["mesh"].update(pipe="two"),
        "plan.json must hold values of the right types",
    ),
    "a number for a list": (
        lambda plan: plan.update(chunk_lengths=64),
        "plan.json must hold values of the right types",
    ),
    "a model of another size": (
        lambda plan: plan["model"].update(num_layers=8),
        "agree with model.num_layers = 4, got 8",
    ),
    "chunks that do not add up": (
        lambda plan: plan["chunk_lengths"].pop(),
        "sequence.chunks must add up to sequence.length=64",
    ),
    "too few slots": (lambda plan: plan.update(kv_slots=0), "kv_slots of a plan must be 1 for the schedule"),
    "another order": (lambda plan: plan["schedule"].update(name="fast"), "fast"),
}


@pytest.mark.parametrize(("edit", "message"), HAND_EDITED.values(), ids=HAND_EDITED)
def test_a_plan_edited_by_hand_is_checked(config, tmp_path, capsys, edit, message):
    main(["plan", config, "--json"])
    plan = json.loads(capsys.readouterr().out)
    edit(plan)
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    assert main(["train", config, "--plan", "plan.json", "--run-dir", "run"]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and not (tmp_path / "run").exists()


def test_train_follows_a_given_plan_on_devices_of_its_own(config, tmp_path, capsys):
    """In a process without the test's devices, as a user would start it, but compiled soon."""
    main(["plan", config, "--json", "sequence.chunks=2"])
    (tmp_path / "plan.json").write_text(capsys.readouterr().out)
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("JAX_", "XLA_"))}
    environment["XLA_FLAGS"] = QUICK_XLA_FLAGS
    words = ["train", config, "--run-dir", "run", "train.log_every=1", "--plan", "plan.json"]
    done = subprocess.run(
        [sys.executable, "-m", "sppo_jax.cli", *words], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "step 2/2" in done.stdout and "validation loss" in done.stdout
    # What `sppo plan` says comes first, and each step has what fine-tuning asks for first.
    assert done.stdout.startswith("4 layers, 16 wide, 64 tokens per step, on cpu:1x2 (2 devices)\n  verdict")
    assert "Plan, and why" in done.stdout and re.search(r"step 2/2  loss \S+  accuracy \S+%  norm ", done.stdout)
    plan = Plan.from_json((tmp_path / "run" / "plan.json").read_text())
    assert plan.chunk_lengths == (32, 32)
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2
