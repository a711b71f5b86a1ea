"""The planner against a clock: predicted and measured step times of many Plans of one small model, on two devices.

    python -m bench.clock                      measure, write results and results/figures/clock.md
    options: --rounds 5  --out bench/results  --only SUBSTRING  --cache DIR (keeps compiled programs)

The devices are simulated in this process, each with one thread: the compiler is told to cut no loop and no matrix
product into pieces for other threads, or a device would use the cores of idle devices and hide every bubble. The
benchmark checks this: work on one device alone must keep one core busy.

First both devices measure what `sppo profile` measures, with this model's shapes. Then the planner, given those
figures, predicts every Plan. Then every Plan's train step is timed, round by round, with all Plans in every round, so
that a passing load slows all of them. Every Plan trains the same tokens.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from bench.blocks import FIGURES, write_block
from bench.figures import write
from bench.gpu_parts.machine import cpu_name
from sppo_jax.config import Config, config_from_dict
from sppo_jax.hardware import DEVICES, Cluster, make_cluster, measured
from sppo_jax.plan.plan import Plan
from sppo_jax.report.draw.axis import Axis
from sppo_jax.report.draw.chart import Panel, Series
from sppo_jax.search.make import make_plan

# Memory that a step gives back is kept for the next step, as on accelerators, and new pages are large. Otherwise every
# buffer has fresh pages in each step, and the first touch takes longer than all later writes.
MEMORY = (
    "glibc.malloc.hugetlb=1:glibc.malloc.arena_max=1:glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=68719476736"
)
NUM_DEVICES = 2
# Two layers a stage and two stages, or four virtual ones; attention and matrix products take similar time. One head of
# keys, because a batch of products would still be cut into pieces for other threads.
MODEL = {
    "vocab_size": 2048,
    "hidden_size": 128,
    "num_layers": 4,
    "num_heads": 2,
    "num_kv_heads": 1,
    "mlp_size": 768,
    "compute_dtype": "float32",
}
LENGTH, SEQUENCES = 2048, 4
KEEP, AGAIN, ALL = ("keep", "keep", "recompute"), ("recompute",) * 3, ("keep",) * 3


def case(
    data: int, pipe: int, seq: int, chunks, schedule: str, stash=KEEP, *, interleave=1, wave=1, **sequence
) -> dict:
    """Describe one Plan; every choice is pinned."""
    return {
        "mesh": {"data": data, "pipe": pipe, "seq": seq},
        "sequence": {"chunks": chunks, "per_pipeline": SEQUENCES // data, "balance": "equal", **sequence},
        "schedule": {"name": schedule, "interleave": interleave, "wave": wave},
        "stash": dict(zip(("inputs", "attention", "rest"), stash, strict=True)) | {"alpha": 0.0},
    }


CASES = {
    "data 2, 1 chunk": case(2, 1, 1, 1, "1f1b"),
    "data 2, 4 chunks": case(2, 1, 1, 4, "seq1f1b"),
    "data 2, 16 chunks": case(2, 1, 1, 16, "seq1f1b"),
    "data 2, 4 chunks, recompute": case(2, 1, 1, 4, "seq1f1b", AGAIN),
    "data 2, 2 chunks, keep all": case(2, 1, 1, 2, "seq1f1b", ALL),
    "pipe 2, 1 chunk": case(1, 2, 1, 1, "1f1b"),
    "pipe 2, 1 chunk, recompute": case(1, 2, 1, 1, "1f1b", AGAIN),
    "pipe 2, 4 chunks, gpipe": case(1, 2, 1, 4, "gpipe"),
    "pipe 2, 2 chunks": case(1, 2, 1, 2, "seq1f1b"),
    "pipe 2, 4 chunks": case(1, 2, 1, 4, "seq1f1b"),
    "pipe 2, 8 chunks": case(1, 2, 1, 8, "seq1f1b"),
    "pipe 2, 16 chunks": case(1, 2, 1, 16, "seq1f1b"),
    "pipe 2, 4 chunks, flops": case(1, 2, 1, 4, "seq1f1b", balance="flops"),
    "pipe 2, 1 chunk, sppo": case(1, 2, 1, 1, "sppo"),
    "pipe 2, 2 chunks, sppo": case(1, 2, 1, 2, "sppo"),
    "pipe 2, 4 chunks, sppo": case(1, 2, 1, 4, "sppo"),
    "pipe 2, 2 chunks, sppo, waves of 4": case(1, 2, 1, 2, "sppo", wave=4),
    "pipe 2, 4 chunks, sppo, waves of 2": case(1, 2, 1, 4, "sppo", wave=2),
    "pipe 2, 4 chunks, sppo, waves of 4": case(1, 2, 1, 4, "sppo", wave=4),
    "pipe 2, 4 chunks, keep all": case(1, 2, 1, 4, "seq1f1b", ALL),
    "pipe 2 x 2, 4 chunks, sppo": case(1, 2, 1, 4, "sppo", interleave=2),
    "pipe 2 x 2, 4 chunks, sppo, waves of 4": case(1, 2, 1, 4, "sppo", interleave=2, wave=4),
    "pipe 2 x 2, 4 chunks": case(1, 2, 1, 4, "interleaved-seq1f1b", interleave=2),
    "pipe 2 x 2, 8 chunks": case(1, 2, 1, 8, "interleaved-seq1f1b", interleave=2),
    "ulysses 2, 1 chunk": case(1, 1, 2, 1, "1f1b", kind="ulysses"),
    "ulysses 2, 4 chunks": case(1, 1, 2, 4, "seq1f1b", kind="ulysses"),
    "ulysses 2, 8 chunks, recompute": case(1, 1, 2, 8, "seq1f1b", AGAIN, kind="ulysses"),
    "ring 2, 1 chunk": case(1, 1, 2, 1, "1f1b", kind="ring"),
    "ring 2, 4 chunks, keys travel": case(1, 1, 2, 4, "seq1f1b", kind="ring", ring_pass="kv"),
    "ring 2, 4 chunks, queries travel": case(1, 1, 2, 4, "seq1f1b", kind="ring", ring_pass="q"),
}
# Plans that differ in their waves, or in the groups of a stage.
PAIRS = (
    ("pipe 2, 2 chunks, sppo, waves of 4", "pipe 2, 2 chunks, sppo"),
    ("pipe 2, 4 chunks, sppo, waves of 2", "pipe 2, 4 chunks, sppo"),
    ("pipe 2, 4 chunks, sppo, waves of 4", "pipe 2, 4 chunks, sppo"),
    ("pipe 2 x 2, 4 chunks, sppo", "pipe 2, 4 chunks, sppo"),
    ("pipe 2 x 2, 4 chunks, sppo, waves of 4", "pipe 2, 4 chunks, sppo, waves of 4"),
    ("pipe 2 x 2, 4 chunks", "pipe 2, 4 chunks"),
    ("pipe 2 x 2, 8 chunks", "pipe 2, 8 chunks"),
)
# What the planner chooses by itself.
FREE = "planner's own choice"
CHOICES = {FREE: {"schedule": {"interleave": "auto"}}}


def config_of(choices: dict) -> Config:
    """Complete a case; {} for what does not depend on one."""
    sequence = {"length": LENGTH, "per_step": SEQUENCES, **choices.get("sequence", {})}
    return config_from_dict({"model": MODEL, "train": {"steps": 1}, **choices, "sequence": sequence})


def predicted_again(report: dict) -> dict:
    """Return a stored report with today's predictions from the stored profile; measured figures stay.

    The planner's own choice keeps the prediction of the Plan that was timed, if the planner has another one now.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.json"
        path.write_text(json.dumps(report["profile"]), encoding="utf-8")
        found = plans(make_cluster(measured(DEVICES["cpu"], path), NUM_DEVICES), "")
    rows = []
    for row in report["rows"]:
        plan = found[row["plan"]]
        same = described(plan).items() <= row.items()
        if not same and row["plan"] not in CHOICES:
            raise ValueError(f"clock must time the Plan of {row['plan']!r} again, got another Plan: run clock.py")
        rows.append({**row, "predicted_s": round(plan.predicted.step_s, 4)} if same else row)
    now = {name: {**described(found[name]), "predicted_s": round(found[name].predicted.step_s, 4)} for name in CHOICES}
    return {**report, "rows": rows, "verdict": judge(rows), "choices_now": now}


def described(plan: Plan) -> dict:
    """Return what the table says of a Plan."""
    return {
        "mesh": f"{plan.mesh.data} x {plan.mesh.pipe} x {plan.mesh.seq}",
        "schedule": plan.schedule.name,
        "chunks": len(plan.chunk_lengths),
        "rest": plan.stash.rest,
    }


def plans(cluster: Cluster, only: str) -> dict[str, Plan]:
    """Make the Plan of every case, and those of the planner's own choice."""
    named = {**CASES, **CHOICES}
    return {name: make_plan(config_of(choices), cluster) for name, choices in named.items() if only in name}


# -- the devices ------------------------------------------------------------------------------------------------------


def simulate_devices() -> None:
    """Have jax, not imported so far, see devices of one thread each."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = " ".join(
        [
            f"--xla_force_host_platform_device_count={NUM_DEVICES}",
            "--xla_cpu_multi_thread_eigen=false",
            "--xla_cpu_experimental_ynn_fusion_type=",
            "--xla_backend_extra_options=xla_force_enable_experimental_llvm_ir_gemm",
            "--xla_cpu_collective_call_terminate_timeout_seconds=600",
        ]
    )


def busy_cores(*, active: int) -> float:
    """Return how many cores are busy while so many devices multiply matrices and the others wait for them."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax import lax
    from jax.sharding import AxisType, Mesh
    from jax.sharding import PartitionSpec as P

    mesh = Mesh(np.asarray(jax.devices()), ("device",), axis_types=(AxisType.Auto,))

    def work(x):
        turns = jnp.where(lax.axis_index("device") < active, 200, 0)
        x = lax.fori_loop(0, turns, lambda _, x: jnp.tanh(x @ x), x)
        return lax.psum(x, "device")

    step = jax.jit(jax.shard_map(work, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False))
    x = jnp.full((512, 512), 0.01, jnp.float32)
    step(x).block_until_ready()
    begin = time.perf_counter(), time.process_time()
    step(x).block_until_ready()
    return (time.process_time() - begin[1]) / (time.perf_counter() - begin[0])


def profile_devices(path: Path) -> None:
    """Measure the devices with this model's shapes."""
    from sppo_jax.hardware.measured_figures import write_profile
    from sppo_jax.profile.measure import default_sizes, measure

    sizes = replace(default_sizes("cpu", quick=True), chunks=(512,), prefixes=(0, LENGTH - 512), runs=5)
    write_profile(measure(config_of({}).model, sizes, say), path)


def time_plans(found: dict[str, Plan], rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Return wall and CPU seconds of every Plan's train step in every round."""
    steps, same = {}, {}
    for name, plan in found.items():
        begin = time.perf_counter()
        same[name] = next((other for other in steps if program_of(found[other]) == program_of(plan)), name)
        if same[name] != name:
            continue  # a choice that is one of the cases is timed once
        steps[name] = _train_step(plan)
        steps[name]()
        say(f"{len(steps)} of {len(found)}: {name} compiled and run in {time.perf_counter() - begin:.1f} s")
    times = {name: [] for name in steps}
    for turn in range(rounds):
        for name, step in steps.items():
            begin = time.perf_counter(), time.process_time()
            step()
            times[name].append((time.perf_counter() - begin[0], time.process_time() - begin[1]))
        say(f"round {turn + 1} of {rounds}: {sum(t[-1][0] for t in times.values()):.1f} s")
    return {name: times[other] for name, other in same.items()}


def program_of(plan: Plan) -> str:
    """Return all of a Plan that its program depends on."""
    return replace(plan, reasons={}, predicted=replace(plan.predicted, step_s=0.0, bubble_fraction=0.0)).to_json()


def _train_step(plan: Plan):
    """Return a function that trains one step and keeps the state."""
    import jax
    from flax import nnx
    from jax.sharding import NamedSharding, PartitionSpec

    from bench.cases import random_batch
    from sppo_jax.models import build_model
    from sppo_jax.pipeline import api
    from sppo_jax.pipeline.params import layout, storage
    from sppo_jax.train.state import init_state, shardings_of, state_shapes
    from sppo_jax.train.step import make_optimizer, make_schedule, make_train_step
    from sppo_jax.train.watch.signals import Signals

    config = config_of({})
    mesh, model = layout.make_mesh(plan), build_model(config, abstract=True)
    params = nnx.state(model, nnx.Param)
    optimizer = make_optimizer(config.optimizer, make_schedule(config.optimizer, 100), params)
    shapes = state_shapes(optimizer, storage.stored_shapes(plan, params, mesh), mesh)
    step = make_train_step(api.value_and_grad(plan, model, mesh), optimizer, shardings_of(shapes))
    rows = NamedSharding(mesh, PartitionSpec("data"))
    batch = {
        key: jax.make_array_from_callback(x.shape, rows, x.__getitem__)
        for key, x in random_batch(SEQUENCES, LENGTH, MODEL["vocab_size"]).items()
    }
    state, signals = [init_state(config, optimizer, shapes)], Signals(mesh).array()

    def train():
        state[0], metrics = step(state[0], batch, signals)
        return jax.block_until_ready(metrics["loss"])

    return train


# -- the report -------------------------------------------------------------------------------------------------------


def ranks(values: list[float]) -> list[float]:
    """Return each value's rank from 0; equal ones share the mean of theirs."""
    return [sum(v < value for v in values) + (sum(v == value for v in values) - 1) / 2 for value in values]


def spearman(left: list[float], right: list[float]) -> float:
    """Return the correlation of the ranks of two lists."""
    return statistics.correlation(ranks(left), ranks(right))


def rows_of(found: dict[str, Plan], times: dict[str, list[tuple[float, float]]]) -> list[dict]:
    """Join predictions with medians over rounds."""
    rows = []
    for name, plan in found.items():
        wall = [seconds for seconds, _ in times[name]]
        rows.append(
            {
                "plan": name,
                **described(plan),
                "predicted_s": round(plan.predicted.step_s, 4),
                "measured_s": round(statistics.median(wall), 4),
                "least_s": round(min(wall), 4),
                "most_s": round(max(wall), 4),
                "cores": round(statistics.median(cpu / seconds for seconds, cpu in times[name]), 2),
            }
        )
    return rows


def judge(rows: list[dict]) -> dict:
    """Say how well predictions rank, and what the planner's own choice costs."""
    given = [row for row in rows if row["plan"] not in CHOICES]
    best, chosen = (min(given, key=lambda row: row[key]) for key in ("measured_s", "predicted_s"))
    ratios = [row["measured_s"] / row["predicted_s"] for row in given]
    middle = statistics.median(ratios)
    verdict = {
        "plans": len(given),
        "spearman": _spearman_of(given),
        "chosen": chosen["plan"],
        "chosen_to_best": round(chosen["measured_s"] / best["measured_s"], 3),
        "best": best["plan"],
        "measured_to_predicted": round(middle, 3),
        "worst_error_after_scaling": round(max(abs(ratio / middle - 1) for ratio in ratios), 3),
    }
    for axis, name in enumerate(("data", "pipe", "seq")):
        own = [row for row in given if row["mesh"].split(" x ")[axis] != "1"]
        if len(own) > 2:
            verdict[f"spearman_{name}"] = _spearman_of(own)
    for row in rows:
        if row["plan"] in CHOICES:
            verdict[row["plan"]] = f"mesh {row['mesh']}, {row['schedule']}, {row['chunks']} chunks, rest {row['rest']}"
            verdict[f"{row['plan']}, to best"] = round(row["measured_s"] / best["measured_s"], 3)
    return verdict


def _spearman_of(rows: list[dict]) -> float:
    return round(spearman([row["predicted_s"] for row in rows], [row["measured_s"] for row in rows]), 3)


def say(text: str) -> None:
    """Print a line of progress."""
    print(text, file=sys.stderr, flush=True)


def text_of(report: dict) -> str:
    """Write the report as Markdown."""
    verdict = report["verdict"]
    lines = [
        f"{report['date']}, {report['hardware']}, {NUM_DEVICES} simulated devices of one thread each, "
        f"jax {report['jax']}; {SEQUENCES} sequences of {LENGTH} tokens a step; medians of {report['rounds']} rounds.",
        f"Cores busy while one device works alone: {report['busy_cores']['one']}, while both do: "
        f"{report['busy_cores']['all']}.",
        "",
        f"Rank correlation (Spearman) of predicted and measured step times over {verdict['plans']} Plans: "
        f"**{verdict['spearman']}** (aim: at least 0.8). The Plan with the shortest predicted step "
        f"({verdict['chosen']}) takes **{verdict['chosen_to_best']}** times the best of them ({verdict['best']}; aim: "
        f"at most 1.1). The median of measured over predicted times is {verdict['measured_to_predicted']}; after "
        f"division by this factor the worst Plan is {verdict['worst_error_after_scaling']:.0%} off.",
    ]
    for name in CHOICES:
        if name in verdict:
            lines.append(f"The {name} ({verdict[name]}) takes **{verdict[f'{name}, to best']}** times the best Plan.")
        now = report.get("choices_now", {}).get(name)
        row = next((row for row in report["rows"] if row["plan"] == name), None)
        if now and row and not {**now, "predicted_s": row["predicted_s"]}.items() <= row.items():
            lines.append(f"Today's {name} is another Plan, which was not timed: {now}.")
    lines += [
        "",
        "| Plan | data x pipe x seq | schedule | chunks | predicted s | measured s | least .. most | "
        "measured / predicted | cores busy |",
        "|" + "---|" * 9,
    ]
    for row in sorted(report["rows"], key=lambda row: row["measured_s"]):
        lines.append(
            f"| {row['plan']} | {row['mesh']} | {row['schedule']} | {row['chunks']} | {row['predicted_s']:.3f} | "
            f"{row['measured_s']:.3f} | {row['least_s']:.3f} .. {row['most_s']:.3f} | "
            f"{row['measured_s'] / row['predicted_s']:.2f} | {row['cores']:.2f} |"
        )
    return "\n".join(lines + pair_lines({row["plan"]: row for row in report["rows"]}))


def pair_lines(rows: dict[str, dict]) -> list[str]:
    """Return a table of the pairs whose Plans were timed: the step of one over that of the other."""
    lines = []
    for one, other in PAIRS:
        if one in rows and other in rows:
            measured, predicted = (rows[one][key] / rows[other][key] for key in ("measured_s", "predicted_s"))
            lines.append(f"| {one} | {other} | {measured:.3f} | {predicted:.3f} |")
    head = ["", "Waves and groups of layers (2 x 2 is two groups a stage), the ratio of two steps of the table above:"]
    return [*head, "", "| Plan | over | measured | simulated |", "|" + "---|" * 4, *lines] if lines else []


def block(report: dict) -> str:
    """Write the text between the marks of results/figures/clock.md."""
    return f"![Predicted and measured](clock.svg)\n\n{text_of(report)}"


def picture(rows: list[dict]) -> list[Panel]:
    """Return a plot of predicted against measured times, by the axis that has the devices."""
    names = {"2 x 1 x 1": "data 2", "1 x 2 x 1": "pipe 2", "1 x 1 x 2": "seq 2"}
    times = [row[key] for row in rows for key in ("predicted_s", "measured_s")]
    ends = [min(times) * 0.95, max(times) * 1.05]
    series = [Series(name="as predicted", x=ends, y=ends, color=6, dashed=True)]
    for color, (mesh, name) in enumerate(names.items()):
        own = [row for row in rows if row["mesh"] == mesh]
        if own:
            x, y = [row["predicted_s"] for row in own], [row["measured_s"] for row in own]
            series.append(Series(name=name, x=x, y=y, color=color, line=False, mark="circle"))
    x, y = (Axis(label=f"{what} step, s", low=ends[0], high=ends[1]) for what in ("predicted", "measured"))
    return [Panel(title="Step times of Plans on two simulated CPU devices", x=x, y=y, series=series)]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--only", default="", help="only the Plans whose names contain this; no section is written")
    parser.add_argument("--cache", type=Path, help="where compiled programs are kept")
    return parser.parse_args(arguments)


def measure(args: argparse.Namespace) -> dict:
    """Profile, plan, time; return the report."""
    import jax

    if args.cache:
        jax.config.update("jax_compilation_cache_dir", str(args.cache))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    busy = {name: round(busy_cores(active=count), 2) for name, count in (("one", 1), ("all", NUM_DEVICES))}
    say(f"cores busy while one device works: {busy['one']}, while all do: {busy['all']}")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.json"
        profile_devices(path)
        cluster = make_cluster(measured(DEVICES["cpu"], path), NUM_DEVICES)
        profile = json.loads(path.read_text(encoding="utf-8"))
    found = plans(cluster, args.only)
    times = time_plans(found, args.rounds)
    rows = rows_of(found, times)
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "hardware": f"{cpu_name()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "jax": jax.__version__,
        "rounds": args.rounds,
        "load_1min": os.getloadavg()[0],
        "busy_cores": busy,
        "model": MODEL,
        "profile": profile,
        "verdict": judge(rows),
        "rows": rows,
    }


def main(arguments: list[str] | None = None) -> int:
    """Measure, write the results, print the table."""
    args = parse(arguments)
    if MEMORY not in os.environ.get("GLIBC_TUNABLES", ""):  # read when a process starts
        os.execve(
            sys.executable,
            [sys.executable, "-m", "bench.clock", *sys.argv[1:]],
            {**os.environ, "GLIBC_TUNABLES": MEMORY},
        )
    simulate_devices()
    report = measure(args)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "clock_cpu_2dev.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    (args.out / "clock_cpu_2dev.md").write_text(text_of(report) + "\n", encoding="utf-8")
    if not args.only:
        write(FIGURES / "clock.svg", picture(report["rows"]))
        write_block(FIGURES / "clock.md", "clock", block(report))
    print(text_of(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
