"""Compares the planner's bytes with the compiler's, for machines that are not here.

    python -m bench.fit                  cases that were never compiled, or whose program is not today's: up to 4 hours
    python -m bench.fit gpt-7b v5e       those whose name has one of the words; the others keep their results
    python -m bench.fit --variants WORD  with the variants of `sppo fit --variants` too: three times as long
    python -m bench.fit --stale          which rows of fit.json and shipped.json are not of today's programs: minutes;
                                         writes results/stale.json; exit code 1 if any row is stale

Needs the extras fit-gpu and fit-tpu. Writes results/fit.json, a row at a time, and results/figures/fit.md.
`python -m bench.validation` predicts the compiled plans again and compiles nothing.
"""

import argparse
import json
import statistics
import sys
import warnings
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from bench import stale
from bench.blocks import FIGURES, write_block
from bench.fit_cases import CASES, Case
from sppo_jax.config import Config, config_from_dict
from sppo_jax.fit.compiled import GRAPHS, compile_plan, count_plan, lower_plan
from sppo_jax.fit.fingerprint import Lowering, compiler_versions
from sppo_jax.fit.sources import sources_digest
from sppo_jax.hardware import Cluster, parse_cluster
from sppo_jax.plan.plan import Plan
from sppo_jax.processes.environment import prepare_to_compile
from sppo_jax.search.evaluate import memory_of
from sppo_jax.search.make import make_plan

HERE = Path(__file__).parent
RESULTS, DOCUMENT = HERE / "results" / "fit.json", FIGURES / "fit.md"
GIB = 2**30


def measure(case: Case, *, variants: bool = False) -> dict[str, Any]:
    """Plan and compile one case, with the variants of `sppo fit` too if asked for."""
    config, cluster = config_from_dict(case.config()), parse_cluster(case.cluster)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a plan does not fit is no news here
        plan = make_plan(config, cluster)
    fit = compile_plan(config, plan, cluster, variants=variants)
    mesh = plan.mesh
    return {
        "name": case.name,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "calibrated": case.calibrated,
        "unequal": case.unequal,
        "mesh": [mesh.data, mesh.pipe, mesh.seq],
        "chunks": len(plan.chunk_lengths),
        "schedule": plan.schedule.name,
        "kernel": plan.kernel,
        "plan": {**plan.to_dict(), "reasons": {}},
        **fit.to_dict(),
    }


def predicted_again(case: Case, row: dict[str, Any]) -> dict[str, Any]:
    """Return a stored row with today's prediction for the plan that was compiled."""
    config, cluster = config_from_dict(case.config_of_row(row)), parse_cluster(case.cluster)
    memory = memory_of(Plan.from_dict(row["plan"]), config, cluster)
    predicted = {"hbm_bytes": memory.hbm_bytes, "host_bytes": memory.host}
    return {**row, "predicted": predicted, "calibrated": case.calibrated, "unequal": case.unequal}


def program_of(case: Case, row: dict[str, Any]) -> tuple[Config, Plan, Cluster]:
    """Return what decides the program of a stored row."""
    return config_from_dict(case.config()), Plan.from_dict(row["plan"]), parse_cluster(case.cluster)


def lowered_again(case: Case, row: dict[str, Any]) -> Lowering:
    """Return what today's code lowers the plan of a stored row to."""
    return lower_plan(*program_of(case, row))


def counted_again(case: Case, row: dict[str, Any]) -> dict[str, int]:
    """Return what today's code says of the program of a stored row before it lowers it."""
    return count_plan(*program_of(case, row))


def judged(words: Sequence[str]) -> Iterator[stale.Judged]:
    """Yield the verdict on each stored row whose name has one of the words; without words on all."""
    rows = {row["name"]: row for row in load()["rows"]}
    for case in CASES:
        row = rows.get(case.name)
        if row is None or not stale.named(case.name, words):
            continue
        versions = compiler_versions(parse_cluster(case.cluster).device.platform)
        lower, count = partial(lowered_again, case, row), partial(counted_again, case, row)
        verdict, why = stale.judge(row, versions, sources_digest(), lower=lower, count=count)
        yield stale.Judged(file=RESULTS.name, name=case.name, date=row["date"], verdict=verdict, why=why)


def print_stale(words: Sequence[str]) -> int:
    """Print which rows of fit.json and shipped.json are not of today's programs; write them if all were judged."""
    from bench import shipped

    found = []
    for row in chain(judged(words), shipped.judged(words)):  # each is told once it is judged
        found.append(row)
        print(f"{row.verdict:15} {row.file} {row.name}: {row.why}", file=sys.stderr, flush=True)
    if not words:
        stale.write(found, datetime.now(UTC).strftime("%Y-%m-%d"))
    print(stale.report(found))
    return int(any(row.verdict == "stale" for row in found))


def errors(rows: list[dict[str, Any]], key: str) -> list[float]:
    """Return predicted over compiled, less one, of rows that have any."""
    return [row["predicted"][key] / row["compiler"][key] - 1 for row in rows if row["compiler"][key]]


def summary(rows: list[dict[str, Any]]) -> list[str]:
    """Write the errors of each set as a table."""
    lines = ["| | plans | HBM: median error | worst | most under | host: worst |", "|---|---|---|---|---|---|"]
    sets = {
        "counted in": [row for row in rows if row["calibrated"]],
        "held out": [row for row in rows if not row["calibrated"] and not row["unequal"]],
        "held out, chunks of several lengths on TPUs": [row for row in rows if row["unequal"]],
    }
    for name, own in sets.items():
        if not own:
            continue
        hbm, host = errors(own, "hbm_bytes"), errors(own, "host_bytes") or [0.0]
        sizes = [abs(value) for value in hbm]
        lines.append(
            f"| {name} | {len(own)} | {statistics.median(sizes):.1%} | {max(sizes):.1%} | {min(0.0, *hbm):.1%} | "
            f"{max(map(abs, host)):.1%} |"
        )
    return lines


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Write every case, GiB of one device."""
    lines = [
        "| plan | data x pipe x seq | chunks | HBM compiled | predicted | error | host compiled | predicted | "
        "copies exposed | by kernels | outlast compute | loops wait | ring beside attention, products, nothing | "
        "HBM, largest variant | fused calls | compile s |",
        "|" + "---|" * 16,
    ]
    dates = stale.dates(RESULTS.name)
    for row in rows:
        compiler, predicted, copies = row["compiler"], row["predicted"], row["host_copies"]
        moved = copies["overlapped_bytes"] + copies["exposed_bytes"]
        error = predicted["hbm_bytes"] / compiler["hbm_bytes"] - 1
        waits, largest = _of_variants(row)
        cells = [
            row["name"]
            + ("" if row["calibrated"] else " (held out)")
            + (f" ({dates[row['name']]})" if row["name"] in dates else ""),
            " x ".join(map(str, row["mesh"])),
            row["chunks"],
            f"{compiler['hbm_bytes'] / GIB:.2f}",
            f"{predicted['hbm_bytes'] / GIB:.2f}",
            f"{error:+.1%}",
            f"{compiler['host_bytes'] / GIB:.2f}",
            f"{predicted['host_bytes'] / GIB:.2f}",
            f"{copies['exposed_bytes'] / moved:.1%}" if moved else "",
            *_later_counted(copies, moved),
            waits,
            _of_ring(row),
            largest,
            row["flash_calls"],
            f"{row['compile_s']:.0f}" if "compile_s" in row else "",
        ]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return lines


def _later_counted(copies: dict[str, Any], moved: int) -> tuple[str, str]:
    """Return the share that kernels copy, and by which copies outlast products; "" where it was not counted."""
    kernels, waiting = copies.get("kernel_bytes"), copies.get("waiting_share")
    return (
        "" if not moved or kernels is None else f"{kernels / moved:.1%}",
        "" if not moved or waiting is None else f"{waiting:.1%}",
    )


def _of_ring(row: dict[str, Any]) -> str:
    """Return the shares of what a ring sends, by what runs beside them; "" where there is no ring or no count."""
    hops = row.get("ring_hops", {})
    total = sum(hops.values())
    kinds = ("attention_bytes", "products_bytes", "exposed_bytes")
    return ", ".join(f"{hops[kind] / total:.1%}" for kind in kinds) if total else ""


def _of_variants(row: dict[str, Any]) -> tuple[str, str]:
    """Return the share for which loops wait, without and with CUDA graphs, and the most HBM; "" if not compiled."""
    variants, copies = row.get("variants", {}), row["host_copies"]
    if "loops_share" not in copies:
        return "", ""
    graphs = variants.get(GRAPHS, {}).get("host_copies", {}).get("loops_share")
    waits = f"{copies['loops_share']:.1%}" + ("" if graphs is None else f", {graphs:.1%} in graphs")
    return waits, f"{row['largest']['hbm_bytes'] / GIB:.2f}" if variants else ""


def load() -> dict[str, Any]:
    """Return the stored results: the version of jax, and the rows."""
    return json.loads(RESULTS.read_text(encoding="utf-8"))


def predicted_rows(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of all cases that were compiled, predicted with today's planner."""
    rows = {row["name"]: row for row in results["rows"]}
    return [predicted_again(case, rows[case.name]) for case in CASES if case.name in rows]


def block(rows: list[dict[str, Any]], jax_version: str) -> str:
    """Return the text between the marks of results/figures/fit.md."""
    dates = sorted({row["date"] for row in rows})
    text = [
        f"XLA:GPU or XLA:TPU of jax {jax_version} compiled the training step of each plan (forward, backward, "
        "optimizer) ahead of time, without the hardware "
        f"({' to '.join(dict.fromkeys((dates[0], dates[-1])))}); none was run. HBM is arguments + outputs + "
        "temporaries - aliases, on TPUs what XLA allocates, in GiB of one device. A copy is exposed if the compiled "
        "schedule has no matrix product, and no loop with one, between the copy's start and its end. Copies by kernels "
        "run on the compute units, and all others on DMA engines; XLA:TPU does not report this. Copies outlast the "
        "compute that overlaps with them (matrix products, and attention of the chunk with the shortest prefix) for at "
        "most the given share of the predicted step. What a ring sends is told by what runs between its start and its "
        "end: a kernel for "
        "attention, or else another product, or neither. An empty cell was not counted. Predictions are today's "
        "planner's, for the plans that were compiled. Rows with a figure for waiting loops have cuDNN's workspace "
        "in their HBM, by formula; in all "
        "other rows neither side includes it. Loops whose number of iterations is not known wait for writes to the "
        "host, for at most the given further share of the step. A row with a date was compiled on that date, from a "
        "program that is not known to be today's.",
        "",
        *summary(rows),
        "",
        *table(rows),
    ]
    return "\n".join(text)


def write(rows: list[dict[str, Any]], jax_version: str) -> None:
    """Write the results, a row a line, and the block of the document."""
    lines = ",\n".join(json.dumps(row) for row in rows)
    RESULTS.write_text(f'{{"jax": {json.dumps(jax_version)}, "rows": [\n{lines}\n]}}\n', encoding="utf-8")
    write_block(DOCUMENT, "fit", block(rows, jax_version))


def main(words: Sequence[str] | None = None) -> int:
    """Measure the cases asked for, or those that are not of today's programs; write the results after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="parts of the names of cases")
    parser.add_argument("--variants", action="store_true", help="compile the variants of `sppo fit --variants` too")
    parser.add_argument("--stale", action="store_true", help="judge the stored rows, and compile nothing")
    args = parser.parse_args(words)
    prepare_to_compile()
    if args.stale:
        return print_stale(args.words)
    import jax

    results = load()
    fresh = set() if args.words else {row.name for row in judged([]) if row.verdict == "fresh"}
    for case in CASES:
        if case.name in fresh or not stale.named(case.name, args.words):
            continue
        row = measure(case, variants=args.variants)
        print(f"{case.name}: {errors([row], 'hbm_bytes')[0]:+.1%}, compiled in {row['compile_s']:.0f} s", flush=True)
        others = [other for other in results["rows"] if other["name"] != case.name]
        results = {"jax": jax.__version__, "rows": [*others, row]}
        write(predicted_rows(results), jax.__version__)
    print("\n".join(summary(results["rows"])))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
