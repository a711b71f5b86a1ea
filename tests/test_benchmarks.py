"""The benchmark script: its arguments, a tiny run, and its reading of compiled schedules."""

import json
import os
import sys
from pathlib import Path

import jax
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import gpu_target  # noqa: E402
import host_copies  # noqa: E402
import step  # noqa: E402

TINY = {
    "vocab_size": 64,
    "hidden_size": 16,
    "num_layers": 4,
    "num_heads": 2,
    "num_kv_heads": 1,
    "mlp_size": 32,
    "compute_dtype": "float32",
}

# A write behind a loop with a product, a fetch behind nothing, and a copy without start and done, in a loop of 3 turns.
HLO = """
%tick (p: f32[4,8]) -> f32[4,8] {
  %write-start = ((f32[4,8]{1,0:S(5)}, f32[1,8]{1,0}), f32[4,8]{1,0:S(5)}, u32[]) fusion-start(%a, %b), calls=%w
  %layers = (s32[]) while(%t), condition=%c, body=%layer, backend_config={"known_trip_count":{"n":"2"}}
  %write-done = f32[4,8]{1,0:S(5)} fusion-done(%write-start)
  %read-start = ((f32[4,8]{1,0:S(5)}, s32[]), f32[2,8]{1,0}, u32[]) fusion-start(%a, %i), calls=%r
  %read-done = f32[2,8]{1,0} fusion-done(%read-start)
  ROOT %copy.1 = bf16[4,8]{1,0} copy(%h), metadata={op_name="S(5)"}
}

%layer (p: f32[4,8]) -> f32[4,8] {
  ROOT %gemm_fusion_dot.1 = f32[4,8]{1,0} fusion(%p), kind=kCustom, calls=%d
}

ENTRY %main (p: f32[4,8]) -> f32[4,8] {
  %ticks = (s32[], f32[4]{0:S(5)}) while(%t), condition=%c, body=%tick, backend_config={"known_trip_count":{"n":"3"}}
}
"""


def test_defaults_follow_the_mode():
    assert step.parse([]).lengths == (2048, 4096, 8192, 16384)
    args = step.parse(["--compile", "h200"])
    assert (args.model, args.chunk, args.lengths[-1]) == ("llama3.2-1b", 8192, 2**20)


def test_refuses_lengths_that_chunks_do_not_divide(capsys):
    with pytest.raises(SystemExit):
        step.parse(["--lengths", "1536", "--chunk", "1024"])
    assert "multiples of --chunk = 1024, got 1536" in capsys.readouterr().err


def test_counts_host_copies_by_what_hides_them():
    copies = host_copies.host_copies(HLO)
    assert copies.overlapped_bytes == 3 * 8 * 4
    assert copies.exposed_bytes == 3 * (2 * 8 * 4 + 4 * 8 * 2)
    assert copies.loops_unknown == 0


@pytest.mark.parametrize("name", gpu_target.TARGETS)
def test_target_text_is_complete(name):
    text = gpu_target.TARGETS[name].text()
    assert text.count("{") == text.count("}") == 2
    assert ("ACCELERATED_FEATURES" in text) == (gpu_target.TARGETS[name].capability[0] >= 9)


def test_a_tiny_run_writes_json_and_a_table(tmp_path, monkeypatch):
    monkeypatch.setitem(step.MODELS, "small", TINY)
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"])  # the script adds to them
    assert jax.devices()  # flags that come after this change nothing
    assert step.main(["--lengths", "64", "--chunk", "16", "--rounds", "1", "--out", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "time_cpu_small_1dev.json").read_text())
    assert [row["layout"] for row in report["rows"]] == ["1 device, keep", "1 device, recompute"]
    assert all(row["ratio"] > 0 and row["length"] == 64 for row in report["rows"])
    assert "| 64 | 4 | 1 device, keep |" in (tmp_path / "time_cpu_small_1dev.md").read_text()
