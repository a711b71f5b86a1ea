"""A run on conversations comes back as a folder that is ready: length, end tokens, templates, a card, its tokenizer."""

import json
import os
import random

import jax
import pytest
from hf_folders import write_folder

from sppo_jax.cli import main
from sppo_jax.config import config_from_dict
from sppo_jax.data.open import open_data
from sppo_jax.models.hf.tokenizer import add_end_tokens

pytest.importorskip("transformers")
pytest.importorskip("jinja2")
import transformers
from chat_cases import PLAIN, draw, make_tokenizer, without_regions
from tokenizer_folders import CHATML, END, START, make_folder

from sppo_jax.commands.finished_folder import _add_end_of_texts, _add_template
from sppo_jax.config.data import ChatConfig, DataConfig
from sppo_jax.data.chat.stop_tokens import stop_tokens
from sppo_jax.data.chat.template import ChatTemplate
from sppo_jax.data.tokens.encoding import BytesEncoder, FileEncoder

pytestmark = pytest.mark.xdist_group("finished_folder")


def vllm_length(config, tokenizer_config):
    """The longest prompt that vLLM takes by default, by the rules of its vllm/config/model.py at 0052a5b."""
    length = min(config["max_position_embeddings"], tokenizer_config.get("model_max_length", float("inf")))
    rope = config["rope_parameters"]
    if rope["rope_type"] == "yarn":
        length = rope["original_max_position_embeddings"]
    return int(length * (1.0 if rope["rope_type"] in ("su", "longrope", "llama3") else rope.get("factor", 1.0)))


def vllm_stops(generation_config, eos):
    """The tokens at which vLLM stops, by its vllm/sampling_params.py at 00388f6: the tokenizer's, and these."""
    found = generation_config.get("eos_token_id")
    return {eos} | ({found} if isinstance(found, int) else set(found or ()))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The folder that a run starts from, and the folder that comes back."""
    place = tmp_path_factory.mktemp("folders")
    write_folder(place / "hf", vocab_size=304)
    made = make_tokenizer(place / "hf")
    (place / "hf" / "generation_config.json").write_text(json.dumps({"eos_token_id": 5, "temperature": 0.5}))
    settings = json.loads((place / "hf" / "tokenizer_config.json").read_text())
    settings |= {"model_max_length": 512, "chat_template": "old"}
    (place / "hf" / "tokenizer_config.json").write_text(json.dumps(settings))
    (place / "hf" / "additional_chat_templates").mkdir()
    (place / "hf" / "additional_chat_templates" / "rag.jinja").write_text("rag {{ messages }}")
    (place / "t.jinja").write_text(PLAIN)
    rng = random.Random(1)
    rows = "".join(json.dumps({"messages": draw(rng)}) + "\n" for _ in range(20))
    (place / "chats.jsonl").write_text(rows)
    (place / "c.yaml").write_text(f"model: hf:{place}/hf\nsequence: {{length: 1024, chunks: 2}}\ntrain: {{steps: 2}}\n")
    changes = [
        f"data={{source: {place}/chats.jsonl, validation_fraction: 0, cache: {place}/cache}}",
        f"data.chat.template={place}/t.jinja",
        "train.devices=cpu:1",
        "train.log_every=1",
        "model.rope={scaling: yarn, factor: 2}",
    ]
    assert jax.device_count() == 8  # started before the command would simulate fewer
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"])
        patch.setenv("JAX_PLATFORMS", "cpu")
        assert main(["train", str(place / "c.yaml"), *changes, "--run-dir", str(place / "run")]) == 0
        assert main(["convert", "to-hf", str(place / "run"), str(place / "out")]) == 0
    return place, made


def read(path):
    return json.loads(path.read_text())


def test_the_folder_loads_and_writes_the_text_that_was_trained(folders):
    place, made = folders
    transformers.AutoModelForCausalLM.from_pretrained(place / "out")
    back = transformers.AutoTokenizer.from_pretrained(place / "out")
    messages = draw(random.Random(2))
    text = back.apply_chat_template(messages, chat_template=None, tokenize=False)
    assert text == made.apply_chat_template(messages, chat_template=PLAIN, tokenize=False)
    assert back.apply_chat_template(messages, chat_template="rag", tokenize=False).startswith("rag [")
    assert back.model_max_length == 1024
    assert "chat_template" not in read(place / "out" / "tokenizer_config.json")


def test_what_vllm_reads_is_right(folders):
    place, made = folders
    config, tokenizer, generation = (
        read(place / "out" / f"{name}.json") for name in ("config", "tokenizer_config", "generation_config")
    )
    before = [read(place / "hf" / f"{name}.json") for name in ("config", "tokenizer_config")]
    assert vllm_length(*before) == 512 and vllm_length(config, tokenizer) == 1024
    end = made.convert_tokens_to_ids("<|im_end|>")
    assert generation == {"eos_token_id": [5, end], "temperature": 0.5}
    assert vllm_stops(generation, made.eos_token_id) == {5, end}


def test_bytes_are_read_by_name_beside_a_model_that_has_another_tokenizer(folders, tmp_path):
    place, _ = folders
    (tmp_path / "a.txt").write_text("ab")
    data = {"source": str(tmp_path / "a.txt"), "validation_fraction": 0, "cache": str(tmp_path / "cache")}
    settings = {"model": {"hf": str(place / "out")}, "sequence": {"length": 8}, "train": {"steps": 1}}
    found = [
        open_data(config_from_dict(settings | {"data": data | more})).training[0]["tokens"].tolist()
        for more in ({"tokenizer": "bytes"}, {})
    ]
    assert found[0][:3] == [256, 97, 98] and found[1][0] != 256


def test_the_card_has_the_recipe_and_the_curves(folders):
    place, _ = folders
    card = (place / "out" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n") and "# hf, trained on to 1,024 tokens" in card
    assert "| steps | 2 |" in card and "| rotary base | 10000, yarn by 2 |" in card
    assert "| source | chats.jsonl, weight 1 |" in card and "](training.svg)" in card
    rows = [json.loads(line) for line in (place / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all(f"| {row['step']} | {row['loss']:.4f} |" in card for row in rows) and len(rows) == 2
    assert (place / "out" / "training.svg").read_text().startswith("<svg")


@pytest.mark.parametrize("regions", [True, False])
def test_stop_tokens_are_the_special_tokens_that_end_answers_and_calls(folders, regions):
    place, made = folders
    encoder = FileEncoder(place / "hf" / "tokenizer.json", start_token=None, end_token=None)
    source = PLAIN if regions else without_regions(PLAIN)
    start, end = (made.convert_tokens_to_ids(f"<|im_{name}|>") for name in ("start", "end"))
    assert stop_tokens(ChatTemplate(source, name="t", variables={}), encoder) == (end,)
    called = source.replace(
        "{{- '<|im_end|>\\n' }}", "{{- '<|im_start|>' if message.tool_calls else '<|im_end|>\\n' }}"
    )
    assert called != source
    assert stop_tokens(ChatTemplate(called, name="t", variables={}), encoder) == (end, start)
    assert stop_tokens(ChatTemplate(source.replace("<|im_end|>\\n", "\\n"), name="t", variables={}), encoder) == ()
    assert stop_tokens(ChatTemplate(source, name="t", variables={}), BytesEncoder()) == ()


@pytest.mark.parametrize(
    ("generation", "config", "wanted"),
    [
        ({}, {"eos_token_id": 3, "bos_token_id": 1}, {"bos_token_id": 1, "eos_token_id": [3, 7]}),
        ({"eos_token_id": [3, 7], "top_k": 2}, {}, {"eos_token_id": [3, 7], "top_k": 2}),
        ({}, {}, {"eos_token_id": [7]}),
    ],
)
def test_end_tokens_are_added_behind_those_of_the_base(tmp_path, generation, config, wanted):
    (tmp_path / "config.json").write_text(json.dumps(config))
    if generation:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    add_end_tokens(tmp_path, [7])
    assert read(tmp_path / "generation_config.json") == wanted


@pytest.mark.parametrize("own", [False, True])
def test_the_template_for_tools_goes_along_unless_the_run_had_a_template_of_its_own(tmp_path, own):
    for name in ("default", "tool_use"):
        (tmp_path / f"{name}.jinja").write_text(f"{name}: {CHATML}")
    templates = [{"name": name, "template": f"{name}: {CHATML}"} for name in ("default", "tool_use")]
    make_folder(tmp_path / "t", added=[START, END], settings={"chat_template": templates})
    make_folder(tmp_path / "out", added=[START, END], settings={"chat_template": templates})
    (tmp_path / "out" / "additional_chat_templates").mkdir()
    (tmp_path / "out" / "additional_chat_templates" / "default.jinja").write_text("old")
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "a"}]}) + "\n")
    chat = ChatConfig(template=str(tmp_path / "default.jinja") if own else "auto")
    _add_template(
        tmp_path / "out", DataConfig(source=str(tmp_path / "a.jsonl"), tokenizer=str(tmp_path / "t"), chat=chat)
    )
    back = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    messages = [{"role": "user", "content": "a"}]
    wanted = {None: "default: ", ("f",): "default: " if own else "tool_use: "}
    for tools, begins in wanted.items():
        tools = [{"type": "function", "function": {"name": name}} for name in tools] if tools else None
        assert back.apply_chat_template(messages, tools=tools, tokenize=False).startswith(begins)
    assert read(tmp_path / "out" / "generation_config.json") == {"eos_token_id": [281]}


@pytest.mark.parametrize(
    ("row", "end_token", "wanted"),
    [
        ({"text": "a"}, "auto", [5, 1]),
        ({"prompt": "a", "completion": "b"}, "auto", [5, 1]),
        ({"text": "a"}, None, 5),
        ({"text": "a"}, "a", 5),
        ({"input_ids": [1, 2]}, "auto", 5),
    ],
)
def test_the_token_that_ends_texts_stops_generation(tmp_path, row, end_token, wanted):
    make_folder(tmp_path, settings={}, files={"generation_config.json": {"eos_token_id": 5}})
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    data = DataConfig(source=str(tmp_path / "a.jsonl"), tokenizer=str(tmp_path), end_token=end_token)
    _add_end_of_texts(tmp_path, data)
    assert read(tmp_path / "generation_config.json") == {"eos_token_id": wanted}
