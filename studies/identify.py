"""Which terms of the cost model the published throughput can tell apart, by halving and doubling each."""

from dataclasses import dataclass, fields

from studies.calibration import calibrate, mean_error, predictions
from studies.cells import Cell
from studies.systems import Scales

_LABELS = {
    "hbm": "bytes a second of device memory",
    "link": "bytes a second between GPUs of a node",
    "network": "bytes a second between nodes",
    "host_link": "bytes a second to the host",
    "overhead_tokens": "tokens that a matmul waits for its weights",
    "attention_backward": "attention's backward for one of its forward",
}
# Terms of `sppo_jax/planner/costs.py` that no published run exercises, because those systems work another way.
UNUSED = (
    "the end of a step: gathered weights, summed gradients, optimizer",
    "padding of chunks shorter than their tick, and the wait of lock-step stages",
    "the ring's hops and the exchange of heads (every judged run hides them, as far as the model goes)",
    "the sums over stages of embedding and head",
    "copies to the host that outlast the tick behind which they hide",
    "the seconds that a tick takes whatever its length (Megatron's own are calibrated in their place)",
)

NOISE = 0.02  # a prediction that moves by less moves within the runs' own scatter
TELLS = 0.005  # a mean error that grows by less says nothing


@dataclass(frozen=True, kw_only=True)
class Term:
    """What halving and doubling one term does to the judged cells, after calibrating the rest again.

    Args:
        name: the term.
        usual: mean absolute error with the term as it is.
        halved: mean absolute error with half of the term.
        doubled: mean absolute error with twice the term.
        moved: the largest relative change of a judged prediction, either way.
        cell: the cell that moves so.
    """

    name: str
    usual: float
    halved: float
    doubled: float
    moved: float
    cell: str

    @property
    def verdict(self) -> str:
        """Whether the data tell the term from half and from twice of it."""
        if self.moved < NOISE:
            return "not identified: no prediction moves by 2%"
        if max(self.halved, self.doubled) < self.usual + TELLS:
            return "not identified: half and twice of it fit as well"
        if min(self.halved, self.doubled) < self.usual + TELLS:
            return "bounded on one side"
        return "identified"


def terms(cells: list[Cell]) -> list[Term]:
    """Halves and doubles each term that is not calibrated."""
    # Machines whose constants are assumed have nothing to calibrate again.
    cells = [cell for cell in cells if cell.role in ("judge", "calibrate") and not cell.constants]
    judged = [cell for cell in cells if cell.role == "judge"]
    usual = predictions(judged, calibrate(cells))
    found = []
    for field in fields(Scales):
        halved, doubled = (
            predictions(judged, calibrate(cells, Scales(**{field.name: factor}))) for factor in (0.5, 2.0)
        )
        moves = [
            (abs(row.predicted / before.predicted - 1), row.cell.name)
            for rows in (halved, doubled)
            for row, before in zip(rows, usual, strict=True)
        ]
        moved, cell = max(moves)
        found.append(
            Term(
                name=_LABELS[field.name],
                usual=mean_error(usual),
                halved=mean_error(halved),
                doubled=mean_error(doubled),
                moved=moved,
                cell=cell,
            )
        )
    return found
