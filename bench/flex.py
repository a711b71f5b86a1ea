"""Flexible teams: one compiled step fed with the same documents in four placements, and what the planner predicts.

    python -m bench.flex                    # about 15 minutes on 2 cores; writes results/flex.json
    python -m bench.flex --parts measured   # one part alone; the other parts keep their results
    options: --devices cpu:8 (simulated) or auto (the devices present)  --rounds 5  --out FILE

Parts:

* `measured`: seconds a step, all placements in turns. One program of a plan with groups=flex takes the placements
  static, packed, per_batch and flex of `sppo_jax/flex/baselines.py`; a plan with groups=static takes the packed rows.
  Simulated devices share the cores of the host, so their times add up the work of all devices: a tick that waits for
  its slowest device costs nothing there. The critical path and the bytes are counted from the tags of the batches.
* `compile`: CPU seconds of compiling the step with and without teams (`flex_compile.py`).
* `bytes`, `published`, `stall`: see `flex_simulated.py`.

Document lengths are Wikipedia's (`sppo_jax/flex/lengths.py`) divided by 32. A row has 4,096 tokens, which is 131,072
divided by 32. Rows are packed to 97%. The baseline static needs many steps for the same documents, so only its first
window and a middle window are timed. Every other window counts with the time of the middle window. A last window that
is not full counts with a part of that time: its rows divided by the rows of a window.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from bench import flex_compile, flex_simulated
from bench.flex_counts import Sent, count, placed
from bench.gpu_parts.machine import cpu_name
from sppo_jax.config import Config, config_from_dict
from sppo_jax.data.rows.corpus import Corpus
from sppo_jax.data.rows.packing import PackedRows
from sppo_jax.flex.lengths import sample_lengths, wikipedia
from sppo_jax.flex.of_plan import window_shape
from sppo_jax.flex.shape import WindowShape
from sppo_jax.plan.plan import Plan
from sppo_jax.processes.environment import simulate_devices
from sppo_jax.search.make import costs_of, make_plan

RESULT = Path(__file__).parent / "results" / "flex.json"
LENGTH, NUM_CHUNKS, ROWS, SCALE, SEED = 4096, 4, 8, 32, 0
# Rows are packed to this share of their length. Rows without padding leave the planner nothing to deal.
FILL = 0.97
MODEL = {
    "vocab_size": 512,
    "hidden_size": 128,
    "num_layers": 2,
    "num_heads": 8,
    "num_kv_heads": 8,
    "head_dim": 16,
    "mlp_size": 384,
    "compute_dtype": "float32",
}
KINDS = ("ulysses", "ring")
# Tokens of the longest document: a row; and half a chunk, so that a team smaller than all members holds any document.
LONGEST = {"all lengths": LENGTH, "short ones": LENGTH // NUM_CHUNKS // 2}


def config_of(members: int, groups: str, kind: str) -> Config:
    """Returns the config of one side; every choice that could differ between the sides is pinned."""
    return config_from_dict(
        {
            "model": MODEL | {"kernel": "blockwise"},
            "mesh": {"data": 1, "pipe": 1, "seq": members},
            "sequence": {
                "length": LENGTH,
                "chunks": NUM_CHUNKS,
                "balance": "equal",
                "per_pipeline": ROWS,
                "split": kind,
                "groups": groups,
            },
            "schedule": {"name": "seq1f1b", "interleave": 1},
            "stash": {"inputs": "keep", "attention": "keep", "rest": "recompute", "alpha": 0.0},
            "hardware": {"cluster": f"cpu:1x{members}"},
            "train": {"steps": 1},
        }
    )


def corpus_rows(corpus: str) -> PackedRows:
    """Returns packed rows of documents with Wikipedia's lengths, divided, and random tokens.

    Args:
        corpus: a name in `LONGEST`; longer documents are left out.
    """
    lengths = sample_lengths(wikipedia(), count=2000, seed=SEED, longest=LONGEST[corpus] * SCALE)
    lengths = np.maximum(1, lengths // SCALE)
    ends = np.cumsum(lengths)
    tokens = np.random.default_rng(SEED).integers(0, MODEL["vocab_size"], int(ends[-1])).astype(np.int32)
    documents = Corpus(parts=(tokens,), starts=ends - lengths, ends=ends, hashes=np.zeros(len(lengths)))
    return PackedRows(documents, length=LENGTH, fill=FILL)


def plan_and_shape(members: int, groups: str, kind: str) -> tuple[Plan, WindowShape]:
    """Returns the plan of one side and its window with the planner's costs."""
    config = config_of(members, groups, kind)
    plan = make_plan(config)
    return plan, window_shape(plan, costs_of(plan, config))


def counted(members: int, kind: str, corpus: str) -> dict[str, Any]:
    """Returns the columns that no clock decides, by placement."""
    shape = plan_and_shape(members, "flex", kind)[1]
    sent = Sent(heads=8, kv_heads=8, head_dim=16, layers=2, stream=kind)
    return {
        name: {
            "winner": baseline.windows[0].winner,
            "rows": baseline.rows,
            "steps": baseline.rows / shape.rows,
            "predicted_s": baseline.cost * shape.weights.unit_s,
            **count(batches, shape, sent),
        }
        for name, (baseline, batches) in placed(corpus_rows(corpus), 0, shape).items()
    }


Step = Callable[[dict[str, np.ndarray]], float]
Turns = Callable[[dict[str, Callable[[], float]]], dict[str, Any]]


def jitted(members: int, groups: str, kind: str) -> tuple[Any, Any]:
    """Returns a side's jitted step of loss and gradients, and parameters for it."""
    import jax
    from flax import nnx

    from sppo_jax.models.build import build_model
    from sppo_jax.pipeline import api
    from sppo_jax.pipeline.params import layout

    config = config_of(members, groups, kind)
    plan = make_plan(config)
    model = build_model(config)
    f = api.value_and_grad(plan, model, layout.make_mesh(plan, tuple(jax.devices()[:members])))
    return jax.jit(f, compiler_options=f.compiler_options), nnx.state(model, nnx.Param)


def make_step(members: int, groups: str, kind: str) -> Step:
    """Compiles a side; returns what runs a step of loss and gradients and returns the loss."""
    import jax

    step, params = jitted(members, groups, kind)

    def run(batch: dict[str, np.ndarray]) -> float:
        return float(jax.block_until_ready(step(params, batch))[0])

    return run


def compiled(args: argparse.Namespace, say: Callable[[str], None]) -> dict[str, Any]:
    """Measures what the step with teams costs to compile, on 8 simulated devices."""
    simulate_devices(8)
    names = ("tokens", "targets", "positions", "document_ids")
    batch = {name: np.zeros((ROWS, LENGTH), np.int32) for name in names}

    def side(groups: str, kind: str) -> Callable[[], Any]:
        return lambda: compile_anew(*jitted(8, groups, kind), batch)

    return flex_compile.of_kinds(side, KINDS, say)


def compile_anew(step: Any, params: Any, batch: dict[str, np.ndarray]) -> Any:
    """Traces, lowers and compiles a step."""
    return step.lower(params, batch).compile()


def take_turns(calls: dict[str, Callable[[], float]], rounds: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Times calls in turns after one that is not timed; returns seconds, CPU seconds and the loss of each."""
    found: dict[str, Any] = {name: {"step_s": [], "cpu_s": [], "loss": call()} for name, call in calls.items()}
    for number in range(rounds):
        for name in list(calls)[:: 1 if number % 2 == 0 else -1]:
            begin_s, cpu_s = time.perf_counter(), time.process_time()
            calls[name]()
            found[name]["step_s"].append(time.perf_counter() - begin_s)
            found[name]["cpu_s"].append(time.process_time() - cpu_s)
        say(f"round {number}: " + ", ".join(f"{name} {found[name]['step_s'][-1]:.2f} s" for name in calls))
    return found


def of_corpus(members: int, kind: str, corpus: str, steps: dict[str, Step], turns: Turns) -> dict[str, Any]:
    """Times all placements of one kind of stream attention; returns them with their counts.

    Args:
        members: devices of the `seq` axis.
        kind: of stream cells, in `KINDS`.
        corpus: a name in `LONGEST`.
        steps: the compiled steps of plans with `sequence.groups` flex and static.
        turns: times calls in turns.
    """
    shape = plan_and_shape(members, "flex", kind)[1]
    found = placed(corpus_rows(corpus), 0, shape)
    flex, static = steps["flex"], steps["static"]
    calls = {name: (lambda batch=batches[0]: flex(batch)) for name, (_, batches) in found.items()}
    of_static = found["static"][1]
    calls["static, middle"] = lambda: flex(of_static[len(of_static) // 2])
    calls["groups=static, packed"] = lambda: static(found["packed"][1][0])
    times = turns(calls)
    rows = counted(members, kind, corpus)
    rows["groups=static, packed"] = dict(rows["packed"])
    tokens = sum(int((batch["document_ids"] >= 0).sum()) for batch in found["packed"][1])
    for name, row in rows.items():
        row |= times[name]
        for unit in ("step_s", "cpu_s"):
            more = [(row["steps"] - 1) * middle for middle in times["static, middle"][unit]]
            all_s = [own + (extra if name == "static" else 0.0) for own, extra in zip(row[unit], more, strict=True)]
            ratios = [packed / own for packed, own in zip(times["packed"][unit], all_s, strict=True)]
            row["tokens_per_s" if unit == "step_s" else "tokens_per_cpu_s"] = tokens / statistics.median(all_s)
            row["ratio_to_packed" if unit == "step_s" else "cpu_ratio_to_packed"] = statistics.median(ratios)
            row["ratios" if unit == "step_s" else "cpu_ratios"] = ratios
    return {"tokens": tokens, "fill": tokens / (shape.rows * shape.length), "rows": rows}


def measured(args: argparse.Namespace, say: Callable[[str], None]) -> dict[str, Any]:
    """Times the placements on the devices that were asked for."""
    simulated = args.devices.startswith("cpu:")
    if simulated:
        simulate_devices(int(args.devices.removeprefix("cpu:")))
    import jax

    members = 2 ** (min(len(jax.devices()), 8).bit_length() - 1)
    if members < 2:
        raise ValueError(f"teams need at least 2 devices, got {len(jax.devices())}; use --devices cpu:8")
    kind_of_device = f"{members} simulated devices on {cpu_name()}" if simulated else jax.devices()[0].device_kind
    result: dict[str, Any] = {"devices": kind_of_device, "members": members, "rounds": args.rounds}
    result |= {"lengths": f"Wikipedia's divided by {SCALE}", "cases": {}}
    for kind in KINDS:
        steps = {groups: make_step(members, groups, kind) for groups in ("flex", "static")}
        for corpus in LONGEST:
            name = f"{kind}, {corpus}"
            say(name)
            turns = functools.partial(take_turns, rounds=args.rounds, say=say)
            result["cases"][name] = of_corpus(members, kind, corpus, steps, turns)
    return result


PARTS = {"measured": measured, "compile": compiled, **flex_simulated.PARTS}


def table(result: dict[str, Any]) -> str:
    """Returns the results in words."""
    lines = []
    if "measured" in result:
        lines += [f"{result['measured']['devices']}; lengths: {result['measured']['lengths']}", ""]
        lines += ["| case | placement | tokens/s to packed | by CPU s | predicted | pairs | critical pairs | sent |"]
        lines += ["|---|---|---|---|---|---|---|---|"]
    for case, own in result.get("measured", {}).get("cases", {}).items():
        rows, packed = own["rows"], own["rows"]["packed"]
        lines += [
            f"| {case} | {name} | {row['ratio_to_packed']:.2f} | {row['cpu_ratio_to_packed']:.2f} | "
            f"{packed['predicted_s'] / row['predicted_s']:.2f} | {row['pairs'] / packed['pairs']:.2f} | "
            f"{row['critical_pairs'] / packed['critical_pairs']:.2f} | {row['sent_bytes'] / packed['sent_bytes']:.2f} |"
            for name, row in rows.items()
        ]
    lines += [
        f"compile, {kind}: {result['compile'][kind]['ratio']:.2f} of the CPU time of the step without teams"
        for kind in KINDS
        if "compile" in result
    ]
    return "\n".join([*lines, *flex_simulated.lines(result)])


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--devices", default="cpu:8", metavar="cpu:N or auto")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULT)
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """Runs the parts, prints a table and writes the results."""
    args = parse(words)
    result: dict[str, Any] = {}
    command = "python -m bench.flex " + " ".join(sys.argv[1:] if words is None else words)
    for part in args.parts:
        made = PARTS[part](args, print)
        # Read late, so that parts may run side by side.
        result = json.loads(args.out.read_text()) if args.out.exists() else {}
        result[part] = {
            "date": time.strftime("%Y-%m-%d"),
            "hardware": f"{platform.machine()}, {os.cpu_count()} cores",
            "jax": version("jax"),
            "command": command.strip(),
            **made,
        }
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(table(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
