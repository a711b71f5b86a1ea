"""Re-makes the pages of bench/results/figures/ without a clock or a compiler, and all pictures of points.

    python -m bench.validation

The blocks `papers`, `kernels` and `bubble` are predictions beside figures that others published. Of `clock` and `fit`
the predicted columns are made again; the measured and compiled columns come from results/clock_cpu_2dev.json and
results/fit.json, which `python -m bench.clock` and `python -m bench.fit` write. The pictures docs/recall.svg,
docs/recall_hybrid.svg, docs/quickstart_hybrid.svg and docs/resume.svg show the stored results of `recall.py`,
`hybrid.py` and `resume.py`, docs/flexsp.svg what `groups.py` simulates, results/records.svg compiled lengths beside
published ones. Takes about half a minute.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path

from bench import clock, fit, hybrid, recall, resume, shipped
from bench.blocks import FIGURES, write_block
from bench.figures import write
from sppo_jax.report.draw.chart import Panel
from studies import bubble, groups, kernels, papers, records_picture
from studies.calibration import calibrate, predictions
from studies.published import published_cells

HERE = Path(__file__).parent
RESULTS = HERE / "results"
COMMAND = "python -m bench.validation"
Pictures = dict[str, list[Panel]]  # paths from the root of the repository, and what the picture shows


def papers_block() -> tuple[str, Pictures]:
    """Returns the block `papers` and its picture."""
    cells = published_cells()
    rates = calibrate(cells)
    rows = predictions(cells, rates)
    return papers.block(rates, rows), {"bench/results/figures/papers.svg": papers.picture(rows)}


def kernels_block() -> tuple[str, Pictures]:
    """Returns the block `kernels`."""
    return kernels.report(list(kernels.points())), {}


def bubble_block() -> tuple[str, Pictures]:
    """Returns the block `bubble` and its picture."""
    found, gained = list(bubble.points()), bubble.gain()
    return bubble.report(found, gained), {"bench/results/figures/bubble.svg": bubble.picture(found, gained)}


def clock_block() -> tuple[str, Pictures]:
    """Returns the block `clock` and its picture."""
    report = clock.predicted_again(_stored("clock_cpu_2dev"))
    return clock.block(report), {"bench/results/figures/clock.svg": clock.picture(report["rows"])}


def fit_block() -> tuple[str, Pictures]:
    """Returns the block `fit`."""
    results = fit.load()
    return fit.block(fit.predicted_rows(results), results["jax"]), {}


def shipped_block() -> tuple[str, Pictures]:
    """Returns the block `shipped`."""
    return shipped.block(shipped.load()), {}


BLOCKS: dict[str, Callable[[], tuple[str, Pictures]]] = {
    "papers": papers_block,
    "kernels": kernels_block,
    "bubble": bubble_block,
    "clock": clock_block,
    "fit": fit_block,
    "shipped": shipped_block,
}


def stored_pictures() -> Pictures:
    """Returns the pictures that belong to none of these blocks: stored results, and the groups of one batch."""
    return {
        "docs/flexsp.svg": groups.pictured(),
        "docs/quickstart_hybrid.svg": hybrid.picture(_stored("hybrid_cpu")["models"]),
        "docs/recall.svg": recall.picture(_stored("recall_cpu")),
        "docs/recall_hybrid.svg": recall.picture(_stored("recall_hybrid_cpu")),
        "bench/results/records.svg": records_picture.picture(),
        "docs/resume.svg": resume.picture(_stored("resume")["pairs"]),
    }


def _stored(name: str) -> dict:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def main() -> int:
    """Writes all blocks and pictures."""
    pictures = stored_pictures()
    for name, make in BLOCKS.items():
        text, shown = make()
        write_block(FIGURES / f"{name}.md", name, text)
        pictures |= shown
        print(f"{name}: written", flush=True)
    for path, panels in pictures.items():
        write(HERE.parent / path, panels)
        print(f"{path}: written", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
