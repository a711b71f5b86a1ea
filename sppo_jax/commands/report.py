"""`sppo report`: a run as one page, and five lines; jax is not imported."""

from collections.abc import Sequence

from sppo_jax.commands.command import DONE, Parser, some_path
from sppo_jax.commands.outputs import PAGE, Output, check_outputs
from sppo_jax.report.run.figures import figures_of_run
from sppo_jax.report.run.html import FILE, run_html, write_page
from sppo_jax.report.run.run_files import CONFIG, EVENTS, METRICS, PLAN, read_run_dir
from sppo_jax.report.run.words import summary


def run(words: Sequence[str]) -> int:
    """Writes a run's report, and prints its path and the state of the run; returns the exit code."""
    parser = Parser(prog="sppo report", description="Draw a run as one page, whether it is finished or not.")
    parser.add_argument("run_dir", metavar="RUN_DIR", type=some_path, help="the run directory of sppo train")
    parser.add_argument("--out", metavar="FILE", type=some_path, help=f"the page; RUN_DIR/{FILE} by default")
    args = parser.parse_args(words)
    data = read_run_dir(args.run_dir)
    out = args.out or args.run_dir / FILE
    check_outputs(
        Output(option="--out", path=out, head=PAGE),
        inputs=[args.run_dir / name for name in (CONFIG, PLAN, METRICS, EVENTS)],
    )
    figures = figures_of_run(data)
    path = write_page(out, run_html(figures))
    print(f"{summary(figures)}\n{path}")
    return DONE
