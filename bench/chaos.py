"""Kill a run again and again with SIGKILL, start it again by the same command, and compare it with one left alone.

    python -m bench.chaos                 # 40 kills, about 8 minutes on 2 cores; writes results/chaos.json
    python -m bench.chaos --kills 5 --out /tmp/chaos.json
    python -m bench.chaos --breadth-first # one group of layers at a time, weights gathered, keys rebuilt
    python -m bench.chaos --moments       # SIGTERM and SIGINT at chosen moments instead: see bench/moments.py

Kills fall at random moments of three kinds, in turn: while the run starts (imports, reading the checkpoint, compiling),
between and during steps, and right behind the line that says a save has begun. After each the newest finished
checkpoint is noted, and the next start must go on from it. At the end every loss, and the fingerprint of every array of
the last checkpoint, must be those of the undisturbed run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import yaml

from bench import moments
from sppo_jax.train.checkpoints.read import checkpoint_steps, read_run

RESULT = Path(__file__).parent / "results" / "chaos.json"
KINDS = ("start", "step", "save")
STEPS_A_LIFE = 8
SAVE_EVERY = 3


@dataclass(frozen=True, kw_only=True)
class Kill:
    """One life of the run.

    Args:
        kind: when it was to end.
        seconds: how long it lived.
        resumed: the step it went on from; None if it ended before it said so.
        reached: the last step it told of; 0 if none.
        saved: the newest finished checkpoint when it was dead; 0 if none.
    """

    kind: str
    seconds: float
    resumed: int | None
    reached: int
    saved: int

    @property
    def lost(self) -> int:
        """Steps that it had done and that must be done again."""
        return max(self.reached - self.saved, 0)


BREADTH_FIRST = {
    "mesh": {"data": 2, "pipe": 2, "seq": 1, "weights": "gathered"},
    "schedule": {"name": "breadth-first", "interleave": 2},
    "stash": {"inputs": "host", "attention": "host", "kv": "rebuild"},
}


def settings(num_steps: int, *, breadth_first: bool = False) -> dict:
    """Return a config of 2 pipelines x 2 stages with its stash on the host; a step takes some 10 ms."""
    return {
        "model": {"vocab_size": 257, "hidden_size": 16, "num_layers": 4, "num_heads": 2, "mlp_size": 32},
        "data": {"seed": 3},
        "mesh": {"data": 2, "pipe": 2, "seq": 1},
        "sequence": {"length": 64, "chunks": 4},
        "stash": {"inputs": "host", "attention": "host"},
        "optimizer": {"lr": 0.01, "warmup_steps": 2},
        "train": {"steps": num_steps, "devices": "cpu:4", "eval_sequences": 2},
        "checkpoint": {"every_steps": SAVE_EVERY, "keep_last": 2},
        **(BREADTH_FIRST if breadth_first else {}),
    }


class Life:
    """One process of the run, read line by line."""

    def __init__(self, config: Path, run_dir: Path):
        words = [sys.executable, "-m", "sppo_jax.cli", "train", str(config), "--run-dir", str(run_dir)]
        # What is compiled once need not be compiled by every life.
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "JAX_COMPILATION_CACHE_DIR": str(config.parent / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        self.begin_s = time.monotonic()
        self._process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)
        self.reached, self.text = 0, ""
        self.resumed: int | None = None

    def lines(self) -> Iterator[str]:
        """Give each line, and take from it how far the run is."""
        for line in self._process.stdout or ():
            self.text += line
            if found := re.match(r"step\s+(\d+)/", line):
                self.reached = int(found[1])
            elif found := re.match(r"resumes from \S+/(\d+),", line):
                self.resumed = int(found[1])
            elif line.startswith("starts in"):
                self.resumed = 0
            yield line

    def kill(self) -> float:
        """End it at once; returns how long it lived, in seconds."""
        self._process.kill()
        self._process.wait()
        for _ in self.lines():
            pass
        return time.monotonic() - self.begin_s

    def wait(self) -> int:
        """Return its exit code, all its lines read."""
        for _ in self.lines():
            pass
        return self._process.wait()


def live(life: Life, kind: str, draw: random.Random) -> None:
    """Let it live until its moment has come, or until it ends by itself."""
    if kind == "start" and draw.random() < 0.5:
        time.sleep(draw.uniform(0.0, 4.0))  # imports, planning, the data
        return
    if kind == "start":
        for _ in life.lines():
            if life.resumed is not None:
                break
        time.sleep(draw.uniform(0.0, 2.0))  # the state is loaded; compiling, the first step
        return
    wanted, seen = draw.randrange(1, STEPS_A_LIFE), 0
    for line in life.lines():
        seen += line.startswith("step ") and ("saving" in line if kind == "save" else "/" in line)
        if seen >= (wanted if kind == "step" else 1 + wanted // SAVE_EVERY):
            break
    time.sleep(draw.uniform(0.0, 0.08))


def chaos(directory: Path, *, num_kills: int, seed: int = 0, breadth_first: bool = False, say=print) -> dict:
    """Run the comparison.

    Args:
        directory: an empty one.
        num_kills: lives that are ended.
        seed: of the moments.
        breadth_first: whether all chunks pass one group of layers before any passes the next.
        say: is told of each.

    Returns:
        The kills and the verdicts, as JSON.
    """
    num_steps, draw, kills = max(4 * num_kills, 24), random.Random(seed), []
    config, run_dir = directory / "chaos.yaml", directory / "killed"
    config.write_text(yaml.safe_dump(settings(num_steps, breadth_first=breadth_first)))
    alone = Life(config, directory / "alone")
    if alone.wait() != 0:
        raise RuntimeError(f"the undisturbed run failed: {alone.text}")
    for number in range(num_kills):
        life, kind = Life(config, run_dir), KINDS[number % len(KINDS)]
        live(life, kind, draw)
        seconds = round(life.kill(), 2)
        saved = max(checkpoint_steps(run_dir / "checkpoints"), default=0)
        kills.append(Kill(kind=kind, seconds=seconds, resumed=life.resumed, reached=life.reached, saved=saved))
        say(f"{number + 1:3}  {kind:5} after {seconds:5.2f} s at step {life.reached:3}: {kills[-1].lost} steps lost")
    last = Life(config, run_dir)
    if last.wait() != 0:
        raise RuntimeError(f"the killed run did not end: {last.text}")
    return verdict(directory, kills, last)


def verdict(directory: Path, kills: list[Kill], last: Life) -> dict:
    """Compare the two runs.

    Args:
        directory: of both.
        kills: the lives that were ended.
        last: the one that was not.

    Returns:
        The kills and what holds, as JSON.
    """
    alone, killed = ({line["step"]: line for line in metrics(directory / name)} for name in ("alone", "killed"))
    ends = [read_run(directory / name / "checkpoints" / str(max(alone))) for name in ("alone", "killed")]
    resumed = [*(kill.resumed for kill in kills[1:]), last.resumed]
    passed_over = sum(line["kind"] == "corrupt" for line in metrics(directory / "killed", "events"))
    return {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "num_steps": len(alone),
        "save_every_steps": SAVE_EVERY,
        "kills": [asdict(kill) | {"lost": kill.lost} for kill in kills],
        "most_lost_steps": max(kill.lost for kill in kills),
        "broken_checkpoints": passed_over,
        "same_steps": list(alone) == list(killed),
        "same_losses": all(alone[step]["loss"] == killed[step]["loss"] for step in alone),
        "same_validation": alone[max(alone)]["validation_loss"] == killed[max(alone)]["validation_loss"],
        "same_state": ends[0]["fingerprints"] == ends[1]["fingerprints"],
        "same_place_in_the_data": ends[0]["data"] == ends[1]["data"],
        "each_went_on_from_the_newest": all(at in (None, kill.saved) for at, kill in zip(resumed, kills, strict=True)),
    }


def metrics(run_dir: Path, name: str = "metrics") -> list[dict]:
    """Return the lines of metrics.jsonl, or of events.jsonl."""
    return [json.loads(line) for line in (run_dir / f"{name}.jsonl").read_text().splitlines()]


def signals_at_moments(out: Path) -> int:
    """Signal commands at chosen moments and write how they ended; returns 1 if one ended wrongly."""
    with tempfile.TemporaryDirectory() as directory:
        ends = moments.moments(Path(directory))
    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    result = {"date": time.strftime("%Y-%m-%d"), "machine": machine, "ends": moments.as_json(ends)}
    out.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if any(end.problem for end in ends) else 0


def main() -> int:
    """Run it, write the result and print what holds; returns 1 if anything does not."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--breadth-first", action="store_true", help="all chunks pass one group of layers at a time")
    parser.add_argument("--moments", action="store_true", help="signals at chosen moments instead of kills")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    if args.moments:
        return signals_at_moments(args.out or moments.RESULT)
    with tempfile.TemporaryDirectory() as directory:
        result = chaos(Path(directory), num_kills=args.kills, seed=args.seed, breadth_first=args.breadth_first)
    (args.out or RESULT).write_text(json.dumps(result, indent=1) + "\n")
    held = {key: value for key, value in result.items() if isinstance(value, bool)}
    for key, value in held.items():
        print(f"{key.replace('_', ' '):32} {'yes' if value else 'NO'}")
    print(f"most steps lost {result['most_lost_steps']}, checkpoints passed over {result['broken_checkpoints']}")
    return 0 if all(held.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
