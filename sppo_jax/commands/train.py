"""`sppo train`: trains as a config says, from the beginning or from the last checkpoint of the run directory."""

import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from sppo_jax.commands.command import (
    DOES_NOT_FIT,
    DONE,
    FAILED,
    config_parser,
    load,
    read_plan,
    simulate,
    some_path,
)
from sppo_jax.config import Config
from sppo_jax.config.load import is_given
from sppo_jax.data.summary.known import known_documents, planned_for
from sppo_jax.hardware import Cluster, visible_gpus
from sppo_jax.plan.plan import Plan
from sppo_jax.predict.pinned import refusal
from sppo_jax.processes import distributed
from sppo_jax.processes.environment import gpus_may_start, skip_cuda_without_driver
from sppo_jax.processes.output import Output
from sppo_jax.report.plan.figures import figures_of
from sppo_jax.report.plan.text import brief_text, plan_text
from sppo_jax.search.make import resolve_cluster
from sppo_jax.search.search import Found


def run(words: Sequence[str]) -> int:
    """Trains as a config says; returns the exit code."""
    parser = config_parser(
        "train",
        "Train as a config says. The same --run-dir, or --resume, continues a run that was stopped.",
    )
    parser.add_argument(
        "--run-dir",
        type=some_path,
        help="directory of the run; one that exists is resumed; runs/NAME-DATE-TIME by default",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="without --run-dir: continue the newest unfinished run of this config in runs/",
    )
    parser.add_argument("--plan", type=some_path, help="a plan.json to follow instead of planning")
    parser.add_argument("--verbose", action="store_true", help="print the plan as sppo plan --verbose does")
    args = parser.parse_intermixed_args(words)
    if isinstance(sys.stdout, Output):
        sys.stdout.drops = True  # a run continues without a reader
    if args.resume and args.run_dir:
        raise ValueError(
            f"--resume must be used without --run-dir, got --run-dir {args.run_dir}; leave out one of them"
        )
    config = load(args, reads="weights")
    simulate(config, together=True)
    skip_cuda_without_driver()
    distributed.start(config)

    run_dir = args.run_dir or Path(distributed.share_text(distributed.together(lambda: _place_of(args, config))))
    if _leaves_balance(args):
        config = _as_begun(config, run_dir)
    with ExitStack() as stack:
        return _train(args, config, run_dir, stack)


def _leaves_balance(args: Namespace) -> bool:
    """Returns whether the config leaves to its run or its folder how experts are balanced."""
    from sppo_jax.train.begun import BALANCE

    return not is_given(BALANCE, args.config, args.overrides)


def _as_begun(config: Config, run_dir: Path) -> Config:
    """Returns the config with the balance of a run that began before, and says so; in all processes the same."""
    from sppo_jax.train.begun import BALANCE, as_begun, with_balance

    begun = distributed.together(lambda: as_begun(config, run_dir) if distributed.is_main() else config)
    balance = float(distributed.share_text(repr(begun.model.experts.balance)))
    if balance == config.model.experts.balance:
        return config
    distributed.say(f"{BALANCE} stays {balance:g}, as in {run_dir / 'config.yaml'}")
    return with_balance(config, balance)


def _place_of(args: Namespace, config: Config) -> str:
    """Returns the run directory where none is named: a new one, or with --resume that of the newest unfinished run."""
    stem, runs = Path(args.config).stem, Path("runs")
    new = str(runs / f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}")
    if not distributed.is_main():
        return new  # the main process decides
    from sppo_jax.train.checkpoints.unfinished import newest_unfinished

    found = newest_unfinished(runs, stem, config, leaves_balance=_leaves_balance(args))
    if args.resume and found is None:
        raise ValueError(
            f"--resume must find an unfinished run of {args.config} in {runs}, got none; leave out --resume, or name a "
            "run by --run-dir"
        )
    if args.resume:
        return str(found)
    if found is not None:
        distributed.say(f"an unfinished run of this config is in {found}; add --resume to continue it")
    return new


def _lack_of_host_memory(config: Config, plan: Plan, cluster: Cluster | None) -> str:
    """Says in one line why the hosts at hand cannot pin what a plan needs; empty where they can, or have no GPUs."""
    least_bytes = distributed.least_host_bytes()

    def lack() -> str:
        if not (gpus_may_start() and visible_gpus()):
            return ""
        return refusal(plan, replace(resolve_cluster(config, cluster), host_bytes=least_bytes))

    return next(filter(None, distributed.exchange(distributed.together(lack))), "")  # all end, or none


def _planned(args: Namespace, config: Config, cluster: Cluster | None, run_dir: Path) -> tuple[Plan, str]:
    """Returns the plan of process 0, and why it does not fit; empty where it does."""
    from sppo_jax.train.planned import found_again, plan_of_run

    def show(found: Found) -> None:
        planned = planned_for(config, found.plan)
        figures = figures_of(found, config, known_documents(config), planned, cluster)
        distributed.say(f"{plan_text(figures) if args.verbose else brief_text(figures)}\n")

    def planned() -> tuple[str, str]:
        if not distributed.is_main():
            return "", ""
        if args.plan:
            plan = read_plan(args.plan, config)
            show(found_again(plan, config, cluster))
            return plan.to_json(), ""
        plan, problem = plan_of_run(config, cluster, run_dir, distributed.say, show)
        return plan.to_json(), problem

    text, problem = distributed.together(planned, is_long=True)
    return Plan.from_json(distributed.share_text(text)), distributed.share_text(problem)


def _say_measured(config: Config, plan: Plan, cluster: Cluster | None) -> None:
    """Says how long a step takes with the rates that sppo check found on these devices, and the version of NCCL."""
    if not distributed.is_main() or config.train.num_simulated_devices:
        return
    from sppo_jax.check.rates import measured_line
    from sppo_jax.processes.software import software

    facts = software()
    if line := measured_line(config, plan, resolve_cluster(config, cluster), facts):
        distributed.say(line)
    if plan.mesh.num_devices > 1 and "NCCL" in facts:
        distributed.say(f"NCCL {facts['NCCL']}")


def _train(args: Namespace, config: Config, run_dir: Path, stack: ExitStack) -> int:
    from sppo_jax.processes.same_program import Different
    from sppo_jax.train.checkpoints.run_dir import changes_since, checkpoint_directory, claimed, write_run
    from sppo_jax.train.loop import RunFailed, train
    from sppo_jax.train.metrics.trackers import check_trackers
    from sppo_jax.train.setup import begin, check_room, prepare
    from sppo_jax.train.watch.alike import check_alike

    cluster = distributed.cluster(config)
    distributed.together(lambda: check_trackers(config) if distributed.is_main() else None)
    changes = distributed.together(lambda: changes_since(run_dir, config))
    planned, too_large = _planned(args, config, cluster, run_dir)
    lack = too_large or _lack_of_host_memory(config, planned, cluster)
    if lack:
        if distributed.is_main():
            print(lack, file=sys.stderr)
        return DOES_NOT_FIT
    experiment = distributed.together(lambda: prepare(config, planned, cluster), is_long=True)
    plan = experiment.plan  # with sequence.groups chosen
    distributed.together(lambda: stack.enter_context(claimed(run_dir)) if distributed.is_main() else None)
    directory = checkpoint_directory(config, run_dir)
    if config.checkpoint.dir is not None and directory.resolve() != run_dir.resolve():
        place = directory, "the directory of checkpoints", "checkpoint.dir"
        distributed.together(lambda: stack.enter_context(claimed(*place)) if distributed.is_main() else None)
    distributed.together(lambda: check_room(experiment, run_dir))
    if plan.groups != planned.groups:
        distributed.say(f"sequence.groups is {plan.groups}: {plan.reasons.get('groups', '')}")
    _say_measured(config, plan, cluster)
    for change in changes:
        distributed.say(f"changed since the run began: {change}")
    start = begin(experiment, run_dir)
    check_alike(experiment)
    distributed.together(lambda: write_run(run_dir, config, plan) if distributed.is_main() else None)
    try:
        train(experiment, run_dir, start)
    except RunFailed as failure:
        if distributed.is_main():
            print(failure, file=sys.stderr)
        return FAILED
    except Different:
        raise
    except ValueError as error:
        raise RuntimeError("training failed on input that had passed all checks") from error
    distributed.say(f"run directory {run_dir}")
    return DONE
