"""Run directories as runs leave them: healthy and long, resumed with troubles, just begun, crashed and torn."""

import json
import math
import os
import random
from datetime import datetime, timedelta
from functools import lru_cache
from pathlib import Path

from report_cases import small_config

from sppo_jax.config import Config, to_yaml
from sppo_jax.plan.plan import Plan
from sppo_jax.search.make import make_plan

LENGTH, STEPS, EVAL_EVERY = 65536, 2000, 167
_BEGIN = datetime.fromisoformat("2026-05-04T09:00:00+00:00")


@lru_cache(maxsize=1)
def plan_and_config() -> tuple[Plan, Config]:
    """Returns a plan for four GPUs and its config."""
    config = small_config(
        train={"steps": STEPS, "eval_every": EVAL_EVERY},
        sequence={"chunks": 16, "per_pipeline": 2},
        optimizer={"lr": 6e-4, "warmup_steps": 100},
    )
    return make_plan(config), config


def metrics(step: int, rng: random.Random, *, gpu: bool = True, validates: bool = False) -> dict:
    """Returns a line of metrics.jsonl as a healthy run writes it."""
    progress = step / STEPS
    loss = 2.05 + 8.6 * math.exp(-step / 70) + 1.1 * math.exp(-step / 700) + rng.gauss(0, 0.035)
    step_s, save_s = 0.452 + rng.gauss(0, 0.004), 0.08 if step % 250 < 10 else 0.0
    data_s = 0.001 + 0.001 * rng.random() + (0.1 if rng.random() < 0.01 else 0)
    warm = min(1.0, step / 100)
    step_s += save_s + data_s
    line = {
        "step": step,
        "loss": loss,
        "token_accuracy": 1 / (1 + math.exp(loss - 2)),
        "entropy": 0.97 * loss,
        "grad_norm": 0.35 + 3 * math.exp(-step / 60) + abs(rng.gauss(0, 0.05)),
        "learning_rate": 6e-4 * warm * (0.55 + 0.45 * math.cos(math.pi * progress)),
        "tokens_per_s": (2 * LENGTH - 40) / step_s,
        "places_per_s": 2 * LENGTH / step_s,
        "step_s": step_s,
        "data_s": data_s,
        "save_s": save_s,
        "mfu": 0.462 * 0.452 / step_s if gpu else None,
        "hbm_peak_bytes": int(min(7.41, 7.2 + step / 300) * 2**30) if gpu else None,
        "host_peak_bytes": int((18 + 1.5 * min(1.0, step / 300)) * 2**30),
        "skipped": 0,
        "spike": False,
    }
    return line | (validation(step, loss, rng) if validates else {})


def validation(step: int, loss: float, rng: random.Random) -> dict:
    """Returns what a validation adds: the longer the run, the more far positions gain."""
    edges = [0, *(LENGTH >> k for k in range(10, -1, -1))]
    gain = 0.11 * (1 - math.exp(-step / 600))
    buckets = [
        {
            "first": first,
            "last": last - 1,
            "num_targets": 8 * (last - first),
            "loss": loss + 0.4 - gain * math.log2(last / 64) * 0.8 + rng.gauss(0, 0.006) + (0.5 if not first else 0),
        }
        for first, last in zip(edges, edges[1:], strict=False)
    ]
    total = sum(bucket["num_targets"] for bucket in buckets)
    mean = sum(bucket["loss"] * bucket["num_targets"] for bucket in buckets) / total
    return {"validation_loss": mean, "validation_loss_by_position": buckets, "validation_s": 4.0 + rng.random()}


def recall_at(step: int) -> list[dict]:
    """Returns recall by distance: near answers are found first."""
    return [
        {"distance": 2**k, "num_targets": 64, "accuracy": 1 / (1 + math.exp(-(step / 130 - (k - 6) * 0.9) * 1.2))}
        for k in range(7, 16)
    ]


def event(step: int, kind: str, text: str, minutes: float | None = None) -> dict:
    """Returns a line of events.jsonl."""
    time = _BEGIN + timedelta(minutes=step * 0.008 if minutes is None else minutes)
    return {"time": time.isoformat(timespec="seconds"), "step": step, "kind": kind, "text": text}


def write_run(run_dir: Path, lines: list[dict], events: list[dict], *, tail: str = "") -> Path:
    """Writes the files of a run; `tail` is a torn last line."""
    plan, config = plan_and_config()
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "config.yaml").write_text(to_yaml(config))
    (run_dir / "plan.json").write_text(plan.to_json() + "\n")
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + tail)
    (run_dir / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in events))
    return run_dir


def grow_older(run_dir: Path, age_s: float) -> None:
    """Makes the files of a run look as if they were written `age_s` seconds earlier."""
    for path in run_dir.iterdir():
        os.utime(path, (path.stat().st_atime, path.stat().st_mtime - age_s))


def healthy(run_dir: Path) -> Path:
    """A run of 2000 steps on GPUs with 12 validations and recall, done."""
    rng, lines, events = random.Random(1), [], [event(0, "start", "the run begins on 4 devices")]
    for step in range(1, STEPS + 1):
        validates = step % EVAL_EVERY == 0 or step == STEPS
        lines.append(metrics(step, rng, validates=validates))
        if validates:
            lines[-1]["recall_by_distance"] = recall_at(step)
            events.append(event(step, "validation", f"validation loss {lines[-1]['validation_loss']:.4f}"))
        if step % 250 == 0:
            events.append(event(step, "save", f"saved checkpoints/{step} in 0.4 s"))
    return write_run(run_dir, lines, [*events, event(STEPS, "stop", f"all {STEPS} steps are done")])


def troubled(run_dir: Path) -> Path:
    """A run on CPUs at step 1234: resumed 3 times, 5 steps skipped, a spike of many times the loss; still going."""
    rng, lines, events, skipped = random.Random(2), [], [event(0, "start", "the run begins on 8 devices")], 0
    for step in range(1, 1235):
        lines.append(metrics(step, rng, gpu=False, validates=step % EVAL_EVERY == 0))
        if step in (300, 301, 302, 303, 900):
            skipped += 1
            lines[-1] |= dict.fromkeys(("loss", "entropy", "grad_norm"))
            why = "a loss of nan and a gradient norm of inf"
            events.append(
                event(step, "skip", f"step {step} skipped: {why} ({step % 300 + 1} in a row, the limit is 10)")
            )
        if 610 <= step < 618:
            lines[-1] |= {"loss": lines[-1]["loss"] + 40 / (step - 608), "spike": step < 613}
        if step == 610:
            events.append(event(step, "spike", "step 610: loss spike: 22.6170, where the last 50 had a median of 2.6"))
        lines[-1]["skipped"] = skipped
        if step % 250 == 0:
            events.append(event(step, "save", f"saved checkpoints/{step}"))
        if step in (250, 500, 1000):
            events.append(event(step, "resume", f"resumes from checkpoints/{step}", step * 0.008 + 30))
    events.append(event(1000, "corrupt", "checkpoints/1100 is torn (no commit mark); skipped"))
    return write_run(run_dir, lines, events)


def begun(run_dir: Path) -> Path:
    """A run that wrote its config and plan, and no step so far."""
    return write_run(run_dir, [], [event(0, "start", "the run begins on 4 devices")])


def two_steps(run_dir: Path) -> Path:
    """A run with two steps."""
    rng = random.Random(3)
    return write_run(run_dir, [metrics(step, rng) for step in (1, 2)], [event(0, "start", "the run begins")])


def torn(run_dir: Path) -> Path:
    """A run that was killed while it wrote a line, two days ago; a part of its steps was done twice."""
    rng = random.Random(4)
    lines = [metrics(step, rng) for step in [*range(10, 500, 10), *range(410, 450, 10)]]
    write_run(run_dir, lines, [event(0, "start", "<b>begins</b>")], tail='{"step": 450, "lo')
    (run_dir / "plan.json").write_text('{"schema_version": 2')
    with (run_dir / "events.jsonl").open("ab") as file:
        file.write(b'\xff\xfe not json\n[1, 2]\n{"kind": 5}\n')
    grow_older(run_dir, 2 * 86400)
    return run_dir


CASES = {"healthy": healthy, "troubled": troubled, "begun": begun, "two_steps": two_steps, "torn": torn}
