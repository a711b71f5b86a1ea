"""What is saved is finite: whatever the settings, a step either leaves a finite state or none at all."""

import itertools
import json
from functools import lru_cache
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from exactness import quick_jit
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxprs import walk
from tiny_runs import lines_of, make_config, quickly, run, write_documents

from sppo_jax.compat import in_host_memory, to_host
from sppo_jax.config import OptimizerConfig
from sppo_jax.config.section import ConfigError
from sppo_jax.models.moe.router import Shares
from sppo_jax.pipeline.layers.token_sums import Totals
from sppo_jax.train import expert_load
from sppo_jax.train import step as step_module
from sppo_jax.train.checkpoints.read import checkpoint_steps
from sppo_jax.train.finite import are_finite, is_bounded
from sppo_jax.train.loop import RunFailed
from sppo_jax.train.state import shardings_of, state_from, state_shapes
from sppo_jax.train.step import make_optimizer, make_schedule, make_train_step

MESH = Mesh(np.array(jax.devices()[:1]), ("data",))
SHAPES = {"matrix": (32, 4), "vector": (4,)}
# What a gradient's elements may be: zeros, those whose squares vanish, and those that nearly overflow.
SIZES = (0.0, 1e-30, 1.0, 1e18)
VALUES = {
    "lr": (0.0, 1e-3, 1e-2, 1e20, 1e30),
    "weight_decay": (0.0, 0.1, 1.0, 1e10, 1e30),
    "b1": (0.0, 0.9, 0.999999),
    "b2": (0.0, 0.95, 0.999999),
    "eps": (1.2e-38, 1e-30, 1e-8, 1e-6, 1.0),
    "clip_norm": (1e-30, 1.0, 1e30),
}
NUM_DRAWN = 40


def drawn(number):
    """Draws settings of the optimizer, and a gradient's size."""
    rng = np.random.default_rng(number)
    settings = {name: float(rng.choice(values)) for name, values in VALUES.items()}
    return OptimizerConfig(**settings), float(rng.choice(SIZES))


def shardings(of_host):
    whole = NamedSharding(MESH, PartitionSpec())
    return nnx.State({"matrix": nnx.Param(in_host_memory(whole) if of_host else whole), "vector": nnx.Param(whole)})


def first_params():
    return nnx.State({name: nnx.Param(jnp.ones(shape)) for name, shape in SHAPES.items()})


def value_and_grad(of_host):
    """Returns `f(params, batch)` whose gradient's elements are the batch's `x`, its negative, or zero."""

    def f(params, batch):
        def grad(x):
            number = jnp.arange(x.size).reshape(x.shape)
            found = jnp.where(number % 5 == 0, 0, jnp.where(number % 3 == 0, -1, 1)) * batch["x"]
            return to_host(found) if of_host and x.ndim > 1 else found

        squares = [x.size * jnp.square(batch["x"]) for x in jax.tree.leaves(params)[:1] if of_host]
        return jnp.float32(1.0), jax.tree.map(grad, params), *squares

    return f


def shapes_and_step(optimizer, of_host):
    def placed(x, sharding):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    params = jax.tree.map(placed, first_params(), shardings(of_host))
    shapes = state_shapes(optimizer, params, MESH)
    return shapes, make_train_step(value_and_grad(of_host), optimizer, shardings_of(shapes))


@lru_cache(maxsize=2)
def step_of_any_settings(of_host):
    """Compiles one step that takes the settings as numbers, and looks at every update."""

    def run(settings, state, batch):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(step_module, "is_bounded", lambda _: False)
            optimizer = make_optimizer(
                SimpleNamespace(**settings, decay_embeddings=True), lambda _: settings["lr"], first_params()
            )
        return shapes_and_step(optimizer, of_host)[1](state, batch, jnp.zeros(1, jnp.int32))

    return quick_jit(run)


def arrays(state):
    return [np.array(jax.device_get(x)) for x in jax.tree.leaves((state.params, state.opt_state))]


@pytest.mark.parametrize("of_host", [False, True], ids=["device", "host"])
def test_drawn_settings_leave_a_finite_state(of_host):
    """Each of three steps is taken as the optimizer takes it, or not at all and counted."""
    step, num_skipped, num_taken = step_of_any_settings(of_host), 0, 0
    optimizer = make_optimizer(OptimizerConfig(), make_schedule(OptimizerConfig(), 10), first_params())
    params = jax.tree.map(jax.device_put, first_params(), shardings(of_host))
    first = state_from(params, optimizer, shapes_and_step(optimizer, of_host)[0])
    for number in range(NUM_DRAWN):
        config, size = drawn(number)
        settings = {name: jnp.float32(getattr(config, name)) for name in VALUES}
        state = first
        for _ in range(3):
            before, skipped = arrays(state), int(state.num_skipped)
            batch = {"x": jnp.float32(size), "targets": jnp.zeros((1, 1), jnp.int32)}
            state, metrics = step(settings, state, batch)
            after = arrays(state)
            assert all(np.isfinite(x).all() for x in after), config
            is_skipped = int(state.num_skipped) > skipped
            assert is_skipped == all(map(np.array_equal, before, after)) == bool(metrics["is_bad_update"]), config
            assert not (is_skipped and is_bounded(config)), config
            num_skipped, num_taken = num_skipped + is_skipped, num_taken + (not is_skipped)
    assert min(num_skipped, num_taken) > NUM_DRAWN // 2
    assert 3 < sum(is_bounded(drawn(number)[0]) for number in range(NUM_DRAWN)) < NUM_DRAWN - 3


def test_usual_settings_are_bounded_and_cost_nothing():
    for lr, b1, eps in itertools.product((0.0, 1e-5, 1e-2), (0.8, 0.9, 0.95), (1e-8, 1e-10)):
        assert is_bounded(OptimizerConfig(lr=lr, b1=b1, eps=eps))
    assert not is_bounded(OptimizerConfig(eps=1e-30)) and not is_bounded(OptimizerConfig(lr=30.0, weight_decay=0.1))
    assert not is_bounded(OptimizerConfig(weight_decay=1e30, lr=1e-30))


@pytest.mark.parametrize(("eps", "looks"), [(1e-8, False), (1e-30, True)])
def test_only_updates_that_the_settings_do_not_bound_are_looked_at(eps, looks):
    """The loss, the norm, and every array of the new state."""
    config = OptimizerConfig(eps=eps)
    optimizer = make_optimizer(config, make_schedule(config, 10), first_params())
    shapes, step = shapes_and_step(optimizer, of_host=False)
    batch = {"x": jnp.float32(1.0), "targets": jnp.zeros((1, 1), jnp.int32)}
    jaxpr = jax.make_jaxpr(step)(shapes, batch, jnp.zeros(1, jnp.int32)).jaxpr
    sizes = [found.eqn.invars[0].aval.size for found in walk(jaxpr) if found.name == "is_finite"]
    assert sizes.count(1) >= 2 and (sum(size > 1 for size in sizes) == 6) == looks == any(size > 1 for size in sizes)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"eps": 0.0}, "optimizer.eps must be at least 1.2e-38, got 0.0; use"),
        ({"eps": 1e-45}, "optimizer.eps must be at least 1.2e-38"),
        ({"b1": 0.99999999}, "optimizer.b1 must be at most 0.999999, got 0.99999999; use"),
        ({"b2": 0.9999999999}, "optimizer.b2 must be at most 0.999999"),
    ],
)
def test_settings_that_divide_by_zero_are_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        OptimizerConfig(**settings)


def test_other_transformations_are_looked_at_too():
    optimizer = optax.sgd(1e38)
    shapes, step = shapes_and_step(optimizer, of_host=False)
    batch = {"x": jnp.float32(10.0), "targets": jnp.zeros((1, 1), jnp.int32)}
    params = jax.tree.map(jax.device_put, first_params(), shardings(False))
    state, metrics = step(state_from(params, optimizer, shapes), batch, jnp.zeros(1, jnp.int32))
    assert bool(metrics["is_bad_update"]) and int(state.num_skipped) == 1
    assert all((x == 1).all() for x in arrays(state))


def test_biases_of_experts_stay_finite():
    config = make_config("a.npy", model={"experts": {"count": 4, "choice_bias": True, "bias_rate": 3e38}}).model
    chosen = jnp.array([[9.0, 1.0, 1.0, 1.0]] * 4)
    totals = Totals(jnp.zeros(()), Shares(*[chosen] * 5))
    params = nnx.State({"layers": {"experts": {"choice_bias": nnx.Param(jnp.zeros((4, 4)))}}})
    assert expert_load.biases_stay_finite(params, totals, config)
    moved = expert_load.move_biases(params, totals, config, jnp.array(True))
    assert are_finite(moved) and not expert_load.biases_stay_finite(moved, totals, config)


def test_a_run_with_updates_that_are_not_finite_saves_none_and_says_why(tmp_path):
    optimizer = {"lr": 1e30, "weight_decay": 1e30, "warmup_steps": 0}
    small = {
        "model": {"num_layers": 1},
        "mesh": {"data": 1, "pipe": 1},
        "sequence": {"chunks": 1},
        "stash": {"inputs": "keep", "attention": "keep"},
        "train": {"steps": 8, "devices": "cpu:1", "max_nonfinite": 2, "eval_sequences": 0, "log_every": 1},
    }
    config = make_config(write_documents(tmp_path / "tokens.npy"), optimizer=optimizer, **small)
    with pytest.raises(RunFailed, match="whose update is not finite at step 2, .*lower optimizer.lr, "):
        run(config, tmp_path / "run", quickly)
    skips = [event["text"] for event in lines_of(tmp_path / "run", "events") if event["kind"] == "skip"]
    assert skips and all("whose update is not finite" in text for text in skips)
    directory = tmp_path / "run" / "checkpoints"
    assert checkpoint_steps(directory)
    json.dumps(lines_of(tmp_path / "run"), allow_nan=False)
    for number in checkpoint_steps(directory):
        saved = _saved(directory / str(number))
        assert len(saved) > 20 and all(np.isfinite(x).all() for x in saved)


def _saved(checkpoint):
    import orbax.checkpoint as ocp

    handler = ocp.PyTreeCheckpointHandler()
    try:
        return [np.asarray(x) for x in jax.tree.leaves(handler.restore((checkpoint / "state").resolve()))]
    finally:
        handler.close()
