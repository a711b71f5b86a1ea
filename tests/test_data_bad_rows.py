"""Rows that are wrong in every form: null text, text that is not UTF-8, values nested too deep, too wide a window."""

import io
import json
import struct
import tarfile

import numpy as np
import pytest

from sppo_jax.data.cache.left_out import NO_TEXT, Tally
from sppo_jax.data.content.documents import read_pieces

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


def write_mds(path, values, kind="json"):
    """Writes a shard of one column, as the form's own library lays it out."""
    head = json.dumps({"column_names": ["text"], "column_encodings": [kind], "column_sizes": [None]}).encode()
    samples = [struct.pack("<I", len(value)) + value for value in values]
    first = 4 + 4 * (len(samples) + 1) + len(head)
    ends = first + np.cumsum([0, *map(len, samples)])
    path.write_bytes(struct.pack("<I", len(samples)) + ends.astype("<u4").tobytes() + head + b"".join(samples))


def write_tar(path, rows):
    with tarfile.open(path, "w") as tar:
        for number, row in enumerate(rows):
            info = tarfile.TarInfo(f"{number}.json")
            info.size = len(row)
            tar.addfile(info, io.BytesIO(row))


def write_records(path, rows):
    writer = pytest.importorskip("array_record.python.array_record_module").ArrayRecordWriter(str(path), "group_size:1")
    for row in rows:
        writer.write(row)
    writer.close()


def compressed(content, window_log=20):
    """Returns a .zst frame of one block that is not packed; decoders must hold a window of 2**window_log bytes."""
    size = struct.pack("<I", len(content) << 3 | 1)[:3]
    return b"\x28\xb5\x2f\xfd\0" + bytes([(window_log - 10) << 3]) + size + content


def write_values(path, values):
    """Writes rows whose text is a value in JSON, given as bytes, in the way that the file's name asks for."""
    rows = [b'{"text": ' + value + b"}" for value in values]
    if path.suffix == ".mds":
        write_mds(path, values)
    elif path.suffix == ".tar":
        write_tar(path, rows)
    elif path.suffix == ".array_record":
        write_records(path, rows)
    else:
        content = b"[" + b",\n".join(rows) + b"]" if ".json." in f"{path.name}." else b"\n".join(rows)
        path.write_bytes(compressed(content) if path.suffix == ".zst" else content)


def texts(path, left_out=None):
    return [piece for piece, _ in read_pieces(path, text_key="text", strict=True, left_out=left_out)]


def one_line(path, *said):
    with pytest.raises(ValueError) as error:
        texts(path)
    told = str(error.value)
    assert "\n" not in told and len(told) < 600 and path.name in told and all(word in told for word in said), told


FORMS = ("a.jsonl", "a.jsonl.zst", "a.json", "a.mds", "a.tar", "a.array_record")


@pytest.mark.parametrize("name", FORMS)
def test_null_and_empty_text_is_left_out_and_counted(tmp_path, name):
    write_values(tmp_path / name, [b'"a"', b"null", b'""', b'"b"'])
    left_out = Tally()
    assert texts(tmp_path / name, left_out) == ["a", "b"] and left_out == {NO_TEXT: 2}


@pytest.mark.parametrize("name", FORMS)
def test_text_that_is_not_utf8_is_refused_with_its_place(tmp_path, name):
    write_values(tmp_path / name, [b'"a"', b'"ca\xe9 b"'])
    one_line(tmp_path / name, "must be UTF-8, got", "byte 0xe9")


@pytest.mark.parametrize("name", FORMS)
def test_values_that_nest_too_deep_are_refused_with_their_place(tmp_path, name):
    write_values(tmp_path / name, [b'"a"', b"[" * 50_000 + b"]" * 50_000])
    one_line(tmp_path / name, "too deep")


def test_bytes_that_are_no_text_are_refused_in_forms_of_bytes(tmp_path):
    write_mds(tmp_path / "a.mds", [b"a", b"ca\xe9"], "str")
    one_line(tmp_path / "a.mds", "must be UTF-8, got", "sample 2", "byte 0xe9")
    write_mds(tmp_path / "b.mds", [b"a"], "bytes")
    one_line(tmp_path / "b.mds", "a value of type bytes", "sample 1")
    write_records(tmp_path / "a.array_record", [b"a", b"ca\xe9"])
    one_line(tmp_path / "a.array_record", "must be UTF-8, got", "record 2", "byte 0xe9")
    example = b"\x0a\x0f\x0a\x0d\x0a\x04text\x12\x05\x0a\x03\x0a\x01"
    write_records(tmp_path / "c.array_record", [example + b"a"])
    assert texts(tmp_path / "c.array_record") == ["a"]
    write_records(tmp_path / "b.array_record", [example + b"\xe9"])
    one_line(tmp_path / "b.array_record", "a value of type bytes", "record 1")


WIDE = ("a.txt.zst", "a.jsonl.zst", "a.json.zst", "a.json.zstd", "a.mds.zst", "a.mds.zstd", "a.tar.zst")


@pytest.mark.parametrize("name", WIDE)
def test_a_zst_file_with_too_wide_a_window_is_refused(tmp_path, name):
    plain = tmp_path / name.rpartition(".")[0]
    plain.write_bytes(b"a") if plain.suffix == ".txt" else write_values(plain, [b'"a"'])
    (tmp_path / name).write_bytes(compressed(plain.read_bytes(), 28))
    one_line(tmp_path / name, "must have a window of at most 128 MB", "compress it without --long")
    (tmp_path / name).write_bytes(compressed(plain.read_bytes(), 27))
    assert texts(tmp_path / name) == ["a"]
