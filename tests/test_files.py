"""Files that are there whole or not at all, and JSON."""

import json
import os

import pytest

from sppo_jax.files import parse_json, write_whole


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
