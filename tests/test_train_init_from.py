"""A run from another run's weights: the same model at another length, on another mesh, with or without its moments."""

import json

import chex
import jax
import numpy as np
import optax
import pytest
from flax import nnx
from tiny_runs import losses_of, make_config, quickly, run, write_documents

from sppo_jax.config import ConfigError
from sppo_jax.search.make import make_plan
from sppo_jax.train.checkpoints.read import read_run
from sppo_jax.train.setup import begin, prepare

pytestmark = [pytest.mark.xdist_group("init_from"), pytest.mark.usefixtures("compiled_once")]
SHORT = {"train": {"steps": 3, "eval_every": 0, "eval_sequences": 0, "log_every": 1}}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Documents, and a run of three steps of a model without a gate."""
    place = tmp_path_factory.mktemp("source")
    documents = write_documents(place / "documents.npy")
    run(make_config(documents, **SHORT, model={"mlp": "gelu"}), place / "run", quickly)
    return place, documents


def begun(source, place, **train):
    """Returns the first state of a run at twice the length on another mesh, and what its first event says."""
    _, documents = source
    longer = {"mesh": {"data": 1, "pipe": 2, "seq": 2}, "sequence": {"length": 128, "chunks": 4}}
    groups = {"model": {"mlp": "gelu"}, **longer, "train": {**SHORT["train"], **train}}
    experiment = prepare(make_config(documents, **groups), make_plan(make_config(documents, **groups)))
    start = begin(experiment, place)
    return start.state, start.events[0][1]


def arrays(tree):
    """Returns values by name, without the zeros that a mesh adds (there are none at these sizes)."""
    return jax.tree.map(np.asarray, nnx.to_pure_dict(tree))


def test_weights_alone_start_a_run_of_another_length(source, tmp_path, monkeypatch):
    place, _ = source
    monkeypatch.setenv("RUNS", str(place))
    state, told = begun(source, tmp_path, init=str(place / "run"))
    same, _ = begun(source, tmp_path, init="$RUNS/run/checkpoints/3", init_optimizer=True)
    chex.assert_trees_all_equal(arrays(state.params), arrays(same.params))
    drawn, _ = begun(source, tmp_path)
    assert not np.array_equal(state.params["embedding"].get_value(), drawn.params["embedding"].get_value())
    assert told == f"starts in {tmp_path} from the weights in {place / 'run' / 'checkpoints' / '3'}"
    moments = jax.tree.leaves(state.opt_state)
    assert int(state.step) == 0 and not any(np.asarray(leaf).any() for leaf in moments)


def test_moments_come_with_their_count_and_the_learning_rate_starts_over(source, tmp_path, monkeypatch):
    monkeypatch.chdir(source[0])  # a path without a root begins where the command runs
    state, told = begun(source, tmp_path, init="run", init_optimizer=True)
    assert "from the weights and moments in run/checkpoints/3" in told
    kinds = (optax.ScaleByAdamState, optax.ScaleByScheduleState)
    nodes = jax.tree.leaves(state.opt_state, is_leaf=lambda node: isinstance(node, kinds))
    adam, schedule = (next(node for node in nodes if isinstance(node, kind)) for kind in kinds)
    assert (int(adam.count), int(schedule.count), int(state.step)) == (3, 0, 0)
    assert all(np.asarray(leaf).any() for leaf in jax.tree.leaves(adam.mu["layers"]))


def test_a_run_that_began_elsewhere_goes_on_with_its_own_checkpoint(source, tmp_path):
    place, documents = source
    config = make_config(documents, **{**SHORT, "train": {**SHORT["train"], "init": str(place / "run")}})
    with pytest.raises(ValueError, match="another checkpoint"):
        run(config, tmp_path / "swiglu", quickly)
    config = make_config(documents, model={"mlp": "gelu"}, train={**SHORT["train"], "init": str(place / "run")})
    run(config, tmp_path / "run", quickly)
    assert losses_of(tmp_path / "run")[1] < losses_of(place / "run")[1]
    assert read_run(tmp_path / "run" / "checkpoints" / "3")["config"]["train"]["init"] == str(place / "run")
    experiment = prepare(config, make_plan(config))
    assert begin(experiment, tmp_path / "run").step == 3


@pytest.mark.parametrize("init_optimizer", [False, True])
@pytest.mark.parametrize("wrong", ["missing", "torn", "another shape"])
def test_what_cannot_be_read_is_one_line(source, tmp_path, wrong, init_optimizer, monkeypatch):
    place, documents = source
    model = {"mlp": "gelu"} | ({"mlp_size": 48} if wrong == "another shape" else {})
    name = "nowhere" if wrong == "missing" else "run"
    train = {**SHORT["train"], "init": str(place / name), "init_optimizer": init_optimizer}
    config = make_config(documents, model=model, train=train)
    if wrong == "torn":
        changed = read_run(place / "run/checkpoints/3")
        changed["fingerprints"]["params/embedding"] ^= 1
        monkeypatch.setattr("sppo_jax.train.checkpoints.read.parse_json", lambda _: json.loads(json.dumps(changed)))
    with pytest.raises(ValueError, match="give another path|use another checkpoint"):
        begin(prepare(config, make_plan(config)), tmp_path)


def test_moments_need_a_run():
    with pytest.raises(ConfigError, match="must have train.init, got null"):
        make_config("documents.npy", train={"init_optimizer": True})
    with pytest.raises(ConfigError, match="train.init must be a path on this machine, got the address gs://b/run"):
        make_config("documents.npy", train={"init": "gs://b/run"})
