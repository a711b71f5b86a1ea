"""Every two features of a run in one run, with the losses of a plain run; real commands in processes of their own."""

import json
import os
import re
import subprocess
import sys
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import yaml
from distributed_cases import REPO, environment
from hf_folders import SMALL, write_folder
from run_pairs import ALONE, APART, FEATURES, NEEDS, can_meet, closed, runs, settings_of

from sppo_jax.config import ModelConfig, config_from_dict
from sppo_jax.config.to_hf import shape_to_hf
from sppo_jax.search.make import make_plan

RUNS = runs()
EXPERTS = dict(qkv_bias=False, qk_norm=True, mlp_size=None, experts=dict(count=4, chosen=2, size=12, balance=0.05))
# Every second layer has a window, or an MLP among layers with experts.
WINDOWS = dict(num_layers=8, layers="4x(local,full)", layer_types={"local": {"sliding_window": 12}})
DENSE = dict(num_layers=8, layers="4x(dense,full)", layer_types={"dense": {"experts": {"count": 0}}}, mlp_size=24)
# Every second layer has the gated delta rule. It divides by the length of a key: of 4 elements, some are so short that
# a gradient of the third step is 1e-3 off where parameters are 1e-7 off.
STATES = dict(num_layers=8, layers="4x(delta,full)", delta={"key_size": 16, "value_size": 4})
STATES |= dict(qkv_bias=False, qk_norm=True, unit_norm=True, output_gate=True)
SHARED = dict(EXPERTS["experts"], shared_size=8, shared_gate=True)
pytestmark = pytest.mark.xdist_group("run_pairs")
SETTINGS = {
    "data": {"source": "documents.npy", "separator": 0, "validation_fraction": 0.2},
    "sequence": {"length": 64},
    # A large eps: AdamW would divide gradients that are zero but for rounding by their own size.
    "optimizer": {"lr": 0.01, "eps": 1e-3, "warmup_steps": 0, "min_lr_ratio": 1.0},
    "train": {"steps": 3, "eval_sequences": 4},
}
GRADIENT = """
import sys
from pathlib import Path
from sppo_jax.processes import distributed
from sppo_jax.processes.environment import simulate_devices
from sppo_jax.config import load_config
from sppo_jax.search.make import make_plan
config = load_config(sys.argv[1], sys.argv[2:])
simulate_devices(distributed.local_devices(4))
distributed.start(config)
from sppo_jax.evaluation.placement import place_batch
from sppo_jax.train.setup import begin, prepare
experiment = prepare(config, make_plan(config, distributed.cluster(config)))
start = begin(experiment, Path("not-there"))
batch = place_batch(next(experiment.loader), experiment.plan, experiment.mesh)
loss, *_ = experiment.value_and_grad(start.state.params, batch)
print("loss", float(loss))
"""
EXPORTED = """
import sys
from pathlib import Path
import jax, numpy as np
from flax import nnx
from sppo_jax.models.hf.read import from_hf
from sppo_jax.train.checkpoints.read import find_checkpoint, load_params
model = from_hf(sys.argv[1], dtype="float32")
wanted = nnx.state(model, nnx.Param)
saved = load_params(find_checkpoint(Path(sys.argv[2])), wanted)
jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), wanted, saved)
"""


def test_every_two_features_meet_in_a_run():
    met = {frozenset(pair) for features in RUNS for pair in combinations(features, 2)}
    assert met == {frozenset(pair) for pair in combinations(FEATURES, 2)} - set(map(frozenset, APART))
    assert all(closed(features) == features and can_meet(features) for features in RUNS) and len(RUNS) <= 9


BROKEN = {
    ("host optimizer", "breadth-first"): ["schedule.name=sppo", "schedule.wave=2"],
    ("host optimizer", "waves"): ["schedule.name=breadth-first", "schedule.interleave=2", "schedule.wave=1"],
}


@pytest.mark.parametrize(("pair", "rule"), NEEDS.items(), ids=str)
def test_a_feature_without_the_one_it_needs_is_refused_by_the_rule(pair, rule):
    model = {**SMALL, "num_layers": 4}
    words = ["mesh.data=2", "mesh.pipe=2", "mesh.seq=1", "sequence.per_pipeline=2", "sequence.chunks=2"]
    words += ["train.devices=cpu:4", "optimizer.place=host", *BROKEN[pair]]
    with pytest.raises(ValueError, match=re.escape(rule)):
        make_plan(config_from_dict({**SETTINGS, "model": model}, words))


def test_states_and_flexible_teams_are_kept_apart_by_the_rule():
    settings = {**SETTINGS, "model": {**SMALL, **STATES}}
    words = ["mesh.data=1", "mesh.pipe=2", "mesh.seq=2", "sequence.groups=flex", "train.devices=cpu:4"]
    with pytest.raises(ValueError, match=re.escape(APART["flex", "states"])):
        make_plan(config_from_dict(settings, words))


def test_states_and_another_kind_are_kept_apart_by_the_rule():
    kinds = {"layers": "4x(delta,local)", "layer_types": WINDOWS["layer_types"]}
    with pytest.raises(ValueError, match=re.escape(APART["kinds", "states"])):
        shape_to_hf(ModelConfig(**SMALL | STATES | kinds), like={}, length=0, dtype="float32")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Documents, a folder of Hugging Face's, a config for each kind of model, and their plain runs."""
    place = tmp_path_factory.mktemp("pairs")
    documents = [np.append((start + np.arange(30 + 7 * (start % 5))) % 23 + 1, 0) for start in range(60)]
    np.save(place / "documents.npy", np.concatenate(documents).astype(np.uint16))
    shapes = {"": {"num_layers": 4}, "-experts": {"num_layers": 4, **EXPERTS}}
    shapes |= {"-kinds": WINDOWS, "-experts-kinds": EXPERTS | DENSE}
    shapes |= {"-states": STATES, "-experts-states": EXPERTS | STATES | {"experts": SHARED}}
    for name, shape in shapes.items():
        write_folder(place / f"hf{name}", **shape)
        for origin, model in {"own": {**SMALL, "init_scale": 0.2, **shape}, "import": f"hf:hf{name}"}.items():
            (place / f"{origin}{name}.yaml").write_text(yaml.safe_dump({**SETTINGS, "model": model}))
    (place / "gradient.py").write_text(GRADIENT)
    (place / "exported.py").write_text(EXPORTED)
    return place


def call(place, *words, processes=1):
    """Runs a command as so many processes; returns its output."""
    words = [str(word) for word in words]
    if processes > 1:
        words = [str(REPO / "launch/local.sh"), str(processes), "--", *words]
    # What one command compiles, the next one of the same run need not.
    cache = dict(JAX_COMPILATION_CACHE_DIR=place / "compiled", JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0)
    environ = environment(JAX_PLATFORMS="cpu", **cache)
    done = subprocess.run(words, cwd=place, env=environ, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


SPPO = (sys.executable, "-m", "sppo_jax.cli")


def rows_of(run_dir: Path):
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row for row in rows}


@pytest.fixture(scope="module")
def plain(place):
    """Returns the metrics of the plain run of a config; each is run once."""
    found = {}

    def get(name):
        if name not in found:
            call(place, *SPPO, "train", f"{name}.yaml", "--run-dir", f"plain-{name}", *ALONE)
            found[name] = rows_of(place / f"plain-{name}")
        return found[name]

    return get


def label(features):
    return "+".join(sorted(features)).replace(" ", "-")


@pytest.mark.slow
@pytest.mark.parametrize("features", [pytest.param(each, id=label(each)) for each in RUNS])
def test_a_run_with_features_has_the_losses_of_a_plain_run(place, plain, features):
    name, run_dir = "import" if "import" in features else "own", label(features)
    name += "".join(f"-{each}" for each in ("experts", "kinds", "states") if each in features)
    processes, words = (2 if "two processes" in features else 1), settings_of(features)
    config = f"{name}.yaml"
    want = plain(name)
    train = (*SPPO, "train", config, "--run-dir", run_dir, *words)
    if "value_and_grad" in features:
        out = call(place, sys.executable, "gradient.py", config, *words, processes=processes)
        (loss,) = {line.split()[-1] for line in out.splitlines() if "loss" in line}
        np.testing.assert_allclose(float(loss), want[1]["loss"], rtol=1e-5)
    if "resume" in features:
        call(place, *train, "train.steps=2", processes=processes)
    out = call(place, *train, processes=processes)
    assert ("resumes from" in out) == ("resume" in features)
    got = rows_of(place / run_dir)
    for key in ("loss", "grad_norm"):
        np.testing.assert_allclose([got[k][key] for k in (1, 2, 3)], [want[k][key] for k in (1, 2, 3)], rtol=2e-5)
    plan = json.loads((place / run_dir / "plan.json").read_text())
    assert (plan["optimizer"] == "host", plan["groups"] == "flex", plan["saves"] == "blocking") == tuple(
        feature in features for feature in ("host optimizer", "flex", "blocking saves")
    )
    if "eval" in features:
        entry = json.loads(call(place, *SPPO, "eval", run_dir, "--json"))
        np.testing.assert_allclose(entry["validation_loss"], want[3]["validation_loss"], rtol=2e-5)
    if "export" in features:
        call(place, *SPPO, "convert", "to-hf", run_dir, f"{run_dir}-hf")
        call(place, sys.executable, "exported.py", f"{run_dir}-hf", run_dir)


def test_this_checkout_is_tested():
    assert Path(os.path.dirname(__file__)).parent == REPO
