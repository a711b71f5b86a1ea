"""From a config to sequences."""

import json
import warnings

import numpy as np
import pytest
import yaml
from data_cases import write_tokenizer

from sppo_jax.config import ConfigError, config_from_dict, to_yaml
from sppo_jax.data.open import open_data


def make_config(source, **data):
    return config_from_dict(
        {
            "model": {"vocab_size": 257, "hidden_size": 8, "num_layers": 2, "num_heads": 2, "mlp_size": 8},
            "data": {"source": source if isinstance(source, dict | list) else str(source), **data},
            "sequence": {"length": 16},
            "train": {"steps": 1},
        }
    )


def test_text_becomes_sequences_that_decode(tmp_path):
    (tmp_path / "a.txt").write_text("caf\u00e9 au lait")
    data = open_data(make_config(tmp_path / "a.txt", validation_fraction=0.3))
    row = data.training[0]
    assert data.decode(row["tokens"][row["document_ids"] >= 0]) == "caf\u00e9 au "
    assert len(data.training) == len(data.validation) == 1
    assert data.validation[7]["document_ids"].tolist().count(0) == 4
    assert open_data(make_config(tmp_path / "a.txt", validation_fraction=0)).validation is None
    assert np.array_equal(data.training[3]["tokens"], data.training[0]["tokens"])


def test_sequences_hold_one_document_if_all_of_all_sources_do(tmp_path):
    paths = [tmp_path / name for name in ("whole.jsonl", "short.jsonl")]
    for path, size in zip(paths, (95, 3), strict=True):  # six sequences with their last token; four documents in one
        path.write_text("\n".join(json.dumps({"text": "x" * size}) for _ in range(20)))
    whole, short = map(str, paths)
    for one, source, data in (
        (True, whole, {}),
        (False, short, {}),
        (True, short, {"pack": "none"}),
        (False, {whole: 1, short: 1}, {}),
        (True, whole, {"validation_source": whole}),
        (False, whole, {"validation_source": short}),
        (True, "recall", {"recall": {"pairs": 1, "distances": [4]}}),
    ):
        config = make_config(source, **data)
        assert open_data(config).has_one_document == one, (source, data)
        assert one or not config.data.has_one_document


def held_out_warnings(path, sizes, **data):
    path.write_text("\n".join(json.dumps({"text": "x" * size}) for size in sizes))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        opened = open_data(make_config(path, **data))
    return opened, [str(warning.message) for warning in caught]


def test_a_source_of_which_most_is_held_out_is_warned_of(tmp_path):
    path = tmp_path / "a.jsonl"
    # One of two documents is held out whatever the fraction: the long one, or the short one.
    told = [held_out_warnings(path, sizes) for sizes in ((10, 990), (990, 10))]
    (opened, texts), (_, others) = sorted(told, key=lambda found: len(found[1]), reverse=True)
    assert len(texts) == 1 and not others
    assert f"data.validation_fraction=0.05 holds out whole documents of data.source={path}, got 1 of 2 " in texts[0]
    assert "with 98.9% of the tokens" in texts[0] and "\n" not in texts[0]
    for change in ("give more documents", "data.validation_source", "data.validation_fraction=0"):
        assert change in texts[0]
    assert len(opened.validation) > 10 * len(opened.training)


@pytest.mark.parametrize(
    ("sizes", "data"),
    [
        ((50,) * 200, {}),
        ((50,) * 200, {"validation_fraction": 0.9}),  # as asked for
        ((1000,), {}),  # of one document its end is held out
        ((10, 990), {"validation_fraction": 0.0}),
        ((990, 10), {"validation_fraction": 0.0}),
    ],
)
def test_what_is_held_out_as_asked_for_is_not_warned_of(tmp_path, sizes, data):
    assert held_out_warnings(tmp_path / "a.jsonl", sizes, **data)[1] == []


def test_a_mixture_draws_by_weight_and_holds_out_of_every_source(tmp_path):
    for name, byte in (("a", "x"), ("b", "y")):
        lines = [json.dumps({"text": byte * (20 + number)}) for number in range(40)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    weights = {str(tmp_path / "b.jsonl"): 1, str(tmp_path / "a.jsonl"): 3}
    data = open_data(make_config(weights, validation_fraction=0.2))
    assert [(source.name[-7:], source.weight) for source in data.sources] == [("a.jsonl", 0.75), ("b.jsonl", 0.25)]
    for rows in (data.training, data.validation):
        drawn = [int(rows[index]["tokens"].max(where=rows[index]["tokens"] < 256, initial=0)) for index in range(40)]
        assert drawn.count(ord("x")) == 30 and drawn.count(ord("y")) == 10


def test_documents_to_validate_on_can_be_given(tmp_path):
    for name, byte in (("train", "x"), ("small", "y"), ("large", "z")):
        (tmp_path / f"{name}.jsonl").write_text(f'{{"text": "{byte * 40}"}}\n' * 3)
    paths = {name: str(tmp_path / f"{name}.jsonl") for name in ("train", "small", "large")}
    data = open_data(make_config(paths["train"], validation_source=paths["small"]))
    assert len(data.training) == 9 and len(data.validation) == 9
    assert {chr(token) for row in range(9) for token in data.training[row]["tokens"][1:9]} == {"x"}
    assert {chr(token) for row in range(9) for token in data.validation[row]["tokens"][1:9]} == {"y"}
    weights = {paths["small"]: 1, paths["large"]: 3}
    data = open_data(make_config(paths["train"], validation_source=weights))
    drawn = [chr(data.validation[index]["tokens"][1]) for index in range(40)]
    assert drawn.count("z") == 30 and drawn.count("y") == 10
    with pytest.raises(ConfigError, match="data.validation_source must give every source a weight above 0"):
        make_config(paths["train"], validation_source={paths["small"]: 0})
    with pytest.raises(ConfigError, match="recall must be the only data.source .*got recall in data.validation_source"):
        make_config(paths["train"], validation_source="recall")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"a.txt": 0, "b.txt": 1}, "data.source must give every source a weight above 0, got a.txt: 0; leave"),
        ({"a.txt": -1.5}, "weight above 0, got a.txt: -1.5"),
        ({}, "weight above 0, got no source"),
        (
            {"a.txt": "much"},
            "must be text, or a mapping of names, each to a number, or a section of settings, got {'a.txt': 'much'}",
        ),
        (
            {"recall": 1, "a.txt": 1},
            "recall must be the only data.source (the task draws its own validation sequences), got recall in data.so",
        ),
        ({3: 1}, "data.source must be text, or a mapping of names"),
        (["a.txt"], "data.source must be text, or a mapping of names"),
    ],
)
def test_wrong_weights_are_refused(source, message):
    with pytest.raises(ConfigError) as error:
        make_config(source)
    assert message in str(error.value)


def test_start_and_end_tokens_need_a_tokenizer(tmp_path):
    (tmp_path / "a.txt").write_text("some words")
    with pytest.raises(ValueError, match="must be auto where data.tokenizer is not given or bytes, got None and auto"):
        open_data(make_config(tmp_path / "a.txt", start_token=None))


def test_a_config_with_weights_is_written_and_read_back():
    config = make_config({"b": 1, "a": 2.5})
    assert config_from_dict(yaml.safe_load(to_yaml(config))) == config


def test_the_fingerprint_follows_from_the_data_not_from_where_it_lies(tmp_path):
    prints = []
    for folder, text, settings in [
        ("one", "some words", {}),
        ("two", "some words", {}),
        ("two", "some words", {"seed": 1}),
        ("two", "some words", {"pack": "stream"}),
        ("two", "other words", {}),
    ]:
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "a.txt").write_text(text * 10)
        prints.append(open_data(make_config(tmp_path / folder, validation_fraction=0, **settings)).fingerprint)
    assert prints[0] == prints[1] and len(set(prints)) == 4


def test_tokens_without_a_tokenizer_are_shown_as_numbers(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(40))
    assert open_data(make_config(tmp_path / "a.npy")).decode(np.array([3, 40])) == "3 40"
    path = write_tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "a.txt").write_text("the cat the dog " * 9)
    data = open_data(make_config(tmp_path / "a.txt", tokenizer=str(path), validation_fraction=0))
    assert data.decode(data.training[0]["tokens"][:4]) in ("<s> the cat the", "the dog the cat")
