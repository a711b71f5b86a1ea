"""The decoder against a plain numpy forward pass, and its layers where the trainer uses them."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, PartitionSpec
from jax.tree_util import DictKey

from sppo_jax.config import Config, ModelConfig, SequenceConfig, TrainConfig
from sppo_jax.models import Decoder, DecoderLayer, build_model, num_params
from sppo_jax.models.leaves import is_matrix
from sppo_jax.models.rotary import rotary_frequencies

SHAPE = {
    "vocab_size": 61,
    "hidden_size": 24,
    "num_layers": 3,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "mlp_size": 40,
    "init_scale": 0.3,
}
VARIANTS = {
    "llama": {},
    "qwen2": {"qkv_bias": True, "tied_embeddings": True},
    "qwen3": {"qk_norm": True, "head_dim": 10},
    "gemma3": {
        "norms": "both",
        "unit_norm": True,
        "mlp": "geglu",
        "qk_norm": True,
        "embedding_scale": 24**0.5,
        "query_scale": 0.2,
        "logit_cap": 3.0,
        "tied_embeddings": True,
    },
    "olmo3": {"norms": "behind", "qk_norm": True, "qk_norm_over_heads": True},
    "gpt": {
        "mlp": "gelu",
        "num_kv_heads": 4,
        "output_bias": True,
        "rope": {"scaling": "yarn", "factor": 4.0, "original_length": 64},
    },
}


def make_config(**fields):
    return ModelConfig(**(SHAPE | {"compute_dtype": "float32"} | fields))


def randomized(model, seed=0):
    """Gives scales and biases, which start as ones and zeros, values that show a mistake."""
    params = nnx.state(model, nnx.Param)
    leaves, treedef = jax.tree.flatten(params)
    rng = np.random.default_rng(seed)
    nnx.update(
        model, treedef.unflatten([leaf + jnp.asarray(0.2 * rng.normal(size=leaf.shape), leaf.dtype) for leaf in leaves])
    )
    return model


def numpy_norm(x, norm, config):
    scale = norm["scale"] + (1 if config.unit_norm else 0)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + config.norm_eps) * scale


def numpy_heads_norm(x, norm, config):
    """Normalizes heads, each by itself or all of a token as one."""
    if not config.qk_norm_over_heads:
        return numpy_norm(x, norm, config)
    return numpy_norm(x.reshape(len(x), -1), norm, config).reshape(x.shape)


def numpy_gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def numpy_rotate(x, positions, config):
    half = config.head_dim // 2
    frequency, amplitude = rotary_frequencies(config.rope, config.head_dim)
    turn = amplitude * np.exp(1j * positions[:, None] * frequency)
    rotated = (x[..., :half] + 1j * x[..., half:]) * turn[:, None]
    return np.concatenate([rotated.real, rotated.imag], -1)


def numpy_layer(x, p, positions, documents, config):
    h = x if config.norms == "behind" else numpy_norm(x, p["attention_norm"], config)
    q, k, v = (np.tensordot(h, p[name], 1) for name in ("query", "key", "value"))
    if config.qkv_bias:
        q, k, v = q + p["query_bias"], k + p["key_bias"], v + p["value_bias"]
    if config.qk_norm:
        q, k = numpy_heads_norm(q, p["query_norm"], config), numpy_heads_norm(k, p["key_norm"], config)
    q, k = numpy_rotate(q, positions, config), numpy_rotate(k, positions, config)
    visible = (documents[:, None] == documents) & (np.arange(len(x))[:, None] >= np.arange(len(x)))
    out, scale = np.zeros_like(q), config.query_scale or 1 / np.sqrt(config.head_dim)
    for head in range(config.num_heads):
        kv_head = head // (config.num_heads // config.num_kv_heads)
        score = np.where(visible, scale * q[:, head] @ k[:, kv_head].T, -np.inf)
        weight = np.exp(score - score.max(-1, keepdims=True))
        out[:, head] = weight / weight.sum(-1, keepdims=True) @ v[:, kv_head]
    attended = np.tensordot(out, p["output"], 2) + (p["output_bias"] if config.output_bias else 0)
    x = x + (attended if config.norms == "before" else numpy_norm(attended, p["attention_out_norm"], config))
    y = numpy_mlp(x if config.norms == "behind" else numpy_norm(x, p["mlp_norm"], config), p, config)
    return x + (y if config.norms == "before" else numpy_norm(y, p["mlp_out_norm"], config))


def numpy_mlp(h, p, config):
    up = h @ p["up"]
    if config.mlp == "gelu":
        return numpy_gelu(up) @ p["down"]
    gate = h @ p["gate"]
    return ((numpy_gelu(gate) if config.mlp == "geglu" else gate / (1 + np.exp(-gate))) * up) @ p["down"]


def numpy_logits(model, tokens, positions, documents):
    p = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), p)
    x = p["embedding"][tokens] * model.config.embedding_scale
    for index in range(model.config.num_layers):
        layer = jax.tree.map(lambda leaf, index=index: leaf[index], p["layers"])
        x = numpy_layer(x, layer, positions, documents, model.config)
    logits = numpy_norm(x, p["final_norm"], model.config) @ (p["embedding"].T if model.head is None else p["head"])
    cap = model.config.logit_cap
    return cap * np.tanh(logits / cap) if cap else logits


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_a_plain_forward_pass(name, x64):
    model = randomized(Decoder(make_config(compute_dtype="float64", **VARIANTS[name]), rngs=nnx.Rngs(params=0)))
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, 61, (2, 11)).astype(np.int32)
    documents = np.array([[0] * 11, [0] * 4 + [3] * 7], np.int32)
    positions = np.array([list(range(11)), [*range(4), *range(7)]], np.int32)
    logits = jax.jit(lambda *args: model(*args))(tokens, positions, documents)
    assert logits.dtype == jnp.float64
    for row in range(2):
        expected = numpy_logits(model, tokens[row], positions[row], documents[row])
        np.testing.assert_allclose(logits[row], expected, rtol=1e-9, atol=1e-9)
    alone = model(jnp.asarray(tokens[:1]))
    np.testing.assert_allclose(alone[0], logits[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_parameters_are_float32_and_activations_in_the_compute_dtype(dtype):
    model = Decoder(make_config(compute_dtype=dtype, qk_norm=True, qkv_bias=True), rngs=nnx.Rngs(params=0))
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model))} == {jnp.dtype(jnp.float32)}
    layer = one_layer(model)
    x, positions = jnp.ones((2, 5, 24), dtype), jnp.zeros((2, 5), jnp.int32)
    q, k, v = layer.before_attention(x, positions)
    assert (q.shape, k.shape, v.shape) == ((2, 5, 4, 8), (2, 5, 2, 8), (2, 5, 2, 8))
    y = layer.after_attention(x, jnp.ones(q.shape, jnp.float32))
    assert {array.dtype.name for array in (q, k, v, y)} == {dtype}
    assert model(jnp.zeros((1, 4), jnp.int32)).dtype == jnp.float32


def one_layer(model, index=0):
    graphdef, stacked = nnx.split(model.layers)
    return nnx.merge(graphdef, jax.tree.map(lambda leaf: leaf[index], stacked))


def test_casting_matrices_beforehand_changes_nothing():
    model = randomized(Decoder(make_config(compute_dtype="bfloat16", qk_norm=True), rngs=nnx.Rngs(params=0)))
    tokens = jnp.arange(12, dtype=jnp.int32)[None]
    before = model(tokens)
    graphdef, state = nnx.split(model)
    cast = jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf if "scale" in jax.tree_util.keystr(path) else leaf.astype(jnp.bfloat16), state
    )
    np.testing.assert_array_equal(nnx.merge(graphdef, cast)(tokens), before)


def test_layers_start_different_and_residual_projections_small():
    config = make_config(hidden_size=64, num_heads=4, head_dim=32, mlp_size=256, num_layers=4, init_scale=0.02)
    layers = Decoder(config, rngs=nnx.Rngs(params=0)).layers
    assert layers.query.shape == (4, 64, 4, 32)
    assert not np.allclose(layers.query[0], layers.query[1])
    assert np.std(layers.up[...]) == pytest.approx(0.02, rel=0.05)
    for residual in (layers.output, layers.down):
        assert np.std(residual[...]) == pytest.approx(0.02 / np.sqrt(8), rel=0.05)


def test_norms_of_one_plus_a_scale_start_at_the_same_norm():
    params = [nnx.state(Decoder(make_config(unit_norm=unit), rngs=nnx.Rngs(0)), nnx.Param) for unit in (False, True)]
    for path, scale in jax.tree_util.tree_leaves_with_path(params[1]):
        if "scale" in jax.tree_util.keystr(path):
            assert not np.any(scale)
    tokens = jnp.arange(6, dtype=jnp.int32)[None]
    models = [Decoder(make_config(unit_norm=unit), rngs=nnx.Rngs(0)) for unit in (False, True)]
    np.testing.assert_array_equal(models[0](tokens), models[1](tokens))


def test_the_scale_of_embeddings_is_rounded_to_their_dtype():
    """As transformers does: 3072 ** 0.5, which is 55.43, becomes 55.5."""
    model = Decoder(make_config(compute_dtype="bfloat16", embedding_scale=3072**0.5), rngs=nnx.Rngs(0))
    model.embedding[...] = jnp.ones_like(model.embedding[...])
    model.layers.output[...], model.layers.down[...] = (
        jnp.zeros_like(x[...]) for x in (model.layers.output, model.layers.down)
    )
    tokens = jnp.zeros((1, 2), jnp.int32)
    assert np.unique(np.float32(model.hidden_states(tokens, tokens, tokens))) == [55.5]


@pytest.mark.parametrize("name", ["gemma3", "olmo3"])
@pytest.mark.parametrize("experts", [{}, {"count": 3, "size": 8, "chosen": 2}])
def test_other_norms_are_counted(name, experts):
    config = make_config(**VARIANTS[name], experts=experts)
    params = nnx.state(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(params=0))), nnx.Param)
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == num_params(config)


def test_sinks_are_a_number_for_each_head_and_do_not_decay():
    config = make_config(sinks=True)
    params = nnx.state(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(params=0))), nnx.Param)
    sinks = params["layers"]["sinks"].get_value()
    assert sinks.shape == (config.num_layers, config.num_heads)
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == num_params(config)
    assert not is_matrix((DictKey("layers"), DictKey("sinks")), sinks)


def test_tied_model_has_no_head_and_learns_its_embedding_from_both_ends():
    model = Decoder(make_config(tied_embeddings=True), rngs=nnx.Rngs(params=0))
    assert model.head is None
    params = nnx.state(model, nnx.Param)
    assert "head" not in params
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == num_params(model.config)
    graphdef, _ = nnx.split(model)
    tokens = jnp.array([[3, 4, 5]], jnp.int32)
    grads = jax.grad(lambda params: jnp.sum(jnp.square(nnx.merge(graphdef, params)(tokens))))(params)
    norms = np.abs(grads["embedding"][...]).sum(-1)
    assert (norms > 0).all(), "tokens that do not occur get gradients through the head"


def test_layer_vjp_inside_shard_map_equals_the_whole(x64):
    model = randomized(
        Decoder(make_config(compute_dtype="float64", qk_norm=True, qkv_bias=True), rngs=nnx.Rngs(params=0))
    )
    graphdef, state = nnx.split(one_layer(model, 1))
    rng = np.random.default_rng(2)
    x = jnp.asarray(rng.normal(size=(16, 24)))
    positions = jnp.arange(16, dtype=jnp.int32)

    def grads(state, x, positions):
        def local(state, x):
            layer = nnx.merge(graphdef, state)
            q, k, v = layer.before_attention(x, positions)
            mixed = q + jnp.repeat(jnp.sin(k) + v, 2, axis=-2)
            return layer.after_attention(x, mixed)

        y, pullback = jax.vjp(local, state, x)
        return (y, *pullback(jnp.cos(y)))

    mesh = jax.make_mesh((4,), ("seq",), axis_types=(AxisType.Auto,))
    split, whole = PartitionSpec("seq"), PartitionSpec()
    sharded = jax.jit(jax.shard_map(grads, mesh=mesh, in_specs=(whole, split, split), out_specs=(split, whole, split)))
    expected, got = grads(state, x, positions), sharded(state, x, positions)
    chex.assert_trees_all_close(got, expected, rtol=1e-11, atol=1e-11)


def test_a_users_layer_is_stacked_like_ours():
    class Doubled(DecoderLayer):
        def after_attention(self, x_TD, out_TNH):
            return super().after_attention(x_TD, out_TNH + out_TNH)

    tokens = jnp.arange(6, dtype=jnp.int32)[None]
    ours = Decoder(make_config(), rngs=nnx.Rngs(params=0))
    theirs = Decoder(make_config(), rngs=nnx.Rngs(params=0), layer=Doubled)
    assert isinstance(theirs.layers, Doubled)
    assert not np.allclose(ours(tokens), theirs(tokens))


def full_config(**model):
    return Config(model=make_config(**model), sequence=SequenceConfig(length=16), train=TrainConfig(steps=1, seed=5))


def test_build_model_resolves_auto_and_seeds_from_the_config():
    model = build_model(full_config(compute_dtype="auto"))
    assert model.config.compute_dtype == "float32"
    np.testing.assert_array_equal(model.embedding[...], build_model(full_config(), seed=5).embedding[...])
    assert not np.allclose(model.embedding[...], build_model(full_config(), seed=6).embedding[...])


def test_build_model_abstract_makes_no_arrays():
    model = build_model(full_config(), abstract=True)
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(nnx.state(model)))


def test_build_model_refuses_float64_without_64_bit_mode():
    with pytest.raises(ValueError, match="float64 must have jax's 64-bit mode.*JAX_ENABLE_X64=1"):
        build_model(full_config(compute_dtype="float64"))
