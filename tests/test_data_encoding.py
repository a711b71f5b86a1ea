"""Bytes and tokenizers: what goes around a document, and what is refused."""

import json
import sys

import numpy as np
import pytest
from data_cases import write_tokenizer

from sppo_jax.config import DataConfig
from sppo_jax.data.tokens.encoding import BytesEncoder, open_encoder


@pytest.fixture
def path(tmp_path):
    return write_tokenizer(tmp_path / "tokenizer.json")


def test_bytes_there_and_back():
    encoder = BytesEncoder()
    text = "h\u00e9llo \U0001f600\n"
    (tokens,) = encoder.encode([text])
    assert tokens.tolist() == list(text.encode())
    assert encoder.decode(np.array([256, *tokens, 256])) == text


def test_a_tokenizer_there_and_back(path):
    encoder = open_encoder(DataConfig(tokenizer=str(path)), vocab_size=100)
    one, two = encoder.encode(["the cat", "the the dog"])
    assert encoder.decode(one) == "the cat" and encoder.decode(two) == "the the dog"
    assert len(two) == 3
    again = open_encoder(DataConfig(tokenizer=str(path.parent)), vocab_size=encoder.num_ids)
    assert again.key == encoder.key


@pytest.mark.parametrize(
    ("settings", "start", "end"),
    [
        ({}, ("<s>",), ()),
        ({"start_token": None}, (), ()),
        ({"end_token": "</s>"}, ("<s>",), ("</s>",)),
        ({"start_token": "the", "end_token": None}, ("the",), ()),
    ],
)
def test_what_goes_around_a_document(path, settings, start, end):
    encoder = open_encoder(DataConfig(tokenizer=str(path), **settings), vocab_size=100)
    ids = json.loads(path.read_text())["model"]["vocab"]
    assert encoder.start == tuple(ids[token] for token in start)
    assert encoder.end == tuple(ids[token] for token in end)


def test_other_settings_have_other_keys(path):
    keys = [
        open_encoder(DataConfig(tokenizer=str(path), **settings), vocab_size=100).key
        for settings in ({}, {"end_token": "</s>"}, {"start_token": None})
    ]
    assert len(set(keys)) == 3


def test_wrong_tokenizers_are_refused(path, tmp_path, monkeypatch):
    (tmp_path / "broken.json").write_text("{}")
    (tmp_path / "folder").mkdir()
    cases = [
        ({"tokenizer": "absent.json"}, 100, "must be a readable tokenizer.json .*got absent.json .No such file"),
        ({"tokenizer": str(tmp_path / "folder")}, 100, "got .*folder/tokenizer.json"),
        ({"tokenizer": str(tmp_path / "broken.json")}, 100, "must be a tokenizer.json of the tokenizers library, got"),
        (
            {"tokenizer": str(path)},
            4,
            "model.vocab_size must be above 5, the largest token of .*, got 4; use model.vocab_size=6 or more",
        ),
        ({"tokenizer": str(path), "end_token": "<end>"}, 100, "data.end_token must be a token of .*, got '<end>'"),
    ]
    for settings, vocab_size, message in cases:
        with pytest.raises(ValueError, match=message):
            open_encoder(DataConfig(**settings), vocab_size=vocab_size)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ValueError, match=r"tokenizers library, which is not installed; run pip install tokenizers"):
        open_encoder(DataConfig(tokenizer=str(path)), vocab_size=100)
