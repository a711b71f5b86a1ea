"""Prompts and completions in messages, and Alpaca's instructions, are conversations."""

import pytest

from sppo_jax.config.data import DataConfig
from sppo_jax.data.content.other_conversations import with_messages

pytest.importorskip("jinja2")
from row_cases import opened, trained

USER, ASSISTANT = {"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}


def messages(row, **settings):
    return with_messages(row, DataConfig(**settings), "a.jsonl line 3")["messages"]


def test_of_a_prompt_in_messages_the_completion_alone_is_trained(tmp_path):
    earlier = {"role": "assistant", "content": "B"}
    row = {"prompt": [USER, earlier, USER], "completion": [ASSISTANT, USER, ASSISTANT]}
    assert [message.get("train", True) for message in messages(row)] == [False] * 3 + [True] * 3
    assert trained(opened(tmp_path, [row])) == ["A\nA\n"]
    assert trained(opened(tmp_path, [row], train_on="last")) == ["A\n"]
    assert trained(opened(tmp_path, [row], train_on="all")) == ["<assistant>A\n<user>Q\n<assistant>A\n"]
    excluded = row | {"completion": [ASSISTANT | {"weight": 0}, USER, ASSISTANT]}
    assert trained(opened(tmp_path, [excluded])) == ["A\n"]
    # What is ignored is what messages say, not that the prompt is given.
    assert trained(opened(tmp_path, [row], ignore_keys=["train"])) == ["A\nA\n"]


@pytest.mark.parametrize(
    ("row", "asked"),
    [
        ({"instruction": "I", "input": "J", "output": "O"}, "I\n\nJ"),
        ({"instruction": "I", "input": "", "output": "O"}, "I"),
        ({"instruction": "I", "output": "O"}, "I"),
        ({"instruction": "", "input": "J", "output": "O"}, "J"),
    ],
)
def test_an_instruction_is_a_turn_of_the_user(tmp_path, row, asked):
    wanted = [{"role": "user", "content": asked}, {"role": "assistant", "content": "O"}]
    assert messages(row) == wanted
    assert messages(row | {"system": "S"}) == [{"role": "system", "content": "S"}, *wanted]
    assert messages(row | {"system": "", "history": []}) == wanted
    before = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert messages(row | {"history": [["a", "b"]]}) == [*before, *wanted]
    assert trained(opened(tmp_path, [row | {"history": [["a", "b"]]}])) == ["b\nO\n"]
    assert trained(opened(tmp_path, [row | {"history": [["a", "b"]]}], train_on="last")) == ["O\n"]
    assert opened(tmp_path, [row]).sources[0].training.corpus.digest != ""


def test_without_a_template_instructions_are_refused(tmp_path):
    with pytest.raises(ValueError, match="data.chat.template must be a path"):
        opened(tmp_path, [{"instruction": "I", "output": "O"}], chat={})


@pytest.mark.parametrize(
    ("row", "told"),
    [
        (
            {"instruction": 3, "output": "O"},
            "instruction must be text where instruction is given, got a value of type int",
        ),
        ({"instruction": "I", "output": ["O"]}, "output must be text where instruction is given"),
        ({"instruction": "I", "output": "O", "input": 3}, "input must be text"),
        ({"instruction": "I", "output": "O", "history": [["a"]]}, "history must be a list of pairs of texts"),
        ({"instruction": "I", "output": "O", "history": "a"}, "history must be a list of pairs of texts"),
        ({"prompt": [USER], "completion": "A"}, "must both be lists of messages in each row"),
        ({"prompt": ["Q"], "completion": [ASSISTANT]}, "must both be lists of messages in each row"),
    ],
)
def test_wrong_rows_are_one_line(row, told):
    with pytest.raises(ValueError, match=told) as error:
        messages(row)
    assert "\n" not in str(error.value) and "a.jsonl line 3" in str(error.value)


def test_what_the_format_asks_for_must_be_there():
    with pytest.raises(ValueError, match="instruction must be text where instruction is given, got none"):
        messages({"messages": [USER, ASSISTANT]}, format="alpaca")
    with pytest.raises(ValueError, match="lists of messages in each row .* got none for prompt"):
        messages({"messages": [USER, ASSISTANT]}, format="prompt")


def test_rows_say_it_for_each_message(tmp_path):
    row = {"messages": [USER, ASSISTANT, USER, {"role": "assistant", "content": "R"}], "loss_mask": [0, 0, 0, 1]}
    assert trained(opened(tmp_path, [row])) == ["R\n"]
    shared = {"conversations": [{"from": m["role"], "value": m["content"]} for m in row["messages"]], "mask": "User"}
    assert trained(opened(tmp_path, [shared])) == ["A\nR\n"]
    assert trained(opened(tmp_path, [shared | {"loss_mask": [0, 0, 0, 1]}])) == ["R\n"]
    assert trained(opened(tmp_path, [row], ignore_keys=["loss_mask"])) == ["A\nR\n"]
    assert with_messages(row | {"weight": 0}, DataConfig(), "x") is None
