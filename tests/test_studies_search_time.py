"""The page's table of search times has a row for every setting, and a missing checkout is refused."""

import sys

import pytest

from bench.blocks import read_block
from studies import search_time
from studies.search_time import Measured


def test_the_page_has_a_row_for_every_setting():
    rows = [line.split(" | ")[0] for line in read_block(search_time.PAGE, "search").splitlines() if "|" in line]
    assert rows[2:] == [f"| {setting.name}" for setting in search_time.SETTINGS] + ["| together"]


def test_the_table_compares_with_the_planners_before():
    count = len(search_time.SETTINGS)
    columns = [[Measured(seconds, seconds > 1)] * count for seconds in (1.0, 1.5, 2.0, 2.5)]
    lines = search_time.table(*columns).splitlines()
    assert lines[4].endswith("| 1.00, nothing fits | 1.50 | 1.50 | 2.00 | 2.50 | 1.25 |")
    assert (
        lines[-1] == f"| together | {count}.0 | {1.5 * count:.1f} | 1.50 | {2 * count}.0 | {2.5 * count:.1f} | 1.25 |"
    )


def test_a_search_is_measured():
    fastest = search_time.SETTINGS[10:11]
    assert search_time.measure(fastest, breadth_first=True)[0].fits


def test_a_missing_checkout_is_refused(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sys, "argv", ["search_time.py", "--before-waves", str(tmp_path)])
    with pytest.raises(SystemExit) as refused:
        search_time.main()
    assert refused.value.code == 2 and "must be a checkout with sppo_jax/" in capsys.readouterr().err
