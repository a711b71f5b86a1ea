"""Tiny runs for the tests of training: a config, its documents, and a run of it in this process."""

import json
from dataclasses import replace

import numpy as np
from exactness import quick_options

from sppo_jax.config import config_from_dict
from sppo_jax.search.make import make_plan
from sppo_jax.train.checkpoints.run_dir import claimed, write_run
from sppo_jax.train.loop import train
from sppo_jax.train.setup import begin, prepare


def write_documents(path):
    """Writes twenty documents that count upwards from different starts; returns their path."""
    documents = [np.append((start + np.arange(70)) % 23 + 1, 0) for start in range(20)]
    np.save(path, np.concatenate(documents).astype(np.uint16))
    return str(path)


def make_config(source, **groups):
    """Returns a config of two pipelines of two stages; groups replace settings."""
    settings = {
        "model": {
            "vocab_size": 24,
            "hidden_size": 16,
            "num_layers": 4,
            "num_heads": 2,
            "mlp_size": 32,
            "init_scale": 0.2,
        },
        "data": {"source": source, "separator": 0, "validation_fraction": 0.2},
        "mesh": {"data": 2, "pipe": 2},
        "sequence": {"length": 64, "chunks": 4},
        "stash": {"inputs": "host", "attention": "host"},
        "optimizer": {"lr": 0.02, "warmup_steps": 2, "clip_norm": 0.5},
        "train": {"steps": 12, "devices": "cpu:4", "log_every": 4, "eval_every": 6, "eval_sequences": 3},
    }
    return config_from_dict({key: {**settings.get(key, {}), **groups.get(key, {})} for key in {**settings, **groups}})


def one_layer(**groups):
    """Returns groups for `make_config`: one device and one layer, which compile soon, and every step is logged."""
    small = {
        "model": {"num_layers": 1},
        "data": {"validation_fraction": 0.5},
        "mesh": {"data": 1, "pipe": 1},
        "sequence": {"chunks": 1, "per_pipeline": 2},
        "stash": {"inputs": "keep", "attention": "keep"},
        "train": {"steps": 10, "log_every": 1, "devices": "cpu:1"},
    }
    return {key: {**small.get(key, {}), **groups.get(key, {})} for key in {**small, **groups}}


def run(config, run_dir, change=lambda experiment: experiment):
    """Trains as `sppo train` does.

    Args:
        config: the settings.
        run_dir: where to.
        change: replaces parts of the experiment before it starts.

    Returns:
        The experiment and how it ended.
    """
    plan = make_plan(config)
    with claimed(run_dir):
        experiment = change(prepare(config, plan))
        start = begin(experiment, run_dir)
        write_run(run_dir, config, plan)
        return experiment, train(experiment, run_dir, start)


def quickly(experiment):
    """Compiles soon and runs slowly, for runs that need not agree bit for bit."""

    def value_and_grad(params, batch):
        return experiment.value_and_grad(params, batch)

    value_and_grad.compiler_options = quick_options()
    return replace(experiment, value_and_grad=value_and_grad)


def lines_of(run_dir, name="metrics"):
    """Returns the lines of metrics.jsonl, or of events.jsonl."""
    return [json.loads(line) for line in (run_dir / f"{name}.jsonl").read_text().splitlines()]


def losses_of(run_dir):
    """Returns each logged step's loss."""
    return {line["step"]: line["loss"] for line in lines_of(run_dir)}


def at_batch(number, act):
    """Returns a `change` for `run` that does something just before the batch of that number, from 1, is read."""

    class Acting:
        def __init__(self, loader):
            self._loader, self._count = loader, 0

        def __next__(self):
            self._count += 1
            if self._count == number:
                act()
            return next(self._loader)

        @property
        def rows(self):
            return self._loader.rows

        @property
        def state(self):
            return self._loader.state

        @state.setter
        def state(self, state):
            self._loader.state = state

    return lambda experiment: replace(experiment, loader=Acting(experiment.loader))
