"""Parameters as they are stored on meshes of any size: shapes, exact steps, and training that goes on elsewhere."""

import jax
import numpy as np
import pytest
from exactness import dense_step, quick_options, random_batch, relative_errors, small_model, small_plan
from flax import nnx
from jax.sharding import AbstractMesh, AxisType

from sppo_jax.config import config_from_dict
from sppo_jax.models import build_model
from sppo_jax.pipeline import api
from sppo_jax.pipeline.api import value_and_grad
from sppo_jax.pipeline.params import storage
from sppo_jax.pipeline.params.layout import make_mesh
from sppo_jax.plan.parts import MeshShape
from sppo_jax.predict.stage_params import stage_params

# Mesh, chunks and changes of the model: five divides nothing; six divides some dims of one model, and by two cuts.
MESHES = {
    "data 3": dict(mesh=(3, 1, 1), chunks=(8, 8)),
    "seq 3 x pipe 2": dict(mesh=(1, 2, 3), chunks=(6, 12), kind="ring"),
    "seq 5": dict(mesh=(1, 1, 5), chunks=(10, 20), kind="ring"),
    "data 3 x seq 2, two cuts": dict(mesh=(3, 1, 2), chunks=(8, 8), hidden=14),
    "data 2 x seq 3, two cuts, ring": dict(mesh=(2, 1, 3), chunks=(6, 6), kind="ring", hidden=14),
    "pipe 3 x data 2": dict(mesh=(2, 3, 1), chunks=(8, 8, 8), num_layers=3),
}


def make(name):
    settings = dict(MESHES[name])
    hidden, num_layers = settings.pop("hidden", 16), settings.pop("num_layers", 2)
    model = small_model(vocab_size=20, hidden_size=hidden, num_layers=num_layers)
    return small_plan(**settings), model


def stored(plan, model, mesh):
    params = nnx.state(model, nnx.Param)
    shapes = storage.stored_shapes(plan, params, mesh)
    place = jax.jit(lambda x: storage.store(x, shapes), out_shardings=jax.tree.map(lambda x: x.sharding, shapes))
    return place(params), shapes


def test_two_cuts_need_no_out_shardings():
    """jax names the shardings of a program's results on the first mesh that the program mentions."""
    plan = small_plan((12,), mesh=(1, 1, 6), kind="ring")
    model = small_model(dtype="float32", vocab_size=20, hidden_size=15, num_layers=1, num_heads=2, head_dim=10)
    params = nnx.state(model, nnx.Param)
    batch = random_batch(np.random.default_rng(3), 1, 12, 20)
    step = jax.jit(value_and_grad(plan, model), compiler_options=quick_options()).lower(params, batch).compile()
    query = step.output_shardings[1]["layers"]["query"].get_value()  # [1, 15, 2, 10]
    assert query.shard_shape((1, 15, 2, 10)) in {(1, 5, 1, 10), (1, 5, 2, 5)}


QUICK = ["seq 5", "data 3 x seq 2, two cuts"]
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in MESHES if name not in QUICK]


@pytest.mark.parametrize("name", ["data 3", pytest.param("data 3 x seq 2, two cuts", marks=pytest.mark.slow)])
def test_gradients_that_are_added_layer_by_layer_are_the_same(x64, monkeypatch, name):
    """As for TPUs, whose compiler does not take all sums of stacked layers."""
    monkeypatch.setattr(api, "sums_whole_stages", lambda platform: False)
    added = []
    one = storage.sum_over_members
    monkeypatch.setattr(storage, "sum_over_members", lambda x, share: added.append(x.ndim) or one(x, share))
    test_gradients_of_stored_parameters_are_the_dense_ones_with_zeros_behind(None, name)
    assert max(added) == 3  # a layer's matrix, or the heads of one


@pytest.mark.parametrize("name", QUICK + SLOW)
def test_gradients_of_stored_parameters_are_the_dense_ones_with_zeros_behind(x64, name):
    plan, model = make(name)
    mesh, params = make_mesh(plan), nnx.state(model, nnx.Param)
    placed, shapes = stored(plan, model, mesh)
    step = jax.jit(
        value_and_grad(plan, model, mesh),
        compiler_options=quick_options(),
        out_shardings=(None, jax.tree.map(lambda x: x.sharding, shapes)),
    )
    batch = random_batch(np.random.default_rng(3), plan.num_sequences, plan.sequence_length, 20, padding=2)
    loss, grads = step(placed, batch)
    want_loss, want = dense_step(model)(params, batch)
    np.testing.assert_allclose(loss, want_loss, rtol=1e-9)
    assert jax.tree.map(lambda x: x.shape, grads) == jax.tree.map(lambda x: x.shape, shapes)
    assert max(relative_errors(storage.store(grads, params), want).values()) < 1e-9
    for grad, param in zip(jax.tree.leaves(grads), jax.tree.leaves(params), strict=True):
        behind = np.array(grad)
        behind[tuple(slice(0, size) for size in param.shape)] = 0
        assert not behind.any()
    assert any(a.shape != b.shape for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(shapes), strict=True))
    two = any(len(storage.home_of(path[0].key, x.shape, plan).share.cuts) == 2 for path, x in leaves(params))
    assert two == ("two cuts" in name)


def leaves(params):
    return jax.tree_util.tree_leaves_with_path(params)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["seq 5", "data 3 x seq 2, two cuts"])
def test_parameters_in_their_own_shapes_go_through_the_same_step(x64, name):
    plan, model = make(name)
    params = nnx.state(model, nnx.Param)
    batch = random_batch(np.random.default_rng(4), plan.num_sequences, plan.sequence_length, 20)
    loss, grads = jax.jit(value_and_grad(plan, model), compiler_options=quick_options())(params, batch)
    want_loss, want = dense_step(model)(params, batch)
    np.testing.assert_allclose(loss, want_loss, rtol=1e-9)
    assert max(relative_errors(grads, want).values()) < 1e-9


@pytest.mark.slow
def test_evaluation_takes_stored_parameters_too(x64):
    plan, model = make("data 3 x seq 2, two cuts")
    mesh = make_mesh(plan)
    placed, _ = stored(plan, model, mesh)
    batch = random_batch(np.random.default_rng(5), plan.num_sequences, plan.sequence_length, 20)
    scores = api.evaluate(plan, model, mesh)(placed, batch)
    want = api.evaluate(plan, model, mesh)(nnx.state(model, nnx.Param), batch)
    np.testing.assert_allclose(scores.losses_BS, want.losses_BS, rtol=1e-12)
    np.testing.assert_array_equal(scores.hits_BS, want.hits_BS)


LARGE = {
    "model": {"preset": "llama3-8b"},
    "sequence": {"length": 8192},
    "train": {"steps": 1},
}


@pytest.mark.parametrize("pipe", [1, 4])
@pytest.mark.parametrize(("data", "seq"), [(3, 1), (1, 5), (3, 2), (12, 1), (3, 8), (6, 8), (12, 8), (48, 16)])
def test_a_large_model_is_spread_over_any_mesh_as_the_planner_counts(pipe, data, seq):
    config = config_from_dict(LARGE)
    params = nnx.state(build_model(config, abstract=True), nnx.Param)
    plan = replace_mesh(small_plan((8, 8), mesh=(1, 1, 1)), MeshShape(data=data, pipe=pipe, seq=seq))
    mesh = AbstractMesh((data, pipe, seq), ("data", "pipe", "seq"), axis_types=(AxisType.Auto,) * 3)
    own = sum(
        np.prod(storage.home_of(path[0].key, x.shape, plan).shape) / shares(path, x, plan, mesh)
        for path, x in leaves(params)
    )
    assert own == stage_params(config.model, 32 // pipe, pipe, data, seq).own
    whole = sum(x.size for _, x in leaves(params))
    assert own <= 1.1 * whole / (data * pipe * seq)


def replace_mesh(plan, mesh):
    """A plan of which only the mesh counts."""
    object.__setattr__(plan, "mesh", mesh)
    return plan


def shares(path, leaf, plan, mesh):
    """Returns into how many parts a stored parameter is cut."""
    home = storage.home_of(path[0].key, leaf.shape, plan)
    parts = np.prod([cut.parts for cut in home.share.cuts])
    for dim, size in enumerate(home.shape):
        cut = home.share.dims().get(dim)
        assert size % ((cut.parts if cut else 1) * (plan.mesh.pipe if dim == home.stage_dim else 1)) == 0
    return parts * (1 if home.stage_dim is None else plan.mesh.pipe)
