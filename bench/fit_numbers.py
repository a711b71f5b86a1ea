"""Fits the numbers of the memory model (sppo_jax/predict/fitted.py) on compiled plans of results/fit.json.

Run: python bench/fit_numbers.py            a minute: print the best numbers, what tells each, and all errors
     python bench/fit_numbers.py --stored   print the same of the numbers that stand in the file

Only plans for GPUs that are not held out are fitted (`Case.calibrated`). The best numbers of a grid have the least sum
of the median and the worst error. An error counts three times where too little is predicted, because plans leave only
3% free. Nothing is compiled.
"""

import argparse
import itertools
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

from bench import fit
from bench.fit_cases import CASES
from sppo_jax.config import config_from_dict
from sppo_jax.hardware import parse_cluster
from sppo_jax.plan.parts import StashPlan
from sppo_jax.plan.plan import Plan
from sppo_jax.predict.fitted import NUMBERS, Numbers
from sppo_jax.predict.holders import Held, holders_of, sums
from sppo_jax.predict.memory import held_by_table
from sppo_jax.predict.shape import MemoryShape
from sppo_jax.search.evaluate import shape_of_plan

GRIDS = {
    "token_arrays": tuple(quarters / 4 for quarters in range(16, 33)),
    "late_share": (0.3, 0.4, 0.5, 0.6, 0.7, 0.8),
}
# How far a number is moved to see which plans tell it.
_NUDGE = 1.1


class Row(NamedTuple):
    """A compiled plan, and what its prediction follows from."""

    name: str
    is_fitted: bool
    hbm_bytes: int
    shape: MemoryShape
    stash: StashPlan
    held: Held

    @property
    def group(self) -> str:
        """The set in which its error is told."""
        return "TPUs" if self.shape.platform == "tpu" else "counted in" if self.is_fitted else "held out"

    def error(self, numbers: Numbers = NUMBERS) -> float:
        """Returns predicted over compiled bytes, less one."""
        return max(sums(holders_of(self.shape, self.stash, self.held, numbers)).values()) / self.hbm_bytes - 1


def rows() -> list[Row]:
    """Returns all compiled plans."""
    stored, found = {row["name"]: row for row in fit.load()["rows"]}, []
    for case in CASES:
        if case.name not in stored:
            continue
        row = stored[case.name]
        config, cluster = config_from_dict(case.config_of_row(row)), parse_cluster(case.cluster)
        plan = Plan.from_dict(row["plan"])
        shape = shape_of_plan(plan, config, cluster)
        held = held_by_table(plan.outline(), shape, plan.stash)
        found.append(Row(case.name, case.calibrated, row["compiler"]["hbm_bytes"], shape, plan.stash, held))
    return found


def summary(errors: Sequence[float]) -> tuple[float, float]:
    """Returns the median and the worst of errors, without their signs."""
    sizes = [abs(error) for error in errors]
    return statistics.median(sizes or [0.0]), max(sizes, default=0.0)


def told(of: Sequence[Row], name: str, numbers: Numbers = NUMBERS) -> tuple[int, float]:
    """Returns how many plans tell a number, and their median error."""
    nudged = numbers._replace(**{name: getattr(numbers, name) * _NUDGE})
    moved = [row.error(numbers) for row in of if row.error(numbers) != row.error(nudged)]
    return len(moved), summary(moved)[0]


def fitted(of: Sequence[Row]) -> Numbers:
    """Returns the best numbers."""
    gpus = [row for row in of if row.is_fitted and row.shape.platform == "gpu"]

    def cost(numbers: Numbers) -> float:
        return sum(summary([max(error, -3 * error) for error in (row.error(numbers) for row in gpus)]))

    return min((Numbers(*values) for values in itertools.product(*GRIDS.values())), key=cost)


def report(of: Sequence[Row], numbers: Numbers) -> str:
    """Returns the numbers, what tells each, and the errors of each set of plans."""
    lines = [f"{numbers}"]
    for name in Numbers._fields:
        count, error = told(of, name, numbers)
        lines.append(f"{name}: told by {count} plans, median error {error:.3f}")
    in_group: Callable[[str], list[Row]] = lambda group: [row for row in of if row.group == group]  # noqa: E731
    for group in ("counted in", "held out", "TPUs"):
        median, worst = summary([row.error(numbers) for row in in_group(group)])
        lines.append(f"{group}: {len(in_group(group))} plans, median {median:.1%}, worst {worst:.1%}")
    lines += [f"{row.error(numbers):+6.1%}  {row.name}" for row in sorted(of, key=lambda row: -abs(row.error(numbers)))]
    return "\n".join(lines)


def main() -> int:
    """Fits the numbers, or shows those that are stored."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--stored", action="store_true", help="show the numbers that stand in the file")
    of = rows()
    print(report(of, NUMBERS if parser.parse_args().stored else fitted(of)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
