"""Models by their name on the hub: fetched in parts, with the bytes said; a hub that gives nothing is one line."""

import json
import sys
from types import SimpleNamespace

import huggingface_hub
import pytest
from bad_inputs import check_refused, run
from hf_configs import SMALL

from sppo_jax.config.hf import hub
from sppo_jax.config.hf.families import model_folder

NAME = "owner/tiny-1.0"
SIZES = {"config.json": 1, "model.safetensors": 3 * 2**20, "tokenizer.json": 2**20, "x.bin": 9, "original/a.json": 9}


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A hub with one model, and an empty cache; returns the folder of the model's commit there."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "cache" / "models--owner--tiny-1.0" / "snapshots" / "abc"

    def write(name, file):
        assert name == NAME
        folder.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(json.dumps(SMALL))
        return str(folder / file)

    def info(name, revision, files_metadata):
        siblings = [SimpleNamespace(rfilename=file, size=size) for file, size in SIZES.items()]
        return SimpleNamespace(siblings=siblings)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", write)
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: SimpleNamespace(model_info=info))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    return folder


def test_a_plan_fetches_config_json_alone(cache, capfd, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", pytest.fail)
    code, out, _, lines = run(f"plan hf:{NAME} --length 4096 --cluster h100:1x1", capfd)
    assert (code, lines) == (0, []) and "4,096 tokens per step" in out
    assert [path.name for path in cache.iterdir()] == ["config.json"]


def test_a_local_folder_wins(cache, tmp_path):
    (tmp_path / NAME).mkdir(parents=True)
    assert model_folder(NAME).absolute() == tmp_path / NAME and not cache.exists()


@pytest.mark.parametrize(("weights", "size", "files"), [(True, "4 MiB", 2), (False, "1 MiB", 1)])
def test_the_bytes_of_what_is_read_are_said(cache, monkeypatch, weights, size, files):
    folder, said, asked = model_folder(NAME), [], {}
    assert folder == cache and hub.name_of(folder) == NAME
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **given: asked.update(given, name=name))
    hub.fetch(folder, weights=weights, say=said.append)
    assert said == [f"fetching {NAME} from the hub: {size} into {folder}"]
    assert (asked["name"], asked["revision"], asked["ignore_patterns"]) == (NAME, "abc", ["*/*"])
    assert ("*.safetensors" in asked["allow_patterns"]) == weights
    for file in SIZES:
        if "/" not in file:
            (folder / file).touch()
    hub.fetch(folder, weights=weights, say=pytest.fail)
    hub.fetch(folder.parent, weights=weights, say=pytest.fail)  # no folder of the cache


def test_a_disk_without_room_is_told_before_anything_is_fetched(cache, monkeypatch):
    folder = model_folder(NAME)
    monkeypatch.setattr(hub.shutil, "disk_usage", lambda path: SimpleNamespace(free=2**20))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", pytest.fail)
    with pytest.raises(ValueError, match="must have 4 MiB free for owner/tiny-1.0, got 1 MiB at .* HF_HOME"):
        hub.fetch(folder, weights=True, say=pytest.fail)


ERRORS = {
    "GatedRepoError": "https://huggingface.co/owner/tiny-1.0, and run hf auth login or set HF_TOKEN",
    "RepositoryNotFoundError": "correct the folder or the name; for a private model run hf auth login or set HF_TOKEN",
    "OfflineModeIsEnabled": "with network run hf download owner/tiny-1.0 --local-dir tiny-1.0 and use hf:tiny-1.0",
}


@pytest.mark.parametrize("command", ["plan hf:{} --cluster h100:1x1", "init hf:{} --cluster h100:1x1 --out new.yaml"])
@pytest.mark.parametrize("kind", ERRORS)
def test_a_hub_that_gives_nothing_is_one_line(cache, tmp_path, monkeypatch, capfd, kind, command):
    def refuse(*_):
        raise type(kind, (OSError,), {})("why\nand more")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", refuse)
    check_refused(command.format(NAME), f"not give ({kind}: why); ", tmp_path, capfd)
    check_refused(command.format(NAME), ERRORS[kind], tmp_path, capfd)


def test_without_the_package_the_whole_command_is_named(cache, tmp_path, monkeypatch, capfd):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    line = f"run hf download {NAME} --local-dir tiny-1.0 and use hf:tiny-1.0, or run pip install huggingface_hub"
    check_refused(f"plan hf:{NAME}", line, tmp_path, capfd)


@pytest.mark.parametrize("text", ["absent", "a/b/c", "/a/b", "a b/c", "s3://bucket/x"])
def test_what_is_no_name_is_a_folder(cache, text):
    assert not hub.is_name(text)
