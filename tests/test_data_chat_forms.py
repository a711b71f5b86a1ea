"""Every form of a message, in every shape of published templates: all words are there, and the answers are learned."""

import functools
import json

import pytest

from sppo_jax.config.data import ChatConfig
from sppo_jax.data.content.conversations import chat_of, without_nulls

pytest.importorskip("jinja2")
from chat_cases import SHAPES

from sppo_jax.data.chat.template import ChatTemplate

Q, A = {"role": "user", "content": "Q1"}, {"role": "assistant", "content": "RIGHT"}


def part(text, kind="text"):
    return {"type": kind, "text": text}


def called(*answer, **call):
    """Returns a conversation with a call, and its result in the form that is asked for."""
    return [Q, {"role": "assistant", "content": None} | call, *answer, A]


CALL = {"id": "call00000", "type": "function", "function": {"name": "get", "arguments": {"of": "X9"}}}
OLD_CALL = {"name": "get", "arguments": '{"of": "X9"}'}
RESULT = {"role": "tool", "tool_call_id": "call00000", "name": "get"}
RULES = [{"role": "system", "content": "RULES"}, Q, A]
TURNS = [{"from": "human", "value": "Q1"}, {"from": "gpt", "value": "RIGHT"}]
# Rows, and the same conversation in OpenAI's form of today, with texts.
FORMS = {
    "parts": ([{"role": "user", "content": [part("Q1")]}, {"role": "assistant", "content": [part("RIGHT")]}], [Q, A]),
    "parts of the question": ([{"role": "user", "content": [part("Q1")]}, A], [Q, A]),
    "parts of the answer": ([Q, {"role": "assistant", "content": [part("RIGHT")]}], [Q, A]),
    "parts of the system": ([{"role": "system", "content": [part("RULES")]}, Q, A], RULES),
    "two parts": ([{"role": "user", "content": [part("Q"), part("1")]}, A], [Q, A]),
    "one part": ([{"role": "user", "content": part("Q1")}, A], [Q, A]),
    "strings": ([{"role": "user", "content": ["Q", "1"]}, A], [Q, A]),
    "parts of responses": (
        [
            {"role": "user", "content": [part("Q1", "input_text")]},
            {"role": "assistant", "content": [part("RIGHT", "output_text")]},
        ],
        [Q, A],
    ),
    "parts of a result": (called(RESULT | {"content": [part("42")]}, tool_calls=[CALL]), "42"),
    "function_call": (called({"role": "function", "name": "get", "content": "42"}, function_call=OLD_CALL), "42"),
    "tool_calls": (called(RESULT | {"content": "42"}, tool_calls=[CALL]), "42"),
    "a result that is a number": (called(RESULT | {"content": 42}, tool_calls=[CALL]), "42"),
    "a result that is an object": (called(RESULT | {"content": {"k": "V7"}}, tool_calls=[CALL]), '{"k": "V7"}'),
    "a result that is a list": (called(RESULT | {"content": [{"k": 3}]}, tool_calls=[CALL]), '[{"k": 3}]'),
    "model": ([Q, A | {"role": "model"}], [Q, A]),
    "gpt": ([{"role": "human", "content": "Q1"}, A | {"role": "gpt"}], [Q, A]),
    "developer": ([{"role": "developer", "content": "RULES"}, Q, A], RULES),
    "observation": (called(RESULT | {"role": "observation", "content": "42"}, tool_calls=[CALL]), "42"),
    "tool_call": (
        [
            Q,
            {"role": "tool_call", "content": json.dumps(OLD_CALL)},
            RESULT | {"role": "tool_response", "content": "42"},
            A,
        ],
        "42",
    ),
    "ShareGPT": (TURNS, [Q, A]),
    "ShareGPT, function_call": (
        [TURNS[0], {"from": "function_call", "value": json.dumps(OLD_CALL)}, {"from": "observation", "value": "42"}]
        + TURNS[1:],
        "42",
    ),
    "ShareGPT, calls": (
        [TURNS[0], {"from": "function_call", "value": json.dumps([OLD_CALL])}, {"from": "observation", "value": "42"}]
        + TURNS[1:],
        "42",
    ),
}
# Roles that stay as they are where a template copies the names of roles.
COPIED = {"gpt": "human", "developer": "developer", "observation": "observation", "tool_call": "tool_response"}


@functools.cache
def template_of(shape):
    return ChatTemplate(SHAPES[shape], name="t.jinja", variables={})


def rendered(shape, messages):
    """Returns the text of a row, and what is learned of it."""
    key = "conversations" if "from" in messages[0] else "messages"
    found = template_of(shape).render(chat_of(without_nulls({key: messages}), ChatConfig(), "here"))
    return found.text, [found.text[first:last] for first, last in found.trained]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("form", FORMS)
def test_each_form_is_the_conversation_in_the_form_of_today(shape, form):
    row, same = FORMS[form]
    if isinstance(same, str):
        # Two templates write results as JSON, whatever they are.
        result = row[2].get("content") if shape in ("headers", "folds") else None
        same = called(RESULT | {"content": same if result is None else result}, tool_calls=[CALL])
    wanted, learned = rendered(shape, same)
    text, also = rendered(shape, row)
    if shape in ("chatml", "headers") and form in COPIED:
        begin = {"chatml": "<|im_start|>{}\n{}", "headers": "<|header|>{}<|end|>\n\n{}"}[shape]
        words = next(one["content"] for one in row if one["role"] == COPIED[form])
        assert begin.format(COPIED[form], words) in text and also == learned
    else:
        assert (text, also) == (wanted, learned)
    assert "RIGHT" in learned[-1] and all("Q1" not in piece for piece in learned)
    assert len(learned) == sum(message["role"] == "assistant" for message in same)
    if len(learned) == 2:
        assert "get" in learned[0] and "X9" in learned[0]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("message", "told"),
    [
        ({"content": [{"type": "image", "image": "a.png"}, part("Q1")]}, "got a part of type image in message 1"),
        ({"content": [part("Q1"), {"type": "image_url", "image_url": {"url": "x"}}]}, "of type image_url in message 1"),
        ({"content": [{"type": "input_audio", "input_audio": {}}]}, "of type input_audio in message 1"),
        ({"content": {"question": "Q1"}}, "must be text or a list of parts, got dict in message 1"),
        ({"content": [["Q1"]]}, "must be text or a list of parts, got list in message 1"),
    ],
)
def test_what_is_no_text_is_refused_in_a_line(shape, message, told):
    with pytest.raises(ValueError, match=told) as error:
        rendered(shape, [Q | message, A])
    assert "\n" not in str(error.value)


def test_a_template_that_takes_lists_gets_them():
    source = SHAPES["chatml"].replace(
        "{{- m.content }}", "{%- for part in m.content %}{{- '[' + part.text + ']' }}{% endfor %}"
    )
    messages = [{"role": role, "content": ["a", part("b", "input_text")]} for role in ("user", "assistant")]
    found = ChatTemplate(source, name="t", variables={}).render(chat_of({"messages": messages}, ChatConfig(), "here"))
    assert found.text == "<|im_start|>user\n[a][b]<|im_end|>\n<|im_start|>assistant\n[a][b]<|im_end|>\n"


@pytest.mark.parametrize("arguments", ["call.function.arguments | tojson", "call.function.arguments + ''"])
def test_a_template_that_writes_calls_in_place_of_no_text_gets_no_text(arguments):
    source = SHAPES["chatml"].replace("m.tool_calls or []", "([] if m.content is string else m.tool_calls) or []")
    source = source.replace("{{- m.content }}", "{{- m.content or '' }}")
    source = source.replace("call.function | tojson", "call.function.name + " + arguments)
    found = ChatTemplate(source, name="t", variables={}).render(
        chat_of({"messages": called(RESULT | {"content": "42"}, tool_calls=[CALL])}, ChatConfig(), "here")
    )
    assert '<|im_start|>assistant\n<call>get{"of": "X9"}</call><|im_end|>' in found.text


def test_a_template_that_knows_a_role_keeps_it():
    source = SHAPES["thinks"].replace("in ('user', 'system')", "in ('user', 'system', 'developer', 'human')")
    messages = [{"role": role, "content": role[:3].upper()} for role in ("developer", "human", "gpt")]
    found = ChatTemplate(source, name="t", variables={}).render(chat_of({"messages": messages}, ChatConfig(), "here"))
    assert "<|im_start|>developer\nDEV" in found.text and "<|im_start|>human\nHUM" in found.text
    assert "<|im_start|>assistant\nGPT" in found.text


def test_tools_of_the_first_form_are_tools():
    tool = {"name": "get", "description": "finds", "parameters": {"type": "object"}}
    found = chat_of({"messages": [Q, A], "functions": [tool]}, ChatConfig(), "here")
    assert found.tools == [{"type": "function", "function": tool}]


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ({"role": "function_call", "content": "get{}"}, "a call in message 1 of here must be JSON, got 'get{}'"),
        ({"role": "assistant", "function_call": OLD_CALL, "tool_calls": [CALL]}, "got two in message 1 of here"),
        ({"role": "assistant", "function_call": 3}, "a call of a tool must be an object"),
    ],
)
def test_wrong_calls_are_one_line(message, told):
    with pytest.raises(ValueError, match=told) as error:
        chat_of({"messages": [message]}, ChatConfig(), "here")
    assert "\n" not in str(error.value)
