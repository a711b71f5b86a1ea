"""Predictions of published figures: the claims hold, the constants are the product's, and the models' parts add up."""

import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest

from sppo_jax.hardware import DEVICES

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import calibration  # noqa: E402
import papers  # noqa: E402
import systems  # noqa: E402
from published import published_cells  # noqa: E402
from systems import Rates, Setup, segment_lengths, tokens_per_gpu_s  # noqa: E402

RATES = calibration.calibrate(published_cells())
ROWS = calibration.predictions(published_cells(), RATES)
JUDGED = [row for row in ROWS if row.cell.role == "judge"]
PLAIN = Rates(matmul_efficiency=0.5, attention_efficiency=0.5, overhead_s=0.0)


def test_held_out_throughput_is_within_the_bounds_claimed():
    assert len(JUDGED) >= 20
    assert calibration.mean_error(JUDGED) < 0.06
    assert max(abs(row.error) for row in JUDGED) < 0.15


def test_every_verified_throughput_is_judged_or_calibrates_or_says_why_not():
    for row in ROWS:
        cell = row.cell
        assert cell.role != "judge" or "[V]" in cell.mark and "?" not in cell.mark
        assert cell.role != "list" or cell.doubt
    assert sum(row.cell.role == "calibrate" for row in ROWS) == 3


def test_winners_are_right_unless_they_tie():
    ordered = calibration.orderings(ROWS)
    assert len(ordered) >= 10
    assert not [order for order in ordered if order.verdict == "WRONG"]
    assert sum(order.verdict == "tie" for order in ordered) <= 2


def test_calibration_cells_come_out_and_the_products_figures_are_theirs():
    for row in ROWS:
        if row.cell.role == "calibrate":
            assert row.error == pytest.approx(0, abs=1e-3)
    a100 = RATES["a100-80g"]
    for name in ("a100-40g", "a100-80g"):
        assert DEVICES[name].matmul_efficiency == pytest.approx(a100.matmul_efficiency, abs=2e-3)
        assert DEVICES[name].attention_efficiency == pytest.approx(a100.attention_efficiency, abs=2e-3)


def test_a_worse_model_would_fail():
    slower = {name: replace(r, attention_efficiency=r.attention_efficiency * 0.7) for name, r in RATES.items()}
    rows = [row for row in calibration.predictions(published_cells(), slower) if row.cell.role == "judge"]
    assert calibration.mean_error(rows) > 0.10


def test_segments_have_equal_flops_and_the_whole_sequence():
    setup = Setup(model="gpt-7b", length=131072, tensor=8, pipe=4, segments=4)
    lengths = segment_lengths(setup)
    assert sum(lengths) == 131072 and lengths == sorted(lengths, reverse=True)
    assert all(tokens % 8 == 0 for tokens in lengths)
    model = systems.model_of(setup)
    pair = model.num_layers * (4 * 128 + 3) * 32
    token = model.num_layers * (8 * 4096**2 + 4 * 4096 * 16384) + 4 * 4096 * model.vocab_size
    start, costs = 0, []
    for tokens in lengths:
        costs.append(pair * (tokens * start + tokens**2 / 2) + token * tokens)
        start += tokens
    assert max(costs) / min(costs) < 1.01


@pytest.mark.parametrize(
    ("sequences", "segments", "interleave"), [(8, 1, 1), (8, 4, 1), (8, 1, 2), (8, 4, 2), (1, 16, 1)]
)
def test_orders_hold_each_op_once_and_can_run(sequences, segments, interleave):
    setup = Setup(
        model="gpt-7b", length=2**17, tensor=8, pipe=4, sequences=sequences, segments=segments, interleave=interleave
    )
    for stage in range(4):
        order = systems._order(setup, stage)
        assert len(order) == len(set(order)) == 2 * sequences * segments * interleave
        assert {op[3] % 4 for op in order} == {stage}
    assert tokens_per_gpu_s(setup, PLAIN) > 0


def test_pipelines_bubble_is_the_textbooks():
    # Without a head to unbalance the stages: m F + B of a stage, and p - 1 to fill and drain.
    def throughput(**fields):
        setup = Setup(model="gpt-7b", length=2**15, tensor=8, pipe=4, vocab_size=8, network_bytes_s=1e18, **fields)
        return tokens_per_gpu_s(setup, PLAIN)

    ideal = throughput(sequences=8, no_bubble=True)
    assert throughput(sequences=8) / ideal == pytest.approx(8 / 11, rel=2e-3)
    assert throughput(sequences=16) / ideal == pytest.approx(16 / 19, rel=2e-3)
    assert throughput(sequences=16, interleave=2) / ideal == pytest.approx(32 / 35, rel=5e-3)


def test_recomputing_and_waiting_cost_what_they_should():
    plain = Setup(model="gpt-7b", length=2**20, context=32)
    anew = replace(plain, recompute_attention=1.0)
    ratio = tokens_per_gpu_s(plain, PLAIN) / tokens_per_gpu_s(anew, PLAIN)
    assert 4.2 / 3.5 < ratio < 4.5 / 3.5
    staged = Setup(model="gpt-13b", length=2**19, tensor=8, pipe=8, segments=32, offload="hidden")
    full = replace(staged, offload="full", host_link_bytes_s=1e9)
    assert tokens_per_gpu_s(full, PLAIN) < tokens_per_gpu_s(staged, PLAIN)


def test_report_names_every_cell_and_writes_its_block(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(papers, "DOCS", tmp_path)
    assert papers.main(["--write"]) == 0
    text = (tmp_path / "validation.md").read_text()
    drawn = len(list(ElementTree.parse(tmp_path / "papers.svg").iter("{http://www.w3.org/2000/svg}circle")))
    assert drawn > len(JUDGED)
    assert all(row.cell.name in text for row in ROWS)
    assert text.startswith("<!-- begin papers -->") and capsys.readouterr().out.strip() in text


def test_page_is_of_this_cost_model():
    page = (Path(__file__).parents[1] / "docs" / "validation.md").read_text()
    assert papers.report(RATES, ROWS) in page, "re-make it: python benchmarks/papers.py --write"
