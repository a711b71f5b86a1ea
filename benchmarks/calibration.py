"""Constants of the cost model from published figures, predictions of all others, and who wins where."""

from dataclasses import dataclass, replace
from itertools import groupby

from published import KERNEL, Cell
from systems import GPU, PREDICTIONS, Rates, tokens_per_gpu_s

from sppo_jax.hardware import DEVICES

# Two settings whose published figures differ by less than this are one within the runs' own scatter (up to 2%).
TIE = 0.02

Calibration = dict[str, Rates]  # by device


@dataclass(frozen=True, kw_only=True)
class Row:
    """A cell with its prediction."""

    cell: Cell
    predicted: float

    @property
    def error(self) -> float:
        return self.predicted / self.cell.value - 1


@dataclass(frozen=True, kw_only=True)
class Ordering:
    """Which setting of a group wins, published and predicted, and by how much the published winner leads the next."""

    group: str
    published: str
    predicted: str
    margin: float

    @property
    def verdict(self) -> str:
        if self.published == self.predicted:
            return "right"
        return "tie" if self.margin < TIE else "WRONG"


def calibrate(cells: list[Cell]) -> Calibration:
    """Finds the constants of each machine from the cells marked for it: three of the A100, one of the H100."""
    long_units, short_units, other = (cell for cell in cells if cell.role == "calibrate")
    device = DEVICES[other.setup.gpu]
    start = Rates(
        matmul_efficiency=device.matmul_efficiency,
        attention_efficiency=device.attention_efficiency,
        overhead_s=0.0,
    )
    found = _solve(start, "attention_efficiency", 0.1, 1.0, other)
    return calibrate_on(long_units, short_units) | {other.setup.gpu: found}


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
    for _ in range(8):
        rates = _solve(rates, "matmul_efficiency", 0.2, 1.0, long_units)
        rates = _solve(rates, "overhead_s", 0.1, 0.0, short_units)
    return {GPU.name: rates}


def _solve(rates: Rates, name: str, slow: float, fast: float, cell: Cell) -> Rates:
    """Finds, by halving, the constant between `slow` and `fast` with which a cell comes out."""
    for _ in range(30):
        middle = replace(rates, **{name: (slow + fast) / 2})
        if predict(cell, {cell.setup.gpu: middle}) < cell.value:
            slow = (slow + fast) / 2
        else:
            fast = (slow + fast) / 2
    return middle


def other_calibrations(cells: list[Cell]) -> list[float]:
    """Returns the mean errors on the A100's judged cells if 1F1B and Seq1F1B-I of other rows of the table calibrate."""
    judged = [cell for cell in cells if cell.role == "judge" and cell.setup.gpu == GPU.name]
    named = {cell.name: cell for cell in judged}
    errors = []
    for row in ("32K, 8", "64K, 8", "64K, 16"):
        rates = calibrate_on(named[f"1F1B 7B {row} sequences"], named[f"Seq1F1B-I 7B {row} sequences"])
        errors.append(mean_error(predictions(judged, rates)))
    return errors


def predict(cell: Cell, calibration: Calibration) -> float:
    """Predicts one cell in its own unit."""
    rates = calibration[cell.setup.gpu]
    if cell.unit == "ratio":
        assert cell.base is not None
        return tokens_per_gpu_s(cell.setup, rates) / tokens_per_gpu_s(cell.base, rates)
    return PREDICTIONS[cell.unit](cell.setup, rates)


def predictions(cells: list[Cell], rates: Calibration) -> list[Row]:
    """Predicts all cells."""
    return [Row(cell=cell, predicted=predict(cell, rates)) for cell in cells]


def orderings(rows: list[Row]) -> list[Ordering]:
    """Compares who wins in each group: most tokens a second, fewest bytes, longest sequence."""
    grouped = sorted((row for row in rows if row.cell.group), key=lambda row: row.cell.group)
    found = []
    for group, members in groupby(grouped, key=lambda row: row.cell.group):
        own = list(members)
        if len(own) < 2:
            continue
        sign = -1 if own[0].cell.unit == "GB" else 1
        by_value = sorted(own, key=lambda row: -sign * row.cell.value)
        winner = max(own, key=lambda row: sign * row.predicted)
        found.append(
            Ordering(
                group=group,
                published=by_value[0].cell.name,
                predicted=winner.cell.name,
                margin=abs(by_value[0].cell.value / by_value[1].cell.value - 1),
            )
        )
    return found


def mean_error(rows: list[Row]) -> float:
    """Returns the mean absolute relative error."""
    return sum(abs(row.error) for row in rows) / len(rows)
