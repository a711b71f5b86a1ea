"""`sppo convert` there and back on small folders, and what it refuses: one line, nothing written."""

import json
import os
import re
import shutil
import struct
import tracemalloc
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from bad_inputs import run
from flax import nnx
from hf_folders import SMALL, write_folder, write_tokenizer
from safetensors.numpy import load_file, save_file

from sppo_jax.cli import main
from sppo_jax.config import ModelConfig, config_from_dict, load_config
from sppo_jax.config.hf.families import FAMILIES, read_shape
from sppo_jax.data.open import open_data
from sppo_jax.models import dense_loss, from_hf, num_params, to_hf
from sppo_jax.models.hf.folder import INDEX, TensorFolder
from sppo_jax.train.checkpoints.read import find_checkpoint, read_run

pytestmark = pytest.mark.xdist_group("commands_convert")


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """A folder, its tensors, and what from-hf makes of it."""
    place = tmp_path_factory.mktemp("converted")
    tensors = write_folder(place / "hf", tied_embeddings=True)
    assert main(["convert", "from-hf", str(place / "hf"), str(place / "out")]) == 0
    return place, tensors


def test_there_and_back_is_the_identity(converted, tmp_path, capsys):
    place, tensors = converted
    assert main(["convert", "to-hf", str(place / "out"), str(tmp_path / "back")]) == 0
    assert "--like DIR" not in capsys.readouterr().out
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert {name: x.tobytes() for name, x in tensors.items()} == {name: x.tobytes() for name, x in back.items()}
    before, after = (json.loads((path / "config.json").read_text()) for path in (place / "hf", tmp_path / "back"))
    assert after == before | {"max_position_embeddings": 512}
    assert (tmp_path / "back" / "tokenizer.json").read_text() == (place / "hf" / "tokenizer.json").read_text()


def test_a_folder_that_sees_is_converted_and_one_line_names_what_is_left_out(tmp_path, capfd):
    hybrid = dict(layers="delta,full", qkv_bias=False, qk_norm=True, unit_norm=True, output_gate=True)
    tensors = write_folder(tmp_path / "hf", **hybrid)
    text = json.loads((tmp_path / "hf" / "config.json").read_text())
    seeing = {"model_type": "qwen3_5", "architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": text}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(seeing | {"vision_config": {"depth": 1}}))
    of_text = {re.sub("^model[.]", "model.language_model.", name): x for name, x in tensors.items()}
    tower = {"model.visual.proj.weight": np.zeros((2, 3), np.float32), "mtp.norm.weight": np.zeros(3, np.float32)}
    save_file(of_text | tower, tmp_path / "hf" / "model.safetensors")
    code, _, warned, lines = run(["convert", "from-hf", str(tmp_path / "hf"), str(tmp_path / "out")], capfd)
    assert (code, lines, len(warned)) == (0, [], 1)
    assert "has mtp (1 tensors) and visual (1 tensors), left out here" in warned[0]


def test_the_folder_holds_a_checkpoint_a_config_and_the_tokenizer(converted):
    place, _ = converted
    out = place / "out"
    assert sorted(path.name for path in out.iterdir()) == ["0", "config.json", "config.yaml", "tokenizer.json"]
    config = load_config(
        out / "config.yaml", ["sequence.length=1024", "model.rope.scaling=yarn", "model.rope.factor=2"]
    )
    assert config.model.hf == str(place / "hf")
    assert (config.model.hidden_size, config.model.rope.original_length) == (16, 512)
    assert load_config(out / "config.yaml").sequence.length == 512
    assert config_from_dict(read_run(find_checkpoint(out))["config"]).model == load_config(out / "config.yaml").model


def test_the_length_of_the_run_is_what_the_model_is_for(converted, tmp_path):
    place, _ = converted
    shutil.copytree(place / "out" / "0", tmp_path / "7")
    run = read_run(tmp_path / "7")
    run["config"]["sequence"]["length"] = 3000
    run["config"]["model"]["hf"] = None
    run["config"]["data"]["tokenizer"] = str(place / "hf")
    (tmp_path / "7" / "run" / "metadata").write_text(json.dumps(run))
    assert main(["convert", "to-hf", str(tmp_path), str(tmp_path / "back")]) == 0
    assert json.loads((tmp_path / "back" / "config.json").read_text())["max_position_embeddings"] == 3000
    assert (tmp_path / "back" / "tokenizer.json").is_file()  # of the data, where no origin is known


def test_experts_go_there_and_back(tmp_path):
    tensors = write_folder(tmp_path / "hf", **EXPERTS)
    assert main(["convert", "from-hf", str(tmp_path / "hf"), str(tmp_path / "out")]) == 0
    config = load_config(tmp_path / "out" / "config.yaml", ["model.experts.balance=0.01"])
    assert (config.model.experts.count, config.model.experts.chosen, config.model.experts.balance) == (5, 2, 0.01)
    assert main(["convert", "to-hf", str(tmp_path / "out"), str(tmp_path / "back")]) == 0
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert {name: x.tobytes() for name, x in tensors.items()} == {name: x.tobytes() for name, x in back.items()}
    before, after = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("hf", "back"))
    assert after == before | {"max_position_embeddings": 512}


def test_export_goes_on_where_the_origin_is_gone(converted, tmp_path, capsys):
    place, tensors = converted
    (place / "hf").rename(place / "moved")
    try:
        (place / "out" / "config.json").rename(place / "config.json")
        assert main(["convert", "to-hf", str(place / "out" / "0"), str(tmp_path / "plain"), "--dtype", "bfloat16"]) == 0
        assert "--like DIR takes special tokens from DIR" in capsys.readouterr().out
        (place / "config.json").rename(place / "out" / "config.json")
        assert main(["convert", "to-hf", str(place / "out"), str(tmp_path / "copied")]) == 0
        assert main(
            ["convert", "to-hf", str(place / "out"), str(tmp_path / "like"), "--like", str(place / "moved")]
        ) == 0  # fmt: skip
    finally:
        (place / "moved").rename(place / "hf")
    plain = load_file(tmp_path / "plain" / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    np.testing.assert_allclose(plain[name].astype(np.float32), tensors[name], rtol=2**-8)
    for folder, token in (("plain", None), ("copied", 256), ("like", 256)):
        assert json.loads((tmp_path / folder / "config.json").read_text()).get("bos_token_id") == token


def break_tensor(folder, name, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors, name)
    save_file(tensors, folder / "model.safetensors")


def edit(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def truncate(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def name_absent_shard(folder):
    names = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    files = {name: "b.safetensors" if "norm" in name else "a.safetensors" for name in names}
    (folder / INDEX).write_text(json.dumps({"weight_map": files}))


def store_as_fp8(folder):
    path = folder / "model.safetensors"
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + size])
    entry = header["model.norm.weight"]
    entry |= {"dtype": "F8_E4M3", "shape": [64]}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])


def copy_embedding(tensors, name, dtype=np.float32):
    tensors[name] = tensors["model.embed_tokens.weight"].astype(dtype)


def other_head(folder, change):
    """Stores a head beside tied embeddings."""

    def add(tensors, name):
        copy_embedding(tensors, name)
        tensors[name] = change(tensors[name])

    break_tensor(folder, "lm_head.weight", add)


def one_value_more(head):
    head[-1, -1] += 1
    return head


def head_in_a_shard(folder):
    other_head(folder, one_value_more)
    head = {"lm_head.weight": load_file(folder / "model.safetensors")["lm_head.weight"]}
    break_tensor(folder, "lm_head.weight", lambda tensors, name: tensors.pop(name))
    names = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    save_file(head, folder / "b.safetensors")
    files = dict.fromkeys(names, "a.safetensors") | dict.fromkeys(head, "b.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": files}))


EXPERTS = dict(qkv_bias=False, qk_norm=True, experts=dict(count=5, chosen=2, size=12, balance=0.3))
UP = "model.layers.1.mlp.experts.3.up_proj.weight"


def drop_experts(tensors, count):
    """Removes all tensors of the last experts of the last layer."""
    for expert in range(5 - count, 5):
        for part in ("gate", "up", "down"):
            del tensors[f"model.layers.1.mlp.experts.{expert}.{part}_proj.weight"]


def fuse(tensors, without=""):
    """Puts the experts of each layer into two tensors."""
    for layer in range(2):
        name = f"model.layers.{layer}.mlp.experts."
        gate, up, down = (
            np.stack([tensors.pop(f"{name}{expert}.{part}_proj.weight") for expert in range(5)])
            for part in ("gate", "up", "down")
        )
        tensors |= {name + "gate_up_proj": np.concatenate([gate, up], axis=1), name + "down_proj": down}
    tensors.pop(without, None)


def as_in_gpt_oss(tensors, _):
    fuse(tensors)
    for name in [name for name in tensors if "mlp.experts." in name]:
        tensors[name] = np.ascontiguousarray(tensors[name].swapaxes(1, 2))


BROKEN_EXPERTS = {
    "an expert without a tensor": (
        lambda f: break_tensor(f, UP, lambda t, name: t.pop(name)),
        f"must have the tensor {UP}, got none (1 of 51 are missing)",
    ),
    "no last experts": (
        lambda f: break_tensor(f, 2, drop_experts),
        "must have the tensor model.layers.1.mlp.experts.3.gate_proj.weight, got none (6 of 51 are missing)",
    ),
    "more experts than config.json says": (
        lambda f: edit(f, num_experts=4),
        "model.layers.0.mlp.gate.weight must have the shape [4, 16] by config.json, got [5, 16]",
    ),
    "an expert too many": (
        lambda f: break_tensor(f, UP, lambda t, name: t.update({name.replace("3", "5"): t[name]})),
        "got model.layers.1.mlp.experts.5.up_proj.weight without a place (1 in all)",
    ),
    "an expert of another size": (
        lambda f: break_tensor(f, UP, lambda t, name: t.update({name: np.ascontiguousarray(t[name].T)})),
        f"the tensor {UP} must have the shape [12, 16] by config.json, got [16, 12]",
    ),
    "a shared expert": (
        lambda f: break_tensor(
            f, UP, lambda t, name: t.update({"model.layers.0.mlp.shared_expert_gate.weight": t[name]})
        ),
        "got model.layers.0.mlp.shared_expert_gate.weight without a place",
    ),
    "half of the fused": (
        lambda f: break_tensor(f, "model.layers.1.mlp.experts.down_proj", fuse),
        "must have the tensor model.layers.1.mlp.experts.down_proj, got none (1 of 25 are missing)",
    ),
    "fused as in gpt-oss": (
        lambda f: break_tensor(f, UP, as_in_gpt_oss),
        "model.layers.0.mlp.experts.gate_up_proj must have the shape [5, 24, 16] by config.json, got [5, 16, 24]",
    ),
    "MXFP4": (
        lambda f: break_tensor(
            f, UP, lambda t, _: t.update({"model.layers.0.mlp.experts.gate_up_proj_blocks": np.ones(3, np.uint8)})
        ),
        "tensors must be unquantized, got model.layers.0.mlp.experts.gate_up_proj_blocks in",
    ),
    "more chosen than there are": (
        lambda f: edit(f, num_experts_per_tok=6),
        "model.experts.chosen must be at most 5, the experts that a token may use, got 6",
    ),
    "dense layers": (
        lambda f: edit(f, mlp_only_layers=[0], intermediate_size=9),
        "must have the tensor model.layers.0.mlp.gate_proj.weight, got none",
    ),
    "every other layer": (
        lambda f: edit(f, decoder_sparse_step=2, intermediate_size=9),
        "must have the tensor model.layers.0.mlp.gate_proj.weight, got none",
    ),
    "dense layers first": (
        lambda f: edit(f, first_k_dense_replace=1),
        "first_k_dense_replace must be 0 in a qwen3_moe, got 1; name the dense layers in mlp_only_layers",
    ),
    "two counts": (lambda f: edit(f, num_local_experts=4), "num_experts and num_local_experts must be equal, got 5"),
    "no experts": (lambda f: edit(f, num_experts=0), "num_experts must be at least 1, got 0"),
}


@pytest.mark.parametrize("kind", BROKEN_EXPERTS)
def test_broken_experts_are_refused_in_one_line(kind, tmp_path, capsys):
    spoil, words = BROKEN_EXPERTS[kind]
    write_folder(tmp_path / "hf", **EXPERTS)
    spoil(tmp_path / "hf")
    assert main(["convert", "from-hf", str(tmp_path / "hf"), str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


NORM, QUERY = "model.norm.weight", "model.layers.1.self_attn.q_proj.weight"
BROKEN = {
    "no config.json": (lambda f: (f / "config.json").unlink(), "must be a local folder with config.json"),
    "another architecture": (
        lambda f: edit(f, model_type="gemma"),
        f"one of {', '.join(FAMILIES)}, got 'gemma'",
    ),
    "missing tensor": (
        lambda f: break_tensor(f, QUERY, lambda t, name: t.pop(name)),
        f"must have the tensor {QUERY}, got none (1 of 26 are missing)",
    ),
    "wrong shape": (
        lambda f: break_tensor(f, NORM, lambda t, name: t.update({name: t[name][:8]})),
        f"the tensor {NORM} must have the shape [16] by config.json, got [8]",
    ),
    "another vocabulary": (
        lambda f: edit(f, vocab_size=300),
        "model.embed_tokens.weight must have the shape [300, 16] by config.json, got [260, 16]",
    ),
    "tensor without a place": (
        lambda f: break_tensor(f, "score.weight", lambda t, name: t.update({name: np.ones(3, np.float32)})),
        "must have a place in the model, got score.weight without a place",
    ),
    "truncated": (truncate, "must be whole safetensors, got a torn file"),
    "absent shard": (name_absent_shard, "got no b.safetensors in"),
    "index of nothing": (
        lambda f: ((f / "model.safetensors").unlink(), (f / INDEX).write_text("{}")),
        "must be JSON with a weight_map",
    ),
    "fp8": (
        store_as_fp8,
        "the dtype of a tensor must be one of float64, float32, float16, bfloat16, got F8_E4M3 for model.norm.weight",
    ),
    "integers": (
        lambda f: break_tensor(f, NORM, lambda t, name: t.update({name: np.ones(16, np.int32)})),
        "got I32 for model.norm.weight",
    ),
    "torch files": (
        lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"),
        "must be safetensors, got pytorch_model.bin",
    ),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "must have model.safetensors or"),
    "larger tokenizer": (
        lambda f: write_tokenizer(f / "tokenizer.json", 261),
        "vocab_size must be above 260, the last token of",
    ),
    "another head": (lambda f: other_head(f, one_value_more), "lm_head.weight must be model.embed_tokens.weight where"),
    "a head of zeros": (lambda f: other_head(f, np.zeros_like), "tie_word_embeddings is true, got another tensor in"),
    "a head that is rounded": (
        lambda f: other_head(f, lambda head: head.astype(np.float16)),
        "set tie_word_embeddings to false in config.json",
    ),
    "a head of another vocabulary": (lambda f: other_head(f, lambda head: head[:9]), "lm_head.weight must be"),
    "another head in a shard": (head_in_a_shard, "lm_head.weight must be"),
    "an adapter": (
        lambda f: [(f / name).write_text("{}") for name in ("adapter_config.json", "adapter_model.safetensors")],
        "must be whole weights, got the adapter adapter_config.json in",
    ),
    "an adapter without its config": (lambda f: (f / "adapter_model.safetensors").write_text(""), "merge the adapter"),
    "an old adapter": (lambda f: (f / "adapter_model.bin").write_text(""), "got the adapter adapter_model.bin in"),
    "an adapter alone": (
        lambda f: [(f / "config.json").rename(f / "adapter_config.json"), (f / "model.safetensors").unlink()],
        "merge the adapter into the weights first",
    ),
    "broken tokenizer": (lambda f: (f / "tokenizer.json").write_text("{"), "must be a readable tokenizer, got"),
}


def test_tensors_that_say_nothing_new_are_passed_over(tmp_path):
    write_folder(tmp_path / "hf", tied_embeddings=True)
    break_tensor(tmp_path / "hf", {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(2)}, dict.update)
    break_tensor(tmp_path / "hf", "lm_head.weight", copy_embedding)
    model = ModelConfig(**read_shape(tmp_path / "hf"))
    TensorFolder(tmp_path / "hf").check(model)
    break_tensor(tmp_path / "hf", "lm_head.weight", lambda tensors, name: copy_embedding(tensors, name, np.float64))
    TensorFolder(tmp_path / "hf").check(model)


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_folders_are_refused_in_one_line(kind, tmp_path, capsys):
    spoil, words = BROKEN[kind]
    write_folder(tmp_path / "hf", num_layers=2, tied_embeddings=True)
    spoil(tmp_path / "hf")
    assert main(["convert", "from-hf", str(tmp_path / "hf"), str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_wrong_words_and_places_are_refused(converted, tmp_path, capsys):
    place, _ = converted
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("")
    file = tmp_path / "file"
    file.write_text("")
    full, out, hf, none = str(tmp_path / "full"), str(place / "out"), str(place / "hf"), str(tmp_path / "none")
    for words, expected in (
        ((), "the following arguments are required"),
        (("from-fh", hf, none), "invalid choice: 'from-fh'"),
        (("from-hf", hf, full), "must be new or empty"),
        (("from-hf", hf, str(file)), "must be new or empty"),
        (("from-hf", hf, str(file / "below")), "must be writable"),
        (("from-hf", none, str(tmp_path / "new")), "must be a local folder with config.json"),
        (("to-hf", out, full), "must be new or empty"),
        (("to-hf", none, str(tmp_path / "new")), "the path must be a checkpoint or a run directory with a checkpoint"),
        (("to-hf", hf, str(tmp_path / "new")), "the path must be a checkpoint or a run directory with a checkpoint"),
        (("to-hf", out, str(tmp_path / "new"), "--like", none), "must be a local folder with config.json"),
        (("to-hf", out, str(tmp_path / "new"), "--dtype", "int4"), "invalid choice: 'int4'"),
    ):
        assert main(["convert", *words]) == 2, words
        error = capsys.readouterr().err
        assert expected in error and error.count("\n") == 1, error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "full"]


def test_a_disk_without_room_is_refused_before_anything_is_written(converted, tmp_path, monkeypatch, capsys):
    place, _ = converted
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10_000))
    assert main(["convert", "from-hf", str(place / "hf"), str(tmp_path / "deep" / "out")]) == 2
    assert main(["convert", "to-hf", str(place / "out"), str(tmp_path / "deep" / "out"), "--dtype", "bfloat16"]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 2 and all("free, got 9.77 KiB" in error for error in errors), errors
    assert not list(tmp_path.iterdir())


def test_a_model_that_transformers_has_not_is_refused(converted, tmp_path, capsys):
    place, _ = converted
    checkpoint = tmp_path / "checkpoints" / "0"
    (checkpoint / "state").mkdir(parents=True)
    (checkpoint / "run").mkdir()
    model = {**SMALL, "mlp": "gelu", "qkv_bias": False}
    run = {"config": {"model": model, "sequence": {"length": 8}, "train": {"steps": 1}}}
    (checkpoint / "run" / "metadata").write_text(json.dumps(run))
    assert main(["convert", "to-hf", str(tmp_path), str(tmp_path / "new")]) == 2
    assert "model.mlp=swiglu, got gelu" in capsys.readouterr().err
    (checkpoint / "run" / "metadata").write_text("{}")
    assert main(["convert", "to-hf", str(tmp_path), str(tmp_path / "new")]) == 2
    assert "must name its model" in capsys.readouterr().err
    run["config"]["model"] = SMALL
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(run["config"]))
    assert main(["convert", "to-hf", str(tmp_path), str(tmp_path / "new")]) == 2
    assert "must hold the whole model" in capsys.readouterr().err


@pytest.mark.parametrize("changes", [{}, pytest.param(EXPERTS, marks=pytest.mark.slow)], ids=["MLP", "experts"])
def test_a_run_trains_on_from_the_weights_and_is_exported(tmp_path, monkeypatch, changes):
    """Without a learning rate what comes out is what went in, bit for bit, by way of mesh, step and checkpoint."""
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"])
    assert jax.device_count() == 8  # started before the command would simulate fewer
    tensors = write_folder(tmp_path / "hf", **changes)
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog.\n" * 20)
    config = tmp_path / "config.yaml"
    config.write_text(f"model: hf:{tmp_path / 'hf'}\nsequence: {{length: 64, chunks: 2}}\ntrain: {{steps: 1}}\n")
    overrides = [
        f"data.source={tmp_path / 'text.txt'}",
        "data.validation_fraction=0",
        "mesh={data: 1, pipe: 2, seq: 2}",
        "train.devices=cpu:4",
        "optimizer.lr=0",
        "model.rope={scaling: yarn, factor: 4}",
        f"data.cache={tmp_path / 'cache'}",
    ]
    assert main(["train", str(config), *overrides, "--run-dir", str(tmp_path / "run")]) == 0
    assert main(["convert", "to-hf", str(tmp_path / "run"), str(tmp_path / "back")]) == 0
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert {name: x.tobytes() for name, x in tensors.items()} == {name: x.tobytes() for name, x in back.items()}
    exported = json.loads((tmp_path / "back" / "config.json").read_text())
    assert exported["rope_parameters"] | {"rope_theta": 0} == {
        "rope_theta": 0, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512,
        "beta_fast": 32.0, "beta_slow": 1.0,
    }  # fmt: skip
    assert exported["max_position_embeddings"] == 2048
    loss = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])["loss"]
    batch = first_batch(load_config(tmp_path / "run" / "config.yaml"))
    model = from_hf(tmp_path / "hf", rope={"scaling": "yarn", "factor": 4.0})
    assert loss == pytest.approx(float(dense_loss(model, nnx.state(model, nnx.Param), batch)), rel=1e-5)


def first_batch(config):
    """Returns the first sequence that a run of this config sees, its text by the folder's own tokenizer."""
    row = open_data(config).training[0]
    return {key: jnp.asarray(value)[None] for key, value in row.items()}


def test_host_memory_holds_the_model_once(tmp_path):
    """By numpy's and Python's own count: import beside nothing but a tensor, export beside the largest tensor."""
    shape = dict(vocab_size=4000, hidden_size=128, num_layers=16, mlp_size=512, qkv_bias=False)
    largest = max(x.nbytes for x in write_folder(tmp_path / "hf", **shape).values())
    total = num_params(ModelConfig(**{**SMALL, **shape})) * 4
    to_hf(from_hf(tmp_path / "hf"), tmp_path / "first")  # what is loaded and compiled once is not the model's
    tracemalloc.start()
    try:
        model = from_hf(tmp_path / "hf")
        assert total < tracemalloc.get_traced_memory()[1] < total + 2 * largest
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        to_hf(model, tmp_path / "out", dtype="bfloat16")
        assert tracemalloc.get_traced_memory()[1] - before < 1.5 * largest
    finally:
        tracemalloc.stop()
