"""Conversations: text, ids and masks are transformers', and the mask goes through packing."""

import json
import random

import numpy as np
import pytest

from sppo_jax.config import config_from_dict
from sppo_jax.data.open import open_data

pytest.importorskip("jinja2")
from sppo_jax.data.chat import Chat
from sppo_jax.data.chat_spans import overlaps
from sppo_jax.data.chat_template import ChatTemplate

LOOP = """{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' %}{% generation %}{{ message.content }}
{%- for call in message.tool_calls or [] %}<call>{{ call.function | tojson }}</call>{% endfor %}
{{- '<|im_end|>\\n' }}{% endgeneration %}
{%- else %}{{ message.content + '<|im_end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
FOR = "{%- for message in messages %}"
# A construct: what stands in the place of the loop's first line.
LOOPS = {
    "plain": FOR,
    "slice": "{{- messages[0].content }}{%- for message in messages[1:] %}",
    "filter": "{%- for message in messages | rejectattr('role', 'equalto', 'system') %}",
    "reversed": "{%- for message in messages[::-1] %}",
    "alias": "{%- set them = messages %}{%- for message in them %}",
    "namespace": "{%- set ns = namespace(them=[]) %}{%- for m in messages %}{%- set ns.them = ns.them + [m] %}"
    "{%- endfor %}{%- for message in ns.them %}",
    "index": "{%- for i in range(messages | length) %}{%- set message = messages[i] %}",
    "batch": "{%- for pair in messages | batch(2) %}{%- for message in pair %}",
    "continue": FOR + "{%- if message.role == 'system' %}{{- 'S' }}{%- continue %}{% endif %}",
    "break": FOR + "{%- if loop.index > 4 and message.role == 'user' %}{{- 'END' }}{%- break %}{% endif %}",
}
WORDS = "river stone e\u0301t\u00e9 \U0001f600 cat <|im_end|> tree 17 blue".split()


def write(loop) -> str:
    text = LOOP.replace(FOR, LOOPS[loop])
    return (
        text.replace("{%- endfor %}\n{%- if add", "{%- endfor %}{%- endfor %}\n{%- if add") if loop == "batch" else text
    )


def draw(rng) -> list[dict]:
    def text() -> str:
        return " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, 9)))

    found = [{"role": "system", "content": text()}] if rng.random() < 0.5 else []
    for _ in range(rng.randint(1, 4)):
        found.append({"role": "user", "content": text()})
        if rng.random() < 0.5:
            call = {"type": "function", "function": {"name": "f", "arguments": {"word": rng.choice(WORDS)}}}
            found.append({"role": "assistant", "content": "", "tool_calls": [call]})
            found.append({"role": "tool", "content": text()})
        found.append({"role": "assistant", "content": text()})
    return found


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    level = tokenizers.pre_tokenizers.ByteLevel
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer, made.decoder = level(add_prefix_space=False), tokenizers.decoders.ByteLevel()
    special = ["<|im_start|>", "<|im_end|>"]
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=level.alphabet())
    made.train_from_iterator([" ".join(WORDS)] * 9, trainer)
    folder = tmp_path_factory.mktemp("tokenizer")
    found = transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|im_end|>")
    found.save_pretrained(folder)
    return found, folder


@pytest.mark.parametrize("loop", LOOPS)
def test_masks_are_those_of_transformers_with_and_without_regions(tokenizer, loop):
    made, _ = tokenizer
    source = write(loop)
    twin = source.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    with_regions = ChatTemplate(source, name="t", variables={})
    without = ChatTemplate(twin, name="t", variables={})
    assert with_regions.has_generation and not without.has_generation
    rng = random.Random(loop)
    for _ in range(40):
        messages = draw(rng)
        wanted = made.apply_chat_template(
            messages, chat_template=source, return_assistant_tokens_mask=True, return_dict=True
        )
        for template in (with_regions, without):
            rendered = template.render(Chat(messages=messages))
            encoded = made.backend_tokenizer.encode(rendered.text, add_special_tokens=False)
            assert encoded.ids == wanted["input_ids"]
            mask = overlaps(np.array(encoded.offsets).reshape(-1, 2), rendered.trained)
            assert mask.astype(int).tolist() == wanted["assistant_masks"]


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
    (tmp_path / "t.jinja").write_text(LOOP)
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
            json.loads(line)["messages"], chat_template=LOOP, return_assistant_tokens_mask=True, return_dict=True
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
