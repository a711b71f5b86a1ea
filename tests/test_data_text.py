"""Text files give their documents piece by piece, and say which line is wrong."""

import gzip
import json
import sys

import numpy as np
import pytest

from sppo_jax.data.content import documents as text
from sppo_jax.data.content.documents import read_pieces


def documents(path, text_key="text", strict=True) -> list[list[str]]:
    found: list[list[str]] = [[]]
    for piece, is_last in read_pieces(path, text_key=text_key, strict=strict):
        found[-1].append(piece)
        if is_last:
            found.append([])
    assert found.pop() == []
    return found


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
@pytest.mark.parametrize("lines", [["x" * 35], ["abc\n"] * 20, ["\n" * 33], ["a\n", "b" * 50, "\n", "c" * 7]])
def test_long_documents_come_in_pieces_that_end_with_a_line(tmp_path, monkeypatch, name, lines):
    monkeypatch.setattr(text, "_PIECE_CHARS", 16)
    whole = "".join(lines)
    path = tmp_path / name
    path.write_text(whole if name == "a.txt" else json.dumps({"text": whole}) + "\n", newline="")
    (pieces,) = documents(path)
    assert "".join(pieces) == whole and len(pieces) > 1
    assert all(0 < len(piece) <= 32 for piece in pieces)
    assert all(piece.endswith("\n") for piece in pieces[:-1] if "\n" in piece)


def test_halves_of_surrogate_pairs_become_readable(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a\\ud800b \\ud83d\\ude00"}')
    assert documents(tmp_path / "a.jsonl") == [["a\ufffdb \U0001f600"]]


def write_parquet(path, **columns):
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pa.table(columns), path)


def test_wrong_files_are_refused_with_their_line(tmp_path):
    (tmp_path / "torn.jsonl").write_text('{"text": "a"}\n{"text": "b')
    (tmp_path / "list.jsonl").write_text('{"text": "a"}\n\n["b"]\n')
    (tmp_path / "key.jsonl").write_text('{"content": "a", "id": 3}\n')
    (tmp_path / "number.jsonl").write_text('{"text": 3}\n')
    (tmp_path / "plain.jsonl.gz").write_text('{"text": "a"}\n')
    (tmp_path / "torn.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n' * 1000)[:-10])
    (tmp_path / "latin.txt").write_bytes("caf\u00e9".encode("latin-1"))
    (tmp_path / "torn.parquet").write_bytes(b"PAR1 and no more")
    write_parquet(tmp_path / "column.parquet", content=["a"], id=[1])
    write_parquet(tmp_path / "number.parquet", text=[1, 2])
    write_parquet(tmp_path / "cut.parquet", text=["a" * 1000])
    (tmp_path / "cut.parquet").write_bytes((tmp_path / "cut.parquet").read_bytes()[:-30])
    cases = {
        "torn.jsonl": "torn.jsonl line 2 .Unterminated string",
        "list.jsonl": "list.jsonl line 3 with a value of type list; correct the line",
        "key.jsonl": "got 'text', but .*key.jsonl line 1 has 'content', 'id'",
        "number.jsonl": "must name text, got 'text' with a value of type int in .*number.jsonl line 1",
        "plain.jsonl.gz": "must be whole gzip, got .*plain.jsonl.gz",
        "torn.jsonl.gz": "must be whole gzip, got .*after line",
        "latin.txt": "must be UTF-8, got .*latin.txt .*byte 0xe9",
        "torn.parquet": "a .parquet file must be whole, got",
        "cut.parquet": "a .parquet file must be whole, got",
        "column.parquet": "must be a column, got 'text', but .*column.parquet has 'content', 'id'",
        "number.parquet": "must name text, got .text. with a value of type int in .*number.parquet row 1",
        "absent.jsonl": "must be readable, got",
        "absent.parquet": "must be readable, got",
    }
    for name, message in cases.items():
        with pytest.raises(ValueError, match=message):
            documents(tmp_path / name)


def write_rows(path, texts):
    """Writes documents, some of them null or empty, in the way that a file's name asks for."""
    if path.suffix == ".parquet":
        write_parquet(path, text=texts)
    else:
        content = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
        path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


KINDS = ("a.jsonl", "a.jsonl.gz", "a.parquet")


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("texts", [["a", None, "b"], [None, "a"], ["a", ""], [None, None, "a", "", None, "b", None]])
def test_documents_without_text_are_left_out_of_every_kind_of_file(tmp_path, name, texts):
    write_rows(tmp_path / name, texts)
    assert documents(tmp_path / name) == [[text] for text in texts if text]


def not_utf8(path):
    """Writes a document that is not UTF-8, as the second of its file where there can be several."""
    if path.suffix == ".parquet":
        pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        texts = pa.Array.from_buffers(
            pa.string(), 2, [None, pa.py_buffer(np.array([0, 1, 4], np.int32)), pa.py_buffer(b"aca\xe9")]
        )
        parquet.write_table(pa.table({"text": texts}), path)
    else:
        content = b"a\nca\xe9 b" if path.suffix == ".txt" else b'{"text": "a"}\n{"text": "ca\xe9 b"}\n'
        path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


@pytest.mark.parametrize(("name", "where"), [("a.txt", ""), *((name, " line 2") for name in KINDS[:2]), (KINDS[2], "")])
def test_invalid_utf8_is_refused_with_the_name_of_the_file(tmp_path, name, where):
    not_utf8(tmp_path / name)
    with pytest.raises(ValueError, match=f"must be UTF-8, got .*{name}{where} .*byte 0xe9") as error:
        documents(tmp_path / name)
    assert "\n" not in str(error.value)


def test_a_missing_library_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match=r"needs the pyarrow library.*pip install pyarrow"):
        documents(tmp_path / "a.parquet")
