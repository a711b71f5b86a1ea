"""Data of the Hugging Face hub, by a small server of this machine: one commit is read, and errors are one line."""

import json

import numpy as np
import pytest
from hub_server import hub  # noqa: F401

from sppo_jax.config import DataConfig
from sppo_jax.data.sources.open_source import find_files, load_corpus
from sppo_jax.data.storage import remote
from sppo_jax.data.tokens.encoding import open_encoder

pytest.importorskip("pyarrow")
NAME = "hf://datasets/owner/name"
LINES = "".join(json.dumps({"text": f"line {number}"}) + "\n" for number in range(900)).encode()


def load(path, cache):
    config = DataConfig(source=str(path), cache=str(cache))
    return load_corpus(config, config.source, lambda: open_encoder(config, vocab_size=1000), vocab_size=1000)


def documents(corpus):
    return [
        bytes(corpus.read(start + 1, end).astype(np.uint8))
        for start, end in zip(corpus.starts, corpus.ends, strict=True)
    ]


@pytest.mark.parametrize("below", ["data", "data/a.txt", "data/**/*.jsonl", "data/*"])
def test_the_same_bytes_give_the_same_tokens_here_and_from_the_hub(hub, tmp_path, below):  # noqa: F811
    sha = hub.commit(data__a_txt="a text \u00fc".encode(), data__b__c_jsonl=LINES, data__b__d_txt=b"d", e_txt=b"e")
    (tmp_path / "data" / "b").mkdir(parents=True)
    for path, content in hub.commits[sha].items():
        (tmp_path / path).write_bytes(content)
    wanted = load(tmp_path / below, tmp_path / "here")
    for revision in ("", "@main", f"@{sha}"):
        found = load(f"{NAME}{revision}/{below}", tmp_path / "cache")
        assert documents(found) == documents(wanted) and np.array_equal(found.hashes, wanted.hashes)
    assert len([path for path in (tmp_path / "cache").iterdir() if path.is_dir()]) == 1  # one commit, tokenized once


def test_the_commit_is_part_of_the_key(hub, tmp_path):  # noqa: F811
    old = hub.commit(a_txt=b"old 1")
    assert documents(load(f"{NAME}@main", tmp_path)) == [b"old 1"]
    new = hub.commit(a_txt=b"new 1")  # as long as before, and without a time
    assert documents(load(f"{NAME}@main", tmp_path)) == [b"new 1"]
    assert documents(load(f"{NAME}@{old}", tmp_path)) == [b"old 1"]
    (file,), _ = find_files(f"{NAME}/a.txt")
    assert file.key[-1] == new and str(file.path) == f"{NAME}@{new}/a.txt"


def test_a_file_that_is_replaced_under_way_is_read_on_as_it_was(hub, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setattr(remote, "_BLOCK_BYTES", 1 << 12)
    hub.commit(a_jsonl=LINES)
    read = []

    def fault(method, path, range_):
        if "/resolve/" in path and range_ == f"bytes=0-{len(LINES) - 1}":
            read.append(hub.commit(a_jsonl=LINES.replace(b"line", b"next")))

    hub.fault = fault
    assert set(text.split()[0] for text in documents(load(NAME, tmp_path))) == {b"line"} and read
    hub.fault = lambda *_: None
    assert set(text.split()[0] for text in documents(load(NAME, tmp_path))) == {b"next"}


@pytest.mark.parametrize("where", ["/revision/", "/tree/", "/resolve/"])
def test_a_hub_that_fails_is_asked_again(hub, tmp_path, monkeypatch, where):  # noqa: F811
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    hub.commit(data__a_txt=b"a text")
    failed = []

    def fault(method, path, range_):
        if where in path and len(failed) < 14:  # more often than the hub's library tries
            failed.append(path)
            return 503
        return None

    hub.fault = fault
    with pytest.warns(UserWarning, match=f"{NAME}.* could not be reached .*503.*; it is tried again"):
        assert documents(load(f"{NAME}@main/data", tmp_path)) == [b"a text"]
    assert len(failed) == 14


def test_no_hub_is_one_line(hub, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    monkeypatch.setattr(remote, "_PATIENCE_S", 0.0)
    hub.shutdown()
    hub.server_close()
    with pytest.raises(ValueError, match=f"got {NAME} .*refused.*; try again when the service answers") as error:
        load(NAME, tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "address",
    ["hf://datasets/owner/other", f"{NAME}@none/a.txt", f"{NAME}/absent.txt", f"{NAME}/absent", "hf://datasets/owner",
     "hf://x", f"{NAME}/none*.txt"],
)  # fmt: skip
def test_what_the_hub_does_not_have_is_one_line(hub, tmp_path, monkeypatch, address):  # noqa: F811
    monkeypatch.setattr("time.sleep", None)
    hub.commit(a_txt=b"a")
    with pytest.raises(
        ValueError, match="got hf://.*; (name what exists|choose another source|write hf://datasets/OWNER)"
    ) as error:
        load(address, tmp_path)
    assert "\n" not in str(error.value)


def test_a_private_data_set_asks_for_the_token_of_the_environment(hub, tmp_path, monkeypatch):  # noqa: F811
    hub.commit(a_txt=b"a")
    hub.token = "hf_tokenofthetests"
    from huggingface_hub import HfFileSystem

    monkeypatch.setenv("HF_TOKEN", "hf_wrongtokenofthetests")
    with pytest.raises(ValueError, match=f"got {NAME} ") as error:
        load(NAME, tmp_path)
    assert "\n" not in str(error.value) and "wrongtoken" not in str(error.value)
    monkeypatch.setenv("HF_TOKEN", hub.token)
    HfFileSystem.clear_instance_cache()  # as in another process
    assert documents(load(NAME, tmp_path)) == [b"a"]
