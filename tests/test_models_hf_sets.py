"""Two sets of weights in a folder: the one that transformers reads is read, and a line names the other."""

import itertools
import json
import shutil
import warnings

import numpy as np
import pytest

pytest.importorskip("safetensors")
from hf_folders import SMALL, write_folder
from safetensors.numpy import load_file, save_file

from sppo_jax.config import ModelConfig
from sppo_jax.models.hf.folder import TensorFolder

pytestmark = pytest.mark.xdist_group("models_hf")
NAME = "model.norm.weight"
# Sets of weights, in the order in which they are read, each with the value of one tensor; None: never read.
ORDER = {
    "transformers_weights": 5.0,
    "model.safetensors": 1.0,
    "model.safetensors.index.json": 2.0,
    "consolidated.safetensors": None,
    "pytorch_model.bin": None,
    "pytorch_model.bin.index.json": None,
    "model.fp16.safetensors": None,
    "model-00007-of-00009.safetensors": None,
    "consolidated.safetensors.index.json": None,
    "consolidated.00.pth": None,
    "params.json": None,
    "weights.gguf": None,
    "tf_model.h5": None,
    "flax_model.msgpack": None,
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sets") / "hf"
    write_folder(folder)
    return folder


def put(folder, whole, name):
    """Writes a set of weights into a folder."""
    tensors = load_file(whole / "model.safetensors")
    if ORDER[name] is None:
        if name.endswith(".safetensors"):
            save_file(tensors, folder / name)
        else:
            (folder / name).write_text('{"weight_map": {}}')
        return
    tensors[NAME] = np.full_like(tensors[NAME], ORDER[name])
    if name == "model.safetensors.index.json":
        names = sorted(tensors)
        files = {f"model-0000{at}-of-00002.safetensors": names[at - 1 :: 2] for at in (1, 2)}
        for file, part in files.items():
            save_file({each: tensors[each] for each in part}, folder / file)
        weight_map = {each: file for file, part in files.items() for each in part}
        (folder / name).write_text(json.dumps({"weight_map": weight_map}))
    elif name == "transformers_weights":
        save_file(tensors, folder / "chosen.safetensors")
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {name: "chosen.safetensors"}))
    else:
        save_file(tensors, folder / name)


def folder_with(tmp_path, whole, names):
    folder = tmp_path / "hf"
    folder.mkdir()
    shutil.copy(whole / "config.json", folder)
    for name in names:
        put(folder, whole, name)
    return folder


def told_of(folder):
    """Returns a value of the tensor that is read, and the warnings."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        tensors = TensorFolder(folder)
        tensors.check(ModelConfig(**SMALL))
    return float(tensors.read(NAME, (slice(0, 1),))[0]), [str(each.message) for each in found]


@pytest.mark.parametrize("pair", list(itertools.combinations(ORDER, 2)), ids=" and ".join)
def test_of_every_pair_the_set_of_transformers_is_read_with_a_line(tmp_path, whole, pair):
    folder = folder_with(tmp_path, whole, pair)
    first, second = pair
    if ORDER[first] is None:
        with pytest.raises(ValueError, match="must be safetensors|must have model.safetensors") as error:
            TensorFolder(folder)
        assert "\n" not in str(error.value)
        return
    value, told = told_of(folder)
    assert value == ORDER[first] and len(told) == 1
    assert f"{second} beside" in told[0] or f"{second}, " in told[0] or "model-00001-of-00002.safetensors" in told[0]
    assert "is read, as in transformers" in told[0] and "\n" not in told[0]


def test_transformers_takes_the_file_before_the_shards(tmp_path, whole):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("torch")
    for number, names in enumerate(itertools.combinations([name for name, value in ORDER.items() if value], 2)):
        (tmp_path / str(number)).mkdir()
        folder = folder_with(tmp_path / str(number), whole, names)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
        assert theirs.model.norm.weight[0].item() == ORDER[names[0]] == told_of(folder)[0]


@pytest.mark.parametrize("name", [name for name, value in ORDER.items() if value])
def test_one_set_is_read_without_a_line(tmp_path, whole, name):
    assert told_of(folder_with(tmp_path, whole, [name])) == (ORDER[name], [])


def test_an_index_of_the_same_file_is_no_other_set(tmp_path, whole):
    folder = folder_with(tmp_path, whole, ["model.safetensors"])
    names = load_file(folder / "model.safetensors")
    index = {"weight_map": dict.fromkeys(names, "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert told_of(folder) == (1.0, [])


@pytest.mark.parametrize(
    ("named", "told"),
    [
        ("weights.bin", "transformers_weights must name safetensors or their index in the folder, got 'weights.bin'"),
        ("../model.safetensors", "in the folder, got '../model.safetensors'"),
        (3, "in the folder, got 3"),
        ("absent.safetensors", "transformers_weights must name a file of the folder, got no absent.safetensors"),
    ],
)
def test_a_wrong_name_is_refused(tmp_path, whole, named, told):
    folder = folder_with(tmp_path, whole, ["model.safetensors"])
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"transformers_weights": named}))
    with pytest.raises(ValueError, match=told) as error:
        TensorFolder(folder)
    assert "\n" not in str(error.value)


def test_shards_without_an_index_are_refused(tmp_path, whole):
    folder = folder_with(tmp_path, whole, ["model-00007-of-00009.safetensors"])
    with pytest.raises(
        ValueError, match="got model-00007-of-00009.safetensors in .* without its index; download the index"
    ):
        TensorFolder(folder)
