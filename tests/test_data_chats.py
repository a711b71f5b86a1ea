"""Conversations in files: the mask goes through packing, and bad input is one line."""

import json
import random

import numpy as np
import pytest

from sppo_jax.config import config_from_dict
from sppo_jax.data.open import open_data

pytest.importorskip("jinja2")
from chat_cases import FOR, PLAIN, draw, make_tokenizer
from flex_cases import make_shape

from sppo_jax.data.cache.store import Writer
from sppo_jax.data.chat.roles import Chat
from sppo_jax.data.chat.template import ChatTemplate
from sppo_jax.data.loader import Loader
from sppo_jax.data.rows.flex import FlexRows
from sppo_jax.data.tokens.mask_bit import split_words


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    return make_tokenizer(folder), folder


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("{{ raise_exception('no tools here') }}", "no tools here"),
        ("{{ strftime_now('%Y') }}", "data.chat.date must be given"),
        ("{{ messages.__class__.__mro__ }}", "SecurityError"),
        ("{{ messages[0].content }}{{ messages[1].content }}", "in a loop over messages"),
        (FOR + "{{ dict(message).content }}{% endfor %}{% if %}", "that jinja2 can read"),
    ],
)
def test_what_a_template_cannot_do_is_one_line(source, told):
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    with pytest.raises(ValueError, match=told) as error:
        ChatTemplate(source, name="t", variables={}).render(Chat(messages=messages))
    assert "\n" not in str(error.value)


def settings(folder, source, length=256, **data):
    return config_from_dict(
        {
            "model": {
                "vocab_size": 512,
                "hidden_size": 8,
                "num_layers": 1,
                "num_heads": 1,
                "mlp_size": 8,
            },
            "data": {
                "source": source if isinstance(source, dict) else str(source),
                "tokenizer": str(folder),
                "validation_fraction": 0,
            }
            | data,
            "sequence": {"length": length},
            "train": {"steps": 1},
        }
    )


def documents(data):
    """Returns tokens and what is learned of each document to train on."""
    corpus = data.sources[0].training.corpus
    return [split_words(corpus.read(start, end)) for start, end in zip(corpus.starts, corpus.ends, strict=True)]


def wanted_of(tokenizer, path, source=PLAIN):
    """Returns transformers' tokens and masks of a file."""
    found = [
        tokenizer.apply_chat_template(
            json.loads(line)["messages"], chat_template=source, return_assistant_tokens_mask=True, return_dict=True
        )
        for line in path.read_text().splitlines()
    ]
    return [(one["input_ids"], np.array(one["assistant_masks"]) == 1) for one in found]


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def chats(tokenizer, tmp_path):
    _, folder = tokenizer
    (tmp_path / "t.jinja").write_text(PLAIN)
    rng = random.Random(0)
    path = write_rows(tmp_path / "chats.jsonl", [{"messages": draw(rng)} for _ in range(40)])
    return folder, path, {"cache": str(tmp_path / "cache"), "chat": {"template": str(tmp_path / "t.jinja")}}


@pytest.mark.parametrize("pack", ["whole", "stream", "none"])
@pytest.mark.parametrize("too_long", ["cut", "turns"])
def test_targets_of_an_epoch_are_the_trained_tokens(chats, tokenizer, pack, too_long):
    folder, path, more = chats
    length = 128 if too_long == "cut" else 4096
    data = open_data(
        settings(folder, path, length, pack=pack, **more | {"chat": more["chat"] | {"too_long": too_long}})
    )
    rows = [data.training[index] for index in range(len(data.training))]
    targets = np.concatenate([row["targets"] for row in rows])
    wanted = sum(int(mask[1:].sum()) for _, mask in wanted_of(tokenizer[0], path))
    assert (targets >= 0).sum() == wanted > 500
    assert data.sources[0].training.corpus.learned.trained_tokens == wanted
    assert all(0 <= row["tokens"].min() and row["tokens"].max() < 512 for row in rows)


def kept_of(mask, length, too_long):
    """Returns how many tokens of a conversation are kept."""
    if len(mask) <= length or too_long == "cut":
        return len(mask)
    ends = np.flatnonzero(mask & ~np.append(mask[1:], False)) + 1
    return int(ends[ends <= length].max(initial=0)) if too_long == "turns" else 0


@pytest.mark.parametrize("too_long", ["turns", "cut", "drop"])
def test_what_is_too_long_is_cut_or_dropped_and_counted(chats, tokenizer, too_long):
    folder, path, more = chats
    config = settings(folder, path, 100, **more | {"chat": more["chat"] | {"too_long": too_long}})
    wanted = wanted_of(tokenizer[0], path)
    kept = [kept_of(mask, 100, too_long) for _, mask in wanted]
    if too_long == "cut":
        data = open_data(config)
    else:
        with pytest.warns(UserWarning, match=rf"got {kept.count(0)} of 40 without, which are left out"):
            data = open_data(config)
    left = [(ids[:size], mask[:size]) for (ids, mask), size in zip(wanted, kept, strict=True) if size]
    found = documents(data)
    assert [(tokens.tolist(), mask.tolist()) for tokens, mask in found] == [(ids, mask.tolist()) for ids, mask in left]
    counts = data.sources[0].training.corpus.learned
    sizes = [len(ids) for ids, _ in wanted]
    assert (counts.read, counts.too_long) == (40, sum(size > 100 for size in sizes))
    assert counts.dropped == kept.count(0) and (counts.dropped > 0) == (too_long != "cut")
    assert counts.cut == sum(0 < one < size for one, size in zip(kept, sizes, strict=True))
    assert (counts.cut > 0) == (too_long == "turns")
    assert counts.kept_tokens == sum(kept) and counts.tokens == sum(sizes)
    assert counts.dropped_tokens == sum(size for one, size in zip(kept, sizes, strict=True) if not one)


def test_what_is_too_long_is_refused(chats):
    folder, path, more = chats
    with pytest.raises(
        ValueError, match=r"where data.chat.too_long is refuse, got \d+ tokens in .*chats.jsonl line 1 "
    ):
        open_data(settings(folder, path, 20, **more | {"chat": more["chat"] | {"too_long": "refuse"}}))


def test_other_settings_of_chats_are_another_fingerprint(chats):
    folder, path, more = chats
    found = {
        open_data(
            settings(folder, path, **more | {"chat": more["chat"] | {"too_long": "cut", "train_on": train_on}})
        ).fingerprint
        for train_on in ("assistant", "last", "all")
    }
    assert len(found) == 3


USER = {"role": "user", "content": "cat"}
ANSWER = {"role": "assistant", "content": "tree"}


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ([[USER, {"role": "judge", "content": "a"}, ANSWER]], r"line 1: the template \S*t.jinja must .*no role judge"),
        ([[USER, ANSWER], []], "got no messages in .*chats.jsonl line 2; correct the row"),
        (
            [[USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{x"}}]}]],
            "line 1 must be",
        ),
        ([[USER, "text"]], "a message must be an object, got str in message 2 of .*line 1; correct the row"),
        ([[USER, {"content": "a"}]], "a message must have a role, got keys content in message 2 of .*line 1"),
        ([[USER]], "must hold conversations with something to learn, got 1 without"),
        ([[USER, ANSWER | {"train": False}]], "must hold conversations with something to learn, got 1 without"),
    ],
)
def test_wrong_conversations_are_one_line_each_time(chats, tmp_path, rows, told):
    folder, path, more = chats
    template = (
        FOR + "{%- if message.role == 'judge' %}{{- raise_exception('no role judge') }}{% endif %}" + PLAIN[len(FOR) :]
    )
    (tmp_path / "t.jinja").write_text(template)
    write_rows(path, [{"messages": row} for row in rows])
    for _ in range(2):
        with pytest.raises(ValueError, match=told) as error:
            open_data(settings(folder, path, **more))
        assert "\n" not in str(error.value)
    assert not [entry for entry in (tmp_path / "cache").glob("*") if entry.is_dir()]


def test_a_mask_of_all_zeros_is_refused(chats, tmp_path):
    folder, path, more = chats
    write_rows(path, [{"messages": [USER, ANSWER]}] * 40)
    (tmp_path / "t.jinja").write_text(PLAIN.replace("== 'assistant' %}{% gen", "== 'nobody' %}{% gen"))
    with pytest.raises(ValueError, match=r"got 40 without, .*correct the \{% generation %\} regions of"):
        open_data(settings(folder, path, **more))


def test_conversations_without_a_trained_token_are_left_out_and_said(chats):
    folder, path, more = chats
    write_rows(path, [{"messages": [USER, ANSWER]}] * 9 + [{"messages": [USER]}])
    with pytest.warns(UserWarning, match="got 1 of 10 without, which are left out"):
        data = open_data(settings(folder, path, **more))
    assert len(documents(data)) == 9 and data.sources[0].training.corpus.learned.dropped == 1


def test_tokenizing_that_is_killed_begins_anew(chats, tmp_path, monkeypatch):
    folder, path, more = chats
    whole = open_data(settings(folder, path, **more | {"cache": str(tmp_path / "other")}))
    add, seen = Writer.add_ends, []

    def killed(self, ends):
        seen.append(len(ends))
        if len(seen) == 17:
            raise KeyboardInterrupt
        add(self, ends)

    monkeypatch.setattr(Writer, "add_ends", killed)
    with pytest.raises(KeyboardInterrupt):
        open_data(settings(folder, path, **more))
    monkeypatch.setattr(Writer, "add_ends", add)
    again = open_data(settings(folder, path, **more))
    assert again.fingerprint == whole.fingerprint
    assert all(
        np.array_equal(a, b)
        for one, two in zip(documents(whole), documents(again), strict=True)
        for a, b in zip(one, two, strict=True)
    )


@pytest.mark.parametrize("processes", [1, 2])
def test_a_mixture_goes_on_in_the_middle_of_an_epoch_with_any_processes(chats, tmp_path, processes):
    folder, path, more = chats
    (tmp_path / "words.txt").write_text("river stone tree " * 500)
    mixed = {str(path): {"weight": 2, "format": "chat", "min_tokens": 300}, str(tmp_path / "words.txt"): 1.0}
    with pytest.warns(UserWarning, match="do not have at least 300 tokens"):
        data = open_data(settings(folder, mixed, 128, **more | {"chat": more["chat"] | {"too_long": "cut"}}))
    straight = [data.training[index] for index in range(3 * len(data.training))]
    found, at = [], 0
    while at < len(straight):
        stop = at + 6
        batches = []
        for process in range(processes):
            own = range(process * 2 // processes, (process + 1) * 2 // processes)
            loader = Loader(
                data.training, num_sequences=2, local_rows=own, sequence=at, num_threads=0, num_batches_ahead=0
            )
            batches.append([next(loader) for _ in range(3)])
        for parts in zip(*batches, strict=True):
            found += [{key: part[key][row] for key in part} for part in parts for row in range(len(part["tokens"]))]
        at = stop
    for one, two in zip(straight, found, strict=False):
        assert all(np.array_equal(one[key], two[key]) for key in one)


def test_flexible_groups_move_the_mask_with_the_token(chats):
    folder, path, more = chats
    data = open_data(settings(folder, path, 64, **more | {"chat": more["chat"] | {"too_long": "cut"}}))
    rows = FlexRows(data.training, window=4, shape=make_shape(4, (32, 32), ring=4, hidden=1), per_step=4)
    moved = False
    for window in range(len(data.training) // 4):
        before, after = ([source[4 * window + at] for at in range(4)] for source in (data.training, rows))
        pairs = [
            sorted(
                (int(t), int(y)) for row in some for t, y in zip(row["tokens"], row["targets"], strict=True) if y >= 0
            )
            for some in (before, after)
        ]
        assert pairs[0] == pairs[1]
        moved |= any(not np.array_equal(a["targets"], b["targets"]) for a, b in zip(before, after, strict=True))
    assert moved


def test_bytes_need_no_tokenizer_and_can_be_named(tmp_path):
    (tmp_path / "t.jinja").write_text(PLAIN)
    path = write_rows(tmp_path / "chats.jsonl", [{"messages": [USER, ANSWER]}])
    chat = {"template": str(tmp_path / "t.jinja")}
    data = open_data(settings("bytes", path, cache=str(tmp_path / "cache"), chat=chat))
    ((tokens, learned),) = documents(data)
    text = "<|im_start|>user\ncat<|im_end|>\n<|im_start|>assistant\ntree<|im_end|>\n"
    assert bytes(tokens.astype(np.uint8)).decode() == text == data.decode(tokens)
    assert bytes(tokens[learned].astype(np.uint8)).decode() == "tree<|im_end|>\n"
    (tmp_path / "a.txt").write_bytes(b"ab\xff")
    words = open_data(settings("bytes", tmp_path / "a.txt", cache=str(tmp_path / "cache")))
    assert words.training[0]["tokens"][:4].tolist() == [256, 97, 98, 255]
    with pytest.raises(ValueError, match="where data.tokenizer is not given or bytes, got None"):
        open_data(settings("bytes", tmp_path / "a.txt", start_token=None))
