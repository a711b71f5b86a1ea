"""`sppo fit`: compile the train step for a cluster that need not be there, and compare bytes."""

import sys
import warnings
from argparse import Namespace
from collections.abc import Sequence

from sppo_jax.commands.command import (
    DOES_NOT_FIT,
    DONE,
    Parser,
    config_parser,
    evaluation_config,
    load,
    read_plan,
    simulate,
    some_path,
)
from sppo_jax.config import Config, load_config
from sppo_jax.data.summary.known import documents_to_plan_for, planned_for
from sppo_jax.files.whole import json_text
from sppo_jax.fit.compiled import MAX_EXPOSED, Fit, compile_plan
from sppo_jax.fit.evaluation import compile_evaluation
from sppo_jax.fit.nearest import Change, nearest_change
from sppo_jax.hardware import Cluster
from sppo_jax.plan.plan import Plan
from sppo_jax.processes.environment import prepare_to_compile
from sppo_jax.search.evaluation import plan_evaluation
from sppo_jax.search.make import make_plan, resolve_cluster


def run(words: Sequence[str]) -> int:
    """Compiles, and prints the compiler's figures beside the planner's; returns the exit code."""
    args = _parser().parse_intermixed_args(words)
    config = load(args)
    simulate(config)
    if args.eval:
        return _fit_evaluation(args, evaluation_config(args, config))
    cluster = resolve_cluster(config)
    plan = read_plan(args.plan, config) if args.plan else make_plan(config, cluster, documents_to_plan_for(config))
    prepare_to_compile()
    fit = compile_plan(config, plan, cluster, variants=args.variants)
    change = None if fit.fits or fit.slice_problem else _nearest(args, config, cluster, fit)
    if args.json:
        named = {"overrides": list(change.overrides)} if change else None
        print(json_text({**fit.to_dict(), "cluster": cluster.name, "nearest_change": named}, indent=2))
    else:
        lines = [_headline(plan, cluster), "" if args.plan else planned_for(config, plan), fit.describe()]
        print("\n".join(filter(None, lines)))
    if fit.exposed_activations_share > MAX_EXPOSED:
        warnings.warn(_exposed(fit), stacklevel=2)
    if fit.fits:
        return DONE
    print(_problem(fit, change), file=sys.stderr)
    return DOES_NOT_FIT


def _fit_evaluation(args: Namespace, config: Config) -> int:
    """Compiles an evaluation, and prints the compiler's bytes beside the planner's; returns the exit code.

    Raises:
        ValueError: another option asks for what only a training step has, or no mesh suits the model and the length.
    """
    for name, given in (("--plan", args.plan), ("--variants", args.variants)):
        if given:
            raise ValueError(f"{name} is of a training step, so it must not come with --eval; remove {name} or --eval")
    cluster = resolve_cluster(config)
    plan = plan_evaluation(config, cluster, max(1, config.train.eval_sequences)).plan
    prepare_to_compile()
    fit = compile_evaluation(config, plan, cluster)
    if args.json:
        print(json_text({**fit.to_dict(), "cluster": cluster.name}, indent=2))
    else:
        print(f"evaluation of {_headline(plan, cluster)}\n{fit.describe()}")
    if fit.problem:
        print(fit.problem, file=sys.stderr)
    return DONE if fit.fits else DOES_NOT_FIT


def _parser() -> Parser:
    parser = config_parser(
        "fit",
        "Compile the training step ahead of time, without the hardware, and compare its memory with the prediction.",
    )
    parser.add_argument("--cluster", metavar="NAME:HOSTSxDEVICES", help="the devices, e.g. a100-80g:16x8")
    parser.add_argument("--eval", action="store_true", help="compile an evaluation: forwards alone")
    parser.add_argument("--plan", type=some_path, help="a plan.json to compile instead of planning")
    parser.add_argument(
        "--variants",
        action="store_true",
        help="also compile with all products by cuBLAS, and on one GPU with loops in CUDA graphs; the largest must fit",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    return parser


def _nearest(args: Namespace, config: Config, cluster: Cluster, fit: Fit) -> Change | None:
    named = [f"hardware.cluster={cluster.name}", *args.overrides]

    def reload(overrides: tuple[str, ...]) -> Config:
        return load_config(args.config, [*named, *overrides])

    return nearest_change(reload, config, cluster, fit.largest.hbm_bytes / fit.predicted.hbm_bytes)


def _headline(plan: Plan, cluster: Cluster) -> str:
    mesh, chunks = plan.mesh, len(plan.chunk_lengths)
    return (
        f"{plan.sequence_length} tokens in {chunks} chunks on {cluster.name}: data {mesh.data} x pipe {mesh.pipe} x "
        f"seq {mesh.seq}, {plan.schedule.name}, {plan.kernel} attention"
    )


def _exposed(fit: Fit) -> str:
    return (
        f"at most {MAX_EXPOSED:.0%} of the bytes of host copies should be exposed (not overlapped with compute), got "
        f"{fit.exposed_activations_share:.1%}; use longer chunks, more layers per stage, or a lower stash.alpha"
    )


def _problem(fit: Fit, change: Change | None) -> str:
    over = []
    for name, key in (("HBM", "hbm_bytes"), ("host memory", "host_bytes")):
        got, capacity = getattr(fit.largest, key), getattr(fit.capacity, key)
        if got > capacity:
            over.append(f"{(got - capacity) / 2**30:.1f} GiB of {name} per device too much")
    over += filter(None, (fit.pool_problem, fit.slice_problem))
    tail = change.describe() if change else "no change that was tried fits"
    return f"does not fit: {' and '.join(over)}" + ("" if fit.slice_problem else f"; {tail}")
