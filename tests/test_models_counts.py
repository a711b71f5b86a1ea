"""Parameters and FLOPs by hand; a built model has as many parameters (`test_models_decoder.py`)."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from sppo_jax.config import DeltaConfig, ExpertsConfig, ModelConfig
from sppo_jax.config.presets import apply_preset
from sppo_jax.models.counts import (
    chunk_pairs,
    expert_arrays,
    flops_per_token,
    layer_costs,
    layer_matrices,
    layer_vectors,
    num_active_params,
    num_params,
    vocabulary_params,
)
from sppo_jax.models.layer_classes import layer_of
from sppo_jax.pipeline.block import Residuals

MODEL = ModelConfig(vocab_size=100, hidden_size=8, num_layers=4, num_heads=4, num_kv_heads=2, mlp_size=16)
LAYER = layer_costs(MODEL)
DELTA = DeltaConfig(value_heads=6, key_heads=2, key_size=3, value_size=5, taps=3)
EXPERTS = {
    "plain": dict(count=6, chosen=2, size=3),
    "biases": dict(count=6, chosen=2, size=3, bias=True, mlp="clamped", scores="softmax_of_chosen"),
    "a shared expert": dict(count=6, chosen=2, size=3, shared_size=7),
    "all": dict(
        count=6,
        chosen=3,
        size=3,
        bias=True,
        shared_size=7,
        shared_gate=True,
        choice_bias=True,
        scores="sigmoid",
        expert_groups=3,
        chosen_groups=2,
    ),
}
# Qwen3-30B-A3B, which its authors call a model of 30.5 billion parameters, 3.3 of them active.
QWEN3_30B = ModelConfig(
    vocab_size=151936,
    hidden_size=2048,
    num_layers=48,
    num_heads=32,
    num_kv_heads=4,
    head_dim=128,
    qk_norm=True,
    experts=ExpertsConfig(count=128, chosen=8, size=768),
)


def abstract_layer(config: ModelConfig) -> nnx.Module:
    return nnx.eval_shape(lambda: layer_of(config)(config, rngs=nnx.Rngs(0)))


def test_a_layer_by_hand():
    weights = 8 * 8 + 8 * 8 + 8 * 8 + 3 * 8 * 16  # q, k and v, o, mlp
    assert LAYER.params == weights + 2 * 8
    assert LAYER.linear_flops == 2 * weights
    assert LAYER.pair_flops == 4 * 8
    assert LAYER.kv_elements == 2 * 2 * 2
    extras = layer_costs(replace(MODEL, mlp="gelu", qk_norm=True, qkv_bias=True))
    assert extras.params == weights - 8 * 16 + 2 * 8 + 2 * 2 + 16
    more = layer_costs(replace(MODEL, output_bias=True, sinks=True))
    assert (more.params, more.linear_flops) == (LAYER.params + 8 + 4, LAYER.linear_flops)


def test_the_vocabulary_counts_once_where_it_is_tied():
    assert vocabulary_params(MODEL) == 2 * 100 * 8
    tied = replace(MODEL, tied_embeddings=True)
    assert vocabulary_params(tied) == 100 * 8
    assert num_params(MODEL) - num_params(tied) == 100 * 8


def test_causal_pairs_of_chunks_add_up():
    assert sum(chunk_pairs(start, 10) for start in range(0, 100, 10)) == chunk_pairs(0, 100)


def test_pairs_in_a_window_are_those_of_its_tokens():
    """Token i attends to min(i + 1, 30) tokens; as without a window, half of the diagonal counts."""
    for start, tokens in ((0, 10), (0, 100), (20, 5), (20, 50), (60, 7)):
        pairs = sum(min(i + 1, 30) for i in range(start, start + tokens))
        growing = max(0, min(30, start + tokens) - start)
        assert chunk_pairs(start, tokens, 30) == pairs - growing / 2
    assert chunk_pairs(5, 20, 0) == chunk_pairs(5, 20) == chunk_pairs(5, 20, 25)


def test_a_window_leaves_the_flops_of_the_tokens_that_it_holds():
    windowed, at_all = replace(MODEL, sliding_window=64), 3 * MODEL.num_layers * LAYER.pair_flops
    assert flops_per_token(windowed, 64) == flops_per_token(MODEL, 64)
    lost = flops_per_token(MODEL, 256) - flops_per_token(windowed, 256)
    assert lost == at_all * (256 / 2 - chunk_pairs(0, 256, 64) / 256)


def test_flops_of_a_token_are_those_of_a_known_model():
    """Llama 3 8B: 6.98e9 parameters in matrices of layers, 0.525e9 in the head; 32 layers of 32 heads of 128."""
    llama = ModelConfig(
        vocab_size=128256, hidden_size=4096, num_layers=32, num_heads=32, num_kv_heads=8, mlp_size=14336
    )
    assert flops_per_token(llama, 8192) == 6 * (6_979_321_856 + 525_336_576) + 6 * 32 * 4096 * 8192
    assert flops_per_token(replace(llama, tied_embeddings=True), 8192) == flops_per_token(llama, 8192)


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_have_the_parameters_of_a_layer_that_is_built(name):
    model = replace(MODEL, experts=ExpertsConfig(**EXPERTS[name]))
    built = [x.shape for x in jax.tree.leaves(nnx.state(abstract_layer(model), nnx.Param))]
    assert sorted(built) == sorted((*layer_matrices(model), *layer_vectors(model)))
    # The planner's matrices are those that wait on the host where the optimizer does.
    assert {len(dims) for dims in expert_arrays(model)} == {3}
    idle = (6 - model.experts.chosen) * (3 * 8 * 3 + model.experts.bias * (2 * 3 + 8))
    assert num_params(model) - num_active_params(model) == 4 * idle
    assert num_active_params(MODEL) == num_params(MODEL)


NORMS = [
    dict(qk_norm=False),
    dict(qk_norm=True),
    dict(norms="behind", qk_norm=True, qk_norm_over_heads=True),
    dict(norms="both", unit_norm=True, query_scale=0.3, mlp="geglu", output_gate=True),
]


@pytest.mark.parametrize("name", [*EXPERTS, "no experts"])
@pytest.mark.parametrize("norms", NORMS, ids=str)
def test_what_a_layer_saves_is_what_its_vjp_keeps(name, norms):
    model = replace(MODEL, compute_dtype="bfloat16", experts=ExpertsConfig(**EXPERTS.get(name, {})), **norms)
    layer, queries = layer_costs(model), 4 * 2
    assert saved_bytes(model) == TOKENS * (2 * (layer.rest_elements - queries) + 4 * layer.rest_sums)
    assert layer.choices == (model.experts.chosen if model.experts.count else 0)


@pytest.mark.parametrize("name", ["all", "no experts"])
@pytest.mark.parametrize("norms", ["before", "both"])
def test_what_a_layer_with_the_delta_rule_saves_is_what_its_vjp_keeps(name, norms):
    """What the rule takes is beside it: queries, keys and values, and two numbers for each head."""
    model = replace(MODEL, mixer="delta", delta=DELTA, norms=norms, experts=ExpertsConfig(**EXPERTS.get(name, {})))
    layer, heads = layer_costs(replace(model, compute_dtype="bfloat16")), 2 * 2 * 3 + 6 * 5
    products = TOKENS * (2 * (layer.rest_elements - heads) + 4 * (layer.rest_sums - 2 * 6))
    assert saved_bytes(replace(model, compute_dtype="bfloat16")) == products


TOKENS = 5


def saved_bytes(model):
    """Returns the bytes that the vjps of a layer's two methods keep of some tokens."""
    graphdef, params, others = nnx.split(abstract_layer(model), nnx.Param, ...)
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16 if x.ndim > 1 else x.dtype), params)

    def vjp(method, *args):
        def call(params, *own):
            return getattr(nnx.merge(graphdef, params, others), method)(*own, *args)

        policy = jax.checkpoint_policies.dots_saveable
        return lambda *primals: jax.vjp(jax.checkpoint(call, policy=policy, prevent_cse=False), *primals)

    values = (6, 5) if model.mixer == "delta" else (4, 2)
    x, out = (jax.ShapeDtypeStruct((TOKENS, *dims), jnp.bfloat16) for dims in [(8,), values])
    choices = [jnp.zeros((TOKENS, model.experts.chosen), jnp.int16)] if model.experts.count else []
    before = Residuals.of(vjp("before_attention", jnp.arange(TOKENS)), params, x)
    after = Residuals.of(vjp("after_attention", *choices), params, x, out)
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in (*before.shapes, *after.shapes))


def test_a_layer_with_the_delta_rule_by_hand():
    model = replace(MODEL, mixer="delta", delta=DELTA)
    layer, keys, values = layer_costs(model), 2 * 3, 6 * 5
    weights = 8 * (2 * keys + 3 * values + 2 * 6) + 3 * 8 * 16
    assert layer.params == weights + 3 * (2 * keys + values) + 2 * 6 + 5 + 2 * 8
    assert layer.linear_flops == 2 * weights
    assert layer.state_flops == 7 * 6 * 3 * 5 + 2 * 3 * (2 * keys + values)
    assert (layer.pair_flops, layer.kv_elements, layer.lse_elements) == (0, 0, 0)
    assert (layer.attention_elements, layer.state_elements, layer.state_sums) == (0, 2 * (2 * keys + values), 90)
    built = [x.shape for x in jax.tree.leaves(nnx.state(abstract_layer(model), nnx.Param))]
    assert sorted(map(sorted, built)) == sorted(map(sorted, (*layer_matrices(model), *layer_vectors(model))))
    mixed = ModelConfig(vocab_size=100, hidden_size=8, layers="3xdelta,full", num_layers=4, num_heads=4, mlp_size=16)
    delta, full = (layer_costs(mixed.of_type(name)) for name in ("delta", "full"))
    linear = 3 * delta.linear_flops + full.linear_flops
    assert flops_per_token(mixed, 64) == 3 * (linear + 3 * delta.state_flops + 32 * full.pair_flops + 2 * 100 * 8)


def test_an_output_gate_is_a_product_more():
    gated, delta = layer_costs(replace(MODEL, output_gate=True)), 8 * 4 * 2
    assert (gated.params, gated.linear_flops) == (LAYER.params + delta, LAYER.linear_flops + 2 * delta)
    assert gated.rest_elements == LAYER.rest_elements + 4 * 2


def test_gpt_oss_has_the_parameters_that_its_authors_count():
    """They count 20.91 billion, and 3.61 billion of a token without its embedding."""
    model = ModelConfig(**apply_preset("gpt-oss-20b"))
    assert num_params(model) == 20_914_757_184
    assert num_active_params(model) - model.vocab_size * model.hidden_size == 3_608_307_264


def test_flops_count_the_experts_of_a_token():
    layer = layer_costs(QWEN3_30B)
    attention = 2 * 2048 * 32 * 128 + 2 * 2048 * 4 * 128
    assert layer.linear_flops == 2 * (attention + 2048 * 128 + 8 * 3 * 2048 * 768)
    assert layer.expert_flops == 2 * 8 * 3 * 2048 * 768
    assert num_params(QWEN3_30B) == 30_532_122_624
    assert num_active_params(QWEN3_30B) == 3_353_032_704
    # The embedding, the norms and the idle experts multiply nothing.
    active = num_active_params(QWEN3_30B) - 151936 * 2048 - 48 * (2 * 2048 + 2 * 128) - 2048
    assert flops_per_token(QWEN3_30B, 8192) == 6 * active + 6 * 48 * 32 * 128 * 8192
