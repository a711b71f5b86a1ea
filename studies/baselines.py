"""Two trivial predictors of throughput, fitted on the cells that calibrate the cost model.

`one_mfu` gives every run of a machine the same share of the machine's peak. `two_efficiencies` divides the FLOPs of
matmuls and of attention, recomputed ones included, each by its own efficiency, and adds the pipeline's bubble
(p - 1) / N, where N counts the microbatches, or segments, of a step over all virtual stages.
"""

from dataclasses import replace
from statistics import geometric_mean

from sppo_jax.hardware import DEVICES
from sppo_jax.models.counts import flops_per_token, layer_costs
from studies.calibration import Calibration, Row
from studies.cells import Cell
from studies.systems import GPU, Rates, Setup, model_of


def one_mfu(cells: list[Cell]) -> dict[str, float]:
    """Returns the causal MFU of each machine: the geometric mean over its calibration cells."""
    shares: dict[str, list[float]] = {}
    for cell in cells:
        if cell.role == "calibrate":
            share = _per_gpu(cell) * flops_per_token(model_of(cell.setup), cell.setup.length)
            shares.setdefault(cell.key, []).append(share / DEVICES[cell.setup.gpu].matmul_flops_s)
    return {key: geometric_mean(values) for key, values in shares.items()}


def two_efficiencies(cells: list[Cell], calibration: Calibration) -> Calibration:
    """Returns efficiencies of matmuls and attention by machine.

    As for the cost model, attention's efficiency on the A100 is the kernel's, and matmuls' on the H100 is assumed. The
    other one is such that the geometric mean of prediction over figure is 1 on the calibration cells.
    """
    found = {}
    for key, rates in calibration.items():
        own = [cell for cell in cells if cell.role == "calibrate" and cell.key == key]
        free = "matmul_efficiency" if key == GPU.name else "attention_efficiency"
        found[key] = _fitted(rates, free, own) if own else rates
    return found


def _fitted(rates: Rates, name: str, cells: list[Cell]) -> Rates:
    low, high = 0.05, 1.0
    for _ in range(40):
        middle = replace(rates, **{name: (low + high) / 2})
        ratio = geometric_mean(efficient_tokens_s(cell.setup, middle) / _per_gpu(cell) for cell in cells)
        low, high = ((low + high) / 2, high) if ratio < 1 else (low, (low + high) / 2)
    return middle


def efficient_tokens_s(setup: Setup, rates: Rates) -> float:
    """Predicts tokens a second a GPU from two efficiencies and the bubble."""
    model, peak = model_of(setup), DEVICES[setup.gpu].matmul_flops_s
    layer = layer_costs(model)
    linear = 3 * 2.0 * model.vocab_size * model.hidden_size
    linear += (3 + setup.recompute_linear) * model.num_layers * layer.linear_flops
    passes = 1 + rates.attention_backward + setup.recompute_attention  # in forwards, as long as they take
    attention = passes * model.num_layers * layer.pair_flops * setup.length / 2
    token_s = linear / (peak * rates.matmul_efficiency) + attention / (peak * rates.attention_efficiency)
    units = setup.sequences * setup.segments * setup.interleave
    return 1 / (token_s * (1 + (setup.pipe - 1) / units))


def mfu_rows(cells: list[Cell]) -> list[Row]:
    """Predicts throughput cells with one MFU a machine; cells of a machine without calibration cells are left out."""
    shares = one_mfu(cells)
    rows = []
    for cell in cells:
        if cell.key in shares and _is_throughput(cell):
            peak = DEVICES[cell.setup.gpu].matmul_flops_s
            tokens_s = shares[cell.key] * peak / flops_per_token(model_of(cell.setup), cell.setup.length)
            rows.append(Row(cell=cell, predicted=tokens_s * _gpus(cell)))
    return rows


def efficiency_rows(cells: list[Cell], calibration: Calibration) -> list[Row]:
    """Predicts throughput cells with two efficiencies and the bubble."""
    rates = two_efficiencies(cells, calibration)
    return [
        Row(cell=cell, predicted=efficient_tokens_s(cell.setup, rates[cell.key]) * _gpus(cell))
        for cell in cells
        if _is_throughput(cell)
    ]


def _is_throughput(cell: Cell) -> bool:
    return cell.unit in ("tokens/s", "tokens/GPU/s")


def _gpus(cell: Cell) -> int:
    return cell.setup.num_devices if cell.unit == "tokens/s" else 1


def _per_gpu(cell: Cell) -> float:
    return cell.value / _gpus(cell)
