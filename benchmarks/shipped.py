"""Each shipped config on the cluster that it names: device memory against the pool, and host copies that hide.

    python benchmarks/shipped.py                        print: predicted figures, and those compiled and stored
    python benchmarks/shipped.py --compile              compile all configs with their variants first: about an hour
    python benchmarks/shipped.py --compile 1536k 5m     those whose name has one of the words; others keep their results

Compiling needs the extra fit-gpu and writes results/shipped.json. Nothing is run.
"""

import argparse
import json
import warnings
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sppo_jax.config import load_config
from sppo_jax.fit.compiled import CUBLAS, GRAPHS, compile_plan, prepare_environment
from sppo_jax.hardware import pool_bytes, usable_bytes
from sppo_jax.planner.make import resolve_cluster
from sppo_jax.planner.search import Found, search

HERE = Path(__file__).parent
RESULTS, CONFIGS = HERE / "results" / "shipped.json", HERE.parent / "configs"
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
    """Return the configs that name a cluster of GPUs."""
    found = []
    for path in sorted(CONFIGS.glob("*.yaml")):
        cluster = load_config(path).hardware.cluster
        if cluster is not None and not cluster.startswith("cpu"):
            found.append(path.stem)
    return found


def planned(name: str) -> Found:
    """Return what the planner finds for a config today."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a plan does not fit is a cell of the table
        return search(load_config(CONFIGS / f"{name}.yaml"))


def compiled(name: str) -> dict[str, Any]:
    """Compile a config's step with its variants."""
    config = load_config(CONFIGS / f"{name}.yaml")
    fit = compile_plan(config, planned(name).plan, resolve_cluster(config), variants=True)
    return {"name": name, "date": datetime.now(UTC).strftime("%Y-%m-%d"), **fit.to_dict()}


def row(name: str, stored: dict[str, Any] | None) -> list[str]:
    """Return the cells of a config; those of the compiler are empty where it was not compiled."""
    cluster = resolve_cluster(load_config(CONFIGS / f"{name}.yaml"))
    found = planned(name)
    cells = [name, cluster.name, "yes" if found.fits else f"no: {found.problem}"]
    cells += [f"{found.plan.predicted.step_s:,.0f} s", _gib(found.memory.hbm_bytes), _gib(usable_bytes(cluster))]
    if stored is None:
        return [*cells, "", "", _gib(pool_bytes(cluster)), *[""] * 5]
    copies, variants = stored["host_copies"], stored["variants"]
    moved = copies["overlapped_bytes"] + copies["exposed_bytes"] or 1
    return [
        *cells,
        _gib(stored["compiler"]["hbm_bytes"]),
        _gib(variants[CUBLAS]["compiler"]["hbm_bytes"]),
        _gib(pool_bytes(cluster)),
        _gib(stored["workspace_bytes"]),
        f"{copies['exposed_bytes'] / moved:.1%}",
        f"{copies['waiting_share']:.1%}",
        f"{copies['loops_share']:.1%}",
        f"{variants[GRAPHS]['host_copies']['loops_share']:.1%}",
    ]


def table(stored: dict[str, dict[str, Any]]) -> str:
    """Return the table, a config a row."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(row(name, stored.get(name)))} |" for name in names())])


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"


def load() -> dict[str, dict[str, Any]]:
    """Return the stored figures by config."""
    return json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}


def main(words: Sequence[str] | None = None) -> int:
    """Compile if asked to, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--compile", nargs="*", metavar="WORD", help="compile the configs whose name has a word, or all"
    )
    args = parser.parse_args(words)
    stored = load()
    if args.compile is not None:
        prepare_environment()
        for name in names():
            if args.compile and not any(word in name for word in args.compile):
                continue
            stored[name] = compiled(name)
            RESULTS.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
    print(table(stored))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
