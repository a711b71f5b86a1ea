"""What people see while data are read: a share of the bytes, tokens a second, and the time left."""

import gzip
import json

import numpy as np
import pytest
from s3_server import s3, s3_server, upload  # noqa: F401

from sppo_jax.config import config_from_dict
from sppo_jax.data.open import open_data, write_parts
from sppo_jax.data.storage import progress
from sppo_jax.data.storage.folders import look_at
from sppo_jax.data.storage.parts import FilePart
from sppo_jax.data.storage.progress import Progress, total_bytes

TEMPLATE = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
ROWS = {
    "text": {"text": "a text " * 50},
    "rows of tokens": {"input_ids": [5, 6, 7] * 50},
    "conversations": {"messages": [{"role": "assistant", "content": "an answer " * 3}]},
}


@pytest.fixture
def shown(monkeypatch):
    """Shows progress at once."""
    monkeypatch.setattr(progress, "_SHOWN_AFTER_S", 0.0)


def config_of(tmp_path, source, cache):
    return config_from_dict(
        {
            "model": {"vocab_size": 300, "hidden_size": 8, "num_layers": 1, "num_heads": 1, "mlp_size": 8},
            "sequence": {"length": 64},
            "train": {"steps": 1},
            "data": {"source": source, "cache": cache, "tokenizer": "bytes",
                     "chat": {"template": str(tmp_path / "template")}},
        }
    )  # fmt: skip


def told(said, what):
    """Returns the last line of a bar, which must have all figures."""
    line = said.replace("\r", "\n").strip().splitlines()[-1]
    assert line.startswith(f"{what}: 100%") and "<00:00" in line and "tokens/s" in line, said
    return line


@pytest.mark.parametrize("kind", ROWS)
def test_all_kinds_of_rows_show_tokens_a_second_and_the_time_left(tmp_path, capsys, shown, kind):
    (tmp_path / "template").write_text(TEMPLATE)
    (tmp_path / "in").mkdir()
    for number in range(3):
        content = "".join(json.dumps(ROWS[kind]) + "\n" for _ in range(9)).encode()
        (tmp_path / "in" / f"{number}.jsonl.gz").write_bytes(gzip.compress(content))
    open_data(config_of(tmp_path, str(tmp_path / "in"), str(tmp_path / "cache")))
    told(capsys.readouterr().err, "reading tokens" if kind == "rows of tokens" else "tokenizing")
    open_data(config_of(tmp_path, str(tmp_path / "in"), str(tmp_path / "cache")))
    assert not capsys.readouterr().err  # nothing is read again


def test_copies_show_how_far_they_are(s3, tmp_path, capsys, shown, monkeypatch):  # noqa: F811
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    np.arange(200, dtype=np.uint16).tofile(tmp_path / "a.bin")
    upload(s3, tmp_path / "a.bin", "data/a.bin")
    open_data(config_of(tmp_path, "s3://data/a.bin", str(tmp_path / "cache")))
    assert "400/400" in told(capsys.readouterr().err, "copying")
    (tmp_path / "in").mkdir()
    for number in range(2):
        (tmp_path / "in" / f"{number}.jsonl").write_text(json.dumps(ROWS["text"]) + "\n")
    config = config_of(tmp_path, str(tmp_path / "in"), "s3://data/tokens")
    for number in (1, 2):
        write_parts(config, FilePart(number=number, count=2))
    capsys.readouterr()
    open_data(config)
    told(capsys.readouterr().err, "copying")


def test_a_compressed_file_never_counts_more_than_its_bytes_and_the_next_one_is_known(tmp_path):
    files = []
    for number in range(2):
        path = tmp_path / f"{number}.txt.gz"
        path.write_bytes(b"x" * 1000)
        files.append(look_at(path, path.name))
    with Progress(total_bytes(files)) as bar:
        seen = []
        for file in files:
            with bar.reading(file):
                for _ in range(10):
                    bar.advance(1000)  # ten times as much as the file has
                    seen.append(bar._bar.n)
        assert seen[:10] == [250, 500, 750, *[1000] * 7]  # a guess
        assert seen[10:] == [1100, 1200, 1300, 1400, 1500, 1600, 1700, 1800, 1900, 2000]
        assert bar._bar.n == bar._bar.total == 2000
