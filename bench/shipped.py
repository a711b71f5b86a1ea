"""Each shipped config on its cluster: step against stall limit, pinned memory, device memory, host copies.

    python -m bench.shipped                        print: predicted figures, and those compiled and stored
    python -m bench.shipped --write                print, and write the block of results/figures/shipped.md
    python -m bench.shipped --compile              compile all configs with their variants first: about an hour
    python -m bench.shipped --compile 1536k 5m     those whose name has one of the words; others keep their results

A config that was not compiled here has the figures of results/fit.json if the same plan was compiled there. Compiling
needs the extra fit-gpu and writes results/shipped.json. Nothing is run.
"""

import argparse
import json
import warnings
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from bench import pinned, stale
from bench.blocks import FIGURES, write_block
from bench.rows import compile_rows, load_rows
from sppo_jax.config import Config, load_config
from sppo_jax.fit.compiled import CUBLAS, GRAPHS, compile_plan, count_plan, lower_plan
from sppo_jax.fit.fingerprint import Lowering, compiler_versions
from sppo_jax.fit.sources import sources_digest
from sppo_jax.hardware import Cluster, pool_bytes, usable_bytes
from sppo_jax.plan.plan import Plan
from sppo_jax.plan.stall_limit import stall_limit_s
from sppo_jax.processes.environment import prepare_to_compile
from sppo_jax.search.make import resolve_cluster
from sppo_jax.search.search import Found, search

HERE = Path(__file__).parent
RESULTS, CONFIGS = HERE / "results" / "shipped.json", HERE.parent / "configs"
OTHERS, DOCUMENT = HERE / "results" / "fit.json", FIGURES / "shipped.md"
OLD_STALL_S = 1800
_SAME_PLAN = 0.03  # the memory of one plan is predicted a little differently from time to time
GIB = 2**30
COLUMNS = (
    "config",
    "cluster",
    "fits",
    "step, predicted",
    "HBM predicted",
    "plans may take",
    "compiled, with the workspace",
    "products by cuBLAS",
    "pool",
    "workspace",
    "exposed",
    "late",
    "loops wait",
    "in CUDA graphs",
)


def names() -> list[str]:
    """Return the configs that name a cluster of GPUs or TPUs."""
    found = []
    for path in sorted(CONFIGS.glob("*.yaml")):
        cluster = load_config(path).hardware.cluster
        if cluster is not None and not cluster.startswith("cpu"):
            found.append(path.stem)
    return found


@cache
def planned(name: str) -> Found:
    """Return what the planner finds for a config today."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a plan does not fit is a cell of the table
        return search(load_config(CONFIGS / f"{name}.yaml"))


def compiled(name: str) -> dict[str, Any]:
    """Compile a config's step with its variants."""
    config = load_config(CONFIGS / f"{name}.yaml")
    plan = planned(name).plan
    fit = compile_plan(config, plan, resolve_cluster(config), variants=True)
    day = datetime.now(UTC).strftime("%Y-%m-%d")
    return {"name": name, "date": day, "plan": {**plan.to_dict(), "reasons": {}}, **fit.to_dict()}


def judged(words: Sequence[str]) -> Iterator[stale.Judged]:
    """Yield the verdict on each stored config whose name has one of the words; without words on all."""
    for name, row in load().items():
        if not stale.named(name, words):
            continue
        config = load_config(CONFIGS / f"{name}.yaml")
        cluster = resolve_cluster(config)
        versions = compiler_versions(cluster.device.platform)

        def lower(name: str = name, config: Config = config, cluster: Cluster = cluster) -> Lowering:
            return lower_plan(config, planned(name).plan, cluster)

        def count(name: str = name, config: Config = config, cluster: Cluster = cluster) -> dict[str, int]:
            return count_plan(config, planned(name).plan, cluster)

        verdict, why = stale.judge(row, versions, sources_digest(), lower=lower, count=count)
        yield stale.Judged(file=RESULTS.name, name=name, date=row["date"], verdict=verdict, why=why)


def compiled_elsewhere(plan: Plan) -> dict[str, Any] | None:
    """Return the row of results/fit.json that has the same plan with cuDNN's workspace, None if there is none."""
    for found in json.loads(OTHERS.read_text(encoding="utf-8"))["rows"]:
        if "workspace_bytes" in found and _choices(found["plan"]) == _choices(plan.to_dict()):
            return found
    return None


def _is_of(stored: dict[str, Any], found: Found) -> bool:
    """Return whether a stored row is of the plan of today; older rows have no plan, but what was predicted for it."""
    if "plan" in stored:
        return _choices(stored["plan"]) == _choices(found.plan.to_dict())
    then, now = stored["predicted"], {"hbm_bytes": found.memory.hbm_bytes, "host_bytes": found.memory.host}
    return all(abs(then[name] - size) <= _SAME_PLAN * size for name, size in now.items())


def _choices(plan: dict[str, Any]) -> dict[str, Any]:
    """Return what a plan decides; of an older plan what it decides without having the field."""
    beside = ("predicted", "reasons", "version", "saves", "host_arrays", "host_pieces", "schema_version")
    return {"backward_queries": 0} | {name: value for name, value in plan.items() if name not in beside}


def row(name: str, stored: dict[str, Any] | None) -> list[str]:
    """Return the cells of a config; those of the compiler are empty where it was not compiled."""
    cluster = resolve_cluster(load_config(CONFIGS / f"{name}.yaml"))
    found = planned(name)
    stored = stored if stored and _is_of(stored, found) else compiled_elsewhere(found.plan)
    cells = [name, cluster.name, "yes" if found.fits else f"no: {found.problem}"]
    cells += [f"{found.plan.predicted.step_s:,.0f} s", _gib(found.memory.hbm_bytes), _gib(usable_bytes(cluster))]
    if stored is None:
        return [*cells, "", "", _gib(pool_bytes(cluster)), *[""] * 5]
    copies, variants = stored["host_copies"], stored.get("variants") or {}
    moved = copies["overlapped_bytes"] + copies["exposed_bytes"] or 1
    return [
        *cells,
        _gib(stored["compiler"]["hbm_bytes"]),
        _gib(variants[CUBLAS]["compiler"]["hbm_bytes"]) if variants else "",
        _gib(pool_bytes(cluster)),
        _gib(stored["workspace_bytes"]),
        f"{copies['exposed_bytes'] / moved:.1%}",
        f"{copies['waiting_share']:.1%}",
        f"{copies['loops_share']:.1%}",
        f"{variants[GRAPHS]['host_copies']['loops_share']:.1%}" if GRAPHS in variants else "",
    ]


def table(stored: dict[str, dict[str, Any]]) -> str:
    """Return the table, a config a row."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(row(name, stored.get(name)))} |" for name in names())])


def start_table() -> str:
    """Return the seconds of a step beside the stall limits, and the pinned memory, a config a row."""
    cells = ["config", "step, predicted", "stall limit before", "now", *pinned.COLUMNS[2:]]
    lines = [f"| {' | '.join(cells)} |", "|---" * len(cells) + "|"]
    for case in pinned.CASES:
        plan = planned(case.config).plan
        seconds = (plan.predicted.step_s, OLD_STALL_S, stall_limit_s(plan))
        own = pinned.row(case, None if case.overrides else plan)
        cells = [case.config, *(f"{each:,.0f} s" for each in seconds), *own[2:]]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def block(stored: dict[str, dict[str, Any]]) -> str:
    """Return the text of the block `shipped`."""
    return f"""\
Each config under `configs/` on the cluster that it names, as planned today. Nothing was run. A run ends after the stall
limit without progress; earlier, this limit was 1800 s for every run. Pinned memory is replayed (`bench/pinned.py`) for
NVIDIA drivers since r580. "Before" is a pool that is not filled at the start, with the limit of that time. In such a
pool a stash of 512 GiB or more fails.

{start_table()}

The next table has device memory and copies, compiled ahead of time by jax 0.12.0.1; an empty cell was not compiled for
the plan of today. A plan fits if its memory is at most the memory that plans may take. The pool is the memory that a
run gets. Exposed copies overlap with no compute. Loops whose number of iterations is not known wait for writes for at
most the given share of a step; the last column is the share with these loops in CUDA graphs, which several devices no
longer have.

{table(stored)}"""


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"


def load() -> dict[str, dict[str, Any]]:
    """Return the stored figures by config."""
    return load_rows(RESULTS)


def main(words: Sequence[str] | None = None) -> int:
    """Compile if asked to, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--compile", nargs="*", metavar="WORD", help="compile the configs whose name has a word, or all"
    )
    parser.add_argument("--write", action="store_true", help="write the block of results/figures/shipped.md")
    args = parser.parse_args(words)
    if args.compile is not None:
        prepare_to_compile()
        compile_rows(names(), args.compile, compiled, RESULTS)
    stored = load()
    text = block(stored) if args.write else table(stored)
    print(text)
    if args.write:
        write_block(DOCUMENT, "shipped", text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
