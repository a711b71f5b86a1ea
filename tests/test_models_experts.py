"""A layer's experts against the modules of transformers: outputs and the gradients of tokens and of all parameters.

Each module's tensors are read by the rules for Hugging Face folders, so these tests also try the rules.
"""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from exactness import quick_jit
from flax import nnx
from hf_models import float64_transformers
from transformers import DeepseekV3Config, GptOssConfig, Qwen2MoeConfig
from transformers.models.deepseek_v3 import modeling_deepseek_v3
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.qwen2_moe import modeling_qwen2_moe

from sppo_jax.config import ModelConfig
from sppo_jax.models.hf.form import Form
from sppo_jax.models.hf.tensor_rules import read_parameter
from sppo_jax.models.hf.tensors import rules_for, sizes_of
from sppo_jax.models.moe.experts import ACTIVATIONS, ExpertsMLP

# Neither the size of an expert nor twice the size is the hidden size, so that no transposed tensor fits.
NUM_TOKENS, HIDDEN, SIZE = 29, 12, 5
COMMON = dict(hidden_size=HIDDEN, num_experts_per_tok=3, moe_intermediate_size=SIZE)


class Family(NamedTuple):
    """A module of transformers.

    Args:
        module: its class.
        config: its config.
        experts: our settings that say the same.
        form: of its tensors.
        renamed: how its tensors are called otherwise than in the rules.
    """

    module: type
    config: object
    experts: dict
    form: str = "halves"
    renamed: tuple[str, str] = ("", "")


FAMILIES = {
    "qwen2_moe": Family(
        modeling_qwen2_moe.Qwen2MoeSparseMoeBlock,
        Qwen2MoeConfig(**COMMON, num_experts=6, shared_expert_intermediate_size=7, norm_topk_prob=False),
        dict(count=6, chosen=3, size=SIZE, normalized=False, shared_size=7, shared_gate=True),
    ),
    "deepseek_v3": Family(
        modeling_deepseek_v3.DeepseekV3MoE,
        DeepseekV3Config(
            **COMMON, num_local_experts=12, n_group=4, topk_group=2, routed_scaling_factor=2.5, n_shared_experts=2
        ),
        dict(
            count=12, chosen=3, size=SIZE, scores="sigmoid", scaling=2.5, choice_bias=True, expert_groups=4,
            chosen_groups=2, shared_size=2 * SIZE,
        ),
        renamed=("shared_experts", "shared_expert"),
    ),
    "gpt_oss": Family(
        modeling_gpt_oss.GptOssMLP,
        GptOssConfig(hidden_size=HIDDEN, num_experts_per_tok=3, intermediate_size=SIZE, num_local_experts=6),
        dict(count=6, chosen=3, size=SIZE, scores="softmax_of_chosen", mlp="clamped", bias=True),
        form="interleaved",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ["swiglu", "geglu"])
def test_gates_have_the_functions_of_torch(x64, name):
    gate, up = 3 * np.random.default_rng(3).normal(size=(2, 50))
    of_torch = torch.tensor(gate)
    silu, gelu = torch.nn.functional.silu(of_torch), torch.nn.functional.gelu(of_torch, approximate="tanh")
    want = {"swiglu": silu, "geglu": gelu}[name].numpy() * up
    np.testing.assert_allclose(ACTIVATIONS[name](jnp.asarray(gate), jnp.asarray(up)), want, rtol=1e-12, atol=1e-14)


def make_module(family):
    """Makes a module whose parameters and buffers are random, and so large that gates are clamped."""
    family.config._experts_implementation = "eager"
    torch.manual_seed(5)
    module = family.module(family.config).double()
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.normal_(0, 2.0 if family.form == "interleaved" else 0.4)
    return module


def our_params(family, model, tensors):
    """Reads the parameters of our layer from the module's tensors, by their paths."""

    def read(name, part):
        wanted = name.removeprefix("model.layers.0.mlp.").replace(*reversed(family.renamed))
        return tensors[wanted].detach().numpy()[part]

    rules, sizes = rules_for(model, Form(family.form)), sizes_of(model)
    return {
        path.removeprefix("layers/experts/"): read_parameter(
            rule, read, [slice(None)] * len((*rule.stack, *rule.letters)), sizes, np.dtype("f8")
        )[0]
        for path, rule in rules.items()
        if "experts/" in path
    }


@pytest.mark.parametrize("name", FAMILIES)
def test_outputs_and_gradients_are_those_of_transformers(x64, name):
    family = FAMILIES[name]
    x, dy = np.random.default_rng(6).normal(size=(2, NUM_TOKENS, HIDDEN))
    with float64_transformers(modeling_deepseek_v3, modeling_gpt_oss, modeling_qwen2_moe):
        module, of_torch = make_module(family), torch.tensor(x, requires_grad=True)
        out = module(of_torch[None])
        y = (out[0] if isinstance(out, tuple) else out)[0]
        y.backward(torch.tensor(dy))
    model = ModelConfig(
        vocab_size=8, hidden_size=HIDDEN, num_layers=1, num_heads=2, compute_dtype="float64", experts=family.experts
    )
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    layer = nnx.eval_shape(lambda: ExpertsMLP(model, 1.0, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(layer)
    params = our_params(family, model, tensors)
    assert {key[0]: leaf.get_value().shape for key, leaf in nnx.to_flat_state(state)} == {
        key: value.shape for key, value in params.items()
    }

    def run(params, x):
        layer = nnx.merge(graph, nnx.from_flat_state({(key,): nnx.Param(value) for key, value in params.items()}))
        y, _ = layer(x, layer.choose(x))
        return (y * dy).sum(), y

    (dparams, dx), got = quick_jit(jax.grad(run, argnums=(0, 1), has_aux=True))(params, jnp.asarray(x))
    np.testing.assert_allclose(got, y.detach(), rtol=1e-11, atol=1e-11)
    np.testing.assert_allclose(dx, of_torch.grad, rtol=1e-11, atol=1e-10)
    grads = {key: torch.zeros_like(value) if value.grad is None else value.grad for key, value in tensors.items()}
    want = our_params(family, model, grads)
    chex.assert_trees_all_close(dparams, want, rtol=1e-9, atol=1e-10)
    assert not np.any(want.pop("choice_bias", 0)) and all(np.any(value) for value in want.values())
