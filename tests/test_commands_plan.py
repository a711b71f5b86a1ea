"""`sppo plan` shows on a terminal, and nowhere else, that a search takes long."""

import sys
import time

import pytest

from sppo_jax.commands import plan


def shown(monkeypatch, capsys, *, is_terminal, search_s):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    monkeypatch.setattr(plan, "_MOMENT_S", 0.1)
    with plan._seconds_shown():
        time.sleep(search_s)
    captured = capsys.readouterr()
    assert not captured.out
    return captured.err


def test_a_long_search_shows_its_seconds_on_a_terminal(monkeypatch, capsys):
    assert shown(monkeypatch, capsys, is_terminal=True, search_s=0.5) == "\rsearching for a plan: 0 s\r\033[K"


@pytest.mark.parametrize(("is_terminal", "search_s"), [(False, 0.3), (True, 0.0)])
def test_nothing_is_shown_elsewhere_nor_for_a_moment(monkeypatch, capsys, is_terminal, search_s):
    assert shown(monkeypatch, capsys, is_terminal=is_terminal, search_s=search_s) == ""


def test_the_line_ends_where_a_search_fails(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(plan, "_MOMENT_S", 0.05)
    with pytest.raises(ValueError), plan._seconds_shown():
        time.sleep(0.3)
        raise ValueError
    assert capsys.readouterr().err.endswith("\r\033[K")
