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


@pytest.mark.parametrize("text", ["[" * 100_000, b'{"a":' * 100_000, "nothing", b"\xff"])
def test_what_cannot_be_read_is_not_json(text):
    with pytest.raises(ValueError):
        parse_json(text)
    assert parse_json(json.dumps({"a": [1]})) == {"a": [1]}
