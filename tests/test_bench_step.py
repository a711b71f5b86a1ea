"""The benchmark script: its arguments and a tiny run."""

import json
import os

import jax
import pytest

from bench import step

TINY = {
    "vocab_size": 64,
    "hidden_size": 16,
    "num_layers": 4,
    "num_heads": 2,
    "num_kv_heads": 1,
    "mlp_size": 32,
    "compute_dtype": "float32",
}


def test_defaults_follow_the_mode():
    assert step.parse([]).lengths == (2048, 4096, 8192, 16384)
    args = step.parse(["--compile", "h200"])
    assert (args.model, args.chunk, args.lengths[-1]) == ("llama3.2-1b", 8192, 2**20)


def test_refuses_lengths_that_chunks_do_not_divide(capsys):
    with pytest.raises(SystemExit):
        step.parse(["--lengths", "1536", "--chunk", "1024"])
    assert "multiples of --chunk = 1024, got 1536" in capsys.readouterr().err


@pytest.mark.slow
def test_a_tiny_run_writes_json_and_a_table(tmp_path, monkeypatch):
    monkeypatch.setitem(step.MODELS, "small", TINY)
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"])  # the script adds to them
    assert jax.devices()  # flags that come after this change nothing
    assert step.main(["--lengths", "64", "--chunk", "16", "--rounds", "1", "--out", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "time_cpu_small_1dev.json").read_text())
    assert [row["layout"] for row in report["rows"]] == [
        f"1 device{order}, {places}" for order in ("", ", breadth-first v=2") for places in ("keep", "recompute")
    ]
    assert all(row["ratio"] > 0 and row["length"] == 64 for row in report["rows"])
    assert "| 64 | 4 | 1 device, keep |" in (tmp_path / "time_cpu_small_1dev.md").read_text()


def test_a_compiled_table_says_which_of_xlas_figures_it_has():
    for path in sorted(step.Path(step.__file__).with_name("results").glob("memory_*.json")):
        rows = json.loads(path.read_text())["rows"]
        table = step.compile_table(rows)
        assert table[0].startswith("HBM: arguments + outputs + temporaries - aliases, as XLA:GPU gives them")
        assert path.with_suffix(".md").read_text().endswith("\n\n" + "\n".join([*table, ""]))
