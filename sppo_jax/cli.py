"""The command line: `sppo train` and `sppo plan`; jax is imported only after the devices are chosen."""

from __future__ import annotations

import argparse
import os
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from sppo_jax.config import Config, load_config
from sppo_jax.planner.make import make_plan
from sppo_jax.planner.plan import Plan
from sppo_jax.schedule.timeline import text_timeline

DONE, FAILED, WRONG_INPUT = 0, 1, 2


class _Parser(argparse.ArgumentParser):
    """Reports a wrong command line like any other wrong input: one line, no usage text."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{self.prog}: {message}; see {self.prog} --help")


def _warn_in_a_line(message: Warning | str, *_: object) -> None:
    print(f"warning: {message}", file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: the command's words; those of the process by default.

    Returns:
        The exit code: 0 done, 1 the run failed, 2 the user's input is wrong (one line on standard error).
    """
    words = list(sys.argv[1:] if argv is None else argv)
    commands = {"train": _train, "plan": _plan}
    try:
        parser = _Parser(prog="sppo", description="Train decoder LLMs on sequences that do not fit on one device.")
        parser.add_argument("command", choices=commands, help="see sppo COMMAND --help")
        command = parser.parse_args(words[:1]).command
        with warnings.catch_warnings():
            warnings.showwarning = _warn_in_a_line
            return commands[command](words[1:])
    except ValueError as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return WRONG_INPUT


def _plan(words: Sequence[str]) -> int:
    """Print the plan of a config; no accelerator is touched."""
    parser = _config_parser("plan")
    parser.add_argument("--json", action="store_true", help="print plan.json instead of text")
    args = parser.parse_intermixed_args(words)
    config = _load(args)
    plan = make_plan(config)
    print(plan.to_json() if args.json else f"{plan.describe()}\n\n{text_timeline(plan.table())}")
    return DONE


def _train(words: Sequence[str]) -> int:
    """Train as a config says."""
    parser = _config_parser("train")
    parser.add_argument("--run-dir", type=Path, help="where to write; runs/NAME-DATE-TIME by default")
    parser.add_argument("--plan", type=Path, help="a plan.json to follow instead of planning")
    args = parser.parse_intermixed_args(words)
    config = _load(args)
    run_dir = args.run_dir or Path("runs") / f"{Path(args.config).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    plan = _read_plan(args.plan, config) if args.plan else make_plan(config)

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


def _config_parser(command: str) -> _Parser:
    parser = _Parser(prog=f"sppo {command}")
    parser.add_argument("config", metavar="CONFIG.yaml")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="settings that replace the file's")
    return parser


def _load(args: argparse.Namespace) -> Config:
    """Read the config and simulate the devices it asks for, which must happen before jax is imported."""
    config = load_config(args.config, args.overrides)
    if config.train.num_simulated_devices:
        _simulate(config.train.num_simulated_devices)
    return config


def _simulate(num_devices: int) -> None:
    os.environ["JAX_PLATFORMS"] = "cpu"
    # With fewer cores than devices a collective waits for devices that have not had their turn: allow them time.
    flags = {
        "--xla_force_host_platform_device_count": num_devices,
        "--xla_cpu_collective_call_terminate_timeout_seconds": 600,
    }
    kept = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if flag.partition("=")[0] not in flags]
    os.environ["XLA_FLAGS"] = " ".join([*kept, *(f"{name}={value}" for name, value in flags.items())])


def _read_plan(path: Path, config: Config) -> Plan:
    """Read a plan that was given, and check that it is one for this config."""
    try:
        plan = Plan.from_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--plan must be a readable plan.json, got {path} ({error}); give another") from error
    shapes = {
        "sequence.length": (config.sequence.length, plan.sequence_length),
        "sequence.per_pipeline": (config.sequence.per_pipeline, plan.sequences_per_pipeline),
        "mesh.data": (config.mesh.data, plan.mesh.data),
        "mesh.pipe": (config.mesh.pipe, plan.mesh.pipe),
        "mesh.seq": (config.mesh.seq, plan.mesh.seq),
    }
    for name, (wanted, found) in shapes.items():
        if wanted != found:
            raise ValueError(f"--plan must agree with {name} = {wanted}, got {found} in {path}; set {name}={found}")
    return plan


if __name__ == "__main__":
    sys.exit(main())
