"""The judge of signals at chosen moments sees what is wrong; one command is signalled for real behind `slow`."""

from dataclasses import replace

import pytest

from bench import moments

SAVED = moments.End(moment="step", name="SIGTERM", saves=True, code=0, seconds=1.0, step=4, saved=4, text="step 4")
EARLY = replace(SAVED, moment="tokenizing", saves=False, code=130, step=0, saved=0)


@pytest.mark.parametrize(
    ("end", "problem"),
    [
        (SAVED, ""),
        (EARLY, ""),
        (replace(SAVED, code=130), "exit code 130"),
        (replace(EARLY, code=0), "exit code 0"),
        (replace(SAVED, saved=3), "step 4, saved 3"),
        (replace(SAVED, step=0, saved=0), "step 0, saved 0"),
        (replace(SAVED, seconds=5.1), "5.1 s"),
        (replace(SAVED, text="Traceback (most recent call last)"), "a traceback"),
        (replace(SAVED, moment="validation"), "no word of what was dropped"),
        (replace(SAVED, moment="validation", text="stopped; what it measured is dropped"), ""),
    ],
)
def test_the_judge_sees_what_is_wrong(end, problem):
    assert end.problem == problem
    assert moments.as_json([end])[0]["problem"] == problem


@pytest.mark.slow
def test_every_moment_ends_as_it_should(tmp_path, monkeypatch):
    monkeypatch.setattr(moments, "LIMIT_S", 60.0)  # other tests share the cores
    ends = moments.moments(tmp_path)
    assert len(ends) == 16 and [end for end in ends if end.problem] == []
