"""Tokens in files: any number of them with few open, and no file that changes."""

import errno
import os
import subprocess
import sys

import numpy as np
import pytest

from sppo_jax.data.tokens import token_map
from sppo_jax.data.tokens.token_map import TokenMap


def token_map_of(path, values, dtype=np.uint16, **changes):
    values = np.array(values, dtype)
    values.tofile(path)
    settings = dict(path=path, dtype=values.dtype, offset_bytes=0, length=len(values))
    return TokenMap(**(settings | dict(changed_ns=path.stat().st_mtime_ns) | changes))


def test_any_part_is_read(tmp_path):
    tokens = token_map_of(tmp_path / "a.bin", range(10), np.int32)
    assert len(tokens) == 10 and tokens[2:5].tolist() == [2, 3, 4] and tokens[:].dtype == np.int32
    later = token_map_of(tmp_path / "b.bin", range(10), offset_bytes=6, length=4)
    assert later[:].tolist() == [3, 4, 5, 6]
    assert token_map_of(tmp_path / "c.bin", [])[:].tolist() == []


def test_few_files_are_open_at_a_time(tmp_path):
    maps = [token_map_of(tmp_path / f"{number}.bin", [number, 1]) for number in range(300)]
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(2):
        assert [int(tokens[:1][0]) for tokens in maps] == list(range(300))
    assert len(os.listdir("/proc/self/fd")) <= before + token_map._MOST_OPEN


@pytest.mark.parametrize("change", ["longer", "shorter", "other", "gone"])
def test_a_file_that_changes_is_refused(tmp_path, change):
    path = tmp_path / "a.bin"
    tokens = token_map_of(path, range(10))
    if change == "gone":
        path.unlink()
    else:
        np.arange({"longer": 20, "shorter": 5, "other": 10}[change], dtype=np.uint16).tofile(path)
        os.utime(path, ns=(0, 5))
    with pytest.raises(ValueError, match="must be readable, got" if change == "gone" else "got a change of .*a.bin"):
        tokens[:]


LIMITED = """
import resource, sys
from pathlib import Path
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[2]), int(sys.argv[2])))
from sppo_jax.config import DataConfig
from sppo_jax.data.sources.open_source import load_corpus
config = DataConfig(source=sys.argv[1], separator=0, cache=sys.argv[3])
corpus = load_corpus(config, config.source, None, vocab_size=1000)
print(corpus.num_documents, sum(int(corpus.read(a, b).sum()) for a, b in zip(corpus.starts, corpus.ends)))
"""


def run_limited(folder, limit, cache):
    words = [sys.executable, "-c", LIMITED, str(folder), str(limit), str(cache)]
    return subprocess.run(words, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": ":".join(sys.path)})


@pytest.mark.parametrize("suffix", [".bin", pytest.param(".npy", marks=pytest.mark.slow)])
def test_more_files_of_tokens_than_may_be_open(tmp_path, suffix):
    (tmp_path / "data").mkdir()
    for number in range(600):
        values = np.array([1 + number, 0, 1, 0], np.uint16)
        path = tmp_path / "data" / f"{number:03}{suffix}"
        values.tofile(path) if suffix == ".bin" else np.save(path, values)
    done = run_limited(tmp_path / "data", 1024, tmp_path / "cache")
    assert done.stdout.split() == ["1200", str(sum(range(600)) + 1200)], done.stderr
    # What is left where even a few are too many is no disk that is full.
    done = run_limited(tmp_path / "data", 24, tmp_path / "cache2")
    assert done.returncode == 1
    assert "Too many open files" in done.stderr and "raise the limit of open files (ulimit -n)" in done.stderr
    assert "disk" not in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
@pytest.mark.parametrize("where", ["cache", "source", "tokenizer", "run directory"])
def test_the_limit_of_open_files_is_named_wherever_it_is_met(tmp_path, monkeypatch, number, where):
    from sppo_jax.config import DataConfig
    from sppo_jax.data.cache.store import entry_of
    from sppo_jax.data.content.documents import read_pieces
    from sppo_jax.data.tokens.encoding import open_encoder
    from sppo_jax.train.checkpoints.run_dir import claimed

    def full(*_, **__):
        raise OSError(number, os.strerror(number))

    (tmp_path / "t.json").write_text("{}")

    def meet():
        if where == "cache":
            entry_of(tmp_path, {}, full, dtype=None)
        elif where == "source":
            monkeypatch.setattr("pathlib.Path.open", full)
            list(read_pieces(tmp_path / "t.txt", text_key="text", strict=True))
        elif where == "tokenizer":
            monkeypatch.setattr("pathlib.Path.read_bytes", full)
            open_encoder(DataConfig(tokenizer=str(tmp_path / "t.json")), vocab_size=9)
        else:
            monkeypatch.setattr("pathlib.Path.write_bytes", full)
            with claimed(tmp_path / "run"):
                pass

    with pytest.raises(ValueError, match=r"raise the limit of open files \(ulimit -n\)") as error:
        meet()
    assert "disk" not in str(error.value) and os.strerror(number) in str(error.value)
