"""`sppo data` shows what is learned of conversations: counts, lengths, one conversation with marks, tokens a second."""

import json

import numpy as np
import pytest

from sppo_jax.cli import main
from sppo_jax.config import config_from_dict
from sppo_jax.data.open import open_data
from sppo_jax.data.summary.summary import summarize
from sppo_jax.report.data.chats import learned_text
from sppo_jax.report.data.trained_line import trained_line, trained_share
from sppo_jax.search.make import make_plan

pytest.importorskip("jinja2")
from chat_cases import PLAIN
from hf_folders import write_folder

ROWS = [
    [{"role": "user", "content": "cat\x1b"}, {"role": "assistant", "content": "tree"}],
    [{"role": "user", "content": "dog"}, {"role": "assistant", "content": "x" * 500}],
]


@pytest.fixture
def settings(tmp_path):
    (tmp_path / "t.jinja").write_text(PLAIN)
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in ROWS * 3))
    (tmp_path / "words.txt").write_text("some words " * 100)
    return {
        "model": {"vocab_size": 257, "hidden_size": 8, "num_layers": 2, "num_heads": 2, "mlp_size": 8},
        "data": {
            "source": {str(path): 3, str(tmp_path / "words.txt"): 1},
            "chat": {"template": str(tmp_path / "t.jinja"), "too_long": "cut"},
            "validation_fraction": 0,
            "cache": str(tmp_path / "cache"),
        },
        "sequence": {"length": 128, "per_step": 2},
        "train": {"steps": 1, "devices": "cpu:1"},
    }


def test_shares_are_those_of_the_sequences(settings):
    config = config_from_dict(settings)
    data = open_data(config)
    summary = summarize(config, data)
    places = [[source.training[row]["targets"] >= 0 for row in range(len(source.training))] for source in data.sources]
    # Text has a target less a document than tokens.
    wanted = 0.75 * np.mean(places[0]) + 0.25 * (np.mean(places[1]) + 1 / places[1][0].size / len(places[1]))
    assert trained_share(summary) == pytest.approx(wanted)
    step_s = make_plan(config).predicted.step_s
    line = trained_line(config, summary)
    assert line.startswith(f"trained tokens per second: {wanted * 256 / step_s:,.0f} of {256 / step_s:,.0f} places")
    sizes = sorted(np.concatenate([one.training.corpus.ends - one.training.corpus.starts for one in data.sources]))
    assert summary.percentiles[1] == (50, sizes[3]) and summary.percentiles[-1] == (100, sizes[-1])


def test_rows_of_tokens_are_rows_and_words_where_the_model_has_a_tokenizer(tmp_path, settings):
    write_folder(tmp_path / "hf")
    rows = [{"input_ids": [40, 41, 42, 43], "labels": [-100, -100, 42, 43]}] * 8
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = settings | {"data": {"source": str(tmp_path / "rows.jsonl"), "cache": str(tmp_path / "cache")}}
    config = config_from_dict(given | {"model": {"hf": str(tmp_path / "hf")}})
    counts, shown = learned_text(summarize(config, open_data(config)), colour=False)
    assert "rows read" in counts and "conversation" not in counts
    assert shown.startswith("A row of ") and shown.splitlines()[1] == "  H I[[J K]]"
    (tmp_path / "hf" / "tokenizer.json").unlink()
    assert learned_text(summarize(config, open_data(config)), colour=False)[1].splitlines()[1] == "  40 41[[42 43]]"


@pytest.mark.parametrize("colour", [True, False])
def test_a_conversation_is_shown_with_its_marks(settings, colour):
    settings["data"]["source"] = min(settings["data"]["source"])
    config = config_from_dict(settings)
    counts, shown = learned_text(summarize(config, open_data(config)), colour=colour)
    assert "6 conversations read; 3 longer than a sequence, 0 cut, 0 left out" in counts
    assert "as these say: the template's {% generation %} regions" in counts
    begin, end = ("\x1b[32m", "\x1b[0m") if colour else ("[[", "]]")
    assert f"is {'green' if colour else 'in [[ ]]'}\n  <|im_start|>user\n" in shown
    lines = shown.splitlines()
    at = lines.index("  <|im_start|>assistant")
    if "cat" in shown:
        assert lines[at + 1 :] == [f"  {begin}tree<|im_end|>", f"  {end}"] and "cat\\x1b" in shown
    else:
        left = 500 + len("<|im_end|>\n") - 240 - 120
        text = f"{begin}{'x' * 240} ... {left:,} characters ... {'x' * (120 - 11)}<|im_end|>"
        assert lines[at + 1 :] == [f"  {text}", f"  {end}"]


def test_the_command_prints_and_text_alone_says_nothing_of_it(settings, tmp_path, capsys):
    path = tmp_path / "c.yaml"
    path.write_text(json.dumps(settings))
    assert main(["data", str(path)]) == 0
    out = capsys.readouterr().out
    assert "What is learned\n" in out and "what is trained is in [[ ]]" in out and "trained tokens per second: " in out
    assert main(["data", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["sources"][0]["learned"]["read"] == 6 and found["conversation"]["tokens"] > 9
    assert main(["data", str(path), f"data.source={tmp_path}/words.txt", "data.chat={}"]) == 0
    out = capsys.readouterr().out
    assert "What is learned" not in out and "trained tokens" not in out


def test_no_devices_no_seconds(settings):
    settings["train"] = {"steps": 1}
    config = config_from_dict(settings)
    assert "not predicted, neither hardware.cluster" in trained_line(config, summarize(config, open_data(config)))
