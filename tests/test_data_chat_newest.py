"""Conversations that are too long: which turns are kept, by rule, by what is trained, and by what lies at the cut."""

import json
import warnings

import pytest

from sppo_jax.config import config_from_dict
from sppo_jax.data.open import open_data
from sppo_jax.train.checkpoints.run_dir import changes_since

pytest.importorskip("jinja2")
from chat_cases import CHATML, THINKS

from sppo_jax.data.chat.template import ChatTemplate
from sppo_jax.data.tokens.mask_bit import split_words

SYSTEM = {"role": "system", "content": "RULES"}
CALL = {"type": "function", "function": {"name": "get", "arguments": {"of": "X9"}}}


def asked(*numbers):
    """Returns questions and answers of a number each."""
    return [
        {"role": role, "content": f"{role[0].upper()}{number}" + "." * 20}
        for number in numbers
        for role in ("user", "assistant")
    ]


def with_tool(number):
    user, answer = asked(number)
    return [user, {"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "42"}, answer]


def text_of(messages):
    """Returns what ChatML makes of messages."""
    return "".join(
        f"<|im_start|>{one['role']}\n{one['content']}"
        + "".join(f"<call>{json.dumps(call['function'])}</call>" for call in one.get("tool_calls", []))
        + "<|im_end|>\n"
        for one in messages
    )


# What lies at the cut, the conversation, the messages that the newest turns and the leading turns are, and further ones
# for which a sequence has room, and for little more.
ANSWER, LONG = asked(1, 2, 3), {"role": "user", "content": "Q" * 300}
CUTS = {
    "an answer": (ANSWER, ANSWER[2:], ANSWER[:4], []),
    "a system message": ([SYSTEM, *ANSWER], [SYSTEM, *ANSWER[2:]], [SYSTEM, *ANSWER[:4]], []),
    "a tool's result": (
        [SYSTEM, *with_tool(1), *asked(2)],
        [SYSTEM, *asked(2)],
        [SYSTEM, *with_tool(1)[:2]],
        [],
    ),
    "a tool's result, with its call": (
        [SYSTEM, LONG, *with_tool(1)[1:], *asked(2)],
        [SYSTEM, *asked(2)],
        [],
        [SYSTEM, *with_tool(1)[1:], *asked(2)],
    ),
    "an answer that alone is too long": (
        [*asked(1), {"role": "user", "content": "Q"}, {"role": "assistant", "content": "A" * 400}],
        [],
        asked(1),
        [],
    ),
}
RULES = ("auto", "newest", "turns", "cut", "drop")


def settings(folder, messages, length=128, template=CHATML, **chat):
    (folder / "t.jinja").write_text(template)
    rows, path = messages if isinstance(messages[0], list) else [messages], folder / "chats.jsonl"
    text = "".join(json.dumps({"messages": row}) + "\n" for row in rows)
    if not path.exists() or path.read_text() != text:  # the cache looks at the time of a file
        path.write_text(text)
    data = {"source": str(path), "cache": str(folder / "cache"), "tokenizer": "bytes"}
    chat = {"template": str(folder / "t.jinja")} | chat
    return {
        "model": {"vocab_size": 257, "hidden_size": 8, "num_layers": 1, "num_heads": 1, "mlp_size": 8},
        "data": data | {"validation_fraction": 0, "chat": chat},
        "sequence": {"length": length},
        "train": {"steps": 1},
    }


def read(folder, messages, **more):
    """Returns texts, what is learned of each, and the counts."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        corpus = open_data(config_from_dict(settings(folder, messages, **more))).sources[0].training.corpus
    found = []
    for start, end in zip(corpus.starts, corpus.ends, strict=True):
        tokens, learned = split_words(corpus.read(start, end))
        pieces = bytes(token if keep else 0 for token, keep in zip(tokens.tolist(), learned, strict=True)).split(b"\0")
        found.append((bytes(tokens.tolist()).decode(), [piece.decode() for piece in pieces if piece]))
    return found, corpus.learned, [str(one.message) for one in told]


@pytest.mark.parametrize("train_on", ["assistant", "last", "all"])
@pytest.mark.parametrize("too_long", [*RULES, "refuse"])
@pytest.mark.parametrize("cut", CUTS)
def test_what_is_kept(tmp_path, cut, too_long, train_on):
    messages, newest, leading, room = CUTS[cut]
    short, whole = asked(9), text_of(messages)
    length = max(len(text_of(some)) for some in (newest, leading, room)) + 5
    rule = too_long if too_long != "auto" else "newest" if train_on == "last" else "turns"
    more = {"length": length, "too_long": too_long, "train_on": train_on}
    if rule == "refuse":
        with pytest.raises(
            ValueError, match=r"is refuse, got .*chats.jsonl line 1.*or choose newest, turns, cut or drop"
        ):
            read(tmp_path, [messages, short], **more)
        return
    found, counts, told = read(tmp_path, [messages, short], **more)
    kept = {"newest": text_of(newest), "turns": text_of(leading), "cut": whole, "drop": ""}[rule]
    if rule == "turns" and train_on == "last":
        kept = ""  # the last turn is what does not fit
    if rule == "turns" and train_on == "all":
        kept = whole_messages(messages, length)
    assert [text for text, _ in found] == [text for text in (kept, text_of(short)) if text]
    assert (counts.read, counts.too_long, counts.dropped) == (2, 1, int(not kept))
    assert counts.cut == int(bool(kept) and kept != whole)
    assert counts.tokens == len(whole) + len(text_of(short))
    assert counts.kept_tokens == sum(len(text) for text, _ in found)
    if kept and train_on != "all":
        answers = [one for one in messages if one["role"] == "assistant"]
        answers = answers[-1:] if train_on == "last" else answers
        written = [text_of([one]).removeprefix("<|im_start|>assistant\n") for one in answers]
        assert found[0][1] == [piece for piece in written if piece in kept]
    advice = {"turns": "set data.chat.too_long=newest", "newest": "leave out the rows whose last turns are too long"}
    if not kept:
        assert any(advice.get(rule, "set data.chat.too_long=newest or turns") in line for line in told)


def whole_messages(messages, length):
    ends = [len(text_of(messages[:count])) for count in range(len(messages) + 1)]
    return text_of(messages)[: max(end for end in ends if end <= length)]


def test_as_many_turns_are_kept_as_fit_and_few_are_rendered(tmp_path, monkeypatch):
    messages = [SYSTEM, *asked(*range(10, 60))]
    render, num_renders = ChatTemplate.render, []

    def counted(self, chat):
        num_renders.append(len(chat.messages))
        return render(self, chat)

    monkeypatch.setattr(ChatTemplate, "render", counted)
    for length in (150, 400, 2000, 3000):
        ((text, _),), _, _ = read(tmp_path, messages, length=length, too_long="newest")
        fitting = [text_of([SYSTEM, *messages[first:]]) for first in range(3, len(messages), 2)]
        assert text == next(one for one in fitting if len(one) <= length)
        assert len(num_renders) <= 3
        num_renders.clear()


@pytest.mark.parametrize("change", ["shorter", "longer"])
def test_as_many_turns_are_kept_as_fit_where_templates_count_turns(tmp_path, change):
    """A template may write more, or less, of later turns than of the first."""
    mark = {"shorter": "'x' * loop.index", "longer": "'x' * (40 - loop.index)"}[change]
    template, messages = CHATML.replace("{{- m.content }}", "{{- m.content + " + mark + " }}"), asked(*range(10, 20))
    found = {}
    for first in range(2, len(messages), 2):
        ((text, _),), _, _ = read(tmp_path, messages[first:], length=9999, template=template)
        found[first] = text
    for first, text in found.items():
        ((newest, _),), _, _ = read(tmp_path, messages, length=len(text), too_long="newest", template=template)
        assert newest == text, first


def test_the_newest_turns_are_rendered_as_a_conversation_of_their_own(tmp_path):
    messages = [SYSTEM, *asked(1, 2, 3)]
    for message in messages[2::2]:
        message["reasoning_content"] = "thought"
    ((alone, _),), _, _ = read(tmp_path, [SYSTEM, *messages[3:]], length=999, template=THINKS)
    ((text, _),), _, _ = read(tmp_path, messages, length=len(alone) + 9, too_long="newest", template=THINKS)
    assert text == alone and text.count("thought") == 1


def test_auto_is_in_the_cache_what_it_stands_for(tmp_path):
    for train_on, rule in (("assistant", "turns"), ("last", "newest"), ("all", "turns")):
        for too_long in ("auto", rule):
            read(tmp_path, ANSWER, train_on=train_on, too_long=too_long)
    assert len([entry for entry in (tmp_path / "cache").iterdir() if entry.is_dir()]) == 3


def test_a_run_that_began_with_turns_goes_on_by_default(tmp_path):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    given = settings(tmp_path, ANSWER)
    (tmp_path / "run" / "config.yaml").write_text(json.dumps(settings(tmp_path, ANSWER, too_long="turns")))
    assert changes_since(tmp_path / "run", config_from_dict(given)) == []
    given["data"]["chat"]["train_on"] = "last"
    (tmp_path / "run" / "config.yaml").write_text(
        json.dumps(settings(tmp_path, ANSWER, too_long="turns", train_on="last"))
    )
    with pytest.raises(
        ValueError, match="data.chat.too_long must stay turns.*got newest; set data.chat.too_long=turns"
    ):
        changes_since(tmp_path / "run", config_from_dict(given))


# Of a run that began when the default was `turns`, and the format of the cache was 3.
CHAT_OF_BEFORE = (
    '"date": null, "format": 3, "messages_key": "messages", "template": TEMPLATE, "too_long": "turns", '
    '"tools_key": "tools", "train_on": "assistant", "values": {}, "variables": {}'
)


def test_what_was_read_rightly_has_the_fingerprint_of_before(tmp_path):
    data = open_data(config_from_dict(settings(tmp_path, [[SYSTEM, *with_tool(1)]] * 3, length=512)))
    assert data.fingerprint == "d4566a0645fcadd6"
    digest = data.sources[0].training.corpus.digest
    assert digest == "1551479148 {" + CHAT_OF_BEFORE.replace("TEMPLATE", json.dumps(CHATML)) + "}"
