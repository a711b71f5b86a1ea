"""What the training loop costs: tokens a second of `train` beside those of its bare compiled step, taking turns.

    python -m bench.loop      # about 10 minutes on 2 quiet cores; writes results/loop.json

The bare side calls the compiled step on one batch that lies on the devices, again and again. The other side is the
whole loop: documents read, packed and placed, every loss fetched and written down, and the state saved in the
background. Both use the same program; rounds of the two take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sppo_jax.config import Config, load_config
from sppo_jax.plan.plan import Plan
from sppo_jax.processes.environment import simulate_devices
from sppo_jax.search.make import make_plan

HERE = Path(__file__).parent
RESULT, CONFIG = HERE / "results" / "loop.json", HERE.parent / "configs" / "quickstart.yaml"
WARM_UP = 3
Sides = dict[str, Callable[[Config, Plan, Path], float]]


class Stopwatch:
    """A loader that notes when each batch was asked for."""

    def __init__(self, loader):
        self._loader, self.times_s = loader, []

    def __next__(self):
        self.times_s.append(time.perf_counter())
        return next(self._loader)

    @property
    def state(self):
        return self._loader.state

    @state.setter
    def state(self, state):
        self._loader.state = state


def loop_seconds(config: Config, plan: Plan, run_dir: Path) -> float:
    """Return seconds a step of the whole loop, from the batch after the warm-up to the last one."""
    from sppo_jax.train.checkpoints.run_dir import claimed, write_run
    from sppo_jax.train.loop import train
    from sppo_jax.train.setup import begin, prepare

    experiment = prepare(config, plan)
    watch = Stopwatch(experiment.loader)
    experiment = replace(experiment, loader=watch)
    with claimed(run_dir):
        write_run(run_dir, config, plan)
        train(experiment, run_dir, begin(experiment, run_dir))
    times_s = watch.times_s[WARM_UP:]
    return (times_s[-1] - times_s[0]) / (len(times_s) - 1)


def bare_seconds(config: Config, plan: Plan, run_dir: Path) -> float:
    """Return seconds a step of the compiled step alone."""
    import jax

    from sppo_jax.evaluation.placement import batch_shapes, place_batch
    from sppo_jax.train.setup import begin, prepare
    from sppo_jax.train.state import shardings_of
    from sppo_jax.train.step import make_train_step
    from sppo_jax.train.watch.signals import Signals

    experiment = prepare(config, plan)
    state, signals = begin(experiment, run_dir).state, Signals(experiment.mesh).array()
    batch = place_batch(next(experiment.loader), experiment.plan, experiment.mesh)
    experiment.loader.close()
    step = make_train_step(experiment.value_and_grad, experiment.optimizer, shardings_of(experiment.shapes))
    step = step.lower(state, batch_shapes(experiment.plan, experiment.mesh), signals).compile()
    for _ in range(WARM_UP):
        state, outputs = step(state, batch, signals)
        jax.block_until_ready(outputs)
    begin_s, num_steps = time.perf_counter(), config.train.steps - WARM_UP
    for _ in range(num_steps):
        state, outputs = step(state, batch, signals)
        jax.block_until_ready(outputs)  # simulated devices take one step at a time, in the loop too
    return (time.perf_counter() - begin_s) / num_steps


def take_turns(sides: Sides, config: Config, num_rounds: int, directory: Path, say=print) -> list[dict[str, float]]:
    """Time the sides again and again, their order turned round from round to round; return seconds by side."""
    plan, rounds = make_plan(config), []
    for number in range(num_rounds):
        order = list(sides)[:: 1 if number % 2 == 0 else -1]
        rounds.append({name: sides[name](config, plan, directory / f"{number}-{name}") for name in order})
        say(f"round {number}: " + ", ".join(f"{name} {rounds[-1][name]:.4f}" for name in sides))
    return rounds


def compare(sides: Sides, config_path: Path, overrides: list[str], num_rounds: int, out: Path) -> dict[str, Any]:
    """Let two sides take turns with one config; write and return first / second, with date and hardware."""
    config = load_config(config_path, overrides)
    simulate_devices(config.train.num_simulated_devices)
    import jax

    with tempfile.TemporaryDirectory() as directory:
        jax.config.update("jax_compilation_cache_dir", directory)
        rounds = take_turns(sides, config, num_rounds, Path(directory))
    first, second = sides
    ratios = sorted(each[first] / each[second] for each in rounds)
    result = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, jax {jax.__version__}",
        "config": f"{config_path.parent.name}/{config_path.name}, {', '.join(overrides)}",
        "rounds": rounds,
        "ratio": statistics.median(ratios),
        "ratios": ratios,
    }
    out.write_text(json.dumps(result, indent=1) + "\n")
    return result


def main(words: Sequence[str] | None = None) -> int:
    """Run it and write the result; returns 1 if the loop keeps less than 97% of the bare step's tokens a second."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save-every-s", type=float, default=10.0)
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args(words)
    overrides = [
        f"train.steps={args.steps}",
        "train.log_every=1",
        "train.eval_sequences=0",
        f"checkpoint.every_s={args.save_every_s}",
    ]
    sides = {"bare_s": bare_seconds, "loop_s": loop_seconds}
    result = compare(sides, args.config, overrides, args.rounds, args.out)
    spread = f"{min(result['ratios']):.1%} to {max(result['ratios']):.1%}"
    print(f"the loop keeps {result['ratio']:.1%} of the bare step's tokens a second ({spread})")
    return 0 if result["ratio"] >= 0.97 else 1


if __name__ == "__main__":
    sys.exit(main())
