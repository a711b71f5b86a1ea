"""The check of a text's words: what templates do rightly passes, and what they leave out is refused or counted."""

import functools
import json

import pytest

pytest.importorskip("jinja2")
from chat_cases import FOR, LEAVES_OUT, SHAPES, TEMPLATES, without_words

from sppo_jax.data.chat.roles import Chat
from sppo_jax.data.chat.template import ChatTemplate

Q, A = {"role": "user", "content": "Q1"}, {"role": "assistant", "content": "RIGHT"}


@functools.cache
def template_of(source):
    return ChatTemplate(source, name="t.jinja", variables={})


def render(source, messages):
    return template_of(source).render(Chat(messages=messages))


def calling(arguments, name="get", content=""):
    call = {"type": "function", "id": "call00000", "function": {"name": name, "arguments": arguments}}
    return [Q, {"role": "assistant", "content": content, "tool_calls": [call]}]


VALUES = {
    "text": 'an "apple"\n pie: {dish}',
    "accent": "e\u0301t\u00e9 \U0001f600",
    "yes": True,
    "number": 1.5,
    "list": [31, {"k": "violet"}],
}
# Ways in which templates write the arguments of a call.
WRITTEN = {
    "JSON": "{{ args | tojson }}",
    "JSON in ASCII": "{{ args | tojson(ensure_ascii=True, indent=2) }}",
    "sorted": "{{ args | tojson(sort_keys=True) }}",
    "Python": "{{ args }}",
    "tags": "{% for key, value in args.items() %}<{{ key }}>{{ value if value is string else value | tojson }}"
    "{% endfor %}",
    "lines": "{% for key, value in args | dictsort %}\n  {{ key }}: {{ value }}{% endfor %}",
}


@pytest.mark.parametrize("way", WRITTEN)
@pytest.mark.parametrize("order", ["name first", "arguments first"])
def test_a_call_counts_by_its_name_and_values(way, order):
    write = ["{{ call.function.name }}", "{%- set args = call.function.arguments %}" + WRITTEN[way]]
    write = "|".join(write if order == "name first" else write[::-1])
    source = SHAPES["chatml"].replace("{{- call.function | tojson }}", write)
    assert render(source, calling(VALUES)).lost_thoughts == ()
    for name in VALUES:
        if way == "JSON":
            told = r"got .* in the call of 'get' left out of message 2 \(role assistant\); name a template"
            without = source.replace("args | tojson", f"dict(args, {name}=0) | tojson")
            with pytest.raises(ValueError, match=told):
                render(without, calling(VALUES))


@pytest.mark.parametrize("construct", LEAVES_OUT)
def test_a_message_that_a_construct_leaves_out_is_refused(construct):
    """Without these messages the constructs pass: their ids and masks are compared with transformers' elsewhere."""
    messages = [{"role": "system", "content": "RULES"}, *[Q, A] * 3]
    with pytest.raises(ValueError, match=r"left out of message [16] "):
        render(TEMPLATES[construct], messages)
    assert render(TEMPLATES[construct], without_words(messages, construct)).trained


NO_TOOL, NO_USER = ("'' if m.role == '" + role + "' else m.content" for role in ("tool", "user"))
NO_TEXT, FAR = "m.content if m.role == 'user'", "kind" + " and" * 100 + " words"
LONG = A | {"content": "right but long"}


@pytest.mark.parametrize(
    ("change", "messages", "told"),
    [
        (("m.content", "m.content[:9]"), [Q, LONG], "the text 'right but long' left out of message 2"),
        (("m.content", NO_TOOL), [*calling({}), A | {"role": "tool"}, A], "the text 'RIGHT' left out of message 3"),
        (
            ("m.tool_calls or []", "[]"),
            [*calling({"of": "a longer value"}), A],
            "the call of 'get' left out of message 2",
        ),
        (
            ("m.content", NO_TEXT),
            calling({"of": FAR}, content="kind words"),
            "the text 'kind words' left out of message 2",
        ),
        (("m.tool_calls or []", "[]"), [*calling({}, "start"), A], "the call of 'start' left out of message 2"),
        (("m.content", NO_USER), [Q | {"content": "user"}, A], "the text 'user' left out of message 1"),
        (("m.content", NO_USER), [Q | {"content": "s"}, A], "the text 's' left out of message 1"),
        (("messages %}", "messages[1:] %}"), [Q, A], "the text 'Q1' left out of message 1"),
        (("messages %}", "messages[1:] %}"), [A | {"role": "user"}, A], "the text 'RIGHT' left out of message 1"),
    ],
)
def test_missing_words_are_refused_in_a_line(change, messages, told):
    with pytest.raises(ValueError, match=f"t.jinja must write the words of every message, got {told}") as error:
        render(SHAPES["chatml"].replace(*change), messages)
    assert "\n" not in str(error.value) and "data.chat.template" in str(error.value)


def test_what_is_known_of_a_template_saves_renderings_and_hides_nothing(monkeypatch):
    template = ChatTemplate(
        SHAPES["chatml"].replace("m.content", "m.content if loop.index < 4"), name="t", variables={}
    )
    render, num_renders = template._text, []
    monkeypatch.setattr(template, "_text", lambda *args, **more: num_renders.append(1) or render(*args, **more))
    for first in (True, False):
        num_renders.clear()
        for words in ("ok", "user", "s"):
            template.render(Chat(messages=[Q | {"content": words}, A, Q | {"content": f" {words}"}]))
        assert (len(num_renders) > 6) == first
    with pytest.raises(ValueError, match="the text 'ok' left out of message 5"):
        template.render(Chat(messages=[Q, A, Q, A | {"content": ""}, Q | {"content": "ok"}]))


def test_the_text_beside_a_call_is_looked_for_too():
    messages = [*calling({"of": "X9"}, content="let me look"), A]
    assert "let me look" in render(SHAPES["chatml"], messages).text
    for shape in ("folds", "headers"):
        with pytest.raises(ValueError, match="the text 'let me look' left out of message 2"):
            render(SHAPES[shape], messages)


@pytest.mark.parametrize("content", ["ok", "kind words, and more than a few"])
def test_a_system_message_may_be_written_elsewhere(content):
    messages = [{"role": "system", "content": content}, Q, A]
    for shape in SHAPES:
        assert content in render(SHAPES[shape], messages).text
    last = SHAPES["folds"].replace("loop.first", "loop.index0 == messages | length - 2")
    text = render(last, [*messages, Q | {"content": "Q2"}, A]).text
    assert text.index("Q1") < text.index(content) < text.index("Q2")
    without = SHAPES["folds"].replace("(system if loop.first else '')", "''")
    with pytest.raises(ValueError, match="left out of message 1 .role system"):
        render(without, messages)


def test_words_of_another_message_do_not_count():
    source = FOR + "{%- if message.role != 'critic' %}" + SHAPES["chatml"].replace("m.", "message.").split("%}", 1)[1]
    source = source.replace("{% endfor %}{%- if add", "{%- endif %}{% endfor %}{%- if add")
    twice = {"role": "critic", "content": "a text that the user says too, word by word"}
    with pytest.raises(ValueError, match="'a text that the user says too, word by w...' left out of message 2"):
        render(source, [twice | {"role": "user"}, twice, A])


THOUGHT = [Q, A | {"content": "A1"}, Q | {"content": "Q2"}, A | {"content": "A2"}]


def thinking(way):
    """Returns a conversation whose answers have thoughts in a form."""
    messages = json.loads(json.dumps(THOUGHT))
    for message, thought in ((messages[1], "T1"), (messages[3], "T2")):
        if way == "tags":
            message["content"] = f"<think>\n{thought}\n</think>\n\n{message['content']}"
        elif way == "parts":
            kinds = [{"type": "thinking", "thinking": thought}, {"type": "text", "text": message["content"]}]
            message["content"] = kinds
        else:
            message[way] = thought
    return messages


@pytest.mark.parametrize("way", ["tags", "parts", "reasoning_content", "thinking", "reasoning"])
def test_thoughts_of_earlier_turns_are_left_out_and_said(way):
    rendered = render(SHAPES["thinks"], thinking(way))
    assert rendered.lost_thoughts == (1,) and "T2" in rendered.text and "T1" not in rendered.text
    assert render(SHAPES["chatml"], thinking(way)).lost_thoughts == (() if way == "tags" else (1, 3))
    assert render(SHAPES["thinks"], thinking(way)[:2]).lost_thoughts == ()


def test_a_thought_that_the_answer_repeats_is_left_out():
    messages = [Q, A | {"reasoning_content": "RIGHT"}]
    assert render(SHAPES["chatml"], messages).lost_thoughts == (1,)
    assert render(SHAPES["thinks"], messages).lost_thoughts == ()


def test_text_between_two_thoughts_is_text():
    with pytest.raises(ValueError, match="the text 'first' left out of message 2"):
        render(SHAPES["thinks"], [Q, A | {"content": "<think>a</think>first<think>b</think>second"}])
