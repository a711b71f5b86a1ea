"""The clock benchmark without a clock: its Plans, its statistics and its report."""

import pytest

from bench import clock
from sppo_jax.hardware import DEVICES, make_cluster


@pytest.fixture(scope="module")
def found():
    return clock.plans(make_cluster(DEVICES["cpu"], clock.NUM_DEVICES), "")


def test_at_least_twenty_plans_train_the_same_tokens_on_both_devices(found):
    assert len(found) > 20 and clock.FREE in found
    for plan in found.values():
        assert plan.mesh.data * plan.mesh.pipe * plan.mesh.seq == clock.NUM_DEVICES
        assert plan.mesh.data * plan.sequences_per_pipeline == clock.SEQUENCES
        assert plan.sequence_length == clock.LENGTH
    assert len({clock.program_of(found[name]) for name in clock.CASES}) == len(clock.CASES)


@pytest.mark.parametrize(
    "left, right, value",
    [
        ([1, 2, 3], [10, 20, 400], 1.0),
        ([1, 2, 3], [3, 2, 1], -1.0),
        ([1, 2, 3, 4], [1, 3, 2, 4], 0.8),
        ([1, 1, 2], [1, 1, 5], 1.0),
    ],
)
def test_ranks_correlate_as_by_hand(left, right, value):
    assert clock.spearman(left, right) == pytest.approx(value)


def test_equal_values_share_a_rank():
    assert clock.ranks([5.0, 1.0, 5.0]) == [1.5, 0.0, 1.5]


def test_the_report_says_what_the_choice_costs(found):
    times = {name: [(2 * plan.predicted.step_s, 3 * plan.predicted.step_s)] * 3 for name, plan in found.items()}
    rows = clock.rows_of(found, times)
    verdict = clock.judge(rows)
    assert verdict["plans"] == len(clock.CASES) >= 20 and verdict["spearman"] == 1.0
    assert verdict["chosen_to_best"] == 1.0
    assert all(verdict[f"{name}, to best"] <= 1.0 for name in clock.CHOICES)
    assert verdict["measured_to_predicted"] == pytest.approx(2, rel=0.01)
    assert all(row["cores"] == 1.5 for row in rows)
    busy = {"one": 1.0, "all": 2.0}
    report = {"date": "2026-11-21", "hardware": "a CPU", "jax": "0", "rounds": 3, "busy_cores": busy}
    text = clock.text_of({**report, "rows": rows, "verdict": verdict})
    assert text.count("\n| ") == len(found) + 1 + len(clock.PAIRS) + 1 and "**1.0**" in text
    assert f"\n| {clock.PAIRS[0][0]} | {clock.PAIRS[0][1]} | " in text
    (panel,) = clock.picture(rows)
    by_mesh = {series.name: list(zip(series.x, series.y, strict=True)) for series in panel.series if not series.line}
    assert set(by_mesh) == {"data 2", "pipe 2", "seq 2"}
    points = [(row["predicted_s"], row["measured_s"]) for row in rows]
    assert sorted(point for own in by_mesh.values() for point in own) == sorted(points)
