"""This project's side of the rounds of peer_trl.py: a run with a stopwatch, in a process of its own.

python -m bench.peer_trl_ours CONFIG.yaml RUN_DIR
"""

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from unittest import mock

from bench.loop import Stopwatch
from sppo_jax.config import load_config
from sppo_jax.search.make import make_plan
from sppo_jax.train.checkpoints.run_dir import claimed, write_run
from sppo_jax.train.loop import train
from sppo_jax.train.setup import begin, prepare


class Clocks(Stopwatch):
    """Notes seconds and CPU seconds when each batch is asked for; on a CPU the step before has ended by then."""

    def __init__(self, loader):
        super().__init__(loader)
        self.notes = []

    def note(self):
        self.notes.append((time.perf_counter(), time.process_time()))

    def __next__(self):
        self.note()
        return super().__next__()


def main(words: list[str]) -> None:
    config, run_dir = load_config(words[0]), Path(words[1])
    plan = make_plan(config)
    experiment = prepare(config, plan)
    clocks = Clocks(experiment.loader)
    experiment = replace(experiment, loader=clocks)
    # The report is drawn once a minute at most, so rounds of a few steps are timed without it.
    with claimed(run_dir), mock.patch("sppo_jax.train.metrics.record.write_report"):
        write_run(run_dir, config, plan)
        train(experiment, run_dir, begin(experiment, run_dir))
        clocks.note()
    # The first step does not count, as on TRL's side.
    steps = list(zip(clocks.notes[1:], clocks.notes[2:], strict=False))
    found = {"step_s": [b[0] - a[0] for a, b in steps], "step_cpu_s": [b[1] - a[1] for a, b in steps]}
    (run_dir / "result.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
