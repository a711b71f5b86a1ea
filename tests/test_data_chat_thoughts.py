"""Thoughts that a template leaves out: counted, the first one named, and a warning where turns are trained without."""

import json
import re
import warnings

import pytest

from sppo_jax.config import config_from_dict
from sppo_jax.data.open import open_data, write_parts
from sppo_jax.data.storage.parts import FilePart
from sppo_jax.data.summary.summary import summarize
from sppo_jax.report.data.chats import learned_text

pytest.importorskip("jinja2")
from chat_cases import THINKS

PLAIN = [{"role": "user", "content": "Q0"}, {"role": "assistant", "content": "A0"}]
TWO = [
    {"role": "user", "content": "Q1"},
    {"role": "assistant", "content": "<think>\nT1\n</think>\n\nA1"},
    {"role": "user", "content": "Q2"},
    {"role": "assistant", "content": "A2", "reasoning_content": "T2"},
]
EXCLUDED = [PLAIN[0], TWO[1] | {"train": False}, *TWO[2:]]


@pytest.fixture
def config_of(tmp_path):
    (tmp_path / "t.jinja").write_text(THINKS)

    def config(*chats, **chat):
        (tmp_path / "in").mkdir()
        for number, one in enumerate(chats):
            (tmp_path / "in" / f"{number}.jsonl").write_text(json.dumps({"messages": one}) + "\n")
        data = {"source": str(tmp_path / "in"), "cache": str(tmp_path / "cache"), "tokenizer": "bytes"}
        data |= {"chat": {"template": str(tmp_path / "t.jinja")} | chat, "validation_fraction": 0}
        model = {"vocab_size": 257, "hidden_size": 8, "num_layers": 1, "num_heads": 1, "mlp_size": 8}
        return config_from_dict({"model": model, "data": data, "sequence": {"length": 512}, "train": {"steps": 1}})

    return config


def line_of(config, data):
    (counts, *_) = learned_text(summarize(config, data), colour=False)
    return [line.strip() for line in counts.splitlines() if "thoughts" in line]


@pytest.mark.parametrize("num_parts", [0, 3])
def test_they_are_counted_named_and_warned_of(config_of, num_parts):
    config = config_of(PLAIN, TWO, EXCLUDED)
    for number in range(num_parts):
        write_parts(config, FilePart(number=number + 1, count=num_parts))
    for _ in ("tokenized now", "from the cache"):
        told = r"own thought, got 1 turns whose .* is in message 2 of \S*1.jsonl line 1\); set data.chat.train_on"
        with pytest.warns(UserWarning, match=told) as found:
            data = open_data(config)
        assert len(found) == 1 and "\n" not in str(found[0].message)
    (line,) = line_of(config, data)
    told = r"2 thoughts are left out .*, the first in message 2 of \S*1.jsonl line 1; 1 of their turns are trained"
    assert re.fullmatch(told, line)


@pytest.mark.parametrize(
    ("chats", "chat", "num_lost"),
    [([TWO], {"train_on": "last"}, 1), ([EXCLUDED], {}, 1), ([TWO[:2]], {}, 0), ([PLAIN], {}, 0)],
)
def test_without_a_turn_that_is_trained_so_nothing_is_warned_of(config_of, chats, chat, num_lost):
    config = config_of(*chats, **chat)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data = open_data(config)
    assert len(line_of(config, data)) == num_lost


def test_what_is_refused_has_file_and_row(config_of):
    config = config_of(PLAIN, [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}, PLAIN[1]])
    with pytest.raises(ValueError, match=r"1.jsonl line 1: the parts of a message must be text, .* in message 1; "):
        open_data(config)
