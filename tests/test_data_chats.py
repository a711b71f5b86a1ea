"""Conversations in files: the mask goes through packing, and bad input is one line."""

import json
import random

import numpy as np
import pytest

from sppo_jax.config import config_from_dict
from sppo_jax.data.open import open_data

pytest.importorskip("jinja2")
from chat_cases import FOR, PLAIN, draw, make_tokenizer

from sppo_jax.data.chat import Chat
from sppo_jax.data.chat_template import ChatTemplate


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


def settings(folder, source, **data):
    return config_from_dict(
        {
            "model": {
                "vocab_size": 512,
                "hidden_size": 8,
                "num_layers": 1,
                "num_heads": 1,
                "mlp_size": 8,
            },
            "data": {"source": str(source), "tokenizer": str(folder), "validation_fraction": 0} | data,
            "sequence": {"length": 256},
            "train": {"steps": 1},
        }
    )


@pytest.fixture
def chats(tokenizer, tmp_path):
    _, folder = tokenizer
    (tmp_path / "t.jinja").write_text(PLAIN)
    rng = random.Random(0)
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps({"messages": draw(rng)}) + "\n" for _ in range(40)))
    return folder, path, {"cache": str(tmp_path / "cache"), "chat": {"template": str(tmp_path / "t.jinja")}}


@pytest.mark.parametrize("pack", ["whole", "stream", "none"])
def test_targets_of_an_epoch_are_the_trained_tokens(chats, tokenizer, pack):
    folder, path, more = chats
    made, _ = tokenizer
    data = open_data(settings(folder, path, pack=pack, **more | {"chat": more["chat"] | {"too_long": "cut"}}))
    rows = [data.training[index] for index in range(len(data.training))]
    targets = np.concatenate([row["targets"] for row in rows])
    wanted = 0
    for line in path.read_text().splitlines():
        found = made.apply_chat_template(
            json.loads(line)["messages"], chat_template=PLAIN, return_assistant_tokens_mask=True, return_dict=True
        )
        wanted += sum(found["assistant_masks"][1:])
    assert (targets >= 0).sum() == wanted > 500
    assert all(0 <= row["tokens"].min() and row["tokens"].max() < 512 for row in rows)


def test_other_settings_of_chats_are_another_fingerprint(chats):
    folder, path, more = chats
    found = {
        open_data(
            settings(folder, path, **more | {"chat": more["chat"] | {"too_long": "cut", "train_on": train_on}})
        ).fingerprint
        for train_on in ("assistant", "last", "all")
    }
    assert len(found) == 3
