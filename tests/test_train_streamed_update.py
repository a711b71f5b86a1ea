"""A state whose matrices wait on the host trains as the dense model does, clipped and skipped steps included."""

import sys
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exactness import quick_options, random_batch, relative_errors, small_model, small_plan
from flax import nnx
from jax.sharding import Mesh

from sppo_jax.config import CheckpointConfig, OptimizerConfig
from sppo_jax.models.dense import dense_value_and_grad
from sppo_jax.pipeline import api
from sppo_jax.pipeline.params import layout, storage
from sppo_jax.plan.plan import Plan
from sppo_jax.train import streamed_update
from sppo_jax.train.checkpoints import layer_order
from sppo_jax.train.checkpoints.read import restore_newest
from sppo_jax.train.checkpoints.save import Checkpoints
from sppo_jax.train.state import shardings_of, state_from, state_shapes
from sppo_jax.train.step import make_optimizer, make_schedule, make_train_step
from sppo_jax.train.watch.signals import Signals

pytestmark = pytest.mark.xdist_group("train_streamed_update")

NUM_STEPS, NOT_FINITE, LENGTH = 20, (4, 11), 32
CONFIG = OptimizerConfig(lr=0.02, warmup_steps=3, clip_norm=4.0, place="host")
# One device, and two pipelines of two stages.
MESHES = {"one": (1, 1, 1), "four": (2, 2, 1)}
MODEL, NUM_GROUPS = dict(num_layers=4, qkv_bias=True), 2


def plan_on(mesh, optimizer="host") -> Plan:
    sequences = 2 // mesh[0]
    order = dict(schedule="breadth-first", interleave=NUM_GROUPS, kv="rebuild", wave=sequences, sequences=sequences)
    places = dict(places=("host", "recompute", "recompute"), alpha=1.0)
    # Three parts of a share, or six, which do not divide it.
    return small_plan((12, 12, 8), mesh=mesh, **order, **places, weights="gathered", optimizer=optimizer)


def batches():
    """Returns a batch a step; two have a factor that makes loss and gradient no numbers."""
    rng = np.random.default_rng(3)
    found = [random_batch(rng, 2, LENGTH, 53) for _ in range(NUM_STEPS)]
    return [batch | {"factor": np.nan if step in NOT_FINITE else 1.0} for step, batch in enumerate(found)]


def with_factor(value_and_grad):
    def scaled(params, batch):
        loss, grads, *squares = value_and_grad(params, {key: batch[key] for key in batch if key != "factor"})
        return loss * batch["factor"], grads, *squares

    scaled.compiler_options = quick_options()
    return scaled


def optimizer_of(model):
    return make_optimizer(CONFIG, make_schedule(CONFIG, NUM_STEPS), nnx.state(model, nnx.Param))


def trained(step, state, signals, steps):
    outputs = []
    for batch in steps:
        state, metrics = step(state, batch, signals)
        outputs.append([float(metrics[name]) for name in ("loss", "grad_norm")])
    return state, np.array(outputs)


@lru_cache(maxsize=1)
def dense():
    """Returns the dense model's parameters and outputs after all steps."""
    model = small_model(**MODEL)
    params, mesh = nnx.state(model, nnx.Param), Mesh(np.array(jax.devices()[:1]), ("data",))
    params = jax.device_put(params, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
    optimizer = optimizer_of(model)
    shapes = state_shapes(optimizer, params, mesh)
    step = make_train_step(with_factor(dense_value_and_grad(model)), optimizer, shardings_of(shapes))
    state = state_from(jax.tree.map(jnp.copy, params), optimizer, shapes)
    state, outputs = trained(step, state, Signals(mesh).array(), batches())
    return jax.device_get(state), outputs


class Run:
    """A step on a mesh, and the shapes of its state."""

    def __init__(self, plan):
        model = small_model(**MODEL)
        self.mesh, self.params = layout.make_mesh(plan), nnx.state(model, nnx.Param)
        self.optimizer = optimizer_of(model)
        self.shapes, self.saved = (
            state_shapes(
                self.optimizer, storage.stored_shapes(plan, self.params, self.mesh, in_order=ordered), self.mesh
            )
            for ordered in (False, True)
        )
        value_and_grad = with_factor(api.value_and_grad(plan, model, self.mesh))
        self.step = make_train_step(value_and_grad, self.optimizer, shardings_of(self.shapes))
        self.signals = Signals(self.mesh).array()

    def first(self):
        # A step gives its state away.
        placed = storage.store(jax.tree.map(jnp.copy, self.params), self.shapes.params)
        return state_from(
            jax.tree.map(jax.device_put, placed, shardings_of(self.shapes).params), self.optimizer, self.shapes
        )

    def save(self, state, directory, saves="async"):
        running = self.shapes if saves == "blocking" else None
        checkpoints = Checkpoints(directory, CheckpointConfig(), self.saved, running=running)
        state, problem = checkpoints.save(state, {"config": {}, "plan": {}, "data": {}}, step=1)
        assert problem is None and checkpoints.close() is None
        return state

    def restored(self, directory):
        found = restore_newest(directory, self.saved, pytest.fail).state
        return layer_order.rearrange(found, self.shapes)


@lru_cache(maxsize=4)
def run_in_float64(name, optimizer):
    """Returns a run whose step is compiled once for all tests that train."""
    return Run(plan_on(MESHES[name], optimizer))


def in_order(state):
    """Returns parameters and moments as numpy arrays in the model's own shapes."""
    adam = state.opt_state[1][0]
    shapes = nnx.state(small_model(**MODEL), nnx.Param)
    return [
        jax.device_get(storage.store(tree, shapes)) for tree in map(jax.device_get, (state.params, adam.mu, adam.nu))
    ]


@pytest.mark.parametrize("name", [pytest.param("one", marks=pytest.mark.slow), "four"])
def test_twenty_steps_with_the_optimizer_on_the_host_are_those_of_the_dense_model(x64, name, monkeypatch):
    monkeypatch.setattr(streamed_update, "_SLICE_BYTES", 1000)
    run = run_in_float64(name, "host")
    state, outputs = trained(run.step, run.first(), run.signals, batches())
    want, want_outputs = dense()
    finite = [step for step in range(NUM_STEPS) if step not in NOT_FINITE]
    np.testing.assert_allclose(outputs[finite], want_outputs[finite], rtol=1e-9)
    assert np.isnan(outputs[list(NOT_FINITE), 0]).all() and int(state.num_skipped) == 2
    # Some steps are clipped and some are not.
    norms = want_outputs[finite, 1]
    assert (norms > CONFIG.clip_norm).sum() > 3 and (norms < CONFIG.clip_norm).sum() > 3
    for got, wanted in zip(in_order(state), in_order(want), strict=True):
        assert max(relative_errors(got, wanted).values()) < 1e-9
    assert int(state.opt_state[1][0].count) == int(want.opt_state[1][0].count) == NUM_STEPS - 2


@pytest.mark.slow
@pytest.mark.parametrize("case", ["a state", "lone layers of two shapes"])
def test_other_layers_train_too(case, x64, monkeypatch):
    module, wide = sys.modules[__name__], {"mlp_size": 9, "head_dim": 10}
    lone = case != "a state"
    layers = dict(layers="2x(wide,full)", layer_types={"wide": wide}) if lone else dict(layers="2x(delta,full)")
    monkeypatch.setattr(module, "MODEL", dict(num_layers=4) | layers)
    monkeypatch.setattr(module, "NUM_GROUPS", 4 if lone else 2)
    monkeypatch.setitem(MESHES, "seq", (1, 1, 2))
    for cached in (dense, run_in_float64):
        monkeypatch.setattr(module, cached.__name__, cached.__wrapped__)
    test_twenty_steps_with_the_optimizer_on_the_host_are_those_of_the_dense_model(x64, "seq", monkeypatch)


@pytest.mark.slow
def test_a_run_goes_on_where_the_optimizer_moved_to_the_device_and_back(x64, monkeypatch, tmp_path):
    """It takes the same steps as a run that stays, and to the last bit where it only stopped."""
    monkeypatch.setattr(streamed_update, "_SLICE_BYTES", 1000)
    host, device = (run_in_float64("four", place) for place in ("host", "device"))
    steps = batches()[:6]
    stayed, want = trained(host.step, host.first(), host.signals, steps)
    want_state = in_order(stayed)
    for number, (runs, rtol) in enumerate([((host, host, host), 0.0), ((host, device, host), 1e-9)]):
        state, outputs = runs[0].first(), []
        for leg, run in enumerate(runs):
            if leg:
                directory = tmp_path / f"{number} {leg}"
                runs[leg - 1].save(state, directory)
                state = run.restored(directory)
            state, found = trained(run.step, state, run.signals, steps[2 * leg : 2 * leg + 2])
            outputs += list(found)
        np.testing.assert_allclose(outputs, want, rtol=rtol)
        for got, wanted in zip(in_order(state), want_state, strict=True):
            assert max(relative_errors(got, wanted).values()) <= rtol


def random_state(run):
    """Returns a state of random numbers, placed as the run's."""
    rng = np.random.default_rng(5)
    state = state_from(run.first().params, run.optimizer, run.shapes)

    def draw(tree):
        drawn = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), run.params)
        return jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), storage.store(drawn, tree), tree)

    clipping, (adam, *others) = state.opt_state
    adam = adam._replace(mu=draw(adam.mu), nu=draw(adam.nu))
    return state._replace(opt_state=(clipping, (adam, *others)))


def kinds(tree):
    return {x.sharding.memory_kind for x in jax.tree.leaves(tree)}


def test_matrices_and_their_moments_are_on_the_host_and_vectors_are_not():
    state = random_state(Run(plan_on(MESHES["four"])))
    adam = state.opt_state[1][0]
    for tree in (state.params, adam.mu, adam.nu):
        flat = dict(nnx.to_flat_state(tree))
        away = {path for path, leaf in flat.items() if leaf[...].sharding.memory_kind == "pinned_host"}
        assert flat.keys() - away == {path for path in flat if {"scale", "bias"} & set(path) or "bias" in path[-1]}
    assert kinds((state.step, adam.count)) == {"device"}


@pytest.mark.slow
@pytest.mark.parametrize("saves", ["async", "blocking"])
def test_a_state_moves_between_meshes_and_between_host_and_device_bit_for_bit(tmp_path, saves):
    """Also the fingerprints are those of a state on the device, or it would not be restored."""
    runs = [
        Run(plan_on(MESHES["four"])),
        Run(plan_on((1, 1, 2), "device")),
        Run(plan_on((1, 1, 2))),
        Run(plan_on(MESHES["four"])),
    ]
    state = random_state(runs[0])
    want = in_order(state)
    for number, (run, following) in enumerate(zip(runs, runs[1:], strict=False)):
        given, kept = state, run.save(state, tmp_path / str(number), saves)
        jax.tree.map(np.testing.assert_array_equal, in_order(kept), want)
        assert jax.tree.map(lambda x: x.sharding, kept) == shardings_of(run.shapes)
        # A blocking save has no second array beside any that changes its place.
        moved = [old is not new for old, new in zip(jax.tree.leaves(given), jax.tree.leaves(kept), strict=True)]
        assert any(moved) == (saves == "blocking")
        assert [x.is_deleted() for x in jax.tree.leaves(given)] == moved
        state = following.restored(tmp_path / str(number))
        assert kinds(state.params) == kinds(following.first().params)
        jax.tree.map(np.testing.assert_array_equal, in_order(state), want)


def test_what_is_saved_is_a_copy(tmp_path):
    """The next step writes to the buffers of the state while the save goes on."""
    run = Run(plan_on(MESHES["one"]))
    state = run.first()
    copied = layer_order.in_order(state, run.saved)
    for leaf in jax.tree.leaves(state.params):
        if leaf.sharding.memory_kind == "pinned_host":
            leaf.delete()
    assert np.isfinite(copied.params["embedding"].get_value()).all()


@pytest.mark.parametrize(
    ("shape", "itemsize", "want"),
    [
        ((32, 1, 1, 4096, 14336), 4, (128, 1024)),  # 56 MiB a slice
        ((128256, 4096), 4, (32, 4008)),
        ((1, 1, 1, 3, 5), 4, (3, 1)),  # fewer rows than slices
        ((7919, 4096), 4, (7919, 1)),  # a prime
    ],
)
def test_a_parameter_is_updated_in_slices_of_few_bytes(shape, itemsize, want):
    assert streamed_update.slices_of(shape, itemsize) == want


def test_gradients_of_such_a_plan_need_parameters_on_the_host():
    model = small_model(**MODEL)
    (batch, *_), params = batches(), nnx.state(model, nnx.Param)
    with pytest.raises(ValueError, match="must get parameters in host memory, got parameters in device memory; put"):
        api.value_and_grad(plan_on(MESHES["one"]), model)(params, batch)
