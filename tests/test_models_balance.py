"""The losses that balance experts: both forms against their formulas elsewhere, and the same for any cuts."""

from functools import lru_cache, partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from exactness import quick_jit
from hf_models import float64_transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.qwen3_moe import modeling_qwen3_moe

from sppo_jax.config.experts import ExpertsConfig
from sppo_jax.models.moe import router
from sppo_jax.models.moe.balance import Balance, loads_of, moved_bias

NUM_LAYERS, NUM_TOKENS, NUM_EXPERTS, TOP_K = 3, 24, 6, 2
EXPERTS = ExpertsConfig(count=NUM_EXPERTS, chosen=TOP_K)
LOGITS = 2 * np.random.default_rng(10).normal(size=(NUM_LAYERS, NUM_TOKENS, NUM_EXPERTS))
IS_REAL = np.random.default_rng(11).uniform(size=NUM_TOKENS) < 0.7
CHOSEN = np.argsort(-LOGITS, axis=-1)[..., :TOP_K]


def sums_of(logits_LTE, is_real_T):
    """Adds up the shares of the real tokens of each layer."""
    shares = router.shares_of(jnp.asarray(logits_LTE), jnp.asarray(CHOSEN), EXPERTS)
    return jax.tree.map(lambda x: jnp.einsum("lt...,t->l...", x, jnp.asarray(is_real_T, x.dtype)), shares)


def transformers_loss(logits, is_real):
    """Returns transformers' loss of all layers together, which masks padding."""
    mask = None if is_real.all() else torch.tensor(is_real)
    return modeling_qwen3_moe.load_balancing_loss_func(tuple(logits), NUM_EXPERTS, TOP_K, mask)


def megatron_loss(logits, is_real):
    """Returns the sum over layers of Megatron's loss: E / (k T^2) sum over experts of probabilities and of choices."""
    loss, num_tokens = 0, is_real.sum()
    for of_layer, chosen in zip(logits[:, is_real], CHOSEN[:, is_real], strict=True):
        counts = torch.tensor(np.bincount(chosen.ravel(), minlength=NUM_EXPERTS))
        probs = torch.softmax(of_layer, dim=-1).sum(0)
        loss = loss + (probs * counts).sum() * NUM_EXPERTS / (TOP_K * num_tokens * num_tokens)
    return loss


def z_loss(logits, is_real):
    """Returns the sum over layers of the mean square of log sum exp, as ST-MoE and Megatron define it."""
    return torch.logsumexp(logits[:, is_real], dim=-1).square().mean(1).sum()


@pytest.mark.parametrize("is_real", [np.ones(NUM_TOKENS, bool), IS_REAL], ids=["no padding", "padding"])
@pytest.mark.parametrize(
    ("penalty", "formula"),
    [
        (Balance(1.0, "model", TOP_K, 0.0, "batch"), transformers_loss),
        (Balance(1.0, "layer", TOP_K, 0.0, "batch"), megatron_loss),
        (Balance(0.0, "model", TOP_K, 1.0, "batch"), z_loss),
    ],
    ids=["transformers", "Megatron", "z"],
)
def test_losses_and_gradients_are_those_of_other_trainers(x64, penalty, formula, is_real):
    of_torch = torch.tensor(LOGITS, requires_grad=True)
    with float64_transformers():
        want = formula(of_torch, is_real)
        want.backward()
    step = quick_jit(jax.value_and_grad(lambda logits, is_real: penalty(sums_of(logits, is_real))))
    got, grad = step(LOGITS, is_real)
    assert float(got) == pytest.approx(want.item(), rel=1e-12)
    np.testing.assert_allclose(grad, of_torch.grad, rtol=1e-9, atol=1e-15)
    assert not np.any(grad[:, ~is_real])


@lru_cache
def by_chunks(form):
    """Compiles loss and gradient of a whole sequence, and of its chunks one after another."""
    penalty = Balance(0.3, form, TOP_K, 0.1, "sequence")

    def whole(logits):
        return penalty(sums_of(logits, IS_REAL))

    def chunked(logits, members_CT):
        sums, pulls = zip(*(jax.vjp(partial(sums_of, is_real_T=real_T), logits) for real_T in members_CT), strict=True)
        total = jax.tree.map(lambda *parts: sum(parts), *sums)
        loss, at_total = jax.value_and_grad(penalty)(total)
        return loss, sum(pull(at_total)[0] for pull in pulls)

    return quick_jit(jax.value_and_grad(whole)), quick_jit(chunked)


@settings(max_examples=15)
@given(cuts=st.lists(st.integers(0, NUM_TOKENS), min_size=3, max_size=3), form=st.sampled_from(["model", "layer"]))
def test_any_chunks_give_the_same_loss_and_gradient(cuts, form):
    """The gradient of a chunk's shares is taken at the sums of all chunks."""
    whole, chunked = by_chunks(form)
    members = np.searchsorted(sorted(cuts), np.arange(NUM_TOKENS), side="right")[None] == np.arange(4)[:, None]
    logits = LOGITS.astype(np.float32)
    chex.assert_trees_all_close(chunked(logits, members & IS_REAL), whole(logits), rtol=1e-4, atol=1e-6)


def test_a_balanced_router_has_the_least_loss_and_no_tokens_have_none():
    even = router.Shares(*(np.full((1, 4), 8.0), np.full((1, 4), 16.0), *(np.array([32.0]) for _ in range(3))))
    for form, least in (("model", 2.0), ("layer", 1.0)):  # transformers counts k choices a token
        penalty = Balance(1.0, form, 2, 0.0, "batch")
        assert float(penalty(even)) == least
        assert float(penalty(jax.tree.map(np.zeros_like, even))) == 0
    assert Balance.of(ExpertsConfig(count=4, balance=0.0)) is None and Balance.of(ExpertsConfig()) is None
    assert Balance.of(ExpertsConfig(count=4, chosen=3, balance=0.5, z=0.1, balance_form="layer")) == Balance(
        0.5, "layer", 3, 0.1, "sequence"
    )


def test_loads_and_biases_that_move_against_them():
    chosen = np.array([[6, 2, 0, 0], [2, 2, 2, 2]], np.float32)
    entropy, tokens = np.array([0, 8 * np.log(4)], np.float32), np.array([8, 8], np.float32)
    loads = loads_of(router.Shares(chosen, jnp.asarray(chosen), tokens, entropy, tokens))
    assert [float(x) for x in loads] == pytest.approx([(3 + 1) / 2, 0.5, 0.25])
    moved = moved_bias(jnp.ones((2, 4)), jnp.asarray(chosen), 0.25)
    np.testing.assert_array_equal(moved, [[0.75, 1.0, 1.25, 1.25], [1.0] * 4])
