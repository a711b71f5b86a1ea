"""Text files give their documents piece by piece, and say which line is wrong."""

import gzip
import json
import sys

import pytest

from sppo_jax.data import text
from sppo_jax.data.text import read_pieces


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
        "number.parquet": "must name text, got 'text' of type int64",
        "absent.jsonl": "must be readable, got",
        "absent.parquet": "must be readable, got",
    }
    for name, message in cases.items():
        with pytest.raises(ValueError, match=message):
            documents(tmp_path / name)


def test_a_missing_library_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match=r'needs the pyarrow library.*pip install "sppo_jax\[data\]"'):
        documents(tmp_path / "a.parquet")
