"""`sppo profile-trace`: a few steps under the profiler, for Perfetto and xprof."""

import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sppo_jax.commands.command import DONE, config_parser, load, read_plan, simulate, some_path
from sppo_jax.data.summary.known import documents_to_plan_for
from sppo_jax.processes.environment import skip_cuda_without_driver
from sppo_jax.search.make import make_plan

if TYPE_CHECKING:
    from sppo_jax.train.trace import Trace

_MOST_STEPS = 100


def run(words: Sequence[str]) -> int:
    """Traces some steps of a config's training, and prints the path of the trace; returns the exit code."""
    parser = config_parser("profile-trace", "Train a few steps under the profiler, and save nothing but the trace.")
    parser.add_argument(
        "--out", type=some_path, metavar="DIR", help="directory of the trace; traces/NAME-DATE-TIME by default"
    )
    parser.add_argument("--steps", type=int, default=3, metavar="N", help="steps to trace; 3 by default")
    parser.add_argument("--plan", type=some_path, help="a plan.json to follow instead of planning")
    args = parser.parse_intermixed_args(words)
    if not 1 <= args.steps <= _MOST_STEPS:
        raise ValueError(f"--steps must be in 1..{_MOST_STEPS}, got {args.steps}; trace a few steps, e.g. 3")
    config = load(args, reads="weights")
    simulate(config)
    skip_cuda_without_driver()
    out = args.out or Path("traces") / f"{Path(args.config).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    plan = read_plan(args.plan, config) if args.plan else make_plan(config, None, documents_to_plan_for(config))

    from sppo_jax.train.setup import prepare
    from sppo_jax.train.trace import trace_steps

    experiment = prepare(config, plan)
    _make(out)
    trace = trace_steps(experiment, out, num_steps=args.steps)
    print(_text(trace, out))
    return DONE


def _make(out: Path) -> None:
    """Makes the directory, before anything is compiled.

    Raises:
        ValueError: the directory cannot be made or written.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"--out must be a directory that can be made, got {out} ({error.strerror}); name another directory"
        ) from None
    if not os.access(out, os.W_OK):
        raise ValueError(
            f"--out must be a directory that can be written, got {out} (permission denied); name another directory"
        )


def _text(trace: "Trace", out: Path) -> str:
    lines = [f"traced {trace.num_steps} steps in {out}"]
    if trace.step_s:
        lines[0] += f", {statistics.median(trace.step_s):.3f} s per step under the profiler"
    size_mib = trace.perfetto.stat().st_size / 2**20
    lines.append(
        f"Perfetto: open {trace.perfetto} ({size_mib:.1f} MiB) at https://ui.perfetto.dev (stays in the browser)"
    )
    if trace.xplane:
        lines.append(f"xprof:    pip install xprof && xprof --logdir {out}")
    lines.append("Steps are named `train`; names of device operations have forward_tick, head_tick or backward_tick.")
    return "\n".join(lines)
