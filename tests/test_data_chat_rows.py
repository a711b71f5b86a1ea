"""Rows as people write them become the same conversations: OpenAI's and ShareGPT's, JSON and Parquet, with nulls."""

import json

import pytest

from sppo_jax.config.data import ChatConfig
from sppo_jax.data.content.conversations import chat_of, rows_of, without_nulls

pytest.importorskip("jinja2")
from chat_cases import PLAIN

from sppo_jax.data.chat.roles import Chat
from sppo_jax.data.chat.template import ChatTemplate

CALL = {"type": "function", "function": {"name": "f", "arguments": {"a": 1, "b": [2]}}}
TOOLS = [{"type": "function", "function": {"name": "f", "description": "finds", "parameters": {"type": "object"}}}]
MESSAGES = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": "cat"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "3"},
    {"role": "assistant", "content": "tree"},
]


def chat(row, **settings):
    return chat_of(without_nulls(row), ChatConfig(**settings), "here")


def test_sharegpt_is_the_same_conversation():
    turns = [("human", "cat"), ("gpt", "tree"), ("human", "dog"), ("gpt", "leaf"), ("observation", "3")]
    row = {"system": "be kind", "conversations": [{"from": one, "value": text} for one, text in turns]}
    roles = ["system", "user", "assistant", "user", "assistant", "tool"]
    assert [message["role"] for message in chat(row).messages] == roles
    assert [message["content"] for message in chat(row).messages] == ["be kind", "cat", "tree", "dog", "leaf", "3"]
    named = {"role": "system", "content": "given"}
    assert chat({"conversations": [named], "system": "x"}).messages == [named]


def test_arguments_may_be_text_an_object_or_missing():
    def with_arguments(**arguments):
        call = {"type": "function", "function": {"name": "f"} | arguments}
        return chat({"messages": [MESSAGES[1], {"role": "assistant", "content": None, "tool_calls": [call]}]})

    wanted = with_arguments(arguments={"a": 1, "b": [2]})
    assert wanted.messages[1]["tool_calls"] == [CALL]
    assert with_arguments(arguments='{"a": 1, "b": [2]}') == wanted
    assert with_arguments(arguments="").messages[1]["tool_calls"][0]["function"]["arguments"] == {}
    flat = {"messages": [MESSAGES[1], {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{}"}]}]}
    assert chat(flat).messages[1]["tool_calls"] == [{"name": "f", "arguments": {}}]


@pytest.mark.parametrize("arguments", ["object", "text"])
def test_a_template_gets_arguments_as_it_takes_them(arguments):
    write = {"object": "{{ c.arguments.b[0] }}", "text": "{{ c.arguments + '' }}"}[arguments]
    source = (
        "{%- for message in messages %}{{ message.role }}:{{ message.content }}"
        "{%- for call in message.tool_calls or [] %}{%- set c = call.function %}{{ c.name }}<"
        + write
        + ">{% endfor %}\n"
        "{%- endfor %}{%- if add_generation_prompt %}assistant:{% endif %}"
    )
    if arguments == "object":
        source = source.replace("<{{", "{{- raise_exception('text') if c.arguments is string }}<{{").replace(
            "c.arguments.b[0]", "c.arguments | tojson"
        )
    for given in ({"a": 1, "b": [2]}, '{"a": 1, "b": [2]}'):
        call = {"type": "function", "function": {"name": "f", "arguments": given}}
        row = {"messages": [*MESSAGES[:2], {"role": "assistant", "content": "", "tool_calls": [call]}]}
        rendered = ChatTemplate(source, name="t", variables={}).render(chat(row))
        assert 'f<{"a": 1, "b": [2]}>' in rendered.text
        assert [rendered.text[first:last] for first, last in rendered.trained] == ['f<{"a": 1, "b": [2]}>']


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet"])
def test_files_of_every_kind_give_the_same_conversations_without_nulls(tmp_path, suffix):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    rows = [{"messages": MESSAGES, "tools": TOOLS}, {"messages": MESSAGES[:2] + MESSAGES[4:]}]
    path = tmp_path / f"a{suffix}"
    if suffix == ".parquet":
        # A column has one type, so that every message gets every key, and each key that is missing is null.
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        text = "\n".join(json.dumps(row | {"other": None}) for row in rows).encode()
        with pa.output_stream(str(path)) as file:
            file.write(text)
    found = list(rows_of(path))
    place = "row" if suffix == ".parquet" else "line"
    assert [where for where, _ in found] == [f"{path} {place} 1", f"{path} {place} 2"]
    chats = [chat_of(row, ChatConfig(), where) for where, row in found]
    assert chats == [Chat(messages=row["messages"], tools=row.get("tools")) for row in rows]


def test_keys_and_values_are_settings():
    row = {"turns": MESSAGES, "functions": json.dumps(TOOLS), "messages": "no"}
    found = chat(row, messages_key="turns", tools_key="functions")
    assert found == Chat(messages=MESSAGES, tools=TOOLS)
    source = PLAIN.replace("{%- for", "{%- if loud %}{{- 'LOUD ' + mood }}{% endif %}{%- for", 1)
    for values, begin in (({"loud": True, "mood": "x"}, "LOUD x<|im"), ({"loud": False}, "<|im"), ({}, "<|im")):
        assert ChatTemplate(source, name="t", variables=values).render(found).text.startswith(begin)


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"text": "a"}, "must name a list of messages, got keys text in here"),
        ({"messages": "a"}, "must name a list of messages"),
        ({"messages": MESSAGES, "tools": "[1"}, "tools in here must be JSON, got '\\[1'"),
        ({"messages": MESSAGES, "tools": "1"}, "data.chat.tools_key must name a list of tools, got int in here"),
        ({"messages": [{"role": "assistant", "tool_calls": "f"}]}, "tool_calls must be a list"),
        (
            {"messages": [{"role": "assistant", "tool_calls": ["f"]}]},
            "a call of a tool must be an object, got 'f' in me",
        ),
    ],
)
def test_wrong_rows_are_one_line(row, told):
    with pytest.raises(ValueError, match=told) as error:
        chat(row)
    assert "\n" not in str(error.value)
