"""Everything that is claimed of a GPU, measured by one command.

    python -m bench.gpu                        all cases, over an hour on one H100
    python -m bench.gpu --within 575 --resume  in 575 s what decides most; repeat to go on
    python -m bench.gpu --parts health,exact   some parts
    python -m bench.gpu --tiny                 every part on the CPU, in two minutes, to see that the parts work
    python -m bench.gpu --compile h200         compile every program for a GPU that is not here; nothing runs
    options: --out bench/results  --case PART/NAME (repeat)  --list  --host-gib 120

Parts: system (libraries, limits), exact (kernels, the delta rule and a pipeline step against float32), probe (loops
that wait for host copies), attention (FLOP/s by queries and prefix), delta (the gated delta rule), pool (host memory
that is pinned), health (ceilings of the machine), step (whole train steps), overlap (a profiler's trace), peer (the
same in PyTorch and plain JAX), flex (teams of devices by document, on 2, 4 and 8 GPUs). docs/first_gpu.md says what to
run first, and what each result decides.
Each case is a process of its own; its results are added to one JSON when it ends. Compiled programs stay under
--out, in cache, or where JAX_COMPILATION_CACHE_DIR says. What time did not allow is "not run"; --resume runs it. A case
that failed runs again only by its name. Needs one idle NVIDIA GPU of 16 GiB or more, and 24 GiB of host memory; cases
that need more memory, more devices, or a package that is missing, are skipped with the reason. What a failed case
printed is added to a .log beside the JSON.
Exit code 1: a comparison of part exact or flex failed; 2: nothing can run here.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the package is not installed

from bench.gpu_parts.case import FAILED, NOT_RUN, Case, Outcome
from bench.gpu_parts.child import PARTS
from bench.gpu_parts.machine import Machine, absent_machine, cpu_machine, gpu_machine
from bench.gpu_parts.order import ordered
from bench.gpu_parts.report import SECTIONS, Sections, failed_comparisons, write_reports
from bench.gpu_parts.results import Results
from bench.gpu_parts.runner import not_run, run_case, skipped, why_not

# What is left of the time for tables and pictures.
_REPORT_S = 5.0
OUT = Path(__file__).resolve().parent / "results"


@dataclass(frozen=True, kw_only=True)
class Stopwatch:
    """What is measured of one kind of accelerator.

    Args:
        name: with which the names of files of results begin.
        help: of the command.
        parts: the folder of `bench` that has each part.
        here: finds the machine, given the bytes of its host or None.
        absent: returns what a name of --compile says.
        order: in which cases run.
        sections: of the tables.
    """

    name: str
    help: str
    parts: Mapping[str, str]
    here: Callable[[int | None], Machine]
    absent: Callable[[str], Machine]
    order: Callable[[Sequence[Case]], list[Case]]
    sections: Sections


GPUS = Stopwatch(
    name="gpu",
    help=__doc__,
    parts=dict.fromkeys(PARTS, "gpu_parts"),
    here=lambda given_bytes: gpu_machine(os.environ.get("CUDA_VISIBLE_DEVICES"), given_bytes),
    absent=absent_machine,
    order=ordered,
    sections=SECTIONS,
)


def parse(words: list[str] | None = None, watch: Stopwatch = GPUS) -> argparse.Namespace:
    """Read the command line.

    Raises:
        ValueError: a word is wrong.
    """
    parser = argparse.ArgumentParser(description=watch.help, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--parts", default=",".join(watch.parts), help="parts to run, separated by commas; all by default"
    )
    parser.add_argument("--case", action="append", default=[], metavar="PART/NAME", help="run this case alone")
    parser.add_argument(
        "--within",
        type=float,
        default=float("inf"),
        metavar="SECONDS",
        help="end in time; begin no case that ends later",
    )
    parser.add_argument("--resume", action="store_true", help="keep earlier results, and run what was not run")
    parser.add_argument("--tiny", action="store_true", help="tiny cases on the CPU")
    parser.add_argument("--compile", metavar="DEVICE", help="compile for a device that need not be here, do not run")
    parser.add_argument("--list", action="store_true", help="print the cases, run nothing")
    parser.add_argument(
        "--host-gib",
        type=float,
        metavar="GIB",
        help="host memory; by default what the system shows",
    )
    parser.add_argument("--out", type=Path, default=OUT, metavar="DIR", help="where results go")
    args = parser.parse_args(words)
    args.parts = args.parts.split(",")
    for part in args.parts:
        if part not in watch.parts:
            raise ValueError(f"--parts takes {', '.join(watch.parts)}, got {part!r}; correct the name")
    if not args.within > 0:
        raise ValueError(f"--within must be more than 0, got {args.within:g}; give the seconds that are left")
    if args.tiny and args.compile:
        raise ValueError("--tiny runs on the CPU and --compile compiles for another device, got both; leave one out")
    return args


def main(words: list[str] | None = None, watch: Stopwatch = GPUS) -> int:
    """Run the cases that were asked for; return the exit code."""
    try:
        return _run(parse(words, watch), watch)
    except ValueError as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return 2


def _run(args: argparse.Namespace, watch: Stopwatch) -> int:
    end_s = time.monotonic() + args.within - _REPORT_S
    cases = select(args, watch)
    if args.list:
        print("\n".join(f"{case.key:58} about {case.expected_s:.0f} s" for case in cases))
        return 0
    machine, mode = _machine(args, watch), "compile" if args.compile else "run"
    refusals = {case.key: _why_not(case, machine, mode) for case in cases}
    if all(refusals.values()):
        raise ValueError(f"at least one case must be able to run, got {cases[0].key}, which {refusals[cases[0].key]}")
    path = args.out / f"{_name(args, machine, watch)}.json"
    resume = functools.partial(Results.resume, compiled_only=mode == "compile")
    results = (resume if args.resume else Results.begin)(path, machine)
    if mode == "run":  # parts step and overlap share programs, and so do later calls
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str((args.out / "cache").resolve()))
    again = [case for case in cases if _is_left(case, results, named=bool(args.case))]
    left = run_cases(again, machine, mode, results, refusals, end_s=end_s)
    print(write_reports(results, watch.sections))
    if left:
        print(f"not run for lack of time: {', '.join(left)}; run the same command with --resume")
    return 1 if failed_comparisons(results) else 0


def _is_left(case: Case, results: Results, *, named: bool) -> bool:
    """Return whether a case is to be run: what was not run, and what failed if it was named."""
    outcome = results.outcomes.get(case.key)
    return outcome is None or outcome.status == NOT_RUN or (named and outcome.status == FAILED)


def _machine(args: argparse.Namespace, watch: Stopwatch) -> Machine:
    if args.compile:
        return watch.absent(args.compile)
    if args.tiny:
        return cpu_machine()
    return watch.here(int(args.host_gib * 2**30) if args.host_gib else None)


def _name(args: argparse.Namespace, machine: Machine, watch: Stopwatch) -> str:
    if args.compile:
        return f"{watch.name}_{machine.device}_compiled_jax-{version('jax')}"
    return f"{watch.name}_{'tiny' if args.tiny else machine.device}"


def select(args: argparse.Namespace, watch: Stopwatch = GPUS) -> list[Case]:
    """List the cases of the parts that were asked for, most telling first, or those that were named, as they were.

    Raises:
        ValueError: no case has a name that was given.
    """
    modules = [import_module(f"bench.{watch.parts[part]}.{part}") for part in args.parts]
    cases = [case for module in modules for case in module.cases(tiny=args.tiny)]
    known = {case.key: case for case in cases}
    for key in args.case:
        if key not in known:
            near = get_close_matches(key, known, n=1, cutoff=0)[0]
            raise ValueError(f"--case takes a name that --list prints, got {key!r}; the nearest is {near!r}")
    return [known[key] for key in args.case] or watch.order(cases)


def _why_not(case: Case, machine: Machine, mode: str) -> str:
    if mode == "compile":
        return f"runs {case.packages[0]}, which jax does not compile" if case.packages else ""
    return why_not(case, machine)


def run_cases(
    cases: list[Case],
    machine: Machine,
    mode: str,
    results: Results,
    refusals: dict[str, str],
    *,
    end_s: float = float("inf"),
    run: Callable[..., Outcome] = run_case,
    clock: Callable[[], float] = time.monotonic,
) -> list[str]:
    """Run cases one after the other, and add each outcome to the results.

    Args:
        cases: in this order.
        machine, mode: as `runner.run_case` takes them.
        results: takes the outcomes.
        refusals: why a case cannot run, by its key; "" where it can.
        end_s: when all must have ended, by the clock; a case that is expected to end later is not begun.
        run: runs one case.
        clock: gives the seconds.

    Returns:
        The cases that were not run for lack of time, or not to their end.
    """
    left = []
    for number, case in enumerate(cases, start=1):
        remaining_s = end_s - clock()
        if refusals[case.key]:
            outcome = skipped(case, refusals[case.key])
        elif case.expected_s > remaining_s:
            outcome = not_run(case, remaining_s)
        else:
            outcome = run(case, machine, mode, limit_s=remaining_s)
        if outcome.status == NOT_RUN:
            left.append(case.key)
        before = results.outcomes.get(case.key)
        results.add(replace(outcome, rows=before.rows) if before and not outcome.rows else outcome)
        text = (
            f"{outcome.status}: {outcome.reason}" if outcome.reason else f"{outcome.status} in {outcome.wall_s:.0f} s"
        )
        print(f"[{number}/{len(cases)}] {case.key} {text}", flush=True)
    return left


if __name__ == "__main__":
    sys.exit(main())
