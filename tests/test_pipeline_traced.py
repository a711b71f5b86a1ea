"""A wrong batch that cannot be looked at makes the loss NaN, as in the dense model; a mapped step is refused."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exactness import quick_jit, quick_options, random_batch, small_model, small_plan
from flax import nnx
from jax.sharding import PartitionSpec

from sppo_jax.attention.validate import KEYS
from sppo_jax.models.dense import dense_loss
from sppo_jax.pipeline import traced
from sppo_jax.pipeline.api import value_and_grad
from sppo_jax.pipeline.params.layout import inner_mesh, make_mesh

pytestmark = pytest.mark.xdist_group("pipeline_api")
PLAN, VOCABULARY = small_plan((8, 8), mesh=(1, 2, 2)), 20
# Of a token of a document, and of a token of padding: what is wrong about it.
WRONG = {
    "a target of the vocabulary's size": ("targets", 2, VOCABULARY),
    "a large target": ("targets", 2, 2**31 - 1),
    "a token of the vocabulary's size": ("tokens", 2, VOCABULARY),
    "a negative token": ("tokens", 2, -1),
    "a negative position": ("positions", 2, -1),
    "padding with a target": ("targets", 15, 1),
}


def good_batch():
    return random_batch(np.random.default_rng(0), 1, 16, VOCABULARY, padding=3)


def wrong_batch(name):
    batch = good_batch()
    key, token, value = WRONG[name]
    batch[key][0, token] = value
    return batch


@pytest.fixture(scope="module")
def step():
    """Returns the parameters and a step within a caller's jit."""
    model = small_model(vocab_size=VOCABULARY, dtype="float32", num_layers=2)
    f = value_and_grad(PLAN, model)
    return nnx.state(model, nnx.Param), jax.jit(lambda p, b: f(p, b), compiler_options=quick_options())


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_batch_makes_loss_and_gradients_nan(step, name):
    params, f = step
    loss, grads = f(params, wrong_batch(name))
    assert np.isnan(loss) and np.isnan(grads["head"].get_value()).any()


def test_a_good_batch_has_its_loss_and_any_negative_target_is_none(step):
    params, f = step
    batch = good_batch()
    loss, _ = f(params, batch)
    model = small_model(vocab_size=VOCABULARY, dtype="float32", num_layers=2)
    dense = quick_jit(partial(dense_loss, model))
    np.testing.assert_allclose(loss, dense(params, batch), rtol=1e-5)
    assert np.isnan(dense(params, wrong_batch("a target of the vocabulary's size")))
    batch["targets"] = np.where(batch["targets"] < 0, -100, batch["targets"])
    np.testing.assert_array_equal(f(params, batch)[0], loss)


def test_a_second_document_is_wrong_where_sequences_hold_one():
    """Sequences of padding alone, of a document on one device, of one on all devices, and of two on unlike devices."""
    rows = np.array([[-1] * 4, [-1, -1, 0, -1], [3] * 4, [2, 2, 2, 3]], np.int32)
    tokens = PartitionSpec("data", ("ring", "ulysses"))
    mesh = inner_mesh(make_mesh(PLAN), PLAN)

    def on_device(rows):
        batch = [jnp.zeros_like(rows), jnp.where(rows < 0, -1, 0), jnp.zeros_like(rows), rows]
        scales = [
            traced.loss_scale([x[some] for x in batch], VOCABULARY, 4, jnp.float32, one_document=one)
            for some, one in ((slice(0, 3), True), (slice(0, 4), True), (slice(0, 4), False))
        ]
        losses = traced.without_wrong(jnp.ones(rows.shape), batch, VOCABULARY, one_document=True)
        return traced.second_documents(rows), jnp.stack(scales), losses

    specs = PartitionSpec("data"), PartitionSpec(), tokens
    f = jax.shard_map(on_device, mesh=mesh, in_specs=tokens, out_specs=specs, check_vma=False)
    several, scales, losses = quick_jit(f)(rows)
    assert several.ravel().tolist() == [False, False, False, True]
    assert np.isnan(scales).tolist() == [False, True, False] and scales[0] == pytest.approx(1 / 5)
    assert np.isnan(losses[3]).all() and not np.isnan(losses[:3]).any()


@pytest.mark.parametrize("name", [None, *WRONG])
def test_scores_of_a_sequence_with_a_wrong_token_are_nan(name):
    batch, mesh = {key: np.tile(x, (2, 1)) for key, x in good_batch().items()}, inner_mesh(make_mesh(PLAN), PLAN)
    if name:
        batch = {key: np.concatenate([x, good_batch()[key]]) for key, x in wrong_batch(name).items()}
    tokens = PartitionSpec("data", ("ring", "ulysses"))
    clean = jax.shard_map(
        lambda losses, batch: traced.without_wrong(losses, batch, VOCABULARY),
        mesh=mesh,
        in_specs=(tokens, [tokens] * 4),
        out_specs=tokens,
        check_vma=False,
    )
    losses = jax.jit(clean)(jnp.ones((2, 16)), [jnp.asarray(batch[key]) for key in KEYS])
    is_wrong = np.isnan(losses)
    assert not is_wrong[1].any() and (is_wrong[0] == ((batch["targets"][0] >= 0) & (name is not None))).all()


def test_vmap_is_refused_in_one_line(step):
    params, batch = step[0], good_batch()
    f = value_and_grad(PLAN, small_model(vocab_size=VOCABULARY, dtype="float32", num_layers=2))
    batches = {key: np.tile(x, (3, 1, 1)) for key, x in batch.items()}
    many = jax.tree.map(lambda x: jnp.stack([x] * 3), params)
    for mapped, args in (
        (jax.vmap(f, (None, 0)), (params, batches)),
        (jax.vmap(f, (0, None)), (many, batch)),
        (jax.vmap(step[1], (None, 0)), (params, batches)),
        (jax.jit(jax.vmap(f, (None, {key: 0 if key == "targets" else None for key in KEYS}))), None),
    ):
        args = args or (params, batch | {"targets": batches["targets"]})
        with pytest.raises(
            ValueError, match="must not be within jax.vmap, .*, got a mapped axis of 3; call"
        ) as refused:
            mapped(*args)
        assert "\n" not in str(refused.value)
