"""How texts end: with the folder's eos_token, with what the tokenizer adds, or with nothing."""

import json
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from tokenizer_folders import END, START, make_folder

from sppo_jax.config import config_from_dict
from sppo_jax.data.ends import earlier_end_token, warn_of_other_ends
from sppo_jax.data.open import open_data
from sppo_jax.data.summary.summary import summarize
from sppo_jax.data.tokens.mask_bit import split_words
from sppo_jax.models.hf.tokenizer import end_tokens_of
from sppo_jax.report.data.text import data_text
from sppo_jax.train.checkpoints.run_dir import changes_since, write_run
from sppo_jax.train.setup import _go_on

transformers = pytest.importorskip("transformers")
TEXT = "hello world"
MODEL = {"vocab_size": 300, "hidden_size": 8, "num_layers": 1, "num_heads": 1, "mlp_size": 8}
STOPS = {"generation_config.json": {"eos_token_id": [1, 281]}}
# A folder, the token with which its texts end, and the value of data.end_token with which they end as they did before.
FOLDERS = {
    "a base": (dict(settings={}), "</s>", "null"),
    "an instruct": (dict(added=[START, END], settings={"eos_token": END}, files=STOPS), END, "null"),
    "an eos_token of its own settings": (dict(settings={"eos_token": END}), END, "null"),
    "no eos_token": (dict(settings={"eos_token": None}), "", None),
    "no settings": (dict(), "", None),
    "a post-processor with the eos_token": (dict(settings={}, ends_with="</s>"), "</s>", None),
    "a post-processor with another stop token": (
        dict(settings={}, ends_with="<pad>", files={"generation_config.json": {"eos_token_id": 2}}), "<pad>", None
    ),
    "a post-processor with another token": (dict(settings={}, ends_with="<pad>"), "</s>", "'\"<pad>\"'"),
}  # fmt: skip


def config_of(place, source="a.jsonl", tokenizer="t", **data):
    tokenizer = tokenizer if tokenizer == "bytes" else str(place / tokenizer)
    return config_from_dict(
        {
            "model": MODEL,
            "data": {"source": str(place / source), "tokenizer": tokenizer, "validation_fraction": 0} | data,
            "sequence": {"length": 64},
            "train": {"steps": 1},
        }
    )


def documents(config):
    corpus = open_data(config).sources[0].training.corpus
    return [corpus.read(start, end).tolist() for start, end in zip(corpus.starts, corpus.ends, strict=True)]


@pytest.fixture(autouse=True)
def rows(tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in (TEXT, f"{TEXT}</s>", "a")))


@pytest.mark.parametrize("case", FOLDERS)
def test_texts_end_with_the_token_that_stops(tmp_path, case):
    make, end, before = FOLDERS[case]
    make_folder(tmp_path / "t", **make)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "t")
    config = config_of(tmp_path)
    texts = [TEXT, f"{TEXT}</s>", "a"]
    ends = [theirs.convert_tokens_to_ids(end)] if end else []
    wanted = [theirs(text, add_special_tokens=False)["input_ids"] for text in texts]
    # A text that ends with its eos_token gets no second one, as in TRL; a tokenizer adds its own end to any text.
    once = before is not None
    wanted = [ids if once and ids[-1:] == ends else ids + ends for ids in wanted]
    assert documents(config) == wanted
    assert earlier_end_token(config) == before
    if before:
        word = yaml.safe_load(before.strip("'"))
        plain = [theirs(text)["input_ids"] for text in texts]
        assert documents(config_of(tmp_path, end_token=word)) == plain


def test_a_file_alone_names_no_eos_token(tmp_path):
    make_folder(tmp_path / "t", settings={})
    assert documents(config_of(tmp_path, tokenizer="t/tokenizer.json"))[0][-1] != 1


def test_what_is_no_text_has_no_end(tmp_path):
    make_folder(
        tmp_path / "t",
        added=[START, END],
        settings={"chat_template": "{% for m in messages %}{{ m.role }}{{ m.content }}<|im_end|>{% endfor %}"},
    )
    (tmp_path / "b.jsonl").write_text(json.dumps({"input_ids": [5, 6]}) + "\n")
    (tmp_path / "c.jsonl").write_text(
        json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}) + "\n"
    )
    pytest.importorskip("jinja2")
    for name, last in (("b.jsonl", 6), ("c.jsonl", 281)):
        config = config_of(tmp_path, source=name)
        assert documents(config)[0][-1] == last and earlier_end_token(config) is None
    config = config_of(tmp_path, tokenizer="bytes")
    assert documents(config)[0] == [256, *TEXT.encode()] and earlier_end_token(config) is None


def test_the_ends_of_documents_are_shown(tmp_path):
    make_folder(tmp_path / "t", settings={})
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "the quick fox " * 40 + "hello"}) + "\n")
    config = config_of(tmp_path)
    shown = data_text(summarize(config, open_data(config))).split("How documents end\n")[1].split("\n\n")[0]
    assert "... the quick fox" not in shown and shown.endswith("fox hello</s>")


def test_a_run_that_began_before_goes_on_with_the_value_that_the_line_names(tmp_path):
    make_folder(tmp_path / "t", settings={})
    config = config_of(tmp_path)
    # A run of an earlier version: its config says auto, and its texts ended with nothing.
    before = open_data(config_of(tmp_path, end_token=None)).fingerprint
    data = open_data(config)
    assert data.fingerprint != before
    experiment = SimpleNamespace(config=config, data_fingerprint=data.fingerprint)
    restored = SimpleNamespace(run={"step": 1, "data": {"fingerprint": before}})
    with pytest.raises(ValueError, match="set data.end_token=null if the run began before texts ended with") as error:
        _go_on(experiment, restored, Path("run"), [])
    assert "\n" not in str(error.value)
    (tmp_path / "run").mkdir()
    write_run(tmp_path / "run", config, SimpleNamespace(to_json=lambda: "{}"))
    again = config_of(tmp_path, end_token=None)
    assert changes_since(tmp_path / "run", again) == ["data.end_token: auto -> None"]
    assert open_data(again).fingerprint == before
    other = SimpleNamespace(config=again, data_fingerprint=before)
    with pytest.raises(ValueError, match="not 0.; name the old documents with data.source"):
        _go_on(other, SimpleNamespace(run={"step": 1, "data": {"fingerprint": "0"}}), Path("run"), [])


def test_an_evaluation_of_a_run_that_began_before_is_told(tmp_path):
    make_folder(tmp_path / "t", settings={})
    config = config_of(tmp_path)
    with pytest.warns(UserWarning, match="got other documents .fingerprint b, not a.; add data.end_token=null if"):
        warn_of_other_ends(config, "b", "a")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_other_ends(config, "a", "a")
        warn_of_other_ends(config, "b", None)
        warn_of_other_ends(config_of(tmp_path, end_token=None), "b", "a")


def test_a_completion_ends_as_a_text_does(tmp_path):
    make_folder(tmp_path / "t", settings={})
    rows = [{"prompt": "a", "completion": completion} for completion in ("b", "b</s>")]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    corpus = open_data(config_of(tmp_path, source="p.jsonl")).sources[0].training.corpus
    spans = zip(corpus.starts, corpus.ends, strict=True)
    found = [[part.tolist() for part in split_words(corpus.read(*span))] for span in spans]
    assert found[0] == found[1] and found[0][0][-1] == 1 and found[0][1] == [False, True, True]


@pytest.mark.parametrize(
    "generation", [None, {}, {"eos_token_id": 3}, {"eos_token_id": [3, 4]}, {"eos_token_id": None}]
)
@pytest.mark.parametrize(
    "config", [{}, {"eos_token_id": 3}, {"eos_token_id": [4, 3]}, {"text_config": {"eos_token_id": 4}}]
)
def test_stop_tokens_come_from_where_transformers_has_them(tmp_path, generation, config):
    (tmp_path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    try:  # as transformers does when it loads a model
        theirs = transformers.GenerationConfig.from_pretrained(tmp_path)
    except OSError:
        name = "config.json"
        theirs = transformers.GenerationConfig.from_pretrained(tmp_path, config_file_name=name, _from_model_config=True)
    wanted = theirs.eos_token_id
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = end_tokens_of(tmp_path)
    assert found == (wanted if isinstance(wanted, list) else [] if wanted is None else [wanted])
    inner = config.get("eos_token_id", config.get("text_config", {}).get("eos_token_id"))
    unread = set(inner if isinstance(inner, list) else [] if inner is None else [inner]) - set(found)
    assert len(told) == bool(unread)
