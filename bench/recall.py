"""Does the gradient that goes from chunk to chunk matter? The recall task is trained twice, the second time without it.

    python -m bench.recall                     configs/recall.yaml as it stands
    python -m bench.recall key=value ...       with other settings
    options: --config configs/recall.yaml  --out bench/results  --name recall_cpu  --picture docs/recall.svg

    python -m bench.recall "model.layers=2x(delta,full)" model.num_layers=4 --name recall_hybrid_cpu \
        --picture docs/recall_hybrid.svg    every second layer with the gated delta rule

Both runs have the same program, model, data and optimizer. In the second a chunk keeps the dK and dV that its own
queries give to its keys and values, and those of all later chunks are dropped, as is the cotangent of the state behind
it: what a model gets that is trained chunk by chunk with a memory it does not differentiate. Its forward pass is whole,
so it sees the facts; it cannot learn to write them down. Results go to --out as JSON and as a table, with date and
hardware, and into the picture.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.figures import write
from sppo_jax.config import Config, load_config
from sppo_jax.processes.environment import simulate_devices
from sppo_jax.report.draw.axis import Axis
from sppo_jax.report.draw.chart import Panel, Series

ROOT = Path(__file__).parents[1]
WHOLE, CUT = "whole", "cut at chunks"


@contextmanager
def prefix_gradient_cut() -> Iterator[None]:
    """Drop, while the step is traced, what later chunks add to gradients of a chunk's keys, values and state."""
    import jax
    import jax.numpy as jnp

    from sppo_jax.attention.spreading import sequence
    from sppo_jax.pipeline.pasts.states import StateUnit

    true, cotangent = sequence.take_gradient, StateUnit.cotangent

    def take_and_forget(*args):
        # Chunks go backward last to first: what is in the buffers after a chunk's turn is for chunks before it.
        dk, dv, sums = true(*args)
        return dk, dv, jax.tree.map(jnp.zeros_like, sums)

    def forgotten(*args):
        return jax.tree.map(jnp.zeros_like, cotangent(*args))

    sequence.take_gradient, StateUnit.cotangent = take_and_forget, forgotten
    try:
        yield
    finally:
        sequence.take_gradient, StateUnit.cotangent = true, cotangent


def train(config: Config, *, cut: bool, show: bool = True) -> list[dict[str, Any]]:
    """Train, and validate every `train.eval_every` steps and at the end.

    Args:
        config: with `data.source: recall`.
        cut: whether gradients stop at chunks.
        show: whether to print.

    Returns:
        for each validation: step, loss (nats an answer), accuracy, and recall_by_distance.
    """
    import jax
    import jax.numpy as jnp
    import optax
    from flax import nnx

    from sppo_jax.data.held_out import OnePass
    from sppo_jax.data.loader import Loader
    from sppo_jax.data.open import open_data
    from sppo_jax.evaluation.validate import evaluate
    from sppo_jax.models import build_model
    from sppo_jax.pipeline import api
    from sppo_jax.search.make import make_plan
    from sppo_jax.train.step import make_optimizer, make_schedule

    plan, model, data = make_plan(config), build_model(config), open_data(config)
    loss_and_grads, scores = api.value_and_grad(plan, model), api.evaluate(plan, model)
    params = nnx.state(model, nnx.Param)
    optimizer = make_optimizer(config.optimizer, make_schedule(config.optimizer, config.train.steps), params)

    def step(state, batch):
        params, moments = state
        loss, grads = loss_and_grads(params, batch)
        with jax.numpy_dtype_promotion("standard"):  # the optimizer library relies on implicit promotion
            updates, moments = optimizer.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), loss

    def batches(rows):
        return Loader(rows, num_sequences=config.num_sequences, local_rows=range(config.num_sequences))

    def validate(params):
        chosen = OnePass(data.validation, num_wanted=config.train.eval_sequences).batches(config.num_sequences)
        return evaluate(scores, params, chosen, lambda batch: jax.tree.map(jnp.asarray, dict(batch)))

    state, training, found = (params, optimizer.init(params)), batches(data.training), []
    step = jax.jit(step, donate_argnums=0)
    # Sharded results are traced again, so the cut lasts for the whole run; validation has no gradients to cut.
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    for done in range(1, config.train.steps + 1):
        with prefix_gradient_cut() if cut else nullcontext():
            state, loss = step(state, next(training))
            loss.block_until_ready()  # many steps ahead starve each other of threads on simulated devices
        if done % (config.train.eval_every or config.train.steps) and done != config.train.steps:
            continue
        result = validate(state[0])
        answers = sum(recall.num_targets for recall in result.recall)
        accuracy = sum(recall.accuracy * recall.num_targets for recall in result.recall) / answers
        found.append({"step": done, **result.metrics(), "accuracy": accuracy, "num_answers": answers})
        if show:
            name = "cut  " if cut else "whole"
            spent = f"{time.perf_counter() - start_s:.0f} s, CPU {time.process_time() - start_cpu_s:.0f} s"
            print(f"{name} step {done:5d}  loss {result.loss:.4f}  recall {accuracy:6.1%}  ({spent})", flush=True)
    return found


def write_results(config: Config, runs: dict[str, list[dict[str, Any]]], out: Path, name: str, drawn: Path) -> None:
    """Write JSON and a table of this name, and the picture."""
    chance = 1 / config.data.recall.values
    machine = f"{os.cpu_count()} CPU cores ({platform.machine()}), Python {platform.python_version()}"
    report = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "machine": machine, "chance": chance, **runs}
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    (out / f"{name}.md").write_text(table(config, runs, report["date"], machine), encoding="utf-8")
    write(drawn, picture(report))


def picture(report: dict[str, Any]) -> list[Panel]:
    """Return a plot of the shares of right answers by step.

    Args:
        report: what the JSON holds.
    """
    runs, chance = {name: report[name] for name in (WHOLE, CUT)}, report["chance"]
    last = max(point["step"] for points in runs.values() for point in points)
    curves = [
        Series(name=name, x=[p["step"] for p in points], y=[p["accuracy"] for p in points], color=color, mark="circle")
        for color, (name, points) in enumerate(runs.items())
    ]
    line = Series(name="chance", x=[0, last], y=[chance, chance], color=6, dashed=True)
    y = Axis(label="right answers", low=0, high=1, percent=True)
    x = Axis(label="step", low=0, whole=True)
    return [
        Panel(title="Recall beyond the longest chunk, with gradients whole or cut", x=x, y=y, series=[*curves, line])
    ]


def table(config: Config, runs: dict[str, list[dict[str, Any]]], date: str, machine: str) -> str:
    """Return the last validation of each run, by distance, in Markdown."""
    distances = [str(recall["distance"]) for recall in next(iter(runs.values()))[-1]["recall_by_distance"]]
    head = ["gradients", "loss, nats", "recall", *(f"{distance} back" for distance in distances)]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for name, points in runs.items():
        last = points[-1]
        shares = [last["accuracy"], *(recall["accuracy"] for recall in last["recall_by_distance"])]
        cells = [name, f"{last['validation_loss']:.3f}", *(f"{share:.1%}" for share in shares)]
        lines.append(f"| {' | '.join(cells)} |")
    last = next(iter(runs.values()))[-1]
    told = (
        f"{date}, {machine}: {last['step']} steps of {config.num_sequences} sequences of {config.sequence.length} "
        f"tokens in {config.sequence.chunks} chunks; {last['num_answers']} answers, chance "
        f"{1 / config.data.recall.values:.1%}."
    )
    return "\n".join([told, "", *lines, ""])


def main(words: Sequence[str]) -> int:
    """Train both, and write what came out."""
    parser = argparse.ArgumentParser(description="The recall task with and without gradients from chunk to chunk.")
    parser.add_argument("overrides", metavar="key=value", nargs="*")
    parser.add_argument("--config", default=ROOT / "configs" / "recall.yaml")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results")
    parser.add_argument("--name", default="recall_cpu")
    parser.add_argument("--picture", type=Path, default=ROOT / "docs" / "recall.svg")
    args = parser.parse_intermixed_args(words)
    config = load_config(args.config, args.overrides)
    simulate_devices(config.train.num_simulated_devices)
    runs = {name: train(config, cut=name == CUT) for name in (WHOLE, CUT)}
    write_results(config, runs, args.out, args.name, args.picture)
    print((args.out / f"{args.name}.md").read_text(encoding="utf-8"))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
