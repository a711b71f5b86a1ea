"""Send signals to small runs at random moments of their start and first steps, and judge how each run ends.

    python -m bench.signals                               # 60 signals, about 10 minutes on 2 cores
    python -m bench.signals --signals 12 --processes 2    # launch/local.sh 2
    python -m bench.signals --python PYTHON               # another interpreter, with another jax

SIGINT, SIGTERM, SIGHUP and SIGUSR1 take turns, with and without `| tee`. A signal goes to the whole process group, as a
terminal sends it, so tee dies of it too. The runs tell their phase through an audit hook, which sees the files that
they open. A run must end within 10 seconds (while it compiles: of the end of that). Before the first step it must end
with exit code 130, from then on with 0 and a checkpoint of its last step, and never with a traceback or by a signal.
While Python itself starts (`start`) it may end as Python does.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import yaml

from sppo_jax.train.checkpoints.read import checkpoint_steps

REPO = Path(__file__).parents[1]
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
PHASES = ("start", "imports", "joining", "planning", "data", "compiling", "loop")
LIMIT_S = 10.0
FIRST_S, LAST_STEP = 0.1, 10
_PATIENCE_S = 120.0

# Read by Python at its start, before any of our code: notes the phase that process 0 is in.
_HOOK = """
import os, sys
if "PHASE_FILE" in os.environ and os.environ.get("SPPO_PROCESS_ID", "0") == "0":
    marks = {("import", "sppo_jax.train.metrics.trackers"): "planning", ("os.mkdir", "checkpoints"): "loop"}
    marks |= {("open", "tokens.npy"): "data", ("open", "events.jsonl"): "compiling"}
    marks |= {("import", "sppo_jax.processes.distributed"): "imports"}
    marks |= {("socket.bind", ""): "joining"} if "SPPO_COORDINATOR" in os.environ else {}
    def note(event, words):
        path = str(words[0]).rpartition("/")[2] if event in ("import", "open", "os.mkdir") else ""
        phase = marks.pop((event, path), None)
        if phase:
            file = os.open(os.environ["PHASE_FILE"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            os.write(file, f"{phase} ".encode())
            os.close(file)
    sys.addaudithook(note)
"""


@dataclass(frozen=True, kw_only=True)
class End:
    """How a run ended.

    Args:
        name: of the signal.
        tee: whether its output went through tee.
        at_s: seconds from the run's start to the signal.
        phase: that it was in.
        code: exit code, the negative number of a signal that it died of.
        seconds: from the signal to the end.
        compile_s: of these, until the step was compiled.
        before: the last step in its metrics when the signal came; 0 if none.
        step: the last one in its metrics; 0 if none.
        saved: the newest checkpoint; 0 if none.
        errors: what it wrote to standard error.
    """

    name: str
    tee: bool
    at_s: float
    phase: str
    code: int
    seconds: float
    compile_s: float
    before: int
    step: int
    saved: int
    errors: str

    @property
    def problem(self) -> str:
        """What is wrong with it, "" where nothing is."""
        starting, early = self.phase == "start", self.phase not in ("compiling", "loop")
        wanted = {130} if early else {0} if self.before else {0, 130}
        wanted |= {-signal.Signals[self.name]} if starting else set()
        if "Traceback" in self.errors and not starting:
            return "a traceback"
        if self.code not in wanted:
            return f"exit code {self.code}"
        if self.seconds - self.compile_s > LIMIT_S:
            return f"{self.seconds:.0f} s"
        if self.saved < self.step or (self.code == 0 and not self.saved):
            return f"step {self.step}, saved {self.saved}"
        return ""


def settings(num_processes: int) -> dict:
    """Return a config of a device a process; a step takes milliseconds, and the run outlives every signal."""
    return {
        "model": {"vocab_size": 257, "hidden_size": 16, "num_layers": 1, "num_heads": 1, "mlp_size": 16},
        "data": {"source": "tokens.npy", "validation_fraction": 0.0},
        "mesh": {"data": num_processes, "pipe": 1, "seq": 1},
        "sequence": {"length": 32, "chunks": 1},
        "train": {"steps": 1_000_000, "devices": f"cpu:{num_processes}"},
        "checkpoint": {"every_steps": 0},
    }


class Sweep:
    """Runs in folders of their own below a directory."""

    def __init__(self, directory: Path, *, python: str, num_processes: int):
        """Write what all runs share.

        Args:
            directory: an empty one.
            python: the interpreter.
            num_processes: of each run; more than one come from launch/local.sh.
        """
        self._directory, self._num_processes = directory, num_processes
        (directory / "hook").mkdir()
        (directory / "hook" / "sitecustomize.py").write_text(_HOOK)
        (directory / "tiny.yaml").write_text(yaml.safe_dump(settings(num_processes)))
        (directory / "sppo").write_text(f'#!/bin/sh\nexec {python} -m sppo_jax.cli "$@"\n')
        (directory / "sppo").chmod(0o755)
        np.save(directory / "tokens.npy", (np.arange(20000) % 250).astype(np.uint16))

    def end_of(self, number: int, at_s: float | None, step: int, tee: bool) -> End:
        """Start a run, signal it, and wait for its end.

        Args:
            number: of the run; decides on the signal.
            at_s: seconds from the start to the signal; None: the signal comes behind a step.
            step: that the signal comes behind.
            tee: whether output goes through tee.
        """
        folder, sent = self._directory / str(number), SIGNALS[number % len(SIGNALS)]
        folder.mkdir()
        start_s = time.monotonic()
        run, pipe = self._start(folder, tee)
        _wait(run, folder, start_s, at_s, step)
        phase, before, signal_s = _phase(folder), _last_step(folder), time.monotonic()
        if run.poll() is not None:
            raise RuntimeError(f"a run ended by itself: {_text(folder / 'errors')}{_text(folder / 'shown')[-2000:]}")
        os.killpg(run.pid, sent)
        compiled_s = _wait_for_end(run, folder, signal_s)
        seconds = time.monotonic() - signal_s
        if run.poll() is None:
            _kill(run)
        if pipe:
            pipe.wait()
        end = End(
            name=sent.name,
            tee=tee,
            at_s=signal_s - start_s,
            phase=phase,
            code=run.returncode,
            seconds=seconds,
            compile_s=compiled_s - signal_s if phase == "compiling" else 0.0,
            before=before,
            step=_last_step(folder),
            saved=max(checkpoint_steps(folder / "run" / "checkpoints"), default=0),
            errors=_text(folder / "errors") + _text(folder / "shown") * (self._num_processes > 1),
        )
        shutil.rmtree(folder)
        return end

    def _start(self, folder: Path, tee: bool) -> tuple[subprocess.Popen, subprocess.Popen | None]:
        """Start a run, and tee in its process group."""
        sppo, launcher = str(self._directory / "sppo"), [str(REPO / "launch" / "local.sh"), str(self._num_processes)]
        command = launcher if self._num_processes > 1 else [sppo, "train"]
        quiet = ("SPPO_", "SLURM_", "JAX_", "XLA_")
        env = {name: value for name, value in os.environ.items() if not name.startswith(quiet)}
        env |= {"PYTHONPATH": f"{self._directory / 'hook'}:{REPO}", "PHASE_FILE": str(folder / "phase"), "SPPO": sppo}
        env |= {"XDG_CACHE_HOME": str(folder / "cache"), "CUDA_VISIBLE_DEVICES": ""}
        with (folder / "errors").open("w") as errors, (folder / "shown").open("w") as shown:
            run = subprocess.Popen(
                [*command, str(self._directory / "tiny.yaml"), "--run-dir", str(folder / "run")],
                cwd=self._directory,
                env=env,
                stdout=subprocess.PIPE if tee else shown,
                stderr=errors,
                process_group=0,
            )
            if not tee:
                return run, None
            pipe = subprocess.Popen(["tee", folder / "log"], stdin=run.stdout, stdout=shown, process_group=run.pid)
            run.stdout.close()
            return run, pipe


def _wait(run: subprocess.Popen, folder: Path, start_s: float, at_s: float | None, step: int) -> None:
    """Return when the moment of the signal has come."""
    while run.poll() is None and time.monotonic() - start_s < (_PATIENCE_S if at_s is None else at_s):
        if _last_step(folder) >= (step if at_s is None else LAST_STEP):
            return
        time.sleep(0.005)


def _wait_for_end(run: subprocess.Popen, folder: Path, signal_s: float) -> float:
    """Return when a run has ended, or will not; gives the time until which it compiled."""
    compiled_s = signal_s
    while run.poll() is None and time.monotonic() - signal_s < _PATIENCE_S:
        if _phase(folder) == "compiling":
            compiled_s = time.monotonic()
        time.sleep(0.01)
    return compiled_s


def _kill(run: subprocess.Popen) -> None:
    """End a run that does not end; a launcher's processes are in groups of their own, and end with a second signal."""
    for _ in range(2):
        os.killpg(run.pid, signal.SIGTERM)
        time.sleep(1.0)
    os.killpg(run.pid, signal.SIGKILL)
    run.wait()


def _phase(folder: Path) -> str:
    return (_text(folder / "phase").split() or ["start"])[-1]


def _last_step(folder: Path) -> int:
    lines = [line for line in _text(folder / "run" / "metrics.jsonl").splitlines() if line.endswith("}")]
    return json.loads(lines[-1])["step"] if lines else 0


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def sweep(
    directory: Path,
    *,
    num_signals: int,
    num_processes: int,
    python: str = sys.executable,
    seed: int = 0,
    jobs: int = 1,
    say: Callable[[str], object] = lambda line: None,
) -> list[End]:
    """Signal so many runs.

    Args:
        directory: an empty one.
        num_signals: one a run.
        num_processes: of each run.
        python: the interpreter.
        seed: of the moments.
        jobs: runs at the same time.
        say: is told of each end.

    Returns:
        How each ended; a run that is signalled behind its first step comes first.
    """
    # What a shell or nohup starts in the background ignores SIGINT or SIGHUP, and so would the runs.
    before = [signal.getsignal(each) for each in SIGNALS]
    for each, handler in zip(SIGNALS, before, strict=True):
        signal.signal(each, signal.default_int_handler if handler is signal.SIG_IGN else handler)
    try:
        runs, draw = Sweep(directory, python=python, num_processes=num_processes), random.Random(seed)

        def run(number: int, at_s: float | None, step: int) -> End:
            end = runs.end_of(number, at_s, step, number % 2 == 1)
            say(f"{number:3}  {end.name:7} in {end.phase:9} exit code {end.code:3} {end.seconds:6.2f} s {end.problem}")
            return end

        first = run(0, None, 1)
        moments: list[tuple[int, float | None, int]] = []
        for number in range(1, num_signals):
            at_s = None if draw.random() < 0.25 else draw.uniform(FIRST_S, first.at_s)
            moments.append((number, at_s, draw.randrange(1, LAST_STEP + 1)))
        with ThreadPoolExecutor(jobs) as pool:
            return [first, *pool.map(lambda moment: run(*moment), moments)]
    finally:
        for each, handler in zip(SIGNALS, before, strict=True):
            signal.signal(each, handler)


def table(ends: list[End]) -> str:
    """Return a markdown table of the runs by phase."""
    head = ("phase", "signals", "through tee", "exit codes", "seconds to the end, median", "most", "wrong")
    rows = [head, ("---",) * len(head)]
    for phase in PHASES:
        its = [end for end in ends if end.phase == phase]
        if its:
            codes = sorted({end.code for end in its})
            counts = ", ".join(f"{code} ({sum(end.code == code for end in its)})" for code in codes)
            seconds = [end.seconds - end.compile_s for end in its]
            wrong = sum(bool(end.problem) for end in its)
            times = f"{statistics.median(seconds):.2f}", f"{max(seconds):.2f}"
            rows.append((phase, str(len(its)), str(sum(end.tee for end in its)), counts, *times, str(wrong)))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main() -> int:
    """Run it, print the table and what is wrong; returns 1 if anything is."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--signals", type=int, default=60)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        ends = sweep(
            Path(directory),
            num_signals=args.signals,
            num_processes=args.processes,
            python=args.python,
            seed=args.seed,
            say=lambda line: print(line, flush=True),
        )
    print(table(ends))
    wrong = [end for end in ends if end.problem]
    for end in wrong:
        print(f"{end.problem}: {end}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
