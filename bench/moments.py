"""Send SIGTERM and SIGINT to commands at chosen moments, and judge how each command ends.

    python -m bench.chaos --moments       # 16 signals, about 6 minutes on 2 cores; writes results/moments.json

The moments: tokenizing, compiling, a step, a validation of 1,000 sequences in one process and in two, `sppo eval`, a
save, and `sppo report`. Before the first step, and for commands without a state to save, the exit code is 130. A run
that trains ends with 0 and a checkpoint of its last step, within 5 seconds.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import yaml

from sppo_jax.train.checkpoints.read import checkpoint_steps

REPO = Path(__file__).parents[1]
RESULT = Path(__file__).parent / "results" / "moments.json"
SIGNALS = (signal.SIGTERM, signal.SIGINT)
LIMIT_S = 5.0
_PATIENCE_S = 120.0


@dataclass(frozen=True, kw_only=True)
class End:
    """How a command ended.

    Args:
        moment: where the signal came.
        name: of the signal.
        saves: whether the command had a state to save.
        code: its exit code.
        seconds: from the signal to the end.
        step: the last step that it told of; 0 if none.
        saved: its newest checkpoint; 0 if none.
        text: what it wrote.
    """

    moment: str
    name: str
    saves: bool
    code: int
    seconds: float
    step: int
    saved: int
    text: str

    @property
    def problem(self) -> str:
        """What is wrong with it, "" where nothing is."""
        if "Traceback" in self.text:
            return "a traceback"
        if self.code != (0 if self.saves else 130):
            return f"exit code {self.code}"
        if self.seconds > LIMIT_S:
            return f"{self.seconds:.1f} s"
        if self.saves and (not self.saved or self.saved < self.step):
            return f"step {self.step}, saved {self.saved}"
        if self.moment.startswith("validation") and "; what it measured is dropped" not in self.text:
            return "no word of what was dropped"
        return ""


def settings(num_devices: int, **changes: dict) -> dict:
    """Return a config with a step of some milliseconds; changes are merged into its sections."""
    plain: dict = {
        "model": {"vocab_size": 257, "hidden_size": 32, "num_layers": 2, "num_heads": 2, "mlp_size": 64},
        "data": {"source": "tokens.npy", "separator": 256, "validation_fraction": 0.5},
        "mesh": {"data": num_devices, "pipe": 1, "seq": 1},
        "sequence": {"length": 128, "chunks": 1},
        "train": {"steps": 100_000, "devices": f"cpu:{num_devices}", "log_every": 1, "eval_sequences": 0},
        "checkpoint": {"every_s": 0},
    }
    return {name: section | changes.get(name, {}) for name, section in plain.items()}


class Command:
    """A running command, whose lines are read as they come."""

    def __init__(self, words: Sequence[str], folder: Path, name: str = "run"):
        """Start it; standard error goes where standard output goes."""
        quiet = ("SPPO_", "JAX_", "XLA_", "SLURM_")
        env = {key: value for key, value in os.environ.items() if not key.startswith(quiet)}
        env |= {"PYTHONPATH": str(REPO), "XDG_CACHE_HOME": str(folder / "cache"), "PYTHONUNBUFFERED": "1"}
        env |= {"SPPO": str(folder / "sppo"), "CUDA_VISIBLE_DEVICES": ""}
        self.folder, self.run_dir, self.text = folder, folder / name, ""
        self.process = subprocess.Popen(
            words, cwd=folder, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, process_group=0
        )

    def lines(self) -> Iterator[str]:
        """Give each line."""
        for line in self.process.stdout or ():
            self.text += line
            yield line

    def until(self, *words: str) -> None:
        """Return behind the first line that has all the words."""
        for line in self.lines():
            if all(word in line for word in words):
                return
        raise RuntimeError(f"the command ended before {words}: {self.text[-2000:]}")

    def signalled(self, moment: str, sent: signal.Signals, *, saves: bool) -> End:
        """Send a signal to its process group; returns how it ends."""
        start_s = time.monotonic()
        os.killpg(self.process.pid, sent)
        end = threading.Timer(_PATIENCE_S, self.process.kill)
        end.start()
        for _ in self.lines():
            pass
        code, seconds = self.process.wait(), time.monotonic() - start_s
        end.cancel()
        metrics = self.run_dir / "metrics.jsonl"
        steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()] if metrics.exists() else []
        return End(
            moment=moment,
            name=sent.name,
            saves=saves,
            code=code,
            seconds=round(seconds, 2),
            step=max(steps, default=0),
            saved=max(checkpoint_steps(self.run_dir / "checkpoints"), default=0),
            text=self.text,
        )


class Moments:
    """The commands, each in a folder with its data."""

    def __init__(self, folder: Path):
        """Write data and configs into an empty folder, and train a run to evaluate and report."""
        self.folder, self._number = folder, 0
        tokens = np.random.default_rng(0).integers(0, 256, 400_000).astype(np.uint16)
        tokens[::97] = 256
        np.save(folder / "tokens.npy", tokens)
        row = json.dumps({"text": "river stone tree cloud house water light " * 3})
        (folder / "long.jsonl").write_text(f"{row}\n" * 400_000)
        (folder / "sppo").write_text(f'#!/bin/sh\nexec {sys.executable} -m sppo_jax.cli "$@"\n')
        (folder / "sppo").chmod(0o755)
        validates = {"eval_every": 4, "eval_sequences": 1000}
        self._write("plain", settings(1))
        for name, num_devices in (("validates", 1), ("two", 2)):
            rows = {"per_pipeline": 8 // num_devices}
            self._write(name, settings(num_devices, train=validates, sequence=rows))
        self._write("saves", settings(1, checkpoint={"every_steps": 5}))
        self._write("text", settings(1, data={"source": "long.jsonl", "separator": None, "tokenizer": "bytes"}))
        self._write("short", settings(1, train={"steps": 20}))
        self._timed("train", "short.yaml", "--run-dir", "done")

    def _write(self, name: str, config: dict) -> None:
        (self.folder / f"{name}.yaml").write_text(yaml.safe_dump(config))

    def _timed(self, *words: str) -> float:
        start_s, command = time.monotonic(), Command([str(self.folder / "sppo"), *words], self.folder, "done")
        text = "".join(command.lines())
        if command.process.wait():
            raise RuntimeError(text)
        return time.monotonic() - start_s

    def _train(self, config: str, *, processes: int = 1) -> Command:
        """Start a run in a new directory."""
        self._number += 1
        name = f"run-{self._number}"
        first = (
            [str(REPO / "launch" / "local.sh"), str(processes)]
            if processes > 1
            else [str(self.folder / "sppo"), "train"]
        )
        return Command([*first, f"{config}.yaml", "--run-dir", name], self.folder, name)

    def tokenizing(self, sent: signal.Signals) -> End:
        """Signal a run that writes tokens."""
        left = self._partial()  # by the run before, which the next one removes
        run = self._train("text")
        deadline_s = time.monotonic() + _PATIENCE_S
        while time.monotonic() < deadline_s and not self._partial() - left:
            time.sleep(0.02)
        return run.signalled("tokenizing", sent, saves=False)

    def _partial(self) -> set[Path]:
        """Return the files of tokens that are being written, or were when a run ended."""
        found = self.folder.glob("cache/**/*.new-*/tokens.bin")
        return {path for path in found if path.exists() and path.stat().st_size}

    def compiling(self, sent: signal.Signals) -> End:
        """Signal a run that has a state and compiles its step."""
        run = self._train("plain")
        run.until("starts in")
        time.sleep(0.2)
        return run.signalled("compiling", sent, saves=False)

    def step(self, sent: signal.Signals) -> End:
        """Signal a run between or in steps."""
        run = self._train("plain")
        run.until("step", "5/")
        return run.signalled("step", sent, saves=True)

    def validation(self, sent: signal.Signals, processes: int = 1) -> End:
        """Signal a run in its second validation, which is compiled already."""
        run = self._train("two" if processes > 1 else "validates", processes=processes)
        run.until("validation loss")
        run.until("step", "7/")
        time.sleep(0.5)
        name = "validation" if processes == 1 else f"validation, {processes} processes"
        return run.signalled(name, sent, saves=True)

    def validation_of_two(self, sent: signal.Signals) -> End:
        """Signal both processes of a run in a validation."""
        return self.validation(sent, 2)

    def evaluation(self, sent: signal.Signals) -> End:
        """Signal `sppo eval` in its batches: when one of a single batch would have ended."""
        words = ("eval", "done", "train.eval_sequences={}")
        after_s = self._timed(*(word.format(1) for word in words))
        return self._late("evaluation", sent, after_s, *(word.format(1000) for word in words))

    def save(self, sent: signal.Signals) -> End:
        """Signal a run right behind the line that says that a save has begun."""
        run = self._train("saves")
        run.until("saving")
        return run.signalled("save", sent, saves=True)

    def report(self, sent: signal.Signals) -> End:
        """Signal `sppo report` as it draws."""
        return self._late("report", sent, 0.7 * self._timed("report", "done"), "report", "done")

    def _late(self, moment: str, sent: signal.Signals, after_s: float, *words: str) -> End:
        """Signal a command some seconds after its start."""
        command = Command([str(self.folder / "sppo"), *words], self.folder, "none")
        time.sleep(after_s)
        return command.signalled(moment, sent, saves=False)


def moments(folder: Path, say: Callable[[str], object] = print) -> list[End]:
    """Signal each command once by each signal; returns how each ended."""
    # What a shell starts in the background ignores SIGINT, and so would the commands.
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return _ends(Moments(folder), say)
    finally:
        signal.signal(signal.SIGINT, before)


def _ends(commands: Moments, say: Callable[[str], object]) -> list[End]:
    ends = []
    order = ("tokenizing", "compiling", "step", "validation", "validation_of_two", "evaluation", "save", "report")
    for name in order:
        for sent in SIGNALS:
            end: End = getattr(commands, name)(sent)
            say(f"{end.moment:25} {end.name:7} exit code {end.code:3} {end.seconds:6.2f} s {end.problem}")
            ends.append(end)
    return ends


def as_json(ends: Sequence[End]) -> list[dict]:
    """Return the ends without their texts."""
    return [
        {key: value for key, value in asdict(end).items() if key != "text"} | {"problem": end.problem} for end in ends
    ]
