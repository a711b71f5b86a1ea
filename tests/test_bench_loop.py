"""The training loop and its bare step take turns: a tiny run, as a process of its own."""

import json
import subprocess
import sys

import pytest
import yaml
from distributed_cases import REPO, environment
from tiny_runs import write_documents

SETTINGS = {
    "model": {"vocab_size": 24, "hidden_size": 16, "num_layers": 4, "num_heads": 2, "mlp_size": 32},
    "data": {"separator": 0, "validation_fraction": 0.2},
    "mesh": {"data": 2, "pipe": 2},
    "sequence": {"length": 64, "chunks": 4},
    "train": {"devices": "cpu:4"},
}
# Runs the benchmark and prints how often a step's collectives were put in order.
CODE = """
import sys
from unittest import mock
from bench import loop
from sppo_jax.pipeline import api
with mock.patch.object(api, "in_order", wraps=api.in_order) as in_order:
    status = loop.main(sys.argv[1:])
print(in_order.call_count)
sys.exit(status)
"""


@pytest.mark.slow
def test_two_sides_take_turns_and_are_written_down(tmp_path):
    settings = SETTINGS | {"data": SETTINGS["data"] | {"source": write_documents(tmp_path / "tokens.npy")}}
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(settings))
    words = ["--config", tmp_path / "tiny.yaml", "--rounds", "1", "--steps", "5", "--out", tmp_path / "out.json"]
    command = [sys.executable, "-c", CODE, *map(str, words)]
    done = subprocess.run(command, env=environment(), cwd=REPO, capture_output=True, text=True, timeout=300)
    result = json.loads((tmp_path / "out.json").read_text())
    (turn,) = result["rounds"]
    assert sorted(turn) == ["bare_s", "loop_s"] and result["ratio"] == turn["bare_s"] / turn["loop_s"] > 0
    assert done.stdout.splitlines()[-1] == "2", done.stdout + done.stderr
    assert done.returncode in (0, 1)  # a loop of so small steps may cost what it likes
