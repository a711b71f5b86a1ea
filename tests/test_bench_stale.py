"""A stored compiled figure is judged by versions, files and the lowered program, in this order."""

import json
from typing import NoReturn

import pytest

from bench import fit, shipped, stale
from sppo_jax.fit.fingerprint import Lowering

VERSIONS = {"jaxlib": "0.12.0.1", "libtpu": "0.0.50.1"}
NOW = Lowering(
    fingerprint="a" * 16, num_bodies=8, kernel_calls=4, host_stash_bytes=1 << 30, versions=VERSIONS, sources="s" * 16
)
COUNTS = {"num_bodies": 8, "kernel_calls": 4, "host_stash_bytes": 1 << 30}


def never() -> NoReturn:
    raise AssertionError("what is known without lowering or counting is not lowered or counted")


def counted() -> dict[str, int]:
    return {name: size for name, size in COUNTS.items() if name != "kernel_calls"}


def broken() -> NoReturn:
    raise ValueError("the plan must have schema 12,\ngot 7")


@pytest.mark.parametrize(
    "row, lower, count, verdict, why",
    [
        (NOW.to_dict(), never, never, "fresh", "the same source files"),
        (NOW.to_dict() | {"sources": "other"}, lambda: NOW, never, "fresh", "the same program"),
        (NOW.to_dict() | {"sources": "other", "fingerprint": "b"}, lambda: NOW, never, "stale", "another program of"),
        (
            {"sources": "other", "fingerprint": "b", "versions": VERSIONS, **COUNTS, "num_bodies": 9},
            lambda: NOW,
            never,
            "stale",
            "num_bodies 9 then, 8 now",
        ),
        (
            NOW.to_dict() | {"versions": VERSIONS | {"jaxlib": "0.11.2"}},
            never,
            never,
            "another jaxlib",
            "jaxlib 0.11.2",
        ),
        (
            NOW.to_dict() | {"versions": VERSIONS | {"libtpu": "0.0.52"}},
            never,
            never,
            "another jaxlib",
            "libtpu 0.0.52",
        ),
        (NOW.to_dict() | {"versions": {"jax-cuda13-pjrt": "0.12"}}, never, never, "another jaxlib", "not installed"),
        # Rows from before the digits: the version of jax may be known, and the number of bodies.
        ({"jax": "0.11.2", "num_bodies": 8}, never, never, "another jaxlib", "jaxlib 0.11.2"),
        ({"jax": "0.12.0.1", "num_bodies": 8}, never, counted, "unknown", "before rows had digits"),
        ({"jax": "0.12.0.1", "num_bodies": 7}, never, counted, "stale", "num_bodies 7 then, 8 now"),
        ({}, never, counted, "unknown", "before rows had digits"),
        ({}, never, broken, "unreadable", "the plan must have schema 12, got 7"),
        (NOW.to_dict() | {"sources": "other"}, broken, never, "unreadable", "the plan must have schema 12"),
    ],
)
def test_each_verdict_has_its_reason(row, lower, count, verdict, why):
    found = stale.judge(row, VERSIONS, NOW.sources, lower=lower, count=count)
    assert found[0] == verdict and why in found[1]


def test_rows_that_are_not_fresh_are_listed_and_dated(tmp_path):
    rows = [
        stale.Judged(file="fit.json", name=name, date="2026-11-25", verdict=verdict, why="why")
        for name, verdict in zip("abcde", stale.VERDICTS, strict=True)
    ]
    text = stale.report(rows)
    assert text.endswith("1 fresh, 1 stale, 1 another jaxlib, 1 unknown, 1 unreadable") and "fit.json a" not in text
    path = tmp_path / "stale.json"
    stale.write(rows, "2026-11-29", path)
    assert json.loads(path.read_text())["date"] == "2026-11-29"
    assert stale.dates("fit.json", path) == dict.fromkeys("bcde", "2026-11-25") and stale.dates("x", path) == {}
    assert stale.dates("fit.json", tmp_path / "none") == {}


def test_the_command_fails_only_if_a_row_is_stale(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(stale, "RESULTS", tmp_path / "stale.json")
    for verdict in stale.VERDICTS:
        judged = stale.Judged(file="fit.json", name="a", date="2026-11-25", verdict=verdict, why="why")
        monkeypatch.setattr(fit, "judged", lambda words, judged=judged: iter([judged]))
        monkeypatch.setattr(shipped, "judged", lambda words: iter([]))
        assert fit.print_stale(["a"]) == (verdict == "stale")
        assert f"1 {verdict}" in capsys.readouterr().out


def test_the_table_dates_rows_that_are_not_known_to_be_of_todays_program(monkeypatch):
    rows = fit.load()["rows"][:2]
    monkeypatch.setattr(stale, "dates", lambda file: {rows[0]["name"]: "2026-11-25"})
    first, second = fit.table(rows)[2:]
    assert "(2026-11-25)" in first and "(2026-11-25)" not in second
