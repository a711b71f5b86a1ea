"""FlexSP's planning problem: the fast planner beside proven optima, HiGHS, a lower bound, and the published gains.

    python -m studies.flexsp                  # about 15 minutes on 2 cores; writes results/flexsp.json
    python -m studies.flexsp --parts cells    # one part alone; the other parts keep their results

Everything is simulated with FlexSP's released cost model (`sppo_jax/flex/flexsp/costs.py`); no device runs. Times of
the planner are measured. Parts:

* `optima`: 100 microbatches of at most 16 devices and 20 documents, whose optimum HiGHS proves.
* `large`: 20 batches of 512 documents of each corpus on 64 devices, beside HiGHS with 16 buckets and 10 nodes.
* `buckets`: tokens that FlexSP's 16 buckets add to each microbatch, with the planner's bound on them and without.
* `cells`: gains over DeepSpeed beside those of the paper; only Wikipedia's lengths are published, so only it is judged.
* `documents`: what the judged cells would be with other documents, and with 28 GB instead of 30.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sppo_jax.flex.flexsp.bound import lower_bound_ns
from sppo_jax.flex.flexsp.bucketing import MOST_TOKEN_ERROR, bucket
from sppo_jax.flex.flexsp.costs import MODELS, TeamCosts, flexsp_costs
from sppo_jax.flex.flexsp.solver import plan_batch, plan_teams
from sppo_jax.flex.lengths import corpora
from studies.flexsp_cells import PUBLISHED, part_of_cluster, released_batches, sample_batches, simulate_cell
from studies.flexsp_milp import solve_teams

RESULT = Path(__file__).parent / "results" / "flexsp.json"
HARDWARE = "simulated; solver times on 2 CPU cores"
NUM_OPTIMA, NUM_BATCHES = 100, 20
# Batches of a cell that is not judged.
NUM_OTHER_BATCHES = 5
OPTIMUM_NODES, LARGE_NODES, NUM_BUCKETS = 20_000, 10, 16
# A plan is called optimal if HiGHS proves that none is faster by more than this share.
OPTIMUM_GAP = 1e-5


def small_cases() -> Iterator[tuple[int, TeamCosts, np.ndarray]]:
    """Yields numbered microbatches for 4, 8 and 16 devices: 4 to 20 documents, 30% to 95% of the tokens that fit.

    Half of the cases have log-uniform lengths, half Wikipedia's. HiGHS must prove an optimum, so 16 devices have at
    most 12 documents.
    """
    wikipedia = corpora()["wikipedia"]
    for number in range(10_000):
        numbers = random.Random(number)
        num_devices = (4, 8, 16)[number % 3]
        model = list(MODELS)[number // 3 % 3]
        costs = part_of_cluster(flexsp_costs(MODELS[model]), num_devices)
        count = 4 + int(numbers.random() * (17 if num_devices < 16 else 9))
        if number // 9 % 2:
            raw = [256 * (costs.cluster_tokens / 512) ** numbers.random() for _ in range(count)]
        else:
            raw = [float(np.interp(numbers.random(), wikipedia.shares, wikipedia.tokens)) for _ in range(count)]
        fill = 0.3 + 0.65 * numbers.random()
        scaled = np.array(raw) * fill * costs.cluster_tokens / sum(raw)
        lengths = np.maximum(1, np.rint(scaled / 128)).astype(np.int64) * 128
        if lengths.sum() <= costs.cluster_tokens:
            yield number, costs, lengths


def optima(say: Callable[[str], None]) -> dict[str, Any]:
    """Compares the fast planner with proven optima."""
    rows: list[dict[str, Any]] = []
    for number, costs, lengths in small_cases():
        best = solve_teams(lengths, costs, node_limit=OPTIMUM_NODES, gap=OPTIMUM_GAP)
        if best.plan is None or not best.proven:
            continue
        plan = plan_teams(lengths, costs)
        rows.append(
            {
                "case": number,
                "devices": costs.num_devices,
                "documents": len(lengths),
                "optimum_ns": best.plan.time_ns,
                "fast_ns": plan.time_ns if plan else None,
                "bound_ns": lower_bound_ns(lengths, costs, best.plan.time_ns),
            }
        )
        if len(rows) % 20 == 0:
            say(f"optima: {len(rows)} of {NUM_OPTIMA}")
        if len(rows) == NUM_OPTIMA:
            break
    above = [row["fast_ns"] / row["optimum_ns"] - 1 for row in rows if row["fast_ns"]]
    return {
        "node_limit": OPTIMUM_NODES,
        "gap": OPTIMUM_GAP,
        "cases": len(rows),
        "without_plan": len(rows) - len(above),
        "above_optimum_mean": statistics.mean(above),
        "above_optimum_worst": max(above),
        "rows": rows,
    }


def large(say: Callable[[str], None]) -> dict[str, Any]:
    """Compares the fast planner with HiGHS and the lower bound on 64 devices, and times the fast planner."""
    costs, result = flexsp_costs(MODELS["7b"]), {}
    for corpus in corpora():
        batches = sample_batches(corpus, 192, NUM_BATCHES)
        rows = [_large_row(lengths, costs) for lengths in batches]
        with multiprocessing.get_context("spawn").Pool(2) as pool:
            for row, highs_ns in zip(rows, pool.map(_highs_ns, batches, chunksize=1), strict=True):
                row["highs_ns"] = highs_ns
        found = [(fast, highs) for row in rows for fast, highs in zip(row["fast_ns"], row["highs_ns"], strict=True)]
        both = [fast / highs - 1 for fast, highs in found if highs]
        gaps = [fast / low - 1 for row in rows for fast, low in zip(row["fast_ns"], row["bound_ns"], strict=True)]
        result[corpus] = {
            "microbatches": len(found),
            "highs_without_plan": len(found) - len(both),
            "above_highs_mean": statistics.mean(both),
            "above_highs_worst": max(both),
            "above_bound_mean": statistics.mean(gaps),
            "above_bound_worst": max(gaps),
            "microbatch_ms_median": statistics.median(ms for row in rows for ms in row["microbatch_ms"]),
            "microbatch_ms_most": max(ms for row in rows for ms in row["microbatch_ms"]),
            "window_ms_median": statistics.median(row["window_ms"] for row in rows),
            "window_ms_most": max(row["window_ms"] for row in rows),
            "rows": rows,
        }
        say(f"large: {corpus} done")
    return {"model": "7b", "devices": 64, "documents": 512, "node_limit": LARGE_NODES, "buckets": NUM_BUCKETS, **result}


def _large_row(lengths: np.ndarray, costs: TeamCosts) -> dict[str, Any]:
    window_ms, (microbatches, plans) = _least_ms(lambda: plan_batch(lengths, costs))
    row: dict[str, Any] = {"window_ms": window_ms}
    row |= {name: [] for name in ("microbatch_ms", "fast_ns", "bound_ns")}
    for own, plan in zip(microbatches, plans, strict=True):
        row["microbatch_ms"].append(_least_ms(lambda own=own: plan_teams(lengths[own], costs))[0])
        row["fast_ns"].append(plan.time_ns)
        row["bound_ns"].append(lower_bound_ns(lengths[own], costs, plan.time_ns))
    return row


def _highs_ns(lengths: np.ndarray) -> list[int | None]:
    """Returns the time of HiGHS's plan of each microbatch of the fast planner's choice; None where it found none."""
    costs, times = flexsp_costs(MODELS["7b"]), []
    for own in plan_batch(lengths, costs)[0]:
        plan = solve_teams(lengths[own], costs, node_limit=LARGE_NODES, num_buckets=NUM_BUCKETS).plan
        times.append(plan.time_ns if plan else None)
    return times


def _least_ms(call: Callable[[], Any]) -> tuple[float, Any]:
    """Returns the least milliseconds of three calls, and what the last returned; other work shares the cores."""
    times = []
    for _ in range(3):
        begin = time.perf_counter()
        value = call()
        times.append((time.perf_counter() - begin) * 1e3)
    return round(min(times), 2), value


def buckets(say: Callable[[str], None]) -> dict[str, Any]:
    """Measures the tokens that 16 buckets add to each microbatch that the bucketed planner uses."""
    result = {corpus: _bucket_figures([("7b", 192)], corpus) for corpus in corpora()}
    judged = [(cell.model, cell.max_kilotokens) for cell in PUBLISHED if cell.judged]
    result["wikipedia-released"] = _bucket_figures(judged, None)
    say("buckets: done")
    return result


def _bucket_figures(models: Sequence[tuple[str, int]], corpus: str | None) -> dict[str, Any]:
    """Returns what buckets add, and what the bound on it costs in simulated time.

    Args:
        models: models, each with its longest document in thousands of tokens.
        corpus: 20 batches of a corpus; None for the 40 released batches of Wikipedia.
    """
    errors: dict[bool, list[float]] = {True: [], False: []}
    times: dict[bool, list[int]] = {True: [], False: []}
    for model, longest in models:
        costs = flexsp_costs(MODELS[model], max_kilotokens=longest)
        for lengths in sample_batches(corpus, longest, NUM_BATCHES) if corpus else released_batches(longest):
            for bound, most in ((True, MOST_TOKEN_ERROR), (False, math.inf)):
                microbatches, plans = plan_batch(lengths, costs, num_buckets=NUM_BUCKETS, most_token_error=most)
                errors[bound] += [bucket(lengths[own], NUM_BUCKETS).token_error for own in microbatches]
                times[bound].append(sum(plan.time_ns for plan in plans))
    return {
        "batches": len(times[True]),
        "microbatches": len(errors[True]),
        "microbatch_mean": statistics.mean(errors[True]),
        "microbatch_worst": max(errors[True]),
        "unbounded_mean": statistics.mean(errors[False]),
        "unbounded_worst": max(errors[False]),
        "batches_changed": sum(own != other for own, other in zip(times[True], times[False], strict=True)),
        "time_over_unbounded": sum(times[True]) / sum(times[False]),
        "time_over_unbounded_worst": max(own / other for own, other in zip(times[True], times[False], strict=True)),
    }


def cells(say: Callable[[str], None]) -> dict[str, Any]:
    """Simulates the cells of the paper's main result."""
    rows = []
    for cell in PUBLISHED:
        longest = cell.max_kilotokens
        batches = released_batches(longest) if cell.judged else sample_batches(cell.corpus, longest, NUM_OTHER_BATCHES)
        seconds = simulate_cell(cell, batches, ("static", "batch", "flexsp", "unbounded", "own"))
        rows.append(
            {
                "model": cell.model,
                "max_kilotokens": cell.max_kilotokens,
                "corpus": cell.corpus,
                "judged": cell.judged,
                "batches": len(batches),
                "seconds": seconds,
                "gain": seconds["static"] / seconds["flexsp"],
                "gain_unbounded": seconds["static"] / seconds["unbounded"],
                "gain_without_buckets": seconds["static"] / seconds["own"],
                "gain_of_batch_degree": seconds["static"] / seconds["batch"],
                "published": cell.over_deepspeed,
                "published_over_megatron": cell.over_megatron,
            }
        )
        say(f"cells: {cell.model} {cell.max_kilotokens}K {cell.corpus} done")
    judged = [row for row in rows if row["judged"]]
    return {**_errors(judged, "gain"), "unbounded": _errors(judged, "gain_unbounded"), "rows": rows}


def _errors(rows: Sequence[dict[str, Any]], gain: str) -> dict[str, float]:
    errors = [abs(row[gain] / row["published"] - 1) for row in rows]
    return {"error_mean": statistics.mean(errors), "error_worst": max(errors)}


def documents(say: Callable[[str], None]) -> dict[str, Any]:
    """Simulates the judged cells with other documents, and with the memory of the authors' training program."""
    choices: dict[str, tuple[Callable[[int], list[np.ndarray]], float]] = {
        "batches 3 to 42 (the authors' simulation; judged)": (released_batches, 30.0),
        "batches 3 to 42, 28 GB": (released_batches, 28.0),
        "batches 0 to 6, 28 GB (the authors' training program)": (
            lambda longest: released_batches(longest, first=0, count=7),
            28.0,
        ),
        "batches 10 to 49 (40 steps after 10)": (lambda longest: released_batches(longest, first=10), 30.0),
        "40 batches of the whole distribution": (lambda longest: sample_batches("wikipedia", longest, 40), 30.0),
    }
    result = {}
    for name, (batches, memory_limit_gb) in choices.items():
        rows = []
        for cell in PUBLISHED:
            if cell.judged:
                own = batches(cell.max_kilotokens)
                seconds = simulate_cell(cell, own, ("static", "flexsp"), memory_limit_gb=memory_limit_gb)
                rows.append({"gain": seconds["static"] / seconds["flexsp"], "published": cell.over_deepspeed})
        result[name] = {**_errors(rows, "gain"), "gains": [row["gain"] for row in rows]}
        say(f"documents: {name} done")
    return result


PARTS = {"optima": optima, "buckets": buckets, "cells": cells, "documents": documents, "large": large}


def table(result: dict[str, Any]) -> str:
    """Returns the results in words."""
    lines = []
    if "optima" in result:
        own = result["optima"]
        lines += [
            f"optima: {own['cases']} proven; fast planner above by {own['above_optimum_mean']:.2%} on average, at most "
            f"{own['above_optimum_worst']:.2%}; without a plan {own['without_plan']}"
        ]
    for corpus, own in result.get("large", {}).items():
        if isinstance(own, dict):
            lines += [
                f"large, {corpus}: over HiGHS {own['above_highs_mean']:+.1%} on average (at most "
                f"{own['above_highs_worst']:+.1%}), over the lower bound {own['above_bound_mean']:.1%} (at most "
                f"{own['above_bound_worst']:.1%}); {own['microbatch_ms_most']:.0f} ms a microbatch and "
                f"{own['window_ms_most']:.0f} ms a batch at most"
            ]
    for corpus, own in result.get("buckets", {}).items():
        lines += [
            f"buckets, {corpus}: {own['microbatch_mean']:.2%} more tokens in a microbatch on average, at most "
            f"{own['microbatch_worst']:.2%}; without the bound {own['unbounded_worst']:.2%} at most. The bound changes "
            f"{own['batches_changed']} of {own['batches']} batches; all take {own['time_over_unbounded']:.4f} of the "
            f"time without it, a single batch at most {own['time_over_unbounded_worst']:.3f}"
        ]
    if "cells" in result:
        own = result["cells"]
        lines += [
            "",
            "| model | longest | corpus | gain | published | error | without buckets | batch degree | over Megatron |",
        ]
        lines += ["|---|---|---|---|---|---|---|---|---|"]
        for row in own["rows"]:
            error = f"{row['gain'] / row['published'] - 1:+.0%}" if row["judged"] else "not judged"
            lines += [
                f"| {row['model']} | {row['max_kilotokens']}K | {row['corpus']} | {row['gain']:.2f} | "
                f"{row['published']:.2f} | {error} | {row['gain_without_buckets']:.2f} | "
                f"{row['gain_of_batch_degree']:.2f} | {row['published_over_megatron']:.2f} (published) |"
            ]
        lines += [
            f"Wikipedia's cells: mean error {own['error_mean']:.1%}, worst {own['error_worst']:.1%}; without the bound "
            f"on what buckets add {own['unbounded']['error_mean']:.1%}, {own['unbounded']['error_worst']:.1%}"
        ]
    for name, own in result.get("documents", {}).items():
        gains = ", ".join(f"{gain:.2f}" for gain in own["gains"])
        lines += [f"{name}: gains {gains}; mean error {own['error_mean']:.1%}, worst {own['error_worst']:.1%}"]
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> int:
    """Runs the parts, prints a table and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args(words)
    result: dict[str, Any] = {}
    for part in args.parts:
        made = PARTS[part](print)
        # Read late, so that parts may run side by side.
        result = json.loads(args.out.read_text()) if args.out.exists() else {}
        result |= {"date": time.strftime("%Y-%m-%d"), "hardware": HARDWARE, "cores": os.cpu_count()}
        result[part] = made
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(table(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
