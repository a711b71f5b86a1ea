"""Training with teams: the same losses as without, stops anywhere, and no device that waits for another one."""

import functools
import json
import os
import signal

import numpy as np
import pytest
from distributed_cases import finish, start_processes
from tiny_runs import at_batch, losses_of, make_config, run

from sppo_jax.data.rows import flex
from sppo_jax.flex import cells
from sppo_jax.flex.baselines import per_batch
from sppo_jax.search.make import make_plan
from sppo_jax.train.setup import prepare

pytestmark = [pytest.mark.xdist_group("train_teams"), pytest.mark.usefixtures("compiled_once")]

STEPS = 20
SETTINGS = {
    "mesh": {"data": 1, "pipe": 2, "seq": 4},
    "sequence": {"length": 64, "chunks": 2, "per_pipeline": 2, "split": "ring", "groups": "flex"},
    "stash": {"inputs": "keep", "attention": "recompute"},
    "train": {"steps": STEPS, "devices": "cpu:8", "log_every": 1, "eval_every": STEPS, "eval_sequences": 2},
}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Writes many short documents and a few long ones."""
    rng = np.random.default_rng(0)
    sizes = np.where(rng.random(120) < 0.1, rng.integers(30, 60, 120), rng.integers(2, 12, 120))
    documents = [np.append((start + np.arange(size)) % 23 + 1, 0) for start, size in enumerate(sizes)]
    path = tmp_path_factory.mktemp("data") / "tokens.npy"
    np.save(path, np.concatenate(documents).astype(np.uint16))
    return str(path)


def in_teams(pieces, shape):
    """Places documents in teams even where the planner, on simulated CPUs, would leave the rows as they are."""
    found = cells.candidates(pieces, shape)
    return min((found[name] for name in found if name != cells.TODAY), key=lambda placement: placement.cost)


@pytest.fixture(scope="module")
def losses(source, tmp_path_factory):
    """Returns the losses of the same steps by the name of the way in which documents are placed."""
    ways = {"packed": cells.today, "per_batch": per_batch, "flex": in_teams}

    @functools.cache
    def found(name):
        run_dir = tmp_path_factory.mktemp("run") / name
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(flex, "plan_cells", ways[name])
            experiment, _ = run(make_config(source, **SETTINGS), run_dir)
        rows = experiment.loader._rows
        # A fifth of the windows at least has documents in teams of several sizes, or the test shows nothing.
        degrees = [set(rows.placement(number).degree.tolist()) for number in range(STEPS)]
        assert name != "flex" or sum(len(each) > 1 for each in degrees) >= STEPS // 5, degrees
        return losses_of(run_dir)

    return found


@pytest.mark.slow
def test_every_way_to_place_documents_learns_the_same(losses):
    assert len(losses("packed")) == STEPS
    for name in ("per_batch", "flex"):
        for step, loss in losses("packed").items():
            assert losses(name)[step] == pytest.approx(loss, rel=1e-5), (name, step)


@pytest.mark.slow
def test_a_stopped_run_with_teams_goes_on_bit_for_bit(losses, source, tmp_path, monkeypatch):
    monkeypatch.setattr(flex, "plan_cells", in_teams)
    config = make_config(source, **SETTINGS)
    _, result = run(config, tmp_path, at_batch(7, lambda: os.kill(os.getpid(), signal.SIGTERM)))
    assert result.stopped_by == "SIGTERM" and result.step < STEPS
    run(config, tmp_path)
    assert losses_of(tmp_path) == losses("flex")


def test_auto_says_what_it_chose(source, monkeypatch):
    config = make_config(source, **SETTINGS | {"sequence": SETTINGS["sequence"] | {"groups": "auto"}})
    plan = make_plan(config)
    assert plan.groups == "static" and "sppo train chooses" in plan.reasons["groups"]
    chosen = prepare(config, plan).plan
    assert chosen.groups in ("static", "flex") and "simulated on the first documents" in chosen.reasons["groups"]
    monkeypatch.setattr("sppo_jax.train.setup.gain", lambda windows, shape: 1.5)
    chosen = prepare(config, plan).plan
    assert chosen.groups == "flex" and chosen.reasons["groups"].startswith("flex: static takes 1.500 of the time")


def test_auto_moves_no_document_whose_sequence_has_a_loss_of_its_own(source, monkeypatch):
    """Teams would need another schedule; the loss stays the same function."""
    monkeypatch.setattr("sppo_jax.train.setup.gain", lambda windows, shape: 1.5)
    sequence = SETTINGS["sequence"] | {"groups": "auto"}
    experts = {"count": 4, "chosen": 2, "size": 8}
    chosen = {}
    for wave in (1, 2):
        schedule = {"wave": wave, "name": "seq1f1b"}
        config = make_config(
            source, **SETTINGS | {"sequence": sequence, "schedule": schedule, "model": {"experts": experts}}
        )
        chosen[wave] = prepare(config, make_plan(config)).plan
    assert chosen[1].groups == "static" and "must have all forwards of a step" in chosen[1].reasons["groups"]
    assert chosen[2].groups == "flex"


# One pipeline has short documents alone and the other one a long one, in turns: were the trip counts of a pipeline its
# own, devices would wait for each other.
UNLIKE = """
import jax
import numpy as np
from exactness import dense_step, quick_options, relative_errors, small_model, small_plan
from flax import nnx
from team_cases import row, with_tokens
from jax.sharding import NamedSharding, PartitionSpec
from sppo_jax.pipeline.api import value_and_grad
from sppo_jax.pipeline.params.layout import make_mesh
from sppo_jax.evaluation.placement import local_rows, place_batch

mesh_shape, steps = json.loads(sys.argv[1]), int(sys.argv[2])
plan = small_plan((16, 16), mesh=tuple(mesh_shape), kind="ring", groups="flex")
model = small_model(vocab_size=20, dtype="float32")
mesh = make_mesh(plan)
whole = NamedSharding(mesh, PartitionSpec())
params = jax.tree.map(
    lambda x: jax.make_array_from_callback(x.shape, whole, lambda i: np.asarray(x)[i]), nnx.state(model, nnx.Param)
)
step = jax.jit(value_and_grad(plan, model, mesh), out_shardings=whole, compiler_options=quick_options())
rng, losses = np.random.default_rng(0), []
for number in range(steps):
    long = np.zeros(32, int), np.arange(32)
    short = row(rng, plan, (False, False))
    batch = with_tokens(rng, [long, short] if number % 2 else [short, long], 20)
    rows = local_rows(mesh, 2)
    loss, grads = step(params, place_batch({key: x[rows] for key, x in batch.items()}, plan, mesh))
    losses.append(float(loss))
if jax.process_count() == 1:
    want_loss, want = dense_step(model)(nnx.state(model, nnx.Param), batch)
    assert abs(losses[-1] - want_loss) < 1e-4 * want_loss, (losses[-1], want_loss)
    assert max(relative_errors(grads, want).values()) < 1e-4, relative_errors(grads, want)
print(json.dumps(losses))
"""


def losses_of_processes(num_processes, num_devices, mesh, steps):
    code = f"join({num_devices})\n" + UNLIKE
    results = finish(start_processes(code, num_processes, json.dumps(mesh), steps, PJRT_NPROC=64), 400)
    assert [status for status, _, _ in results] == [0] * num_processes, results
    return [json.loads(out.splitlines()[-1]) for _, out, _ in results]


@pytest.mark.slow
def test_pipelines_with_unlike_documents_never_wait_for_each_other():
    (alone,) = losses_of_processes(1, 8, (2, 2, 2), 50)
    first, second = losses_of_processes(2, 8, (2, 2, 2), 50)
    assert len(alone) == 50 and first == second
    assert first == pytest.approx(alone, rel=1e-6)


@pytest.mark.slow
def test_sixteen_devices_with_unlike_documents_never_wait_for_each_other():
    (losses,) = losses_of_processes(1, 16, (2, 2, 4), 50)
    assert len(losses) == 50 and np.isfinite(losses).all()
