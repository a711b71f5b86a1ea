"""Caches and a run that an earlier version wrote: what was read rightly gives the same tokens, and the run goes on.

`older/older.tar.xz` holds small sources, the tokens that version 0.1.0 of 2026-11-28 cached of them, a run of two of
four steps, and what that version said: fingerprints of data, and the losses of all four steps.
"""

import json
import tarfile
import warnings
from pathlib import Path

import numpy as np
import pytest

from sppo_jax.cli import main
from sppo_jax.config import config_from_dict
from sppo_jax.data.open import open_data

pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

MADE_AGAIN = "are made again"
# The data of each case, and whether this version makes the tokens again.
CASES = {
    "chats": ({"source": "chats.jsonl", "tokenizer": "bytes", "chat": {}}, True),
    "chats of words": ({"source": "chats.jsonl", "tokenizer": "llama", "chat": {}}, True),
    "last turns": (
        {"source": "chats.jsonl", "tokenizer": "bytes", "chat": {"train_on": "last", "too_long": "turns"}},
        True,
    ),
    "rows": ({"source": "rows.jsonl"}, True),
    "texts of bytes": ({"source": "texts.jsonl", "tokenizer": "bytes"}, False),
    "texts of words": ({"source": "texts.jsonl", "tokenizer": "plain"}, False),
    "texts of a folder with eos": ({"source": "texts.jsonl", "tokenizer": "llama", "end_token": None}, False),
}


@pytest.fixture
def older(tmp_path) -> Path:
    with tarfile.open(Path(__file__).parent / "older" / "older.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


def config_of(older: Path, data: dict):
    sources = older / "sources"
    data = {**data, "source": str(sources / data["source"]), "cache": str(older / "cache"), "validation_fraction": 0.0}
    if data.get("tokenizer", "bytes") != "bytes":
        data["tokenizer"] = str(sources / data["tokenizer"])
    if "chat" in data:
        data["chat"] = {**data["chat"], "template": str(sources / "chat.jinja")}
    model = {"vocab_size": 300, "hidden_size": 16, "num_layers": 1, "num_heads": 2, "mlp_size": 16}
    return config_from_dict(
        {"model": model, "data": data, "sequence": {"length": 128}, "train": {"steps": 4, "devices": "cpu:1"}}
    )


@pytest.mark.parametrize("name", CASES)
def test_what_was_read_rightly_gives_the_same_tokens(older, name):
    data, again = CASES[name]
    before = json.loads((older / "expected.json").read_text())["cases"][name]
    (entry,) = before["entry"]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = open_data(config_of(older, data))
    assert found.fingerprint == before["fingerprint"]
    made = [path.name for path in (older / "cache").iterdir() if path.is_dir()]
    lines = [str(one.message) for one in told if MADE_AGAIN in str(one.message)]
    assert len(made) == len(list(CASES)) + again and len(lines) == again
    if again:
        assert entry in lines[0]
        (new,) = set(made) - {"".join(one["entry"]) for one in expected(older).values()}
        for file, dtype in (("tokens.bin", np.uint32), ("bounds.bin", np.int64)):
            old, now = (np.fromfile(older / "cache" / at / file, dtype) for at in (entry, new))
            assert (old == now).all()


def expected(older: Path) -> dict:
    return json.loads((older / "expected.json").read_text())["cases"]


def test_texts_that_now_end_with_eos_are_made_again_with_a_line(older):
    data, _ = CASES["texts of a folder with eos"]
    with pytest.warns(UserWarning, match=MADE_AGAIN):
        found = open_data(config_of(older, {name: value for name, value in data.items() if name != "end_token"}))
    assert found.fingerprint != expected(older)["texts of a folder with eos"]["fingerprint"]


def test_tokens_are_made_again_once(older):
    config = config_of(older, CASES["rows"][0])
    with pytest.warns(UserWarning, match=MADE_AGAIN):
        open_data(config)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        open_data(config)
    assert not [one for one in told if MADE_AGAIN in str(one.message)]


def test_a_run_that_began_before_goes_on(older, monkeypatch, capsys):
    monkeypatch.chdir(older)
    assert main(["train", "run.yaml", "--run-dir", "run"]) == 0
    said = capsys.readouterr()
    rows = [json.loads(line) for line in (older / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    losses = json.loads((older / "expected.json").read_text())["losses"]
    assert [row["loss"] for row in rows] == pytest.approx(losses, rel=1e-5)  # machines round differently
    assert "resumes from" in said.out + said.err and MADE_AGAIN in said.out + said.err
