"""Every place from which transformers reads a chat template: read alike, or told of in a line; and how turns end."""

import json
import warnings

import pytest
from tokenizer_folders import CHATML, END, START, make_folder

pytest.importorskip("jinja2")
pytest.importorskip("transformers")
import transformers
from chat_cases import PLAIN

from sppo_jax.config import DataConfig, config_from_dict
from sppo_jax.config.data import ChatConfig
from sppo_jax.data.chat.roles import Chat
from sppo_jax.data.chat.stop_tokens import warn_of_no_stop
from sppo_jax.data.chat.template_places import Templates, read_template
from sppo_jax.data.open import open_data
from sppo_jax.data.tokens.encoding import BytesEncoder, open_encoder
from sppo_jax.data.tokens.mask_bit import split_words

MESSAGES = [{"role": "user", "content": "a quick fox"}, {"role": "assistant", "content": "hello"}]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}]


def named(name):
    """Returns a template that writes its name."""
    return f"{name}: {CHATML}"


LIST = [{"name": "default", "template": named("default")}, {"name": "tool_use", "template": named("tools")}]
JINJA, MORE = "chat_template.jinja", "additional_chat_templates"
PLACES = {
    "tokenizer_config.json": dict(settings={"chat_template": CHATML}),
    "a list": dict(settings={"chat_template": LIST}),
    "an object": dict(settings={"chat_template": {"default": named("default"), "tool_use": named("tools")}}),
    "a list without tools": dict(settings={"chat_template": LIST[:1]}),
    "a file": dict(settings={}, files={JINJA: named("file")}),
    "a file alone": dict(files={JINJA: named("file")}),
    "files": dict(
        settings={}, files={JINJA: named("file"), f"{MORE}/tool_use.jinja": named("tools"), f"{MORE}/rag.jinja": "rag"}
    ),
    "files without one beside": dict(
        settings={}, files={f"{MORE}/default.jinja": named("default"), f"{MORE}/tool_use.jinja": named("tools")}
    ),
    "the same template twice": dict(settings={"chat_template": named("file")}, files={JINJA: named("file") + "\n"}),
    "a name of special_tokens_map.json": dict(
        settings={"eos_token": None, "chat_template": CHATML.replace(END, "{{ eos_token }}")},
        files={"special_tokens_map.json": {"eos_token": END}},
    ),
    "a name of the model's own": dict(
        settings={"chat_template": "{{ turn_token }}" + CHATML, "extra_special_tokens": {"turn_token": "<t>"}}
    ),
}


def ready(folder, **chat):
    config = DataConfig(tokenizer=str(folder), chat=ChatConfig(**chat))
    return Templates(read_template(config), config)


@pytest.mark.parametrize("place", PLACES)
def test_each_place_is_read_as_transformers_does(tmp_path, place):
    make_folder(tmp_path, added=[START, END], **PLACES[place])
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        templates = ready(tmp_path)
    for tools in (None, TOOLS):
        wanted = theirs.apply_chat_template(MESSAGES, tools=tools, tokenize=False)
        assert templates.render(Chat(messages=MESSAGES, tools=tools)).text == wanted


BOTH = {
    "a file and the settings": (
        dict(settings={"chat_template": named("old")}, files={JINJA: named("file")}),
        r"chat_template.jinja, which is read, as in transformers, and another in .*/tokenizer_config.json; delete",
    ),
    "a default and a file": (
        dict(settings={}, files={JINJA: named("file"), f"{MORE}/default.jinja": named("default")}),
        r"default.jinja, which is read, as in transformers, and another in .*/chat_template.jinja; delete",
    ),
    "a processor and the settings": (
        dict(settings={"chat_template": named("old")}, files={"chat_template.json": {"chat_template": named("new")}}),
        r"tokenizer_config.json, which is read, as in transformers, and another in .*/chat_template.json; delete",
    ),
    "all four": (
        dict(
            settings={"chat_template": named("old")},
            files={
                JINJA: named("file"),
                f"{MORE}/default.jinja": named("default"),
                "chat_template.json": {"chat_template": named("new")},
            },
        ),
        r"another in .*/tokenizer_config.json and .*/chat_template.jinja and .*/chat_template.json; delete",
    ),
}


@pytest.mark.parametrize("case", BOTH)
def test_of_two_templates_that_of_transformers_is_read_with_a_line(tmp_path, case):
    make, told = BOTH[case]
    make_folder(tmp_path, added=[START, END], **make)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    with pytest.warns(UserWarning, match=told) as found:
        templates = ready(tmp_path)
    assert len(found) == 1
    wanted = theirs.apply_chat_template(MESSAGES, tokenize=False)
    assert templates.render(Chat(messages=MESSAGES)).text == wanted
    (tmp_path / "own.jinja").write_text(named("own"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ready(tmp_path, template=str(tmp_path / "own.jinja")).render(Chat(messages=MESSAGES)).text[:4] == "own:"


def test_templates_without_a_default(tmp_path):
    make_folder(tmp_path, settings={"chat_template": LIST[1:]})
    with pytest.raises(ValueError, match="must be a path where the tokenizer has no chat template, got auto and"):
        ready(tmp_path)
    make_folder(tmp_path, settings={}, files={"chat_template.json": {"chat_template": CHATML}})
    with pytest.raises(ValueError, match="got auto and .* with a processor's chat_template.json; name a file"):
        ready(tmp_path)
    make_folder(tmp_path, settings={"chat_template": named("old")}, files={f"{MORE}/rag.jinja": named("rag")})
    with pytest.raises(ValueError, match="no default specified"):
        transformers.AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(MESSAGES, tokenize=False)
    with pytest.warns(UserWarning, match="must have chat_template.jinja beside additional_chat_templates"):
        assert ready(tmp_path).render(Chat(messages=MESSAGES)).text.startswith("old: ")


WITH_EOS = CHATML.replace(END, "{{ eos_token }}")
REGION = PLAIN.replace("{{- '<|im_end|>\\n' }}{% endgeneration %}", "{% endgeneration %}{{- '<|im_end|>\\n' }}")
STOPS = {
    "a token of the tokenizer": (dict(added=[END], settings={"chat_template": CHATML}), ""),
    "a token that the settings add": (dict(settings={"chat_template": CHATML, "eos_token": END}), ""),
    "an eos_token": (dict(settings={"chat_template": WITH_EOS}), ""),
    "a region": (dict(added=[END], settings={"chat_template": PLAIN}), ""),
    "no eos_token": (dict(settings={"chat_template": WITH_EOS, "eos_token": None}), "'b'"),
    "an empty eos_token": (dict(settings={"chat_template": WITH_EOS, "eos_token": ""}), "'b'"),
    "text of no token": (dict(settings={"chat_template": CHATML}), "'>'"),
    "a region that ends too soon": (dict(added=[END], settings={"chat_template": REGION}), "'b'"),
    "tools alone": (
        dict(added=[END], settings={"chat_template": [{"name": "default", "template": CHATML},
                                                      {"name": "tool_use", "template": CHATML.replace(END, "")}]}),
        "'b' at the end with .*tool_use",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", STOPS)
def test_a_turn_that_does_not_stop_is_told_of(tmp_path, case):
    make, told = STOPS[case]
    make_folder(tmp_path, **make)
    assert REGION != PLAIN
    encoder = open_encoder(DataConfig(tokenizer=str(tmp_path)), vocab_size=300)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        warn_of_no_stop(ready(tmp_path), encoder)
        warn_of_no_stop(ready(tmp_path), BytesEncoder())
    assert len(found) == bool(told)
    if told:
        with pytest.warns(UserWarning, match=f"token that stops generation, got {told}"):
            warn_of_no_stop(ready(tmp_path), encoder)


def chats(folder, path, **data):
    return config_from_dict(
        {
            "model": {"vocab_size": 300, "hidden_size": 8, "num_layers": 1, "num_heads": 1, "mlp_size": 8},
            "data": {"source": str(path), "tokenizer": str(folder), "validation_fraction": 0} | data,
            "sequence": {"length": 256},
            "train": {"steps": 1},
        }
    )


# Special tokens that tokenizer_config.json, added_tokens.json or special_tokens_map.json alone know.
ALONE = {
    "tokenizer_config.json": dict(
        settings={"eos_token": END, "additional_special_tokens": [START, END], "chat_template": CHATML}
    ),
    "added_tokens.json": dict(settings={"chat_template": CHATML}, files={"added_tokens.json": {START: 280, END: 281}}),
    "special_tokens_map.json": dict(
        added=[START, END],
        settings={"chat_template": WITH_EOS, "eos_token": None, "bos_token": None},
        files={"special_tokens_map.json": {"eos_token": END}},
    ),
}


@pytest.mark.parametrize("place", ALONE)
def test_a_conversation_has_the_tokens_of_transformers(tmp_path, place):
    make_folder(tmp_path / "t", **ALONE[place])
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": MESSAGES}) + "\n")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "t")
    corpus = open_data(chats(tmp_path / "t", tmp_path / "a.jsonl")).sources[0].training.corpus
    tokens, learned = split_words(corpus.read(0, int(corpus.ends[0])))
    assert tokens.tolist() == theirs.apply_chat_template(MESSAGES, return_dict=False)
    assert theirs.convert_tokens_to_ids(END) in tokens[learned]


def test_what_did_not_change_has_the_fingerprint_of_before(tmp_path):
    # Fingerprints of the version before these places were read.
    make_folder(tmp_path / "t", added=[START, END], settings={"chat_template": CHATML, "eos_token": END})
    (tmp_path / "a.jsonl").write_text((json.dumps({"messages": MESSAGES}) + "\n") * 3)
    (tmp_path / "b.jsonl").write_text((json.dumps({"text": "the quick fox"}) + "\n") * 3)
    assert open_data(chats(tmp_path / "t", tmp_path / "a.jsonl")).fingerprint == "bf6023fe5cd4d461"
    assert open_data(chats(tmp_path / "t", tmp_path / "b.jsonl", end_token=None)).fingerprint == "f14c45ea50047b82"
    # What only the map names changes no token here.
    (tmp_path / "t" / "special_tokens_map.json").write_text(json.dumps({"sep_token": "</s>"}))
    assert open_data(chats(tmp_path / "t", tmp_path / "a.jsonl")).fingerprint == "bf6023fe5cd4d461"
