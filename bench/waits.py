"""Seconds of a step for which copies to and from the host hold up the device: predicted, and read from compiled steps.

    python -m bench.waits                     predict the stored plans again, and print the table
    python -m bench.waits --write             and write the block `waits` of docs/log/host-copies.md
    python -m bench.waits --compile [WORD..]  compile first: all cases, or those whose name has a word; minutes each

The cases are shipped configs, and drawn plans that are not shipped. Compiling needs the extra fit-gpu and writes
results/waits.json, a row at a time: the copies of the compiled text, so that their seconds are judged by today's rates.
Nothing is run.
"""

import argparse
import random
import warnings
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from bench.blocks import write_block
from bench.rows import compile_rows, load_rows
from bench.shipped import CONFIGS, names
from sppo_jax.config import Config, config_from_dict, load_config
from sppo_jax.fit.compiled import beside_copies, compile_plan
from sppo_jax.fit.hlo.copies import Event, HostCopies, LoopWait, Together
from sppo_jax.plan.plan import Plan
from sppo_jax.predict.seconds.simulate import simulate
from sppo_jax.processes.environment import prepare_to_compile
from sppo_jax.search.evaluate import costs_of, simulation_of
from sppo_jax.search.make import make_plan, resolve_cluster

HERE = Path(__file__).parent
RESULTS, DOCUMENT = HERE / "results" / "waits.json", HERE.parent / "docs" / "log" / "host-copies.md"
_NUM_DRAWN = 8
_ON_HOST = "llama3-8b, 128K, h100:1x8, all on the host"
_K = 1024


class Shares(NamedTuple):
    """Shares of a step.

    Attributes:
        loops: in which loops wait for writes to the host.
        exposed: in which copies last longer than the compute beside them, the optimizer's among them.
    """

    loops: float
    exposed: float


def drawn() -> dict[str, dict[str, Any]]:
    """Return the settings of plans that are not shipped by name: short sequences, a stash on the host."""
    draw = random.Random(64)
    found: dict[str, dict[str, Any]] = {
        _ON_HOST: {
            "model": {"preset": "llama3-8b"},
            "sequence": {"length": 128 * _K},
            "stash": {"inputs": "host", "attention": "host", "rest": "host"},
            "hardware": {"cluster": "h100:1x8"},
            "train": {"steps": 1},
        }
    }
    while len(found) < 1 + _NUM_DRAWN:
        preset = draw.choice(("llama3-8b", "llama3.2-1b", "qwen3-8b", "qwen3-0.6b", "gpt-7b"))
        layers, length = draw.choice((4, 8, 12)), draw.choice((32, 64, 128, 256)) * _K
        cluster = draw.choice(("h100:1x2", "h100:1x4", "h100:1x8", "a100-80g:1x8"))
        rest, chunks = draw.choice(("host", "recompute")), draw.choice((1, 2, 4, 8))
        name = draw.choice(("breadth-first", "sppo"))
        mesh = {} if name == "breadth-first" else {"pipe": 2}
        found[f"{preset} x {layers} layers, {length // _K}K in {chunks}, {cluster}, {name}, rest {rest}"] = {
            "model": {"preset": preset, "num_layers": layers},
            "sequence": {"length": length, "chunks": chunks},
            "mesh": mesh,
            "schedule": {"name": name},
            "stash": {"inputs": "host", "attention": "host", "rest": rest, "kv": "auto"},
            "hardware": {"cluster": cluster},
            "train": {"steps": 1},
        }
    return found


def config_of(name: str) -> Config:
    """Return the config of a case; one that names no devices is for eight H100."""
    settings = drawn().get(name)
    config = config_from_dict(settings) if settings else load_config(CONFIGS / f"{name}.yaml")
    cluster = config.hardware.cluster or "h100:1x8"
    return replace(config, hardware=replace(config.hardware, cluster=cluster))


def cases() -> list[str]:
    """Return the names of all cases."""
    return [*names(), "llama3-8b-128k-8gpu", *drawn()]


def measure(name: str) -> dict[str, Any]:
    """Plan and compile a case."""
    config = config_of(name)
    cluster = resolve_cluster(config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a plan does not fit is no news here
        plan = make_plan(config, cluster)
    fit = compile_plan(config, plan, cluster)
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "jax": fit.jax_version,
        "compile_s": round(fit.compile_s, 1),
        "hbm_bytes": fit.largest.hbm_bytes,
        "together": [[one.op, one.times, [list(event) for event in one.events]] for one in fit.copies.together],
        "loop_waits": [list(one) for one in fit.copies.loop_waits],
        "plan": {**plan.to_dict(), "reasons": {}},
    }


def predicted(name: str, plan: Plan) -> Shares:
    """Return what the planner predicts of a plan today, as shares of the step that was predicted then."""
    config = config_of(name)
    cluster = resolve_cluster(config)
    costs, outline = costs_of(plan, config, cluster), plan.outline()
    found, step_s = simulation_of(plan, config, cluster), plan.predicted.step_s
    free_s = simulate(outline, costs.of_chunks(outline.chunk_lengths)).step_s
    exposed_s = found.step_s - found.waits_s - free_s + costs.host_update_s()
    return Shares(found.waits_s / step_s, exposed_s / step_s)


def compiled(name: str, row: dict[str, Any]) -> Shares:
    """Return what the compiled text of a row says, in today's seconds of compute, as shares of the step of then."""
    config, plan = config_of(name), Plan.from_dict(row["plan"])
    together = [
        Together(kind, times, tuple(Event(*event) for event in events)) for kind, times, events in row["together"]
    ]
    copies = HostCopies(
        overlapped_bytes=0,
        exposed_bytes=0,
        kernel_bytes=None,
        loops_unknown=0,
        together=tuple(together),
        loop_waits=tuple(LoopWait(*one) for one in row["loop_waits"]),
    )
    beside = beside_copies(config, plan, resolve_cluster(config))
    step_s = plan.predicted.step_s
    return Shares(copies.loops_s(*beside) / step_s, copies.waiting_s(*beside) / step_s)


def load() -> dict[str, dict[str, Any]]:
    """Return the stored rows by case."""
    return load_rows(RESULTS)


def table(rows: dict[str, dict[str, Any]]) -> str:
    """Return the table, a case a row."""
    cells = ["case", "step, predicted", "loops wait: predicted", "compiled", "exposed: predicted", "compiled", "date"]
    lines = [f"| {' | '.join(cells)} |", "|---" * len(cells) + "|"]
    for name, row in rows.items():
        plan = Plan.from_dict(row["plan"])
        ours, theirs = predicted(name, plan), compiled(name, row)
        shares = (ours.loops, theirs.loops, ours.exposed, theirs.exposed)
        cells = [name, f"{plan.predicted.step_s:,.2f} s", *(f"{share:.1%}" for share in shares), row["date"]]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> int:
    """Compile if asked to, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compile", nargs="*", metavar="WORD", help="compile the cases whose name has a word, or all")
    parser.add_argument("--write", action="store_true", help="write the block `waits` of docs/log/host-copies.md")
    args = parser.parse_args(words)
    if args.compile is not None:
        prepare_to_compile()
        compile_rows(cases(), args.compile, measure, RESULTS)
    text = table(load())
    print(text)
    if args.write:
        write_block(DOCUMENT, "waits", text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
