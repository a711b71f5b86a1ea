"""Constants of the cost model from published figures, and predictions of all others."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from sppo_jax.hardware import DEVICES
from sppo_jax.hardware.tpu_chips import TPU_CHIPS
from studies import tokamax
from studies.cells import Cell
from studies.published import KERNEL
from studies.systems import GPU, PREDICTIONS, Rates, tokens_per_gpu_s


class Compared(Protocol):
    """A published figure with its prediction."""

    @property
    def error(self) -> float: ...


# By device; "DEVICE, assumed": the planner's own constants; "DEVICE, tokamax": those of MaxText's kernel.
Calibration = dict[str, Rates]


@dataclass(frozen=True, kw_only=True)
class Row:
    """A cell with its prediction."""

    cell: Cell
    predicted: float

    @property
    def error(self) -> float:
        return self.predicted / self.cell.value - 1


def assumed(name: str) -> Rates:
    """Returns the planner's own constants of a device, of which no run that is predicted here was used."""
    device = DEVICES[name]
    return Rates(
        matmul_efficiency=device.matmul_efficiency,
        attention_efficiency=device.attention_efficiency,
        overhead_s=0.0,
        attention_backward=device.attention_backward,
    )


def calibrate(cells: list[Cell]) -> Calibration:
    """Finds the constants of each machine from the cells marked for it.

    Three of the A100, one each of the H100, the v5p and TPU7x.
    """
    long_units, short_units, other, of_v5p, of_tpu7x = (cell for cell in cells if cell.role == "calibrate")
    # ALST runs FlashAttention, not the kernel whose backward the device's figures are of.
    start = replace(assumed(other.setup.gpu), attention_backward=Rates.attention_backward)
    found = {other.setup.gpu: _solve(start, "attention_efficiency", 0.1, 1.0, other)}
    for key in dict.fromkeys(cell.constants for cell in cells if cell.constants.endswith("assumed")):
        found[key] = assumed(key.partition(",")[0])
    reached, clock_hz = calibrate_tpus(of_v5p, of_tpu7x)
    found[of_v5p.key] = tokamax.rates("v5p", reached, TPU_CHIPS["v5p"].clock_hz)
    found[of_tpu7x.key] = tokamax.rates("tpu7x", reached, clock_hz)
    return calibrate_on(long_units, short_units) | found


def calibrate_tpus(of_v5p: Cell, of_tpu7x: Cell) -> tuple[float, float]:
    """Returns what bundles reach, from a run on v5p, and the clock of TPU7x, from a run there."""
    of_reached = partial(tokamax.rates, "v5p", clock_hz=TPU_CHIPS["v5p"].clock_hz)
    reached = _halve(of_reached, 0.3, 1.0, of_v5p)
    return reached, _halve(partial(tokamax.rates, "tpu7x", reached), 0.5e9, 3e9, of_tpu7x)


def calibrate_on(long_units: Cell, short_units: Cell) -> Calibration:
    """Finds the A100's constants from the kernel's benchmark and two runs.

    Attention's efficiency is that of the kernel. Then the matmul efficiency and the overhead of a unit are those with
    which the two runs come out.

    Args:
        long_units: a run with few, long units.
        short_units: a run with many, short ones.
    """
    rates = Rates(
        matmul_efficiency=GPU.matmul_efficiency,
        attention_efficiency=KERNEL.value * 1e12 / GPU.matmul_flops_s,
        overhead_s=0.01,
    )
    for _ in range(6):
        rates = _solve(rates, "matmul_efficiency", 0.2, 1.0, long_units)
        rates = _solve(rates, "overhead_s", 0.1, 0.0, short_units)
    return {GPU.name: rates}


def _solve(rates: Rates, name: str, slow: float, fast: float, cell: Cell) -> Rates:
    """Finds, by halving, the constant between `slow` and `fast` with which a cell comes out."""

    def make(value: float) -> Rates:
        return replace(rates, **{name: value})

    return make(_halve(make, slow, fast, cell))


def _halve(make: Callable[[float], Rates], slow: float, fast: float, cell: Cell) -> float:
    for _ in range(24):
        middle = (slow + fast) / 2
        if predict(cell, {cell.key: make(middle)}) < cell.value:
            slow = middle
        else:
            fast = middle
    return middle


def other_calibrations(cells: list[Cell]) -> list[float]:
    """Returns the mean errors on the A100's judged cells if 1F1B and Seq1F1B-I of other rows of the table calibrate."""
    judged = [cell for cell in cells if cell.role == "judge" and cell.key == GPU.name]
    named = {cell.name: cell for cell in judged}
    errors = []
    for row in ("32K, 8", "64K, 8", "64K, 16"):
        rates = calibrate_on(named[f"1F1B 7B {row} sequences"], named[f"Seq1F1B-I 7B {row} sequences"])
        errors.append(mean_error(predictions(judged, rates)))
    return errors


def predict(cell: Cell, calibration: Calibration) -> float:
    """Predicts one cell in its own unit."""
    rates = calibration[cell.key]
    if cell.unit == "ratio":
        assert cell.base is not None
        return tokens_per_gpu_s(cell.setup, rates) / tokens_per_gpu_s(cell.base, rates)
    return PREDICTIONS[cell.unit](cell.setup, rates)


def predictions(cells: list[Cell], rates: Calibration) -> list[Row]:
    """Predicts all cells."""
    return [Row(cell=cell, predicted=predict(cell, rates)) for cell in cells]


def mean_error(rows: Sequence[Compared]) -> float:
    """Returns the mean absolute relative error of predictions."""
    return sum(abs(row.error) for row in rows) / len(rows)
