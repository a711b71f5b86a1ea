"""Hundreds of files of every form, here and in a bucket, in a process that may have few files open."""

import os
import struct
import subprocess
import sys

import numpy as np
import pytest
from s3_server import environment, s3, s3_server, upload  # noqa: F401
from test_data_bad_rows import FORMS, write_values

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
READ = """
import resource, sys, threading
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[3]), hard))
from sppo_jax.config import DataConfig
from sppo_jax.data.tokens.encoding import open_encoder
from sppo_jax.data.sources.open_source import load_corpus
config = DataConfig(source=sys.argv[1], cache=sys.argv[2])
corpus = load_corpus(config, sys.argv[1], lambda: open_encoder(config, vocab_size=1000), vocab_size=1000)
print(corpus.num_documents, sum(int(corpus.read(a, b)[-1]) for a, b in zip(corpus.starts, corpus.ends)))
print(threading.active_count())
"""


def write_first(path):
    """Writes a file of one document that ends with token 7."""
    table = pa.table({"text": ["\x07"]})
    if path.suffix == ".arrow":
        with pa.ipc.new_stream(str(path), table.schema) as writer:
            writer.write_table(table)
    elif path.suffix == ".parquet":
        pq.write_table(table, path)
    else:
        write_values(path, [b'"\\u0007"'])


def write_rows(folder, each):
    """Writes as many files of each of eight forms."""
    folder.mkdir()
    for name in (*FORMS, "a.arrow", "a.parquet"):
        write_first(folder / name)
        for number in range(1, each):
            os.link(folder / name, folder / f"{number:03}{name[1:]}")


def write_pairs(folder, count):
    """Writes as many pairs of Megatron."""
    folder.mkdir(exist_ok=True)
    parts = [struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, 1, 2), np.array([2], "<i4").tobytes(),
             np.array([0], "<i8").tobytes(), np.array([0, 1], "<i8").tobytes()]  # fmt: skip
    for number in range(count):
        np.array([5, 7], np.uint16).tofile(folder / f"{number:03}.bin")
        (folder / f"{number:03}.idx").write_bytes(b"".join(parts))


def read(source, tmp_path, limit, **environ):
    """Reads a source with as many files open at most; returns the number of documents and the sum of last tokens."""
    words = [sys.executable, "-c", READ, str(source), str(tmp_path / "cache"), str(limit)]
    env = os.environ | environ | {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(words, capture_output=True, text=True, env=env)
    assert not done.returncode, done.stderr[-3000:]
    *found, num_threads = (int(word) for word in done.stdout.split())
    assert num_threads < 9  # each open file behind an address has one
    return found


def test_600_files_of_every_form(tmp_path):
    write_rows(tmp_path / "rows", 80)
    assert read(tmp_path / "rows", tmp_path, 48) == [640, 7 * 640]


def test_600_pairs_of_megatron(tmp_path):
    write_pairs(tmp_path / "pairs", 600)
    assert read(tmp_path / "pairs", tmp_path, 1024) == [600, 7 * 600]


@pytest.mark.slow
def test_600_objects_of_a_bucket(s3, tmp_path):  # noqa: F811
    write_rows(tmp_path / "in", 70)
    write_pairs(tmp_path / "in", 40)
    upload(s3, tmp_path / "in", "data/in")
    server = environment(s3) | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{s3.behind}"}
    assert read("s3://data/in", tmp_path, 64, **server) == [600, 7 * 600]
