"""The peer's bench without the peer: settings that the page names, comparisons, and the stored figures."""

import ast
import json
import re

import numpy as np
import pytest
import yaml

from bench import peer_trl
from bench.blocks import read_block
from sppo_jax.config import config_from_dict

CASE = (peer_trl.LENGTH, peer_trl.PER_STEP, peer_trl.STEPS, peer_trl.WARMUP)
PAGE = peer_trl.PAGE.read_text()
# Settings of the script that change no loss.
SILENT = {"logging_steps", "save_strategy", "report_to", "output_dir"}
result = json.loads(peer_trl.RESULT.read_text())


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.S)


def test_the_page_has_the_script_that_was_run():
    (script,) = blocks("python")
    calls = [node for node in ast.walk(ast.parse(script)) if isinstance(node, ast.Call)]
    (call,) = [node for node in calls if getattr(node.func, "id", "") == "SFTConfig"]
    given = {word.arg: ast.literal_eval(word.value) for word in call.keywords if word.arg not in SILENT}
    run = {name: value for name, value in result["curve"]["trl"].items() if name not in SILENT}
    assert given == run == {k: v for k, v in peer_trl.trl_settings(*CASE).items() if k not in SILENT}


def test_the_page_has_the_config_that_was_run():
    (text,) = blocks("yaml")
    settings = yaml.safe_load(text)
    shape = {"vocab_size": 64, "hidden_size": 8, "num_layers": 1, "num_heads": 1, "mlp_size": 8}

    def config(each):
        return config_from_dict(each | {"model": {"compute_dtype": each["model"]["compute_dtype"]} | shape})

    ours = peer_trl.our_settings("FOLDER", "rows.jsonl", *CASE)
    assert (
        config(settings) == config(ours) == config(result["curve"]["sppo_jax"]) and settings["model"]["hf"] == "FOLDER"
    )
    for words in ("warmup: from_zero", "min_lr_ratio: 0,", "b2: 0.999", "weight_decay: 0}", "validation_fraction: 0"):
        assert words in text


def test_rows_are_written_in_the_order_in_which_a_run_reads_them(tmp_path):
    rows = [[10 * row + token for token in range(8)] for row in range(6)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
    shape = {"vocab_size": 64, "hidden_size": 8, "num_layers": 1, "num_heads": 1, "mlp_size": 8}
    settings = peer_trl.our_settings("", str(tmp_path / "rows.jsonl"), 8, 2, 3, 0) | {"model": shape}
    settings["data"]["cache"] = str(tmp_path / "cache")
    peer_trl.write_in_our_order(settings, tmp_path / "ordered.jsonl")
    found = [json.loads(line)["input_ids"] for line in (tmp_path / "ordered.jsonl").read_text().splitlines()]
    assert sorted(found) == rows and found != rows


def test_weights_are_compared_by_their_movement():
    start = {"a": np.zeros(4, np.float32), "b": np.zeros(6, np.float32)}
    theirs = {"a": np.full(4, 2.0, np.float32), "b": np.full(6, -1.0, np.float32)}
    ours = {"a": np.full(4, 2.5, np.float32), "b": np.full(6, -1.0, np.float32)}
    assert peer_trl.difference_over_movement(ours, theirs, start) == pytest.approx(4 * 0.5 / (4 * 2 + 6))
    assert peer_trl.difference_over_movement(theirs, theirs, start) == 0
    with pytest.raises(ValueError, match="same tensors, got others: .'b'"):
        peer_trl.difference_over_movement({"a": ours["a"]}, theirs, start)


def test_losses_are_compared_step_by_step():
    assert peer_trl.largest_difference([1.0, 2.0, 3.0], [1.0, 2.5, 2.9]) == 0.5
    with pytest.raises(ValueError):
        peer_trl.largest_difference([1.0], [1.0, 2.0])


def test_the_stored_curves_are_equal_and_the_stored_summary_is_theirs():
    curve = result["curve"]
    theirs, ours = curve["losses"]["trl"], curve["losses"]["sppo_jax"]
    assert len(theirs) == peer_trl.STEPS and theirs[-1] < theirs[0] - 0.5
    assert curve["largest difference of losses"] == peer_trl.largest_difference(ours, theirs)
    assert peer_trl.is_equal(curve) and curve["dtype"] == "torch.float32"
    assert curve["largest difference of learning rates"] < 1e-9
    assert curve["largest difference of losses with warmup=first_step"] > 0.01
    assert not peer_trl.is_equal(curve | {"largest difference of losses": 4e-5})
    assert not peer_trl.is_equal(curve | {"mean difference over mean movement of weights": 2e-3})


def test_the_page_has_the_stored_figures():
    assert read_block(peer_trl.PAGE, peer_trl.BLOCK) == peer_trl.table(result)
    assert [timed["length"] for timed in result["seconds"]] == [length for length, _ in peer_trl.TIMED]
    for timed in result["seconds"]:
        assert len(timed["rounds"]["trl"]) == len(timed["rounds"]["sppo_jax"]) >= 3
    assert {"trl", "transformers", "torch", "jax", "sppo_jax"} <= set(result["versions"])
