"""Entries of scores: shares with their errors, keys that differ where scores may, and files that are whole."""

import dataclasses
import json
import math

import numpy as np
import pytest

from sppo_jax.data.tasks.prompts import Prompter
from sppo_jax.data.tokens.encoding import BytesEncoder
from sppo_jax.evaluation.entries import entry_of, key_of, read_entries, share_of, write_entries
from sppo_jax.evaluation.score import Answered, TaskResult
from sppo_jax.evaluation.tables import scores_text
from sppo_jax.evaluation.tasks import NeedleTask

PROMPTER = Prompter(encoder=BytesEncoder())
TASK = NeedleTask(name="needle", num_samples=4)


def result(**changes):
    best = tuple(Answered(nats=nats, count=2, is_hit=nats < 3, joins=nats > 1) for nats in (1.0, 2.0, 4.0, 5.0))
    given = {"hits": np.array([1, 1, 0, 0], bool), "hits_by_byte": None, "depths": (0.05, 0.15, 0.16, 1.0)}
    return TaskResult(best=best, seconds=2.0, **given | changes)


def test_the_figures_of_an_entry():
    entry = entry_of("k", TASK, 4096, result())
    assert (entry["task"], entry["length"], entry["samples"], entry["hits"]) == ("needle", 4096, 4, 2)
    assert entry["share"] == 0.5 and entry["error"] == 0.25 and entry["nats"] == 1.5 and entry["joined"] == 3
    assert entry["depths"] == [
        {"depth": 0.0, "samples": 1, "hits": 1},
        {"depth": 0.1, "samples": 2, "hits": 1},
        {"depth": 0.9, "samples": 1, "hits": 0},
    ]
    assert "acc" not in entry
    choices = entry_of("k", TASK, 64, result(hits_by_byte=np.array([1, 1, 1, 0], bool), depths=None))
    assert (choices["acc"], choices["acc_norm"]) == (0.5, 0.75) and "depths" not in choices


def test_the_error_is_that_of_a_mean():
    assert share_of(np.ones(5, bool)) == (1.0, 0.0)
    share, error = share_of(np.arange(50) < 13)
    assert share == 0.26 and error == pytest.approx(math.sqrt(0.26 * 0.74 / 50))


def test_a_key_differs_where_scores_may():
    class Other(BytesEncoder):
        key = "other"

    class Template:
        def prompt(self, messages):
            return f"<user>{messages[0]['content']}"

    given = ("w", {"hidden_size": 8, "hf": "a"}, TASK, 64, PROMPTER)
    changes = {
        0: ["v"],
        1: [{"hidden_size": 9, "hf": "a"}],
        2: [dataclasses.replace(TASK, num_samples=5), NeedleTask(name="needle-keys", num_samples=4)],
        3: [65],
        4: [Prompter(encoder=Other()), Prompter(encoder=BytesEncoder(), template=Template())],
    }
    others = [key_of(*given[:at], value, *given[at + 1 :]) for at, values in changes.items() for value in values]
    assert len({key_of(*given), *others}) == 1 + len(others)
    moved = (given[0], given[1] | {"hf": "b", "check_kernels": False}, *given[2:])
    assert key_of(*moved) == key_of(*given)


def test_a_file_is_whole_or_as_before(tmp_path, monkeypatch):
    path = tmp_path / "scores.json"
    assert read_entries(path) == []
    write_entries(path, [{"key": "a", "nats": math.nan}])
    assert read_entries(path) == [{"key": "a", "nats": None}] and json.loads(path.read_text())

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("os.fsync", killed)
    with pytest.raises(KeyboardInterrupt):
        write_entries(path, [{"key": "b"}])
    assert read_entries(path) == [{"key": "a", "nats": None}] and [*tmp_path.iterdir()] == [path]
    for text in ("[]", "{", '{"scores": [1]}'):
        path.write_text(text)
        with pytest.raises(ValueError, match="must be one that sppo eval --tasks wrote, got .*scores.json"):
            read_entries(path)
    with pytest.raises(ValueError, match="must be writable, got"):
        monkeypatch.undo()
        write_entries(tmp_path / "gone" / "scores.json", [])


def test_tables_have_a_line_for_each_score_and_a_depth_for_each_length():
    entries = [entry_of("k", TASK, length, result()) for length in (8192, 4096)]
    entries.append(
        entry_of("k", NeedleTask(name="q", num_samples=4), 64, result(hits_by_byte=np.ones(4, bool), depths=None))
    )
    lines = scores_text(entries).splitlines()
    assert lines[1].split() == ["needle", "8,192", "50.0%", "25.0%", "4", "1.5000", "2.0"]
    assert lines[4].split() == ["by", "nats", "a", "byte", "100.0%", "0.0%"]
    assert lines[5].startswith("needle: answers encoded without") and lines[5].endswith(": 1")
    assert [line.split() for line in lines[-4:]] == [
        ["needle", "by", "depth", "4,096", "8,192"],
        ["0.0", "100%", "100%"],
        ["0.1", "50%", "50%"],
        ["0.9", "0%", "0%"],
    ]
