"""`sppo report`: a run as one page, and five lines; or the scores of several runs. jax is not imported."""

from collections.abc import Sequence
from pathlib import Path

from sppo_jax.commands.command import DONE, Parser, some_path
from sppo_jax.commands.outputs import PAGE, Output, check_outputs
from sppo_jax.report.run.figures import figures_of_run
from sppo_jax.report.run.html import FILE, run_html, write_page
from sppo_jax.report.run.run_files import CONFIG, EVENTS, METRICS, PLAN, read_run_dir
from sppo_jax.report.run.scores import compared_html, compared_text, read_scores
from sppo_jax.report.run.words import summary


def run(words: Sequence[str]) -> int:
    """Writes a run's report, and prints its path and the state of the run; returns the exit code."""
    parser = Parser(
        prog="sppo report",
        description="Draw a run as one page, whether it is finished or not; or compare the scores of several runs.",
    )
    parser.add_argument(
        "run_dirs",
        metavar="RUN_DIR",
        nargs="+",
        type=some_path,
        help="the run directory of sppo train; or several, and files of sppo eval --tasks, whose scores are compared",
    )
    parser.add_argument("--out", metavar="FILE", type=some_path, help=f"the page; RUN_DIR/{FILE} by default of one run")
    args = parser.parse_args(words)
    if len(args.run_dirs) > 1:
        return _compare(args.run_dirs, args.out)
    (run_dir,) = args.run_dirs
    data = read_run_dir(run_dir)
    out = args.out or run_dir / FILE
    check_outputs(
        Output(option="--out", path=out, head=PAGE),
        inputs=[run_dir / name for name in (CONFIG, PLAN, METRICS, EVENTS)],
    )
    figures = figures_of_run(data)
    path = write_page(out, run_html(figures))
    print(f"{summary(figures)}\n{path}")
    return DONE


def _compare(paths: Sequence[Path], out: Path | None) -> int:
    """Writes a page with the scores of several runs; returns the exit code.

    Raises:
        ValueError: a run has no scores, or the page has no place.
    """
    if out is None:
        raise ValueError("a report of several runs must have --out FILE, got none; add e.g. --out scores.html")
    runs = [read_scores(path) for path in paths]
    check_outputs(Output(option="--out", path=out, head=PAGE), inputs=[path for path in paths if path.is_file()])
    print(f"{compared_text(runs)}\n{write_page(out, compared_html(runs))}")
    return DONE
