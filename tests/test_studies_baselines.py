"""Trivial baselines of throughput by hand."""

from dataclasses import replace

import pytest

from sppo_jax.hardware import DEVICES
from studies import baselines, calibration
from studies.published import published_cells
from studies.systems import Rates, Setup

CELLS = published_cells()
RATES = calibration.calibrate(CELLS)


def test_one_mfu_reproduces_its_calibration_cells_on_average():
    rows = [row for row in baselines.mfu_rows(CELLS) if row.cell.role == "calibrate"]
    a100 = [1 + row.error for row in rows if row.cell.key == "a100-80g"]
    assert len(a100) == 2 and a100[0] * a100[1] == pytest.approx(1)
    assert next(row.error for row in rows if row.cell.key == "h100") == pytest.approx(0)
    assert not any(row.cell.is_assumed for row in baselines.mfu_rows(CELLS))


def test_one_mfu_by_hand():
    shares = baselines.one_mfu(CELLS)
    cell = next(cell for cell in CELLS if cell.name.startswith("ALST 8B 3.7M"))
    # 6 FLOPs a parameter in products and 6 a layer, head element and key of the mean prefix.
    weights = 32 * (4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336) + 128256 * 4096
    flops = 6 * weights + 6 * 32 * 4096 * cell.setup.length
    assert shares["h100"] == pytest.approx(cell.value * flops / 989e12)


def test_two_efficiencies_by_hand():
    rates = Rates(matmul_efficiency=0.5, attention_efficiency=0.25, overhead_s=9.0)
    setup = Setup(model="gpt-7b", length=2**17, tensor=8, pipe=4, sequences=2, segments=8, interleave=2)
    weights = 32 * 12 * 4096**2
    head = 50304 * 4096
    pairs = 4 * 4096 * 2**16 * 32
    token_s = (6 * (weights + head) / 0.5 + 3.5 * pairs / 0.25) / 312e12
    assert baselines.efficient_tokens_s(setup, rates) == pytest.approx(1 / (token_s * (1 + 3 / 32)))
    again = replace(setup, recompute_linear=True, recompute_attention=1.0)
    token_s = ((8 * weights + 6 * head) / 0.5 + 4.5 * pairs / 0.25) / 312e12
    assert baselines.efficient_tokens_s(again, rates) == pytest.approx(1 / (token_s * (1 + 3 / 32)))


def test_two_efficiencies_are_fitted_on_the_calibration_cells_alone():
    fitted = baselines.two_efficiencies(CELLS, RATES)
    ratios = [1 + row.error for row in baselines.efficiency_rows(CELLS, RATES) if row.cell.role == "calibrate"]
    assert ratios[0] * ratios[1] == pytest.approx(1, rel=1e-6) and ratios[2] == pytest.approx(1, rel=1e-6)
    assert fitted["a100-80g"].attention_efficiency == RATES["a100-80g"].attention_efficiency
    assert fitted["h100"].matmul_efficiency == DEVICES["h100"].matmul_efficiency
    assert fitted["h100, assumed"] == RATES["h100, assumed"]
    calibrated = [replace(cell, value=cell.value * 2) if cell.role == "judge" else cell for cell in CELLS]
    assert baselines.two_efficiencies(calibrated, RATES) == fitted


@pytest.mark.parametrize("system", ["Seq1F1B", "SPPO", "BurstEngine"])
def test_the_cost_model_beats_both_baselines_where_the_page_says_so(system):
    judged = [cell for cell in CELLS if cell.role == "judge" and cell.system == system]
    ours, mfu, two = (
        calibration.mean_error([row for row in rows if row.cell in judged])
        for rows in (
            calibration.predictions(judged, RATES),
            baselines.mfu_rows(CELLS),
            baselines.efficiency_rows(CELLS, RATES),
        )
    )
    assert ours < min(mfu, two)
