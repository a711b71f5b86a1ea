"""Every place from which transformers reads special tokens: read alike, or told of in a line."""

import json
import warnings

import pytest
from tokenizer_folders import END, OTHER, START, make_folder

from sppo_jax.config import DataConfig
from sppo_jax.data.tokens.encoding import FileEncoder, open_encoder
from sppo_jax.data.tokens.tokenizer_places import read_special_tokens

transformers = pytest.importorskip("transformers")
TEXTS = [f"hello {START}user {END}\n{OTHER} </s>", f" a {OTHER} b{END} <s>", "the quick fox", ""]
FLAGS = {"single_word": False, "lstrip": True, "rstrip": False, "normalized": False, "special": True}
NEXT = 280  # the id of the first token behind tokenizer.json's own
TYPED = {"__type": "AddedToken", "content": END, **FLAGS}
PLACES = {
    "tokenizer.json": dict(added=[START, END], settings={}),
    "nothing but tokenizer.json": dict(added=[START]),
    "added_tokens_decoder": dict(settings={"added_tokens_decoder": {NEXT: {"content": END, **FLAGS}}}),
    "added_tokens_decoder in another order": dict(
        settings={"added_tokens_decoder": {NEXT + 1: {"content": START}, NEXT: {"content": END, **FLAGS}}}
    ),
    "added_tokens_decoder with other flags": dict(
        added=[END], settings={"added_tokens_decoder": {NEXT: {"content": END, **FLAGS}}}
    ),
    "additional_special_tokens": dict(settings={"eos_token": END, "additional_special_tokens": [START, END]}),
    "extra_special_tokens": dict(settings={"extra_special_tokens": [START, END]}),
    "extra_special_tokens before additional": dict(
        settings={"extra_special_tokens": [START], "additional_special_tokens": [END]}
    ),
    "extra_special_tokens by name": dict(settings={"extra_special_tokens": {"image_token": OTHER}}),
    "model_specific_special_tokens": dict(settings={"model_specific_special_tokens": {"image_token": OTHER}}),
    "a name of the model's own": dict(settings={"image_token": OTHER}),
    "a name with flags": dict(settings={"eos_token": TYPED}),
    "a name of its own with flags": dict(settings={"image_token": {**TYPED, "content": OTHER}}),
    "eos_token is no token": dict(settings={"eos_token": END}),
    "eos_token is null": dict(settings={"eos_token": None}),
    "eos_token is empty": dict(settings={"eos_token": ""}),
    "two names of one token": dict(settings={"eos_token": END, "pad_token": END}),
    "split_special_tokens": dict(added=[START, END], settings={"split_special_tokens": True}),
    "added_tokens.json": dict(settings={}, files={"added_tokens.json": {START: NEXT, END: NEXT + 1}}),
    "added_tokens.json with a name": dict(
        settings={"eos_token": END, "additional_special_tokens": [START]},
        files={"added_tokens.json": {OTHER: NEXT + 2, END: NEXT, START: NEXT + 1}},
    ),
    "added_tokens.json beside added_tokens_decoder": dict(
        settings={"added_tokens_decoder": {NEXT: {"content": END, **FLAGS}}}, files={"added_tokens.json": {START: NEXT}}
    ),
    "special_tokens_map.json": dict(
        added=[END], settings={"eos_token": None}, files={"special_tokens_map.json": {"eos_token": END}}
    ),
    "special_tokens_map.json over the settings": dict(
        settings={},
        files={"special_tokens_map.json": {"eos_token": {"content": END, "lstrip": True}, "sep_token": OTHER}},
    ),
    "special_tokens_map.json beside added_tokens_decoder": dict(
        settings={"added_tokens_decoder": {}}, files={"special_tokens_map.json": {"eos_token": END}}
    ),
    "special_tokens_map.json with more tokens": dict(
        settings={},
        files={"special_tokens_map.json": {"additional_special_tokens": [START, END], "image_token": OTHER}},
    ),
    "special_tokens_map.json with more tokens that do not count": dict(
        settings={"extra_special_tokens": [START]},
        files={"special_tokens_map.json": {"additional_special_tokens": [END]}},
    ),
    "special_tokens_map.json with extra tokens": dict(
        settings={"extra_special_tokens": [START]}, files={"special_tokens_map.json": {"extra_special_tokens": [END]}}
    ),
    "special_tokens_map.json with extra tokens by name": dict(
        settings={}, files={"special_tokens_map.json": {"extra_special_tokens": {"image_token": OTHER}}}
    ),
    "special_tokens_map.json alone": dict(files={"special_tokens_map.json": {"eos_token": END, "bos_token": "<s>"}}),
}


@pytest.mark.parametrize("place", PLACES)
def test_each_place_is_read_as_transformers_does(tmp_path, place):
    make_folder(tmp_path / "t", **PLACES[place])
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "t")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours = open_encoder(DataConfig(tokenizer=str(tmp_path / "t")), vocab_size=300)
    wanted = [theirs(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
    assert [found.tolist() for found in ours.encode(TEXTS)] == wanted
    assert [found.tokens.tolist() for found in ours.locate(TEXTS)] == wanted
    assert (ours.num_ids, read_special_tokens(tmp_path / "t").texts) == (len(theirs), theirs.special_tokens_map)
    eos = theirs.eos_token_id if theirs.eos_token else None
    assert ours.end == (() if eos is None else (eos,)) and ours.stops == set(ours.end)
    assert set(theirs.all_special_ids) - {None} <= ours.special


@pytest.mark.parametrize(
    "kind", ["LlamaTokenizer", "Qwen2TokenizerFast", "Qwen3_5Tokenizer", "GPT2Tokenizer", "GemmaTokenizer"]
)
def test_names_that_a_class_gives(tmp_path, kind):
    for name, class_tokens in (("a", ["</s>"]), ("b", ["<s>"])):
        folder = tmp_path / name
        make_folder(folder, added=class_tokens)
        (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind, "bos_token": "<s>"}))
        theirs = transformers.AutoTokenizer.from_pretrained(folder)
        assert read_special_tokens(folder).texts == theirs.special_tokens_map
        (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind, "eos_token": None}))
        theirs = transformers.AutoTokenizer.from_pretrained(folder)
        assert read_special_tokens(folder).texts == theirs.special_tokens_map


def test_a_key_stays_where_nothing_is_added_and_differs_where_something_is(tmp_path):
    keys = {}
    for name in ("tokenizer.json", "split_special_tokens", "eos_token is no token", "extra_special_tokens"):
        make_folder(tmp_path / name, **PLACES[name])
        encoder = FileEncoder(tmp_path / name, start_token="auto", end_token=None)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            alone = FileEncoder(tmp_path / name / "tokenizer.json", start_token="auto", end_token=None)
        keys[name] = encoder.key
        assert (encoder.key == alone.key) == (name == "tokenizer.json")
    assert len(set(keys.values())) == 4


TOLD = {
    "a file alone": (
        dict(settings={"eos_token": END}),
        {"tokenizer": "t/tokenizer.json"},
        "alone, .* got '<|im_end|>' there .1 in all.; name the folder",
    ),
    "an id that transformers does not give": (
        dict(settings={}, files={"added_tokens.json": {END: NEXT + 7}}),
        {},
        "must list tokens with the ids that transformers gives them, got 287 for '<|im_end|>', which becomes token 280",
    ),
    "a vocabulary of another tokenizer": (
        dict(settings={}, files={"vocab.json": {"<s>": 0, "hello": 1}}),
        {},
        "one tokenizer, got vocab.json in .* with 'hello' as token 1, which tokenizer.json has as",
    ),
    "two lists of stop tokens": (
        dict(settings={}, files={"generation_config.json": {"eos_token_id": [1]}, "config.json": {"eos_token_id": 2}}),
        {},
        r"generation_config.json is read, as in transformers, \[1\] without \[2\] of config.json",
    ),
    "a token without a row": (
        dict(settings={"extra_special_tokens": [START, END]}),
        {"rows": NEXT + 1},
        "got '<|im_end|>' as token 281 where model.vocab_size is 281, left out here",
    ),
}


@pytest.mark.parametrize("case", TOLD)
def test_what_is_not_read_is_told_in_a_line(tmp_path, case):
    make, how, told = TOLD[case]
    make_folder(tmp_path / "t", **make)
    config = DataConfig(tokenizer=str(tmp_path / how.get("tokenizer", "t")))
    with pytest.warns(UserWarning, match=told.replace("<|", r"<\|").replace("|>", r"\|>")) as found:
        encoder = open_encoder(config, vocab_size=how.get("rows", 300))
    assert len(found) == 1 and "\n" not in str(found[0].message)
    assert encoder.num_ids <= how.get("rows", 300)
    if case == "a token without a row":
        (tokens,) = encoder.encode([f"{START}{END}"])
        assert tokens[0] == NEXT and len(tokens) > 2


REFUSED = {
    "a newer tokenizer.json": (
        dict(
            settings={"fast_tokenizer_files": ["tokenizer.json", "tokenizer.4.0.0.json"]},
            files={"tokenizer.4.0.0.json": {}},
        ),
        "must have one tokenizer, got tokenizer.json and tokenizer.4.0.0.json",
    ),
    "a number for a token": (
        dict(settings={"eos_token": 3}),
        "eos_token must be text or an object with content, got 3",
    ),
    "a text for a list": (dict(settings={"extra_special_tokens": "a"}), "must be a list of tokens, got 'a'"),
    "a text for an id": (dict(settings={}, files={"added_tokens.json": {"a": "b"}}), "a number as its id, got 'b'"),
    "torn settings": (dict(files={"tokenizer_config.json": "{"}), "tokenizer_config.json must be readable JSON"),
    "a list of settings": (dict(files={"tokenizer_config.json": []}), "must hold a JSON object, got list"),
    "a torn decoder": (dict(settings={"added_tokens_decoder": {"a": 1}}), "must give tokens with content by id"),
    "a text for a stop token": (
        dict(settings={}, files={"generation_config.json": {"eos_token_id": "a"}}),
        "eos_token_id must be a token or a list of tokens, got 'a'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_read_is_refused_in_a_line(tmp_path, case):
    make, told = REFUSED[case]
    make_folder(tmp_path, **make)
    with pytest.raises(ValueError, match=told) as error:
        open_encoder(DataConfig(tokenizer=str(tmp_path)), vocab_size=300)
    assert "\n" not in str(error.value)
