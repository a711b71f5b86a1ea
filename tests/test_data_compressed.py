"""Compressed text gives the documents of the same text, and a file that is cut short is refused."""

import bz2
import gzip
import json

import pytest

from sppo_jax.data.content.documents import read_pieces

TEXTS = [f"document {number} \u00fc" * 9 for number in range(40)]
CONTENT = {".jsonl": "".join(json.dumps({"text": text}) + "\n" for text in TEXTS), ".txt": "\n".join(TEXTS)}


def packed(content, suffix):
    if suffix in (".gz", ".bz2"):
        return (gzip if suffix == ".gz" else bz2).compress(content)
    pa = pytest.importorskip("pyarrow")
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd" if suffix == ".zst" else "lz4") as out:
        out.write(content)
    return sink.getvalue().to_pybytes()


def documents(path):
    return [piece for piece, _ in read_pieces(path, text_key="text", strict=True)]


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".lz4", ".zst"])
@pytest.mark.parametrize("kind", CONTENT)
def test_compressed_text_is_read_whole_or_refused(tmp_path, kind, suffix):
    path, whole = tmp_path / f"a{kind}{suffix}", packed(CONTENT[kind].encode(), suffix)
    path.write_bytes(whole)
    assert documents(path) == (TEXTS if kind == ".jsonl" else [CONTENT[kind]])
    for size in range(0, len(whole), 10):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=rf"a {suffix} file must be whole .*a{kind}{suffix} \(.*after line \d+\)"):
            documents(path)
