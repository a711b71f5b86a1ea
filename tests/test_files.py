"""Files that are there whole or not at all, and JSON."""

import json
import math
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from sppo_jax.files.whole import check_encoding, file_system_of, finite, json_text, parse_json, write_whole


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "plan.json"
    write_whole(path, "old")
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "full")))
    with pytest.raises(OSError):
        write_whole(path, "new")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_a_link_stays_and_what_it_points_to_is_replaced(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "real").write_text("old")
    (tmp_path / "link").symlink_to("deep/real")
    write_whole(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "deep" / "real").read_text() == "new"


def test_what_is_no_file_is_written_to_and_stays(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_whole(tmp_path / "pipe", "text")
    assert os.read(reader, 99) == b"text" and [path.name for path in tmp_path.iterdir()] == ["pipe"]
    os.close(reader)


@pytest.mark.parametrize("text", ["[" * 100_000, b'{"a":' * 100_000, "nothing", b"\xff"])
def test_what_cannot_be_read_is_not_json(text):
    with pytest.raises(ValueError):
        parse_json(text)
    assert parse_json(json.dumps({"a": [1]})) == {"a": [1]}


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("caf\u00e9 \u65e5", "caf\u00e9 \u65e5".encode()),
        (os.fsdecode(b"run-\xff"), b"run-\xff"),  # the name of a file, by its own bytes
        (os.fsdecode("run-\u00fc".encode()), "run-\u00fc".encode()),
        ("\ud800", b"?"),
    ],
)
def test_a_text_of_any_characters_is_written(tmp_path, text, written):
    write_whole(tmp_path / "file", text)
    assert (tmp_path / "file").read_bytes() == written


@pytest.mark.parametrize("name", ["run", "l\u00e4uft", "\u65e5", os.fsdecode(b"run-\xff")])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "latin-1"])
def test_paths_must_mean_the_same_place_in_utf_8(monkeypatch, name, encoding):
    monkeypatch.setattr(sys, "getfilesystemencoding", lambda: encoding)
    monkeypatch.setattr(os, "fsencode", lambda text: str(text).encode(encoding, "surrogateescape"))
    if name.isascii() or (encoding == "utf-8" and not name.endswith("\udcff")):
        check_encoding(Path("/runs") / name, "the run directory")
        return
    if not name.endswith("\udcff") and encoding == "ascii":
        name = name.encode().decode("ascii", "surrogateescape")  # as Python reads it from the command line then
    if encoding == "latin-1" and name == "\u65e5":
        name = name.encode().decode("latin-1")
    with pytest.raises(ValueError, match=f"the path of the run directory must be UTF-8.* {encoding} of .*PYTHONUTF8=1"):
        check_encoding(Path("/runs") / name, "the run directory")


def test_json_has_null_for_what_is_not_finite():
    value = {"loss": math.nan, "buckets": [{"loss": math.inf}, (-math.inf, 1.5)], "text": "nan", "step": 3, "no": None}
    plain = {"loss": None, "buckets": [{"loss": None}, [None, 1.5]], "text": "nan", "step": 3, "no": None}
    assert finite(value) == plain and json.loads(json_text(value)) == plain
    assert json_text(np.float64("nan")) == "null" and json_text({"a": [1]}, separators=(",", ":")) == '{"a":[1]}'


def test_figures_reach_json_through_one_guard():
    """The watchdog's posts hold counts, and the note of a kernel's check what it was asked."""
    package, without_figures = Path(__file__).parents[1] / "sppo_jax", {"watchdog.py", "kernel_check.py"}
    writers = [path for name in ("train", "report", "commands", "hardware") for path in (package / name).rglob("*.py")]
    assert {path.name for path in writers if "json.dump" in path.read_text(encoding="utf-8")} <= without_figures


def test_the_file_system_of_a_path_is_that_of_the_nearest_mount(tmp_path):
    mounts = tmp_path / "mounts"
    mounts.write_text(f"disk / ext4 rw 0 0\ns3 {tmp_path} tmpfs rw 0 0\ns3 {tmp_path} fuse.s3fs rw 0 0\ntorn\n")
    assert file_system_of(tmp_path / "a" / "b", mounts) == "fuse.s3fs"
    assert file_system_of(Path("/nowhere"), mounts) == "ext4"
    assert file_system_of(tmp_path, tmp_path / "absent") == "unknown" != file_system_of(tmp_path)
