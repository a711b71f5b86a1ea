"""Parameters and FLOPs by hand; a built model has as many parameters (`test_models_decoder.py`)."""

from dataclasses import replace

from sppo_jax.config import ModelConfig
from sppo_jax.models.counts import chunk_pairs, flops_per_token, layer_costs, num_params, vocabulary_params

MODEL = ModelConfig(vocab_size=100, hidden_size=8, num_layers=4, num_heads=4, num_kv_heads=2, mlp_size=16)
LAYER = layer_costs(MODEL)


def test_a_layer_by_hand():
    weights = 8 * 8 + 8 * 8 + 8 * 8 + 3 * 8 * 16  # q, k and v, o, mlp
    assert LAYER.params == weights + 2 * 8
    assert LAYER.linear_flops == 2 * weights
    assert LAYER.pair_flops == 4 * 8
    assert LAYER.kv_elements == 2 * 2 * 2
    extras = layer_costs(replace(MODEL, mlp="gelu", qk_norm=True, qkv_bias=True))
    assert extras.params == weights - 8 * 16 + 2 * 8 + 2 * 2 + 16


def test_the_vocabulary_counts_once_where_it_is_tied():
    assert vocabulary_params(MODEL) == 2 * 100 * 8
    tied = replace(MODEL, tied_embeddings=True)
    assert vocabulary_params(tied) == 100 * 8
    assert num_params(MODEL) - num_params(tied) == 100 * 8


def test_causal_pairs_of_chunks_add_up():
    assert sum(chunk_pairs(start, 10) for start in range(0, 100, 10)) == chunk_pairs(0, 100)


def test_flops_of_a_token_are_those_of_a_known_model():
    """Llama 3 8B: 6.98e9 parameters in matrices of layers, 0.525e9 in the head; 32 layers of 32 heads of 128."""
    llama = ModelConfig(
        vocab_size=128256, hidden_size=4096, num_layers=32, num_heads=32, num_kv_heads=8, mlp_size=14336
    )
    assert flops_per_token(llama, 8192) == 6 * (6_979_321_856 + 525_336_576) + 6 * 32 * 4096 * 8192
    assert flops_per_token(replace(llama, tied_embeddings=True), 8192) == flops_per_token(llama, 8192)
