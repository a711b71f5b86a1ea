"""The stored results of FlexSP's problem are those of today's code, and hold what is said about them."""

import json
from pathlib import Path

import numpy as np
import pytest

from sppo_jax.flex.flexsp.costs import MODELS, flexsp_costs
from sppo_jax.flex.flexsp.solver import plan_batch
from studies import flexsp
from studies.flexsp_cells import PUBLISHED, released_batches, sample_batches, simulate_cell

STALE = "studies/results/flexsp.json is stale: make it again with `python -m studies.flexsp`"
RESULTS = json.loads(flexsp.RESULT.read_text(encoding="utf-8"))
COSTS = flexsp_costs(MODELS["7b"])


def test_the_results_name_their_date_and_hardware():
    assert RESULTS["date"] >= "2026-11-22" and RESULTS["hardware"] == "simulated; solver times on 2 CPU cores"
    assert set(flexsp.PARTS) <= set(RESULTS)


@pytest.mark.parametrize("corpus", ["wikipedia", "github-assumed", "commoncrawl-assumed"])
def test_stored_plans_on_64_devices_are_todays(corpus):
    own = RESULTS["large"][corpus]
    assert len(own["rows"]) == flexsp.NUM_BATCHES
    lengths = sample_batches(corpus, 192, flexsp.NUM_BATCHES)[3]
    assert [plan.time_ns for plan in plan_batch(lengths, COSTS)[1]] == own["rows"][3]["fast_ns"], STALE


@pytest.mark.parametrize("corpus", ["wikipedia", "github-assumed", "commoncrawl-assumed"])
def test_the_fast_planner_is_fast_and_close_to_highs_and_to_the_bound(corpus):
    own = RESULTS["large"][corpus]
    assert own["above_highs_mean"] <= 0.03
    assert own["above_bound_mean"] <= (0.01 if corpus == "wikipedia" else 0.05)
    assert own["microbatch_ms_most"] <= 50 and own["window_ms_most"] <= 150
    for row in own["rows"]:
        assert all(low <= fast for low, fast in zip(row["bound_ns"], row["fast_ns"], strict=True))


def test_stored_cells_are_those_of_the_paper_and_say_how_far_off_they_are():
    rows = RESULTS["cells"]["rows"]
    assert [row["published"] for row in rows] == [cell.over_deepspeed for cell in PUBLISHED]
    errors = [abs(row["gain"] / row["published"] - 1) for row in rows if row["judged"]]
    assert RESULTS["cells"]["error_mean"] == pytest.approx(np.mean(errors))
    assert RESULTS["cells"]["error_worst"] == pytest.approx(max(errors))
    assert np.mean(errors) <= 0.10 and max(errors) <= 0.20


def test_the_stored_gain_of_the_worst_cell_is_todays():
    worst = max(
        (row for row in RESULTS["cells"]["rows"] if row["judged"]), key=lambda row: row["gain"] / row["published"]
    )
    (cell,) = (cell for cell in PUBLISHED if cell.judged and cell.over_deepspeed == worst["published"])
    seconds = simulate_cell(cell, released_batches(cell.max_kilotokens), ("static", "flexsp"))
    assert seconds["static"] / seconds["flexsp"] == pytest.approx(worst["gain"], rel=1e-12), STALE


def test_the_page_says_what_other_documents_give():
    page = (Path(__file__).parents[1] / "studies" / "README.md").read_text(encoding="utf-8")
    rows = page.partition("| documents | mean error |")[2].splitlines()[2:7]
    for row, own in zip(rows, RESULTS["documents"].values(), strict=True):
        assert row.endswith(f" | {own['error_mean']:.1%} | {own['error_worst']:.1%} |"), STALE
    assert RESULTS["cells"]["error_worst"] == list(RESULTS["documents"].values())[0]["error_worst"]


def test_buckets_of_the_planner_add_at_most_what_the_paper_states():
    for corpus in ("wikipedia", "github-assumed", "commoncrawl-assumed", "wikipedia-released"):
        own = RESULTS["buckets"][corpus]
        assert own["microbatch_worst"] <= 0.023 and own["time_over_unbounded"] <= 1.02
    # The bound does something: without it a microbatch has more.
    assert all(RESULTS["buckets"][corpus]["unbounded_worst"] > 0.023 for corpus in ("wikipedia", "wikipedia-released"))


def test_the_stored_buckets_are_todays():
    own = flexsp._bucket_figures([("7b", 192)], "wikipedia")
    assert own == RESULTS["buckets"]["wikipedia"], STALE


def test_the_table_shows_every_part():
    text = flexsp.table(RESULTS)
    assert all(
        f"{part}" in text
        for part in ("optima: 100 proven", "large, wikipedia", "buckets, wikipedia", "batches 10 to 49")
    )
    assert text.count("not judged") == 12 and text.count("(published)") == 18 and "mean error" in text


def test_parts_are_written_one_by_one(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(flexsp, "PARTS", {"a": lambda say: {"x": 1}, "b": lambda say: {"y": 2}})
    out = tmp_path / "flexsp.json"
    assert flexsp.main(["--parts", "a", "--out", str(out)]) == 0
    assert flexsp.main(["--parts", "b", "--out", str(out)]) == 0
    assert {"a": {"x": 1}, "b": {"y": 2}}.items() <= json.loads(out.read_text()).items()
    assert capsys.readouterr().err == ""
