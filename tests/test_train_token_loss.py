"""A weight for each token, and losses of the tokens' log-probabilities, against the dense model's gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exactness import quick_jit, random_batch, relative_errors, small_model, small_plan
from flax import nnx

from sppo_jax.models.dense import _penalty
from sppo_jax.pipeline.api import evaluate, value_and_grad
from sppo_jax.train.token_loss import token_loss

VOCAB = 51
EXPERTS = dict(count=4, chosen=2, size=7, balance=0.3, z=0.02)
CASES = {
    "capped, tied, ulysses": (
        dict(chunks=(12, 8, 12), mesh=(1, 2, 2), schedule="seq1f1b", sequences=2),
        dict(tied_embeddings=True, logit_cap=2.0, embedding_scale=3.3, num_layers=2),
    ),
    "breadth-first, gathered weights, experts": (
        dict(chunks=(16, 16), mesh=(1, 2, 2), kind="ring", sequences=2, schedule="breadth-first", interleave=2)
        | dict(kv="rebuild", weights="gathered"),
        dict(experts=EXPERTS),
    ),
    "data 2, stash on the host": (
        dict(chunks=(20, 12), mesh=(2, 2, 1), places=("host", "host", "recompute"), alpha=(0.5, 0.3)),
        {},
    ),
    "waves of 2": (dict(chunks=(16, 16), mesh=(1, 2, 1), sequences=2, schedule="seq1f1b", wave=2), {}),
    "interleave, sinks and windows": (
        dict(chunks=(16, 16), mesh=(1, 2, 1), sequences=2, schedule="seq1f1b", interleave=2),
        dict(sliding_window=9, attention_sinks=True),
    ),
    "one chunk": (dict(chunks=(32,), mesh=(1, 1, 1), sequences=2), dict(num_layers=1)),
}
IN_CI = ("capped, tied, ulysses",)
SHORT = [name for name in CASES if name != "one chunk"]
DRAWN = [pytest.param(name, marks=[pytest.mark.slow] * (name not in IN_CI)) for name in CASES]


def log_probabilities(model, params, batch):
    """Returns the dense model's log-probability of each target, 0 where there is none, and the layers' penalty."""
    graph, _, rest = nnx.split(model, nnx.Param, ...)
    model = nnx.merge(graph, params, rest)
    tokens = (jnp.asarray(batch[key]) for key in ("tokens", "positions", "document_ids"))
    x_BSD, sums = model.hidden_states_and_sums(*tokens, checkpoint_layers=False)
    targets_BS = jnp.asarray(batch["targets"])
    logp_BSV = jax.nn.log_softmax(model.logits(x_BSD))
    logp_BS = jnp.take_along_axis(logp_BSV, jnp.maximum(targets_BS, 0)[..., None], -1)[..., 0]
    penalty = _penalty(model, sums, jnp.asarray(batch["document_ids"]))
    return jnp.where(targets_BS >= 0, logp_BS, 0), penalty.astype(logp_BS.dtype)


def dense_value_and_grad_of(model, loss):
    """Returns `f(params, batch) -> (loss, grads)` by jax.grad of the dense model; gradients have the penalty's."""

    def total(params, batch):
        logp_BS, penalty = log_probabilities(model, params, batch)
        value = loss(logp_BS, batch)
        return value + penalty, value

    def f(params, batch):
        (_, value), grads = jax.value_and_grad(total, has_aux=True)(params, batch)
        return value, grads

    return quick_jit(f)


def assert_equal_gradients(got, want):
    np.testing.assert_allclose(got[0], want[0], rtol=1e-9)
    errors = relative_errors(got[1], want[1])
    assert max(errors.values()) < 1e-9, errors


def drawn(name, seed=0):
    shape, changes = CASES[name]
    plan, model = small_plan(**shape), small_model(vocab_size=VOCAB, **changes)
    rng = np.random.default_rng(seed)
    batch = random_batch(rng, plan.num_sequences, plan.sequence_length, VOCAB, documents=4, padding=3)
    return rng, plan, model, batch


def pairs(logp_BS, batch):
    """The preference loss of made-up pairs of documents, as DPO has it."""
    differences, pair, sign = (x.reshape(-1) for x in (logp_BS - batch["reference"], batch["pair"], batch["sign"]))
    margins = jax.ops.segment_sum(differences * sign, pair, 3)
    return -jax.nn.log_sigmoid(0.3 * margins).mean()


def smooth(logp_BS, batch):
    """A random smooth function of all log-probabilities at once."""
    mixed = jnp.tanh(batch["mix"] @ logp_BS.reshape(-1))
    return (mixed**2).sum() + mixed.prod()


def any_loss(logp_BS, batch):
    """Pairs and a random function, or a weighted sum: one dense program for both."""
    of_pairs, of_sum = batch["parts"]
    return of_pairs * (pairs(logp_BS, batch) + smooth(logp_BS, batch)) - of_sum * (logp_BS * batch["factors"]).sum()


@pytest.mark.parametrize("name", DRAWN)
def test_any_loss_of_log_probabilities_and_a_weighted_step_have_the_dense_gradients(x64, name):
    """Pairs and a random function by two programs; then the second program alone, with weights of any sign."""
    rng, plan, model, batch = drawn(name)
    shape, params = batch["tokens"].shape, nnx.state(model, nnx.Param)
    factors_BS = np.where(rng.random(shape) < 0.3, 0, rng.normal(size=shape))
    own = dict(pair=rng.integers(0, 3, shape), sign=rng.choice([-1.0, 1.0], shape), reference=rng.normal(size=shape))
    own |= dict(mix=rng.normal(size=(4, batch["tokens"].size)) / 20, factors=factors_BS)
    dense = dense_value_and_grad_of(model, any_loss)

    both = batch | own | {"parts": np.array([1.0, 0.0])}
    assert_equal_gradients(token_loss(plan, model, any_loss)(params, both)[:2], dense(params, both))
    weights_BS = np.where(batch["targets"] < 0, np.nan, factors_BS)  # those without a target are never read
    of_sum = dense(params, both | {"parts": np.array([0.0, 1.0])})
    assert_equal_gradients(value_and_grad(plan, model)(params, batch | {"weights": weights_BS})[:2], of_sum)


@pytest.mark.parametrize("name", ["one chunk", *[pytest.param(x, marks=pytest.mark.slow) for x in SHORT]])
def test_weights_of_one_over_the_number_of_targets_are_the_plain_step_to_the_bit(x64, name):
    _, plan, model, batch = drawn(name, seed=1)
    params, step = nnx.state(model, nnx.Param), quick_jit(value_and_grad(plan, model))
    count = np.float64((batch["targets"] >= 0).sum())
    ones = batch | {"weights": np.ones(batch["tokens"].shape), "weights_divisor": count}
    plain = step(params, batch)
    for got, want in zip(*map(jax.tree.leaves, (step(params, ones), plain)), strict=True):
        np.testing.assert_array_equal(got, want)
    halves = step(params, ones | {"weights_divisor": 2 * count})
    np.testing.assert_allclose(2 * halves[0], plain[0], rtol=1e-12)


@pytest.fixture(scope="module")
def small():
    plan, model = small_plan((8, 8)), small_model(vocab_size=VOCAB, dtype="float32", num_layers=1)
    return plan, model, nnx.state(model, nnx.Param), random_batch(np.random.default_rng(0), 1, 16, VOCAB)


WRONG = {
    "integers": (dict(weights=np.ones((1, 16), np.int32)), "'weights' must be real, got int32; cast"),
    "another shape": (dict(weights=np.ones((1, 15))), r"'weights' must have the shape \(1, 16\), got \(1, 15\); "),
    "no array": (dict(weights=[1.0] * 16), "'weights' must be an array, got a list; use numpy"),
    "not finite": (
        dict(weights=np.full((1, 16), np.inf)),
        "'weights' must be finite, got inf at token 0 of sequence 0; ",
    ),
    "a divisor alone": (dict(weights_divisor=np.float32(2)), "'weights_divisor' must stand beside 'weights', got it"),
    "a divisor of 0": (
        dict(weights=np.ones((1, 16)), weights_divisor=np.float32(0)),
        "'weights_divisor' must be finite and above 0, got 0",
    ),
    "a divisor a token": (
        dict(weights=np.ones((1, 16)), weights_divisor=np.ones(16)),
        r"'weights_divisor' must have the shape \(\), got \(16,\); ",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_weights_are_refused(small, name):
    plan, model, params, batch = small
    more, line = WRONG[name]
    with pytest.raises(ValueError, match=f"^batch: {line}"):
        value_and_grad(plan, model)(params, batch | more)


def test_a_loss_that_is_no_number_and_weights_beside_a_loss_are_refused(small):
    plan, model, params, batch = small
    with pytest.raises(ValueError, match=r"^loss must return one number, got the shape \(1, 16\); return its sum"):
        token_loss(plan, model, lambda logp_BS, _: logp_BS)(params, batch)
    with pytest.raises(ValueError, match="^batch: the loss must decide the weights, got 'weights'; "):
        token_loss(plan, model, lambda logp_BS, _: logp_BS.sum())(params, batch | {"weights": np.ones((1, 16))})


def test_a_jit_around_a_loss_gives_the_same(small):
    plan, model, params, batch = small
    f = token_loss(plan, model, lambda logp_BS, batch: jnp.tanh(logp_BS * batch["reward"]).sum())
    batch = batch | {"reward": np.float32(0.3)}
    for got, want in zip(*map(jax.tree.leaves, (quick_jit(f)(params, batch), f(params, batch))), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)


def test_scores_are_those_of_the_batch_without_weights(small):
    plan, model, params, batch = small
    score = evaluate(plan, model)
    weighted = score(params, batch | {"weights": np.full((1, 16), 3.0, np.float32)})
    np.testing.assert_array_equal(weighted.losses_BS, score(params, batch).losses_BS)


def test_a_wrong_token_makes_a_weighted_loss_nan(small):
    plan, model, params, batch = small
    wrong = batch | {"tokens": batch["tokens"] + VOCAB, "weights": np.ones((1, 16), np.float32)}
    loss, grads = quick_jit(lambda p, b: value_and_grad(plan, model)(p, b))(params, wrong)
    assert np.isnan(loss) and np.isnan(grads["head"].get_value()).any()
