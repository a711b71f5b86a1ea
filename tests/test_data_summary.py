"""`sppo data` counts what the sequences really hold, and prints it in lines that fit."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from sppo_jax.cli import main
from sppo_jax.config import config_from_dict
from sppo_jax.data.open import open_data
from sppo_jax.data.summary.summary import summarize
from sppo_jax.report.data.text import data_text


@pytest.fixture
def settings(tmp_path):
    """Two sources of different sizes, one with a long document and with characters that cannot be printed."""
    texts = {
        "a": ["short \x1b[0m\n\t\\ caf\u00e9 " * (1 + number % 5) for number in range(30)],
        "b": ["long " * 60] * 3,
    }
    for name, documents in texts.items():
        lines = [json.dumps({"text": text}) for text in documents]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    return {
        "model": {"vocab_size": 257, "hidden_size": 8, "num_layers": 2, "num_heads": 2, "mlp_size": 8},
        "data": {
            "source": {str(tmp_path / "a.jsonl"): 3, str(tmp_path / "b.jsonl"): 1},
            "validation_fraction": 0.1,
        },
        "sequence": {"length": 128, "per_step": 4},
        "train": {"steps": 40},
    }


@pytest.mark.parametrize("pack", ["whole", "stream", "none"])
def test_numbers_are_those_of_the_sequences(settings, pack):
    settings["data"]["pack"] = pack
    config = config_from_dict(settings)
    data = open_data(config)
    found = summarize(config, data)
    rows = [data.training[index] for index in range(len(data.training))]
    assert found.filled == pytest.approx(np.mean([row["document_ids"] >= 0 for row in rows]))
    assert found.epoch_sequences == len(rows) and found.epoch_steps == len(rows) / 4
    assert found.run_epochs == pytest.approx(160 / len(rows))
    for source, opened in zip(found.sources, data.sources, strict=True):
        own = [opened.training[index] for index in range(len(opened.training))]
        assert source.tokens == sum((row["document_ids"] >= 0).sum() for row in own)
        assert source.filled == pytest.approx(source.tokens / (source.sequences * 128))
    long = found.sources[1]
    assert (long.documents, long.held_out_documents) == (2, 1) and long.split == 2
    assert sum(source.run_epochs * source.sequences for source in found.sources) == 160
    sizes = np.concatenate([each.training.corpus.ends - each.training.corpus.starts for each in data.sources])
    assert sum(bucket.documents for bucket in found.histogram) == len(sizes)
    for bucket in found.histogram:
        inside = sizes[(bucket.first <= sizes) & (sizes <= bucket.last)]
        assert (bucket.documents, bucket.tokens) == (len(inside), inside.sum())
    shown = data.training[found.sequence]
    assert found.num_pieces == shown["document_ids"].max() + 1
    assert sum(piece.tokens for piece in found.pieces) <= (shown["document_ids"] >= 0).sum()


def test_the_text_fits_and_is_printable(settings):
    config = config_from_dict(settings)
    text = data_text(summarize(config, open_data(config)))
    assert all(len(line) <= 120 for line in text.splitlines())
    assert all(char.isprintable() for char in text.replace("\n", ""))
    assert "short \\x1b[0m\\n\\t\\\\ caf\u00e9" in text and "<- a sequence has 128" in text
    assert "75.0%" in text and "until every source has been read whole" in text


def test_documents_to_validate_on_stand_behind(settings, tmp_path):
    settings["data"]["validation_source"] = str(tmp_path / "b.jsonl")
    config = config_from_dict(settings)
    found = summarize(config, open_data(config))
    assert [source.held_out_documents for source in found.sources] == [0, 0, 3]
    assert [source.documents for source in found.sources] == [30, 3, 0]
    assert [line.split()[4] for line in data_text(found).splitlines()[6:9]] == ["-", "-", "903"]


def test_the_command_prints_text_or_json_without_jax(settings, tmp_path, capsys):
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(settings))
    assert main(["data", str(path), "--json", "sequence.length=64"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["length"] == 64 and len(found["sources"]) == 2 and found["epoch_steps"] > 0
    code = f"import sys; from sppo_jax.cli import main; main(['data', {str(path)!r}]); assert 'jax' not in sys.modules"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"}
    )
    assert done.returncode == 0, done.stderr
    assert "tokens to train on" in done.stdout


def test_what_is_drawn_at_random_is_sampled(settings, tmp_path, capsys):
    path = tmp_path / "config.yaml"
    settings["data"] = {"source": "recall", "recall": {"pairs": 4, "distances": [20, 30]}}
    path.write_text(yaml.safe_dump(settings))
    assert main(["data", str(path)]) == 0
    text = capsys.readouterr().out
    assert "drawn at random" in text and "run read 160 of them" in text and " v" in text
    assert main(["data", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["sources"] == []


def test_the_quickstart_has_data(capsys):
    assert main(["data", str(Path(__file__).parent.parent / "configs" / "quickstart.yaml")]) == 0
    out = capsys.readouterr().out
    assert "stdlib  100.0%" in out and "<- a sequence has 4,096" in out


def test_wrong_data_are_refused_in_one_line(settings, tmp_path, capsys):
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(settings))
    assert main(["data", str(path), "data.source=nothing.txt"]) == 2
    assert capsys.readouterr().err.startswith("data.source must be readable, got nothing.txt (No such file")
