"""`sppo plan`: the plan for a config, and its reasons; touches no accelerator and does not import jax."""

import sys
import threading
import time
import warnings
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from sppo_jax.commands.command import (
    DOES_NOT_FIT,
    DONE,
    Parser,
    config_parser,
    evaluation_config,
    load,
    positive,
    simulate,
    some_path,
)
from sppo_jax.commands.outputs import PAGE, TRACE, Output, check_outputs, files_read
from sppo_jax.config import Config
from sppo_jax.data.summary.known import documents_to_plan_for, known_documents, known_fill, known_rows, planned_for
from sppo_jax.files.whole import json_text
from sppo_jax.report.flex.line import gain_of_teams
from sppo_jax.report.plan.chrome_trace import chrome_trace
from sppo_jax.report.plan.evaluation_text import evaluation_dict, evaluation_text
from sppo_jax.report.plan.figures import Figures, figures_of
from sppo_jax.report.plan.html import plan_html
from sppo_jax.report.plan.json_report import plan_dict
from sppo_jax.report.plan.limits_text import bound_dict, max_length_text, min_devices_text
from sppo_jax.report.plan.text import brief_text, moments_text, plan_text
from sppo_jax.search.evaluation import plan_evaluation
from sppo_jax.search.given import without_effect
from sppo_jax.search.limits import Bound, max_length, min_devices
from sppo_jax.search.make import resolve_cluster
from sppo_jax.search.search import Found, search

# Seconds of a search before its time is shown.
_MOMENT_S = 2.0
_CLEAR_LINE = "\r\033[K"


def run(words: Sequence[str]) -> int:
    """Prints the plan of a config, or the longest sequence and the smallest cluster; returns the exit code."""
    args = _parser().parse_intermixed_args(words)
    config = load(args)
    simulate(config)
    _say_if_cpu(config)
    if args.eval:
        return _plan_evaluation(args, config)
    check_outputs(
        Output(option="--html", path=args.html, head=PAGE),
        Output(option="--trace", path=args.trace, head=TRACE),
        inputs=[Path(args.config), *files_read(config)],
    )
    bounds: dict[str, Bound] = {}
    with _seconds_shown():
        found, problem = _searched(config, may_fail=args.max_length or args.min_devices)
        if args.max_length:
            bounds["max_length"] = max_length(config, found=found)
        if args.min_devices:
            bounds["min_devices"] = min_devices(config, found=found)
        figures = _figures(config, found, bounds)
    if figures is None and (args.html or args.trace or args.json or args.memory):
        raise ValueError(problem)
    if args.html and figures:
        args.html.write_text(plan_html(figures), encoding="utf-8")
    if args.trace and figures:
        args.trace.write_text(chrome_trace(figures), encoding="utf-8")
    print(_output(args, config, figures, bounds))
    return _exit_code(figures, bounds)


def _plan_evaluation(args: Namespace, config: Config) -> int:
    """Prints the plan of an evaluation; returns the exit code.

    Raises:
        ValueError: another option asks for what only a training step has, or no mesh suits the model and the length.
    """
    for option in ("html", "trace", "max_length", "min_devices", "memory", "verbose"):
        if getattr(args, option):
            name = f"--{option.replace('_', '-')}"
            raise ValueError(f"{name} shows a training step, so it must not come with --eval; remove {name} or --eval")
    config = evaluation_config(args, config)
    cluster = resolve_cluster(config)
    found = plan_evaluation(config, cluster, max(1, config.train.eval_sequences))
    if args.json:
        print(json_text(evaluation_dict(found, cluster), indent=2))
    else:
        print(evaluation_text(found, config.model, cluster))
    if found.problem:
        print(found.problem, file=sys.stderr)
    return DONE if found.fits else DOES_NOT_FIT


def _searched(config: Config, *, may_fail: bool) -> tuple[Found | None, str]:
    """Returns the plan of the config as it is, or, where its size is what is asked for, why it has none.

    Raises:
        ValueError: settings contradict each other, and no size is asked for.
    """
    try:
        return search(config, documents=documents_to_plan_for(config)), ""
    except ValueError as error:
        if not may_fail:
            raise
        return None, str(error)


def _figures(config: Config, found: Found | None, bounds: dict[str, Bound]) -> Figures | None:
    """Returns the figures of the config's plan; where it has none, those of a size that was found, if any was."""
    shown = _at_best(config, bounds) if found is None else (config, found)
    if shown is None:
        return None
    config, found = shown
    for line in without_effect(config, found.plan):
        warnings.warn(line, stacklevel=2)
    fill = known_fill(config)
    if fill and (line := fill.warning(config.train.steps, found.plan.predicted.step_s)):
        warnings.warn(line, stacklevel=2)
    figures = figures_of(found, config, known_documents(config), planned_for(config, found.plan))
    if config.sequence.groups == "static" or figures.documents is None:
        return figures
    return replace(figures, teams_gain=gain_of_teams(config, found.plan, known_rows(config)))


def _at_best(config: Config, bounds: dict[str, Bound]) -> tuple[Config, Found] | None:
    """Returns the config at the first size that was found, and its plan; None where none was."""
    for name, bound in bounds.items():
        best = bound.best
        if best is None or best.found is None:
            continue
        if name == "max_length":
            return replace(config, sequence=replace(config.sequence, length=best.size)), best.found
        return replace(config, hardware=replace(config.hardware, cluster=best.name)), best.found
    return None


def _say_if_cpu(config: Config) -> None:
    """Warns if the devices are this machine's CPU only because no others were found or named."""
    if config.hardware.cluster or config.train.num_simulated_devices or config.hardware.measured:
        return
    if (cluster := resolve_cluster(config)).device.name == "cpu":
        warnings.warn(
            f"no GPU or TPU was found, so this plan is for this CPU ({cluster.name}); add --cluster h100:1x8 to plan "
            "for eight H100s, or another NAME:HOSTSxDEVICES",
            stacklevel=2,
        )


def _parser() -> Parser:
    parser = config_parser(
        "plan",
        "Say whether a run fits, how long a step takes, and why, before anything is compiled. CONFIG.yaml may also be "
        "hf:FOLDER, a Hugging Face folder with a config.json; then --length N gives the tokens of a sequence.",
    )
    parser.add_argument("--cluster", metavar="NAME:HOSTSxDEVICES", help="the devices to plan for, e.g. a100-80g:16x8")
    parser.add_argument("--length", type=positive, metavar="N", help="tokens of a sequence, in place of the config's")
    parser.add_argument(
        "--eval", action="store_true", help="plan an evaluation: forwards alone, without gradients and optimizer"
    )
    parser.add_argument("--json", action="store_true", help="print plan.json and the report as JSON instead of text")
    parser.add_argument("--verbose", action="store_true", help="also print rejected plans, all parts, and the timeline")
    parser.add_argument(
        "--memory", action="store_true", help="also print what holds device memory at each moment of a step"
    )
    parser.add_argument("--html", type=some_path, metavar="FILE", help="also write a page with pictures of the step")
    parser.add_argument(
        "--trace", type=some_path, metavar="FILE", help="also write the step as a Chrome trace for Perfetto"
    )
    parser.add_argument("--max-length", action="store_true", help="find the longest sequence that fits the devices")
    parser.add_argument("--min-devices", action="store_true", help="find the smallest cluster that fits the sequence")
    return parser


@contextmanager
def _seconds_shown() -> Iterator[None]:
    """Shows on a terminal the seconds of a search that takes more than a moment; clears the line at the end."""
    done, start_s = threading.Event(), time.perf_counter()

    def show() -> None:
        while not done.wait(1 if time.perf_counter() - start_s > _MOMENT_S else _MOMENT_S):
            print(f"\rsearching for a plan: {time.perf_counter() - start_s:.0f} s", end="", file=sys.stderr, flush=True)

    clock = threading.Thread(target=show, daemon=True)
    if sys.stderr.isatty():
        clock.start()
    try:
        yield
    finally:
        done.set()
        if clock.ident is not None:
            clock.join()
            if time.perf_counter() - start_s > _MOMENT_S:
                print(_CLEAR_LINE, end="", file=sys.stderr, flush=True)


def _output(args: Namespace, config: Config, figures: Figures | None, bounds: dict[str, Bound]) -> str:
    if args.json and figures:
        answers = {name: bound_dict(bound) for name, bound in bounds.items()}
        return json_text(plan_dict(figures, **answers), indent=2)
    texts, cluster = [], resolve_cluster(config)
    if "max_length" in bounds:
        texts.append(max_length_text(bounds["max_length"], cluster))
    if "min_devices" in bounds:
        texts.append(min_devices_text(bounds["min_devices"], cluster, config.sequence.length))
    if figures and not texts:
        texts = [plan_text(figures) if args.verbose else brief_text(figures)]
    return "\n\n".join([*texts, moments_text(figures)] if figures and args.memory else texts)


def _exit_code(figures: Figures | None, bounds: dict[str, Bound]) -> int:
    """Returns the exit code: whether the limits that were asked for exist or, without limits, whether the plan fits."""
    if figures is None or bounds:
        return DONE if all(bound.best is not None for bound in bounds.values()) else DOES_NOT_FIT
    if figures.found.fits:
        return DONE
    print(figures.found.problem, file=sys.stderr)
    return DOES_NOT_FIT
