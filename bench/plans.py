"""Shipped configs planned by an older version and by this one: seconds of a step, charged alike, and of the planner.

    python -m bench.plans                                print the table of the stored rows
    python -m bench.plans --write                        and write the block `plans` of results/plans.md
    python -m bench.plans --before FOLDER [--only WORD]  plan again first, also in a checkout of an older version

Both plans are charged by today's rates: for documents as long as a sequence, and for drawn documents with the mean of
the standard library's files and of chats (`bench/documents.py`). This version plans for each kind. Seconds of `sppo
plan` are those of one processor core, of a process of its own. Rows are saved in results/plans.json as they end.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.blocks import write_block
from bench.documents import KINDS, drawn
from bench.rows import load_rows
from bench.shipped import CONFIGS, GIB
from bench.shipped import names as shipped_names
from bench.waits import config_of
from sppo_jax.config import Config
from sppo_jax.plan.plan import Plan
from sppo_jax.predict.seconds.documents import Documents
from sppo_jax.search.evaluate import costs_of, documents_step_s, memory_of, simulation_of
from sppo_jax.search.search import search

HERE = Path(__file__).parent
RESULTS, DOCUMENT = HERE / "results" / "plans.json", HERE / "results" / "plans.md"
COLUMNS = ("config", "full", "stdlib", "chats", "HBM", "loops wait", "stash", "`sppo plan`")


def kinds_of(config: Config) -> dict[str, Documents | None]:
    """Return by kind the documents that a plan is charged for; None: full ones."""
    some = {kind: drawn(config.model, config.sequence.length, KINDS[kind]) for kind in ("stdlib", "chats")}
    return {"full": None, **some}


def step_s(plan: Plan, config: Config, documents: Documents | None) -> float:
    """Return the seconds of a step of a plan by today's rates."""
    if documents is not None:
        return documents_step_s(plan, config, documents)
    return simulation_of(plan, config).step_s + costs_of(plan, config).step_overhead_s()


def figures(plans: dict[str, Plan], config: Config) -> dict[str, Any]:
    """Return what the table shows of the plans for each kind of documents."""
    plan = plans["full"]
    simulation = simulation_of(plan, config)
    return {
        "seconds": {kind: step_s(plans[kind], config, documents) for kind, documents in kinds_of(config).items()},
        "hbm_bytes": memory_of(plan, config).hbm_bytes,
        "waits": simulation.waits_s / step_s(plan, config, None),
        "stash": f"{plan.stash.inputs}/{plan.stash.attention}/{plan.stash.rest}",
    }


def asked_for_a_plan(folder: Path, name: str) -> tuple[Plan, float]:
    """Return the plan that `sppo plan` of a checkout prints for today's config, and the CPU seconds it takes."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    words = [sys.executable, "-m", "sppo_jax.cli", "plan", str(CONFIGS / f"{name}.yaml"), "--json"]
    words += ["--cluster", str(config_of(name).hardware.cluster)]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    ran = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Plan.from_dict(json.loads(ran.stdout)), cpu_s


def measure(name: str, folder: Path) -> dict[str, Any]:
    """Plan a config with an older version and with this one, for each kind of documents."""
    config = config_of(name)
    old, old_s = asked_for_a_plan(folder, name)
    new, new_s = asked_for_a_plan(HERE.parent, name)
    kinds = kinds_of(config)
    plans = {kind: new if one is None else search(config, documents=one).plan for kind, one in kinds.items()}
    return {
        "before": {**figures(dict.fromkeys(kinds, old), config), "cpu_s": old_s},
        "after": {**figures(plans, config), "cpu_s": new_s},
    }


def table(rows: dict[str, dict[str, Any]]) -> str:
    """Return the table, a config a row: before, then after, where these differ."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    for name, row in sorted(rows.items()):
        before, after = row["before"], row["after"]
        texts = [[_cells(one) for one in (before, after)]]
        cells = [a if a == b else f"{a}, {b}" for (one, other) in texts for a, b in zip(one, other, strict=True)]
        lines.append(f"| {' | '.join([name, *cells])} |")
    return "\n".join(lines)


def _cells(one: dict[str, Any]) -> list[str]:
    seconds = [f"{one['seconds'][kind]:,.4g} s" for kind in ("full", "stdlib", "chats")]
    return [*seconds, f"{one['hbm_bytes'] / GIB:.1f} GiB", f"{one['waits']:.1%}", one["stash"], f"{one['cpu_s']:.1f} s"]


def names() -> list[str]:
    """Return the configs that are planned; one that names no devices is for eight H100."""
    return [*shipped_names(), "llama3-8b-128k-8gpu"]


def main(words: Sequence[str] | None = None) -> int:
    """Plan again if asked to, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, metavar="FOLDER", help="a checkout of an older version")
    parser.add_argument("--only", default="", metavar="WORD", help="configs whose name has this word")
    parser.add_argument("--write", action="store_true", help="write the block `plans` of results/plans.md")
    args = parser.parse_args(words)
    warnings.simplefilter("ignore")
    rows = load_rows(RESULTS)
    for name in names() if args.before else ():
        if args.only in name:
            rows[name] = measure(name, args.before.resolve())
            RESULTS.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    text = table(rows)
    print(text)
    if args.write:
        write_block(DOCUMENT, "plans", text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
