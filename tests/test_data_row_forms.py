"""The form of a row: found by its keys, refused where there are two, and named by `data.format`."""

import itertools
import json

import pytest
from row_cases import opened, trained

from sppo_jax.config.data import DataConfig
from sppo_jax.data.content.row_forms import check_form, forms_of

pytest.importorskip("jinja2")
TURNS = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]
ROWS = {
    "text": {"text": "abc"},
    "chat": {"messages": TURNS},
    "tokens": {"input_ids": [97, 98, 99], "labels": [-100, 98, -100]},
    "prompt": {"prompt": "P", "completion": "C"},
    "alpaca": {"instruction": "I", "output": "O"},
}
TRAINED = {"text": "\u0100abc", "chat": "A\n", "tokens": "b", "prompt": "C", "alpaca": "O\n"}


@pytest.mark.parametrize("form", ROWS)
def test_each_form_is_found_by_its_keys(tmp_path, form):
    assert forms_of(ROWS[form] | {"id": 1, "input": "x"}, DataConfig()) == (form,)
    assert trained(opened(tmp_path, [ROWS[form]])) == [TRAINED[form]]


@pytest.mark.parametrize(("first", "second"), list(itertools.combinations(ROWS, 2)))
def test_two_forms_are_refused_until_one_is_named(tmp_path, first, second):
    row = ROWS[first] | ROWS[second]
    for rows, line in (([row], 1), ([ROWS[first], row], 2), ([ROWS[second], row], 2)):
        with pytest.raises(ValueError) as error:
            opened(tmp_path, rows)
        told = str(error.value)
        assert "a row must have one form where data.format is auto, got " in told and "\n" not in told
        assert f"a.jsonl line {line}; set data.format to " in told and {first, second} <= set(told.split())
    for form in (first, second):
        assert trained(opened(tmp_path, [row], format=form)) == [TRAINED[form]]
    # Null is no value.
    empty = dict.fromkeys(ROWS[second])
    assert trained(opened(tmp_path, [empty | ROWS[first]])) == [TRAINED[first]]


@pytest.mark.parametrize(
    ("row", "form"),
    [
        (ROWS["chat"] | {"prompt": "Q"}, "chat"),  # repeats the first turn
        (ROWS["text"] | {"prompt": "Q", "instruction": "x"}, "text"),
        (ROWS["text"] | {"input_ids": [1, 2], "attention_mask": [1, 1]}, "text"),  # a text and its tokens
        (ROWS["chat"] | {"input_ids": [1, 2], "position_ids": [0, 1]}, "chat"),
        ({"conversations": TURNS}, "chat"),
        ({"token_ids": [1, 2]}, "tokens"),
    ],
)
def test_what_says_nothing_of_its_own_is_no_form(row, form):
    assert check_form(row, DataConfig(), "x") == (form,)


@pytest.mark.parametrize("key", ["labels", "completion_mask", "loss_mask", "loss_weights", "seq_lengths", "cu_seqlens"])
def test_tokens_with_a_mask_or_bounds_are_a_form_beside_text(key):
    with pytest.raises(ValueError, match=r"got text and tokens \(keys .*\) in x; set data.format to text or tokens"):
        check_form(ROWS["text"] | {"input_ids": [1, 2], key: [1, 2]}, DataConfig(), "x")


@pytest.mark.parametrize("form", ["prompt", "alpaca"])
def test_another_form_is_named_where_text_is_wanted(tmp_path, form):
    with pytest.raises(ValueError, match=f"data.text_key must be a key of every row.*set data.format={form}$"):
        opened(tmp_path, [ROWS[form]], format="text")
    with pytest.raises(ValueError, match=f"data.text_key must be a key of every row.*set data.format={form}$"):
        opened(tmp_path, [ROWS["text"], ROWS[form]])


def test_columns_with_values_decide(tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [{"text": None, "messages": TURNS}, {"text": None, "messages": TURNS}]
    path = tmp_path / "a.parquet"

    def forms(**row):
        pq.write_table(pa.Table.from_pylist([rows[0] | row, rows[1]]), path)
        return trained(opened(tmp_path, [], source=str(path)))

    assert forms() == ["A\n"] * 2
    with pytest.raises(ValueError, match=r"got text and chat .* in .*a.parquet row 1"):
        forms(text="a")
    pq.write_table(pa.table({"prompt": ["P"], "completion": ["C"]}), path)
    assert trained(opened(tmp_path, [], source=str(path))) == ["C"]
    pq.write_table(pa.table({"prompt": [TURNS[:1]], "completion": [TURNS[1:]]}), path)
    assert trained(opened(tmp_path, [], source=str(path))) == ["A\n"]
    pq.write_table(pa.table({"instruction": ["I"], "input": ["J"], "output": ["O"]}), path)
    assert trained(opened(tmp_path, [], source=str(path))) == ["O\n"]
    with pytest.raises(ValueError, match="data.text_key must be a column.*set data.format=alpaca$"):
        opened(tmp_path, [], source=str(path), format="text")


def test_each_source_has_its_own_form_and_keys(tmp_path):
    (tmp_path / "b.jsonl").write_text(json.dumps(ROWS["text"] | ROWS["chat"] | {"weight": 0.5}) + "\n")
    own = {str(tmp_path / "b.jsonl"): {"format": "chat", "ignore_keys": ["weight"]}}
    assert trained(opened(tmp_path, [], source=own)) == ["A\n"]
