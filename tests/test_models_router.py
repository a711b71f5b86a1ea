"""The router: choices, weights and shares, against transformers' routers and against plain numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from exactness import quick_jit
from hf_models import float64_transformers
from transformers import DeepseekV3Config, GptOssConfig
from transformers.models.deepseek_v3 import modeling_deepseek_v3
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.qwen3_moe import modeling_qwen3_moe
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig

from sppo_jax.config.experts import ExpertsConfig
from sppo_jax.models.moe import router

NUM_TOKENS, HIDDEN, NUM_EXPERTS = 200, 5, 12
COMMON = dict(hidden_size=HIDDEN, num_experts_per_tok=3, num_local_experts=NUM_EXPERTS)
# transformers' router, its config, and our settings that say the same.
ROUTERS = {
    "deepseek_v3": (
        modeling_deepseek_v3.DeepseekV3TopkRouter,
        DeepseekV3Config(**COMMON, n_group=4, topk_group=2, routed_scaling_factor=2.5, norm_topk_prob=True),
        dict(scores="sigmoid", scaling=2.5, choice_bias=True, expert_groups=4, chosen_groups=2),
    ),
    "deepseek_v3 not normalised": (
        modeling_deepseek_v3.DeepseekV3TopkRouter,
        DeepseekV3Config(**COMMON, n_group=1, topk_group=1, routed_scaling_factor=1.5, norm_topk_prob=False),
        dict(scores="sigmoid", scaling=1.5, choice_bias=True, normalized=False),
    ),
    "gpt_oss": (modeling_gpt_oss.GptOssTopKRouter, GptOssConfig(**COMMON), dict(scores="softmax_of_chosen")),
    "qwen3_moe": (modeling_qwen3_moe.Qwen3MoeTopKRouter, Qwen3MoeConfig(**COMMON, norm_topk_prob=True), {}),
    "qwen3_moe not normalised": (
        modeling_qwen3_moe.Qwen3MoeTopKRouter,
        Qwen3MoeConfig(**COMMON, norm_topk_prob=False),
        dict(normalized=False),
    ),
}


@pytest.mark.parametrize("name", ROUTERS)
def test_choices_weights_and_gradients_are_those_of_transformers(x64, name):
    kind, config, ours = ROUTERS[name]
    experts = ExpertsConfig(count=NUM_EXPERTS, chosen=3, **ours)
    torch.manual_seed(8)
    with float64_transformers(modeling_deepseek_v3, modeling_gpt_oss):
        theirs = kind(config).double()
        for tensor in (*theirs.parameters(), *theirs.buffers()):
            torch.nn.init.normal_(tensor)
        logits, weights, chosen = theirs(torch.randn(1, NUM_TOKENS, HIDDEN)[0])
        logits.retain_grad()
        factors = torch.randn(NUM_TOKENS, NUM_EXPERTS)
        (weights * factors.gather(1, chosen)).sum().backward()
    logits_TE, of_torch = jnp.asarray(logits.detach().numpy()), chosen.numpy()
    bias_E = jnp.asarray(theirs.e_score_correction_bias.numpy()) if experts.choice_bias else None
    choose = quick_jit(lambda logits_TE, bias_E: router.choose(logits_TE, bias_E, experts))
    got = choose(logits_TE, bias_E)
    assert got.dtype == router.CHOICE
    np.testing.assert_array_equal(np.sort(got, axis=1), np.sort(of_torch, axis=1))

    def run(logits_TE):
        weights_Tk = router.weigh(logits_TE, jnp.asarray(of_torch), experts)
        return (weights_Tk * factors.gather(1, chosen).numpy()).sum(), weights_Tk

    grad, got_weights = quick_jit(jax.grad(run, has_aux=True))(logits_TE)
    np.testing.assert_allclose(got_weights, weights.detach(), rtol=1e-12)
    np.testing.assert_allclose(grad, logits.grad, rtol=1e-9, atol=1e-12)
    if bias_E is not None:  # of which the choice depends, and nothing else
        assert (np.sort(choose(logits_TE, 0 * bias_E), axis=1) != np.sort(of_torch, axis=1)).any()


def test_of_equal_experts_the_first_are_chosen():
    logits = jnp.asarray([[1.0, 2.0, 2.0, 2.0, 0.0, 3.0], [0.0] * 6])
    experts = ExpertsConfig(count=6, chosen=3)
    np.testing.assert_array_equal(router.choose(logits, None, experts), [[5, 1, 2], [0, 1, 2]])


@pytest.mark.parametrize("scores", ["softmax", "sigmoid", "softmax_of_chosen"])
def test_shares_of_a_token(x64, scores):
    experts = ExpertsConfig(count=NUM_EXPERTS, chosen=3, scores=scores)
    logits = 3 * np.random.default_rng(9).normal(size=(NUM_TOKENS, NUM_EXPERTS))
    chosen = np.argsort(-logits, axis=1)[:, :3]
    got = quick_jit(lambda logits: router.shares_of(logits, jnp.asarray(chosen, jnp.int16), experts))(logits)
    raw = 1 / (1 + np.exp(-logits)) if scores == "sigmoid" else np.exp(logits)
    probs = raw / raw.sum(1, keepdims=True)
    counts = np.zeros_like(probs)
    np.put_along_axis(counts, chosen, 1, axis=1)
    np.testing.assert_allclose(got.probs, probs, rtol=1e-12)
    np.testing.assert_array_equal(got.chosen, counts)
    np.testing.assert_allclose(got.z, np.log(np.exp(logits).sum(1)) ** 2, rtol=1e-12)
    np.testing.assert_allclose(got.entropy, -(probs * np.log(probs)).sum(1), rtol=1e-12)
    np.testing.assert_array_equal(got.tokens, 1)


def test_counts_and_entropy_have_no_gradient():
    experts = ExpertsConfig(count=4, chosen=2)
    logits = jnp.asarray([[0.1, 0.4, -0.3, 0.2]])

    def run(logits):
        shares = router.shares_of(logits, router.choose(logits, None, experts), experts)
        return router.Shares(*(jnp.sum(share[..., :1] ** 2) for share in shares))

    grads = quick_jit(jax.jacrev(run))(logits)
    assert [bool(np.any(grad)) for grad in grads] == [name in ("probs", "z") for name in router.Shares._fields]
