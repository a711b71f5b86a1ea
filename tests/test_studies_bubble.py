"""The bubble's plot: on the formula, and drawn."""

import pytest

from bench import figures
from studies import bubble


@pytest.fixture(scope="module")
def found():
    return list(bubble.points((16, 64)))


def test_equal_lengths_and_equal_costs_lie_on_the_formula(found):
    on_formula = [p for p in found if p.kind == "equal costs" or (p.kind, p.groups) == ("equal lengths", 1)]
    assert len(on_formula) == 2 * 3 * 4
    assert all(p.simulated == pytest.approx(p.formula, rel=1e-9) for p in on_formula)


def test_the_formula_by_hand(found):
    for p in found:
        if p.kind == "equal costs":
            assert p.formula == pytest.approx((p.stages - 1) / (p.groups * p.chunks))


def test_unequal_costs_wait_longer_than_the_formula_says(found):
    assert all(p.simulated > p.formula for p in found if p.kind == "equal FLOPs, 4 lengths")
    rising = {(p.stages, p.chunks, p.groups): p.simulated for p in found if p.kind == "equal lengths"}
    for (stages, chunks, groups), simulated in rising.items():
        assert simulated == pytest.approx(rising[stages, chunks, 1] * (1 + 1 / groups) / 2, rel=0.02)


def test_gain_and_picture(found, tmp_path, monkeypatch, capsys):
    gained = bubble.gain()
    assert gained.published == pytest.approx(1.44 / 1.23) and gained.limit == 39 / 32
    assert gained.over_lockstep >= 1
    assert gained.lockstep.chunk_lengths != gained.ours.chunk_lengths and len(gained.lockstep.chunk_lengths) == 32
    # One layer a group is the deepest interleaving.
    assert gained.plain.schedule.interleave == 1 and gained.ours.schedule.interleave == bubble.SPPO_DEPTH
    assert gained.fastest_s == pytest.approx(gained.ours.predicted.step_s, rel=5e-3)
    assert gained.fastest_s < gained.plain_s < gained.lockstep.predicted.step_s
    # The text says so.
    assert gained.plain_over_formula < gained.over_formula < gained.published
    assert gained.by_formula(1) == 1 and gained.by_formula(5) == pytest.approx((39 / 32) / (167 / 160))
    *waiting, gains = bubble.picture(found, gained)
    assert [sum(series.line for series in panel.series) for panel in waiting] == [5] * 3
    assert {len(series.x) for panel in waiting for series in panel.series} == {2}
    values = [gained.published, gained.limit, gained.plain_over_formula, gained.plain_over_lockstep]
    values += [gained.over_formula, gained.over_lockstep]
    assert [series.y[0] for series in gains.series] == values
    assert [series.name.splitlines()[-1] for series in gains.series] == [f"{value:.2f}x" for value in values]
    monkeypatch.setattr(figures, "draw", figures.digest)
    monkeypatch.setattr(bubble, "FIGURES", tmp_path)
    monkeypatch.setattr(bubble, "points", lambda: found)
    assert bubble.main(["--write"]) == 0
    assert "![" in (tmp_path / "bubble.md").read_text()
    assert (tmp_path / "bubble.svg").read_text() == figures.digest([*waiting, gains])
    assert "largest difference" in capsys.readouterr().out
