"""One training step, chunked against dense: its time on this machine's CPU, or its memory as compiled for a GPU.

    python -m bench.step                       time, 1 device: S = 2K, 4K, 8K, 16K
    python -m bench.step --devices 4           time, 4 simulated devices, 4 sequences
    python -m bench.step --compile a100-80g    memory and host copies, S = 16K .. 1M; needs jax[cuda13], no GPU
    options: --lengths 2048,4096  --chunk 1024  --model small|wide|llama3.2-1b  --rounds 5  --out bench/results

Both sides have the same model, tokens and attention kernel. The dense step checkpoints each layer and computes logits
a tile at a time. On one device both take one sequence; on four both take four: the dense step one a device
(data-parallel), the chunked step all of them through pipe 2 x seq 2, and through pipe 4. Breadth-first steps pass two
groups of layers a stage, on one device, on pipe 2 x seq 2, and on seq 4. Times are medians over rounds in which the two
sides take turns, and the ratio is the median of the rounds' ratios, so that a load which comes and goes strikes both;
the ratio of CPU seconds (of all threads) hardly feels it. Results go to --out as JSON and as a table, with date and
hardware, after each length.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from bench.gpu_parts.machine import cpu_name

MODELS = {
    # Attention takes most of the time, as in long sequences of a large model.
    "small": {
        "vocab_size": 1024,
        "hidden_size": 64,
        "num_layers": 4,
        "num_heads": 2,
        "num_kv_heads": 1,
        "mlp_size": 192,
        "compute_dtype": "float32",
    },
    # Matrix products take a good part of it.
    "wide": {
        "vocab_size": 1024,
        "hidden_size": 512,
        "num_layers": 2,
        "num_heads": 8,
        "num_kv_heads": 4,
        "mlp_size": 1536,
        "compute_dtype": "float32",
    },
    "llama3.2-1b": {"preset": "llama3.2-1b", "compute_dtype": "bfloat16"},
}
TIME_LENGTHS = (2048, 4096, 8192, 16384)
COMPILE_LENGTHS = tuple(2**n for n in range(14, 21))
NO_AUTOTUNING = "--xla_gpu_autotune_level=0"  # there is no GPU to try kernels on


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compile", metavar="TARGET", help="compile for a GPU (a100-80g, h100, h200), do not run")
    parser.add_argument("--devices", type=int, choices=(1, 4), default=1)
    parser.add_argument("--model", choices=MODELS, help="default: small, and llama3.2-1b to compile")
    parser.add_argument("--lengths", type=lambda text: tuple(int(x) for x in text.split(",")))
    parser.add_argument("--chunk", type=int, help="tokens of a chunk; default: 1024, and 8192 to compile")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args(arguments)
    args.model = args.model or ("llama3.2-1b" if args.compile else "small")
    args.lengths = args.lengths or (COMPILE_LENGTHS if args.compile else TIME_LENGTHS)
    args.chunk = args.chunk or (8192 if args.compile else 1024)
    wrong = [length for length in args.lengths if length < args.chunk or length % args.chunk]
    if wrong:
        parser.error(f"--lengths must be multiples of --chunk = {args.chunk}, got {wrong[0]}")
    return args


def layouts(num_devices: int) -> list:
    """The ways in which the chunked step uses so many devices."""
    from bench.cases import Layout

    if num_devices == 1:
        return [Layout(1, 1, 1, 1)]
    # By itself the planner overlaps the sequences (seq1f1b); sppo runs them one at a time, with one prefix resident.
    return [Layout(1, 2, 2, 4), Layout(1, 4, 1, 4), Layout(1, 4, 1, 4, "sppo")]


def timed_layouts(num_devices: int) -> list:
    """The layouts whose steps are timed: breadth-first too. Its memory is compiled by `fit.py`."""
    from bench.cases import Layout

    by_groups = {"schedule": "breadth-first", "interleave": 2}
    meshes = [(1, 1, 1, 1)] if num_devices == 1 else [(1, 2, 2, 4), (1, 1, 4, 4)]
    return [*layouts(num_devices), *(Layout(*mesh, **by_groups) for mesh in meshes)]


def say(text: str) -> None:
    """Print a line of progress."""
    print(text, file=sys.stderr, flush=True)


# -- time -------------------------------------------------------------------------------------------------------------


def time_steps(args: argparse.Namespace, length: int) -> list[dict]:
    """Measure one length; one row for each way of running the chunked step."""
    import jax
    from flax import nnx

    from bench import cases
    from sppo_jax.models.decoder import Decoder
    from sppo_jax.pipeline.api import value_and_grad

    model, mesh, sides = None, cases.dense_mesh(jax.devices()[: args.devices]), {}
    for layout in timed_layouts(args.devices):
        for places in ("keep", "recompute"):
            config = cases.make_config(MODELS[args.model], length, length // args.chunk, layout, places)
            model = model or Decoder(config.model, rngs=nnx.Rngs(0))
            sides[f"{layout}, {places}"] = value_and_grad(cases.plan_for(config, "cpu"), model)
    params = nnx.state(model, nnx.Param)
    batch = cases.random_batch(args.devices, length, model.config.vocab_size)
    sides = {"dense": jax.jit(cases.dense_step(model, mesh)), **sides}
    seconds = {name: [] for name in sides}
    for turn in range(args.rounds + 1):
        for name, step in sides.items():
            begin = time.perf_counter(), time.process_time()
            jax.block_until_ready(step(params, batch))
            seconds[name].append((time.perf_counter() - begin[0], time.process_time() - begin[1]))
        say(f"S={length} round {turn}: " + ", ".join(f"{name} {s[-1][0]:.2f} s" for name, s in seconds.items()))
    seconds = {name: list(zip(*s[1:], strict=True)) for name, s in seconds.items()}  # the first compiles
    dense, dense_cpu = seconds.pop("dense")
    rows = []
    for name, (chunked, chunked_cpu) in seconds.items():
        ratios = [c / d for c, d in zip(chunked, dense, strict=True)]
        row = {
            "length": length,
            "chunks": length // args.chunk,
            "layout": name,
            "dense_s": round(statistics.median(dense), 4),
            "chunked_s": round(statistics.median(chunked), 4),
            "ratio": round(statistics.median(ratios), 3),
            "ratio_range": [round(min(ratios), 3), round(max(ratios), 3)],
            "cpu_ratio": round(statistics.median(c / d for c, d in zip(chunked_cpu, dense_cpu, strict=True)), 3),
        }
        rows.append(row)
    return rows


# -- memory -----------------------------------------------------------------------------------------------------------


def compile_steps(args: argparse.Namespace, length: int) -> list[dict]:
    """Compile one length: the dense step, and the chunked step with its stash in each place."""
    from bench.cases import PLACES
    from sppo_jax.fit.targets import compile_only_devices
    from sppo_jax.hardware import DEVICES, make_cluster

    devices = compile_only_devices(make_cluster(DEVICES[args.compile], args.devices))
    chunked = [(layout, places) for layout in layouts(args.devices) for places in PLACES]
    return [_compiled(args, length, devices, *case) for case in [(None, ""), *chunked]]


def _compiled(args, length: int, devices, layout, places: str) -> dict:
    import jax

    from sppo_jax.fit.hlo.copies import host_copies

    name = f"{layout}, {places}" if layout else "dense"
    lowered, options, known = _lower(args, length, devices, layout, places)
    begin = time.perf_counter()
    row = {"length": length, "layout": name, "chunks": length // args.chunk if layout else 1, **known}
    try:
        compiled = lowered.compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        say(f"S={length} {name}: {error}")
        return {**row, "error": str(error).splitlines()[0]}
    memory, copies = compiled.memory_analysis(), host_copies(compiled.as_text())
    row |= {
        "hbm_bytes": memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        + memory.temp_size_in_bytes
        - memory.alias_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "host_bytes": memory.host_temp_size_in_bytes,
        "overlapped_bytes": copies.overlapped_bytes,
        "exposed_bytes": copies.exposed_bytes,
        "loops_unknown": copies.loops_unknown,
        "compile_s": round(time.perf_counter() - begin, 1),
    }
    say(
        f"S={length} {name}: HBM {row['hbm_bytes'] / 2**30:.2f} GiB (temporary {row['temp_bytes'] / 2**30:.2f}), "
        f"host {row['host_bytes'] / 2**30:.2f} GiB, compiled in {row['compile_s']} s"
    )
    return row


def _lower(args, length: int, devices, layout, places: str) -> tuple:
    """Return the lowered step, the compiler's options, and what the plan knows of its memory."""
    import jax
    from flax import nnx

    from bench import cases
    from sppo_jax.compat import compiler_options
    from sppo_jax.evaluation.placement import batch_of, batch_shapes
    from sppo_jax.pipeline.api import Step
    from sppo_jax.pipeline.params import layout as physical
    from sppo_jax.pipeline.params import storage

    if layout is None:
        config = cases.make_config(MODELS[args.model], length, 1, layouts(1)[0], "keep")
        model, mesh = cases.abstract_model(config), cases.dense_mesh(devices)
        whole, by_sequence = cases.dense_shardings(mesh)
        shapes = _shapes(nnx.state(model, nnx.Param), lambda _: whole)
        batch = batch_of((args.devices, length), by_sequence)
        return jax.jit(cases.dense_step(model, mesh)).lower(shapes, batch), None, {}
    config = cases.make_config(MODELS[args.model], length, length // args.chunk, layout, places)
    plan, model = cases.plan_for(config, args.compile), cases.abstract_model(config)
    mesh = physical.make_mesh(plan, devices)
    step, params = Step(plan, model, mesh, train=True), nnx.state(model, nnx.Param)
    shardings = storage.param_shardings(plan, params, mesh)
    shapes = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), params, shardings)
    batch = batch_shapes(plan, mesh)
    known = {
        "predicted_hbm_bytes": max(plan.predicted.hbm_bytes),
        "kv_bytes": _kv_bytes(plan, len(step.layers.layer_types), step.head_shapes[None]),
    }
    return jax.jit(step.__call__).lower(shapes, batch), compiler_options("cuda", step.uses_host, mesh.size), known


def _shapes(params, sharding_of):
    import jax

    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding_of(x)), params)


def _kv_bytes(plan, num_layers: int, shape) -> int:
    """Bytes of K, V, dK and dV of a device, without the room behind the sequence."""
    gradient = 4 if plan.stash.kv_grad_dtype == "float32" else 2
    peaks, tokens = plan.table().prefix_peaks, plan.sequence_length // plan.ring
    num_kv = peaks.rebuilt if plan.stash.kv != "keep" else peaks.kept
    of_group = 2 * num_layers * tokens * shape.num_kv_heads * shape.head_dim
    return of_group * (num_kv * shape.itemsize + peaks.grads * gradient)


# -- report -----------------------------------------------------------------------------------------------------------


def slopes(rows: list[dict]) -> dict[str, dict]:
    """Fit bytes of HBM a token over the longest four lengths, next to those of K, V, dK and dV alone."""
    import numpy as np

    found = {}
    for name in dict.fromkeys(row["layout"] for row in rows):
        own = [row for row in rows if row["layout"] == name and "hbm_bytes" in row][-4:]
        if len(own) < 2:
            continue
        tokens = [row["length"] for row in own]
        found[name] = {"hbm_bytes_a_token": round(float(np.polyfit(tokens, [r["hbm_bytes"] for r in own], 1)[0]))}
        if "kv_bytes" in own[0]:
            found[name]["kv_bytes_a_token"] = round(own[-1]["kv_bytes"] / own[-1]["length"])
    return found


def time_table(rows: list[dict]) -> list[str]:
    """Write times as a table."""
    lines = [
        "| S | chunks | chunked side | dense s | chunked s | ratio | least .. most | ratio of CPU seconds |",
        "|" + "---|" * 8,
    ]
    for row in rows:
        low, high = row["ratio_range"]
        lines.append(
            f"| {row['length']} | {row['chunks']} | {row['layout']} | {row['dense_s']:.2f} | {row['chunked_s']:.2f} | "
            f"{row['ratio']:.2f} | {low:.2f} .. {high:.2f} | {row['cpu_ratio']:.2f} |"
        )
    return lines


def compile_table(rows: list[dict]) -> list[str]:
    """Write memory as a table, in GiB of one device, and which of XLA's figures it is."""
    dense = {row["length"]: row.get("hbm_bytes") for row in rows if row["layout"] == "dense"}
    lines = [
        "HBM: arguments + outputs + temporaries - aliases, as XLA:GPU gives them; host: temporaries.",
        "",
        "| S | step | HBM | of it temporary | K, V, dK, dV | HBM of dense | planner's HBM | host | copies hidden |",
        "|" + "---|" * 9,
    ]
    for row in rows:
        if "error" in row:
            lines.append(f"| {row['length']} | {row['layout']} | {row['error'][:60]} | | | | | | |")
            continue
        gib = {name: f"{value / 2**30:.2f}" for name, value in row.items() if name.endswith("_bytes")}
        base, copied = dense.get(row["length"]), row["overlapped_bytes"] + row["exposed_bytes"]
        cells = [
            row["length"],
            row["layout"],
            gib["hbm_bytes"],
            gib["temp_bytes"],
            gib.get("kv_bytes", ""),
            f"{row['hbm_bytes'] / base:.2f}" if base else "",
            gib.get("predicted_hbm_bytes", ""),
            gib["host_bytes"],
            f"{row['overlapped_bytes'] / copied:.0%} of {copied / 2**30:.2f}" if copied else "",
        ]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    fitted = slopes(rows)
    if fitted:
        lines += ["", "| step | HBM bytes a token, fitted | K, V, dK, dV bytes a token |", "|---|---|---|"]
        lines += [
            f"| {name} | {fit['hbm_bytes_a_token']} | {fit.get('kv_bytes_a_token', '')} |"
            for name, fit in fitted.items()
        ]
    return lines


def write(args: argparse.Namespace, rows: list[dict]) -> Path:
    """Write JSON and table; return the table's path."""
    import jax

    kind = args.compile or "cpu"
    name = f"{'memory' if args.compile else 'time'}_{kind}_{args.model}_{args.devices}dev"
    hardware = f"compiled for {kind}, not run" if args.compile else f"{cpu_name()}, {os.cpu_count()} cores"
    report = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "hardware": hardware,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "model": MODELS[args.model],
        "devices": args.devices,
        "chunk_tokens": args.chunk,
        **({"slopes": slopes(rows)} if args.compile else {"rounds": args.rounds, "load_1min": os.getloadavg()[0]}),
        "rows": rows,
    }
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    head = f"{report['date']}, {hardware}, jax {jax.__version__}, {args.model}, {args.devices} device(s)"
    table = compile_table(rows) if args.compile else time_table(rows)
    path = args.out / f"{name}.md"
    path.write_text("\n".join([head + f", chunks of {args.chunk} tokens.", "", *table, ""]), encoding="utf-8")
    return path


def main(arguments: list[str] | None = None) -> int:
    """Measure, write the results, print the table."""
    args = parse(arguments)
    os.environ["JAX_PLATFORMS"] = "cpu"
    flags = NO_AUTOTUNING if args.compile else f"--xla_force_host_platform_device_count={args.devices}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()  # read when jax first runs
    measure, rows = compile_steps if args.compile else time_steps, []
    for length in args.lengths:
        rows += measure(args, length)
        path = write(args, rows)
    print(path.read_text(encoding="utf-8"), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
