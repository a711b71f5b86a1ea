"""Prompts with their completions: joined as they are, the completion alone is learned, and ended as texts are."""

import numpy as np
import pytest
from data_cases import write_tokenizer
from row_cases import documents, opened, trained

from sppo_jax.config import config_from_dict
from sppo_jax.data.open import open_data
from sppo_jax.data.summary.summary import summarize
from sppo_jax.report.data.text import data_text


def with_tokenizer(tmp_path, rows, **data):
    found = documents(opened(tmp_path, rows, tokenizer=str(tmp_path / "tokenizer.json"), **data))
    return [(tokens.tolist(), learned.astype(int).tolist()) for tokens, learned in found]


def test_the_completion_alone_is_learned_and_ended_as_texts_are(tmp_path):
    write_tokenizer(tmp_path / "tokenizer.json")  # <s> </s> <unk> the cat dog; texts begin with <s>
    row = {"prompt": "the cat", "completion": " dog"}
    assert with_tokenizer(tmp_path, [row]) == [([0, 3, 4, 5], [0, 0, 0, 1])]
    assert with_tokenizer(tmp_path, [row], end_token="</s>") == [([0, 3, 4, 5, 1], [0, 0, 0, 1, 1])]
    assert with_tokenizer(tmp_path, [row], start_token=None, end_token="</s>") == [([3, 4, 5, 1], [0, 0, 1, 1])]
    text = {"text": "the cat dog"}
    for ends in ({}, {"end_token": "</s>"}):
        assert with_tokenizer(tmp_path, [row], **ends)[0][0] == with_tokenizer(tmp_path, [text], **ends)[0][0]


def test_the_boundary_is_found_in_the_tokens_of_the_whole(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    vocab = {"a": 0, "b": 1, "c": 2, "bc": 3}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [("b", "c")]))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    # The token of both sides is what the model must write behind "a".
    assert with_tokenizer(tmp_path, [{"prompt": "ab", "completion": "ca"}]) == [([0, 3, 0], [0, 1, 1])]
    assert with_tokenizer(tmp_path, [{"prompt": "a", "completion": "bca"}]) == [([0, 3, 0], [0, 1, 1])]


@pytest.mark.parametrize("prompt", ["", "Q", "caf\u00e9 \ud800 \U0001f600 "])
@pytest.mark.parametrize("completion", ["A", " caf\u00e9\U0001f600", "\u00e9"])
def test_bytes_of_any_text(tmp_path, prompt, completion):
    (tokens, learned), _ = documents(opened(tmp_path, [{"prompt": prompt, "completion": completion}] * 2))
    whole = prompt.replace("\ud800", "\ufffd").encode() + completion.encode()
    assert tokens.tolist() == [256, *whole] and bytes(tokens[learned].astype(np.uint8)) == completion.encode()


def test_rows_without_a_completion_are_left_out(tmp_path):
    with pytest.warns(UserWarning, match="got 1 of 2 without, which are left out"):
        data = opened(tmp_path, [{"prompt": "Q", "completion": ""}, {"prompt": "Q", "completion": "A"}])
    assert trained(data) == ["A"]
    (left_out,) = data.sources[0].training.corpus.left_out
    assert (left_out.what, left_out.count) == ("prompts with completions", 1)
    with pytest.raises(ValueError, match="completions with something to learn, got 1 without"):
        opened(tmp_path, [{"prompt": "Q", "completion": ""}])


@pytest.mark.parametrize("row", [{"prompt": "Q"}, {"prompt": "Q", "completion": 3}, {"prompt": [], "completion": "A"}])
def test_wrong_rows_are_one_line(tmp_path, row):
    rows = [{"prompt": "Q", "completion": "A"}, row]
    with pytest.raises(ValueError, match=r"must both be text in each row.* in .*a.jsonl line 2; ") as error:
        opened(tmp_path, rows)
    assert "\n" not in str(error.value)


def test_sppo_data_shows_what_is_trained(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "2 + 2 = ", "completion": "4"}\n' * 3)
    shape = {"vocab_size": 257, "hidden_size": 8, "num_layers": 1, "num_heads": 1, "mlp_size": 8}
    data = {"source": str(path), "validation_fraction": 0, "cache": str(tmp_path / "cache")}
    config = config_from_dict({"model": shape, "data": data, "sequence": {"length": 32}, "train": {"steps": 1}})
    text = data_text(summarize(config, open_data(config)))
    assert "2 + 2 = [[4]]" in text and "completions of prompts" in text
