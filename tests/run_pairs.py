"""Runs that combine what runs can do, from one generator: every two features that no rule keeps apart meet in a run.

A run is real commands in processes of their own: it trains, goes on, is evaluated, exported, and asked for a gradient.
Its losses are those of a run of one process and one device without any of the features.
"""

import random
from itertools import combinations

FEATURES = (
    "import",
    "resume",
    "export",
    "eval",
    "value_and_grad",
    "two processes",
    "flex",
    "waves",
    "host optimizer",
    "breadth-first",
    "blocking saves",
    "experts",
    "kinds",
    "states",
)
# A feature that another one needs beside it, by the rule that says so.
NEEDS = {
    ("host optimizer", "breadth-first"): "optimizer.place=host must have schedule.name=breadth-first",
    ("host optimizer", "waves"): "optimizer.place=host must have all 2 sequences of a pipeline in one wave",
}
# Features that no run has together, by the rule that says so.
APART = {
    ("flex", "states"): "a model with layers that have a state must have sequence.groups=static",
    # A hybrid has two layer types already, and no family has a third.
    ("kinds", "states"): "a Hugging Face model must have layer types that a family has",
}
_MOST = 6


def closed(features: frozenset[str]) -> frozenset[str]:
    """Returns features with all that they need."""
    return features | {needed for (feature, needed) in NEEDS if feature in features}


def can_meet(features: frozenset[str]) -> bool:
    """Returns whether no rule keeps two of the features apart."""
    return not any(set(pair) <= features for pair in APART)


def runs(seed: int = 0) -> list[frozenset[str]]:
    """Returns sets of features, few of them, in which every two features meet.

    Each set takes the features that meet most others for the first time, in an order that the seed draws.
    """
    draws, found = random.Random(seed), []
    left = {pair for pair in map(frozenset, combinations(FEATURES, 2)) if can_meet(pair)}
    while left:
        chosen = closed(min(left, key=sorted))
        order = sorted(FEATURES)
        draws.shuffle(order)
        while len(chosen) < _MOST:
            possible = [name for name in order if name not in chosen and can_meet(closed(chosen | {name}))]
            gains = {name: _num_met(closed(chosen | {name}), left) - _num_met(chosen, left) for name in possible}
            best = max(possible, key=lambda name: gains[name])
            if not gains[best]:
                break
            chosen = closed(chosen | {best})
        left -= {frozenset(pair) for pair in combinations(chosen, 2)}
        found.append(chosen)
    return found


def _num_met(features: frozenset[str], left: set[frozenset[str]]) -> int:
    return sum(pair <= features for pair in left)


def settings_of(features: frozenset[str]) -> list[str]:
    """Returns the overrides of a run with these features; four sequences a step in every run."""
    pipelines, seq = (1, 2) if "flex" in features else (2, 1)
    per_pipeline = 4 // pipelines
    words = [f"mesh.data={pipelines}", "mesh.pipe=2", f"mesh.seq={seq}", f"sequence.per_pipeline={per_pipeline}"]
    # A plan that does not fit, as with one byte on the host, would have sums in bfloat16.
    words += ["sequence.chunks=2", "train.devices=cpu:4", "stash.kv_grad_dtype=float32"]
    words += ["sequence.groups=flex"] if "flex" in features else ["sequence.groups=static"]
    words += ["schedule.name=breadth-first", "schedule.interleave=2"] if "breadth-first" in features else []
    words += [f"schedule.wave={per_pipeline}"] if "waves" in features else ["schedule.wave=1"]
    words += ["optimizer.place=host"] if "host optimizer" in features else ["optimizer.place=device"]
    if "blocking saves" in features:
        # Host memory for what waits there, and none for a copy beside.
        words += [f"hardware.host_bytes={240_000 if 'host optimizer' in features else 1}"]
    return words


ALONE = ["mesh.data=1", "mesh.pipe=1", "mesh.seq=1", "sequence.per_pipeline=4", "sequence.chunks=1"]
ALONE += ["train.devices=cpu:1", "schedule.wave=1"]
