"""`sppo train`: train as a config says."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from sppo_jax import distributed
from sppo_jax.commands.command import DONE, FAILED, config_parser, load, read_plan
from sppo_jax.planner.make import make_plan
from sppo_jax.schedule.timeline import text_timeline


def run(words: Sequence[str]) -> int:
    """Trains as a config says; returns the exit code."""
    parser = config_parser("train", "Train as a config says.")
    parser.add_argument("--run-dir", type=Path, help="where to write; runs/NAME-DATE-TIME by default")
    parser.add_argument("--plan", type=Path, help="a plan.json to follow instead of planning")
    args = parser.parse_intermixed_args(words)
    config = load(args, together=True)
    distributed.start(config)
    run_dir = args.run_dir or Path("runs") / f"{Path(args.config).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    plan = read_plan(args.plan, config) if args.plan else make_plan(config, distributed.cluster(config))

    from sppo_jax.train.loop import train
    from sppo_jax.train.run_dir import check_run_dir, create_run_dir
    from sppo_jax.train.setup import prepare

    check_run_dir(run_dir)
    experiment = prepare(config, plan)
    create_run_dir(run_dir, config, plan)
    print(f"{plan.describe()}\n\n{text_timeline(plan.table())}\n", flush=True)
    try:
        train(experiment, run_dir)
    except FloatingPointError as error:
        print(error, file=sys.stderr)
        return FAILED
    except ValueError as error:
        raise RuntimeError("training failed on input that had passed all checks") from error
    print(f"run directory {run_dir}")
    return DONE
