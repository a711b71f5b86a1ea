"""`sppo plan`: what the planner decides for a config, and why; no accelerator is touched, jax is not imported."""

from collections.abc import Sequence

from sppo_jax.commands.command import DONE, config_parser, load
from sppo_jax.planner.make import make_plan
from sppo_jax.schedule.timeline import text_timeline


def run(words: Sequence[str]) -> int:
    """Prints the plan of a config; returns the exit code."""
    parser = config_parser("plan", "Print the plan of a config.")
    parser.add_argument("--json", action="store_true", help="print plan.json instead of text")
    args = parser.parse_intermixed_args(words)
    config = load(args)
    plan = make_plan(config)
    print(plan.to_json() if args.json else f"{plan.describe()}\n\n{text_timeline(plan.table())}")
    return DONE
