"""What rows and messages say about the loss is read, passed over or refused: every known key with every value."""

import itertools
import json

import numpy as np
import pytest
from row_cases import opened, trained

from sppo_jax.config import config_from_dict
from sppo_jax.config.data import ChatConfig, DataConfig
from sppo_jax.data.cache.left_out import SAYS_SO
from sppo_jax.data.content.conversations import chat_of
from sppo_jax.data.content.loss_keys import (
    KEYS,
    ignored_key,
    names_of,
    per_message,
    row_trains,
    speaks_of_loss,
    with_train,
)
from sppo_jax.data.open import open_data
from sppo_jax.data.sources.open_source import jobs_of
from sppo_jax.data.sources.token_rows import tokens_of
from sppo_jax.data.tokens.encoding import BytesEncoder

YES = (True, 1, 1.0, "true", "True", " TRUE", "1", "1.0", np.int64(1), np.float32(1), np.array([1]), np.True_)
NO = (False, 0, 0.0, "false", "False", "FALSE ", "0", "0.0", np.int64(0), np.float32(0), np.array([0]), np.False_)
WRONG = (0.5, -1, 2, 1.5, float("nan"), "half", "", "yes", "None", [1], [], {"a": 1}, np.array([0.5]), np.array([0, 1]))
KINDS = {
    "row": ((), None),
    "conversation": (("conversation",), None),
    "tokens": (("tokens",), 5),
}


def one_line(found, *said):
    with pytest.raises(ValueError) as error:
        found()
    told = str(error.value)
    assert "\n" not in told and len(told) < 500 and all(word in told for word in ("a.jsonl line 7", *said)), told


@pytest.mark.parametrize("key", names_of("message", "flag"))
def test_every_flag_of_a_message_by_every_value(key):
    message = {"role": "assistant", "content": "a"}
    for value in YES:
        assert with_train(message | {key: value}, "x") == message | {"train": True}
    for value in NO:
        assert with_train(message | {key: value}, "x") == message | {"train": False}
    for value in WRONG:
        one_line(
            lambda value=value: with_train(message | {key: value}, "message 2 of a.jsonl line 7"),
            f"{key} must be 0 or 1",
            f"data.ignore_keys=[{key}]",
        )
    # Another key that says 1 does not undo it.
    other = "weight" if key != "weight" else "train"
    assert with_train(message | {key: 0, other: 1}, "x")["train"] is False
    assert with_train(message | {key: 1, other: 0}, "x")["train"] is False


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("key", names_of("row", "flag"))
def test_every_flag_of_a_row_by_every_value(key, kind):
    kinds, length = KINDS[kind]

    def trains(value):
        return row_trains({"id": 3, key: value}, "a.jsonl line 7", *kinds, length=length)

    assert all(trains(value) for value in (*YES, None)) and not any(trains(value) for value in NO)
    for value in WRONG:
        if kind != "tokens" or not isinstance(value, list) and np.size(value) == 1:
            one_line(lambda value=value: trains(value), f"{key} must be 0 or 1", f"data.ignore_keys=[{key}]")


MASKS = names_of("tokens", "mask")


def learned_of(row):
    ((tokens, learned),), marks = tokens_of({"input_ids": [5, 6, 7, 8]} | row, 100, "a.jsonl line 7")
    assert tokens.tolist() == [5, 6, 7, 8]
    return learned.astype(int).tolist(), marks


@pytest.mark.parametrize("key", MASKS)
def test_every_mask_of_tokens_by_every_value(key):
    wanted = [0, 1, 0, 1]
    for mask in (
        wanted,
        [False, True, False, True],
        [0.0, 1.0, 0.0, 1.0],
        np.array(wanted),
        np.array(wanted, np.float32),
    ):
        assert learned_of({key: mask}) == (wanted, (key,))
    assert learned_of({key: [0] * 4})[0] == [0] * 4 and learned_of({key: [1] * 4})[0] == [1] * 4
    for wrong in ([0.5] * 4, [-1, 1, 1, 1], [2, 1, 1, 1], [float("nan"), 1, 1, 1], [1e9, 0, 0, 0]):
        one_line(lambda wrong=wrong: learned_of({key: wrong}), f"{key} must hold 0 and 1", f"ignore_keys=[{key}]")
    for wrong in ([1] * 3, [1] * 5, []):
        one_line(lambda wrong=wrong: learned_of({key: wrong}), f"{key} must be as long as the ids")
    for wrong in ([[1] * 4], [[1], [0], [1], [1, 1]], ["1", "0", "1", "1"], [None, 1, 1, 1]):
        one_line(lambda wrong=wrong: learned_of({key: wrong}), f"{key} must be a list of whole numbers")
    if key not in names_of("row", "flag"):
        for wrong in ("1", 1, True, {"a": 1}):
            one_line(lambda wrong=wrong: learned_of({key: wrong}), f"{key} must be a list of whole numbers")


@pytest.mark.parametrize(("first", "second"), list(itertools.combinations(("labels", *MASKS), 2)))
def test_tokens_are_learned_where_all_masks_say_so(first, second):
    def says(key, mask):
        return (
            [token if one else -100 for token, one in zip([5, 6, 7, 8], mask, strict=True)] if key == "labels" else mask
        )

    assert learned_of({first: says(first, [0, 0, 1, 1]), second: [0, 1, 0, 1]}) == ([0, 0, 0, 1], (first, second))
    assert learned_of({second: [0, 0, 1, 1], first: says(first, [0, 1, 0, 1])})[0] == [0, 0, 0, 1]
    one_line(lambda: learned_of({first: says(first, [1] * 4), second: [0.5] * 4}), f"{second} must hold 0 and 1")


def test_what_is_passed_over_says_nothing():
    for value in ([1] * 4, [0, 1, 0, 1], 0, "x"):
        assert learned_of({"special_tokens_mask": value}) == ([1] * 4, ("no labels: all tokens",))
    assert names_of("tokens", "none") == ("special_tokens_mask",)
    assert names_of("tokens", "padding") == ("attention_mask",)  # tests/test_data_row_documents.py


@pytest.mark.parametrize("key", [name for key in KEYS if key.treatment == "refused" for name in key.names])
def test_keys_that_cannot_be_obeyed_are_refused_by_every_value(key):
    spans = [{"begin_offset": 0, "end_offset": 3, "train": False}]
    for value in (0, 3, True, 0.5, [1, 2], spans):
        if key in names_of("message", "refused"):
            one_line(lambda value=value: with_train({"role": "user", key: value}, "a.jsonl line 7"), key, "ignore_keys")
        else:
            one_line(lambda value=value: row_trains({key: value}, "a.jsonl line 7", "tokens", length=2), key)
    assert with_train({"role": "user", key: []}, "x") == {"role": "user", key: []}


@pytest.mark.parametrize(
    ("key", "speaks"),
    [
        *[
            (key, True)
            for key in ("loss", "my_loss", "lossWeight", "LossMask", "LOSS_MASK", "loss-mask", "token.weights")
        ],
        *[(key, True) for key in ("sampleWeight", "completion_masks", "losses", "output_with_loss", "TRAIN_LOSS2")],
        *[(key, False) for key in ("lossless", "masked", "weighted", "content", "glossary", "unmask", "paperweight")],
    ],
)
def test_words_of_other_keys(key, speaks):
    assert speaks_of_loss(key) == speaks
    message, refused = {"role": "user", "content": "a"}, "what a row says about the loss is never ignored"
    for value in (0, 1, 0.5, True, [1, 0], np.float32(1), np.array([1, 0])):
        if not speaks or key in ("loss",):
            continue
        one_line(lambda value=value: with_train(message | {key: value}, "a.jsonl line 7"), refused, f"=[{key}]")
        for kinds, length in KINDS.values():
            if length is None or np.ndim(value) == 0:
                one_line(
                    lambda value=value, k=kinds, n=length: row_trains({key: value}, "a.jsonl line 7", *k, length=n)
                )
    for value in (None, "text", {"a": 1}, []):
        if key != "loss":
            assert with_train(message | {key: value}, "x") == message | {key: value}
        assert all(row_trains({key: value}, "x", *kinds, length=length) for kinds, length in KINDS.values())
    if speaks:
        # A list of a row of tokens that is not as long as the ids is not about its tokens.
        assert row_trains({key: [1] * 4}, "x", "tokens", length=5)
        one_line(lambda: row_trains({key: [1] * 5}, "a.jsonl line 7", "tokens", length=5), key)


def test_rows_of_conversations_say_it_for_each_message():
    roles = ["system", "user", "assistant", "user", "assistant"]
    assert per_message({"loss_mask": [0, 0, 1, 0, 0]}, roles, "x") == [False, False, True, False, False]
    assert per_message({"loss_mask": [0, True, 0, "1"]}, roles, "x") == [True, False, True, False, True]
    assert per_message({"mask": "User"}, roles, "x") == per_message({}, roles, "x") == [True] * 5
    for wrong in (
        {"loss_mask": [1, 0]},
        {"loss_mask": 0},
        {"loss_mask": [0.5] * 5},
        {"mask": "Assistant"},
        {"mask": 1},
    ):
        one_line(
            lambda wrong=wrong: per_message(wrong, roles, "a.jsonl line 7"), next(iter(wrong)), "data.ignore_keys="
        )


def test_a_conversation_has_train_alone():
    row = {
        "messages": [{"role": "user", "content": "a", "weight": 0}, {"role": "assistant", "content": "b", "loss": 1}]
    }
    assert chat_of(row, ChatConfig(), "here").messages == [
        {"role": "user", "content": "a", "train": False},
        {"role": "assistant", "content": "b", "train": True},
    ]


@pytest.mark.parametrize(
    ("no", "yes"),
    [
        ({"weight": 0}, {"weight": 1}),
        ({"loss_mask": 0}, {"loss_mask": 1}),
        ({"training": False}, {"training": True}),
        ({"train": False}, {"train": True}),
        ({"train": "false"}, {"train": "true"}),
    ],
)
def test_a_turn_that_its_author_excluded_is_not_trained(tmp_path, no, yes):
    pytest.importorskip("jinja2")
    asked, answers = [{"role": "user", "content": text} for text in ("Q1", "Q2")], ("WRONG", "RIGHT")
    turns = [{"role": "assistant", "content": text} | says for text, says in zip(answers, (no, yes), strict=True)]
    row = {"messages": [asked[0], turns[0], asked[1], turns[1]]}
    assert trained(opened(tmp_path, [row])) == ["RIGHT\n"]
    shared = {"messages": [{"from": m["role"], "value": m["content"]} for m in row["messages"]]}
    shared["messages"][1] |= no
    assert trained(opened(tmp_path, [{"conversations": shared["messages"]}])) == ["RIGHT\n"]
    # All of a text but what is excluded.
    assert trained(opened(tmp_path, [row], train_on="all")) == ["<user>Q1\n<user>Q2\n<assistant>RIGHT\n"]
    (key,) = no
    assert trained(opened(tmp_path, [row], ignore_keys=[key])) == ["WRONG\nRIGHT\n"]


def test_rows_of_all_forms_are_left_out_or_refused(tmp_path):
    pytest.importorskip("jinja2")
    turns = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]
    rows = {
        "documents": ({"text": "abc"}, "abc"),
        "conversations": ({"messages": turns}, "A\n"),
        "rows of tokens": ({"input_ids": [97, 98, 99]}, "abc"),
        "prompts with completions": ({"prompt": "ab", "completion": "c"}, "c"),
    }
    for what, (row, wanted) in rows.items():
        data = opened(tmp_path, [row, row | {"weight": 0}, row | {"weight": 1}])
        corpus = data.sources[0].training.corpus
        assert corpus.num_documents == 2 and trained(data)[0].removeprefix("\u0100") == wanted
        assert [(one.what, one.why, one.count) for one in corpus.left_out] == [(what, SAYS_SO, 1)]
        plain = opened(tmp_path, [row, row])
        with pytest.raises(ValueError, match=r"weight must be 0 or 1 .*a.jsonl line 2.*ignore_keys=\[weight\]"):
            opened(tmp_path, [row, row | {"weight": 0.5}])
        with pytest.raises(ValueError, match=r"trainLoss must be .* got 0.25 in .*a.jsonl line 2"):
            opened(tmp_path, [row, row | {"trainLoss": 0.25}])
        ignored = opened(tmp_path, [row, row | {"trainLoss": 0.25, "weight": 0}], ignore_keys=["trainLoss", "weight"])
        assert ignored.fingerprint == plain.fingerprint


def test_columns_of_a_table_are_looked_at_too(tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    shape = {"vocab_size": 257, "hidden_size": 8, "num_layers": 1, "num_heads": 1, "mlp_size": 8}

    def documents(**columns):
        pq.write_table(pa.table({"text": ["ab", "cd", "ef"]} | columns), tmp_path / "a.parquet")
        settings = {"source": str(tmp_path / "a.parquet"), "validation_fraction": 0, "cache": str(tmp_path / "cache")}
        config = {"model": shape, "data": settings, "sequence": {"length": 8}, "train": {"steps": 1}}
        return open_data(config_from_dict(config)).sources[0].training.corpus.num_documents

    assert documents(id=[1, 2, 3], weight=[1.0, None, 0.0]) == 2
    with pytest.raises(ValueError, match=r"weight must be 0 or 1 .* got 0.5 in .*a.parquet row 2"):
        documents(weight=[1.0, 0.5, 0.0])


def test_the_name_of_an_entry_stays_where_nothing_is_ignored():
    assert ignored_key(DataConfig()) == {} and ignored_key(DataConfig(ignore_keys=("b", "a"))) == {
        "ignore_keys": ["a", "b"]
    }


@pytest.mark.parametrize(
    ("more", "again"), [({}, False), ({"id": 3}, False), ({"weight": 1}, True), ({"lossMask": 1}, True)]
)
def test_text_that_was_not_looked_at_is_tokenized_again(tmp_path, more, again):
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "abc"} | more) + "\n")
    config = DataConfig(source=str(tmp_path / "a.jsonl"), cache=str(tmp_path / "cache"))
    (job,) = jobs_of(config, str(config.source), BytesEncoder, vocab_size=257, length=16)
    assert ("rows" in job.key) == again
