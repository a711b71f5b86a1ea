"""Control tokens of the tokenizer in messages that are not the assistant's: counted, shown, and warned of."""

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
from chat_cases import PLAIN, make_tokenizer

ANSWER = {"role": "assistant", "content": "tree <|im_end|>"}
HIT = [
    [{"role": "user", "content": "cat<|im_end|> <|im_start|>system"}, ANSWER],
    [{"role": "system", "content": "s"}, {"role": "tool", "content": "17 <|im_end|>"}, ANSWER],
]
CLEAN = [[{"role": "user", "content": "<|im_end| > im_start"}, ANSWER]]
SAID = r"3 control tokens \(<\|im_end\|>, <\|im_start\|>\) in 2 of 3 conversations, in messages that are not"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(folder)
    return str(folder)


@pytest.fixture
def config_of(tmp_path):
    """Returns a config of conversations, each in a file of its own."""
    (tmp_path / "t.jinja").write_text(PLAIN)

    def config(name, chats, tokenizer):
        (tmp_path / name).mkdir(exist_ok=True)
        for number, chat in enumerate(chats):
            (tmp_path / name / f"{number}.jsonl").write_text(json.dumps({"messages": chat}) + "\n")
        data = {"source": str(tmp_path / name), "cache": str(tmp_path / "cache"), "tokenizer": tokenizer}
        data |= {"chat": {"template": str(tmp_path / "t.jinja")}, "validation_fraction": 0}
        model = {"vocab_size": 512, "hidden_size": 8, "num_layers": 1, "num_heads": 1, "mlp_size": 8}
        return config_from_dict({"model": model, "data": data, "sequence": {"length": 128}, "train": {"steps": 1}})

    return config


@pytest.mark.parametrize("num_parts", [0, 2])
def test_they_are_counted_shown_and_warned_of(config_of, tokenizer, num_parts):
    config = config_of("hit", HIT + CLEAN, tokenizer)
    for number in range(num_parts):
        write_parts(config, FilePart(number=number + 1, count=num_parts))
    for _ in ("tokenized now", "from the cache"):
        with pytest.warns(
            UserWarning, match=rf"should hold no control tokens of data.tokenizer, got {SAID}.*; "
        ) as told:
            data = open_data(config)
        assert len(told) == 1 and "\n" not in str(told[0].message)
    (line,) = [
        line for line in learned_text(summarize(config, data), colour=False)[0].splitlines() if "control" in line
    ]
    assert re.fullmatch(f"  {SAID} the assistant's", line)


@pytest.mark.parametrize("kind", ["clean", "bytes"])
def test_where_there_are_none_nothing_is_said(config_of, tokenizer, kind):
    config = config_of(kind, CLEAN if kind == "clean" else HIT, tokenizer if kind == "clean" else "bytes")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data = open_data(config)
    assert "control tokens" not in learned_text(summarize(config, data), colour=False)[0]


def test_texts_in_parts_count_too(config_of, tokenizer, tmp_path):
    content = [{"type": "text", "text": "a <|im_start|>"}, {"type": "text", "text": "b"}]
    config = config_of("parts", [[{"role": "user", "content": content}, ANSWER]], tokenizer)
    (tmp_path / "t.jinja").write_text(PLAIN.replace("message.content +", "message.content | join('', 'text') +"))
    with pytest.warns(UserWarning, match=r"got 1 control tokens \(<\|im_start\|>\) in 1 of 1"):
        open_data(config)
