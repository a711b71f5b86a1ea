"""The stopwatch of the two forms of experts' products: on a small case, and what is stored."""

import json

import numpy as np

from bench import experts, experts_sums


def test_both_forms_are_timed_on_the_same_arguments(monkeypatch):
    monkeypatch.setattr(experts, "ROUNDS", 1)
    case = (8, 2, 4, 3, 4)
    programs, args = experts.compiled_forms(case)
    texts = {name: program.as_text() for name, program in programs.items()}
    assert "while" in texts["tiles"] and texts["tiles"] != texts["ragged"]
    (tiles, _), (ragged, _) = (program(*args) for program in programs.values())
    np.testing.assert_allclose(tiles, ragged, rtol=1e-5)
    row = experts.measure(case)
    assert row["tiles_s"] > 0 and row["range"][0] <= row["ragged_over_tiles"] <= row["range"][1]


def test_stored_results_are_of_these_cases():
    rows = json.loads(experts.RESULTS.read_text())["rows"]
    assert [(row["tokens"], row["chosen"], row["hidden"], row["experts"], row["size"]) for row in rows] == list(
        experts.CASES
    )


def test_sums_by_packed_row_are_timed_beside_those_of_one_row(monkeypatch):
    monkeypatch.setattr(experts_sums, "ROUNDS", 1)
    row = experts_sums.measure((8, 2, 4, 3, 4))
    assert row["range"][0] <= row["share"] <= row["range"][1]


def test_sums_by_packed_row_cost_less_than_a_hundredth():
    rows = json.loads(experts_sums.RESULTS.read_text())["rows"]
    assert [row["experts"] for row in rows] == [case[3] for case in experts.CASES]
    assert all(row["share"] < 0.01 for row in rows)
