"""Which setting of a group is fastest: published, and predicted."""

from collections import Counter
from dataclasses import dataclass

from studies.calibration import Row

# Two settings whose figures differ by less are one within the runs' own scatter: runs that BurstEngine's spreadsheet
# has twice differ by up to 2%.
TIE = 0.02


@dataclass(frozen=True, kw_only=True)
class Ordering:
    """The fastest setting of a group and its lead over the next, published and predicted."""

    group: str
    published: str
    lead: float
    predicted: str
    predicted_lead: float

    @property
    def verdict(self) -> str:
        """ "not counted", "undecided", "right" or "wrong"; see `VERDICTS`."""
        if self.lead < TIE:
            return "not counted"
        if self.predicted_lead < TIE:
            return "undecided"
        return "right" if self.published == self.predicted else "wrong"


VERDICTS = {
    "right": "the predicted winner is the published one, and both lead by 2% or more",
    "wrong": "both lead by 2% or more, and the winners differ",
    "undecided": "the published winner leads by 2% or more, the predicted one by less, so the model does not decide",
    "not counted": "the published winner leads by less than 2%, so the runs do not decide",
}


def orderings(rows: list[Row]) -> list[Ordering]:
    """Compares the winners of each group of throughput cells; cells whose source contradicts itself are left out."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        for group in row.cell.groups if row.cell.verified else ():
            groups.setdefault(group, []).append(row)
    return [_ordering(group, own) for group, own in sorted(groups.items()) if len(own) > 1]


def _ordering(group: str, rows: list[Row]) -> Ordering:
    published, lead = _winner({row.cell.name: row.cell.value for row in rows})
    predicted, predicted_lead = _winner({row.cell.name: row.predicted for row in rows})
    return Ordering(group=group, published=published, lead=lead, predicted=predicted, predicted_lead=predicted_lead)


def _winner(values: dict[str, float]) -> tuple[str, float]:
    first, second = sorted(values, key=lambda name: -values[name])[:2]
    return first, values[first] / values[second] - 1


def counts(found: list[Ordering]) -> dict[str, int]:
    """Returns how many groups have each verdict."""
    counted = Counter(order.verdict for order in found)
    return {verdict: counted[verdict] for verdict in VERDICTS}
