"""Layers of several types in the dense model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exactness import random_batch, small_model
from flax import nnx

from sppo_jax.attention.dense import dense_attention
from sppo_jax.models.counts import layer_costs, layer_params, num_active_params, num_params
from sppo_jax.models.dense import dense_value_and_grad
from sppo_jax.models.layers import DecoderLayer
from sppo_jax.models.stacks import LayerStacks, scan_layers, stack_names, stacks_of

KINDS = {"local": dict(num_heads=6, num_kv_heads=2, head_dim=4, mlp_size=9, rope=dict(theta=50.0, fraction=0.5))}
PATTERN = "2x(2xlocal,full),local"


def test_layers_run_in_the_order_of_the_pattern(x64):
    """One after another by hand, from the stacks of their kinds."""
    model = small_model(layers=PATTERN, num_layers=7, layer_types=KINDS)
    assert isinstance(model.layers, LayerStacks)
    batch = random_batch(np.random.default_rng(0), 2, 24, 53, padding=3)
    tokens = batch["tokens"], batch["positions"], batch["document_ids"]
    x = model.embedding[...][batch["tokens"]]
    stacks = {kind: nnx.split(stack) for kind, stack in stacks_of(model.layers).items()}
    seen = dict.fromkeys(stacks, 0)
    for kind in ("local", "local", "full", "local", "local", "full", "local"):
        graphdef, state = stacks[kind]
        layer = nnx.merge(graphdef, jax.tree.map(lambda leaf, number=seen[kind]: leaf[number], state))
        seen[kind] += 1
        x = layer.after_attention(x, dense_attention(*layer.before_attention(x, tokens[1]), *tokens[1:]))
    np.testing.assert_allclose(model.hidden_states(*tokens), x, rtol=1e-10)
    assert seen == {"local": 5, "full": 2}


def test_scans_return_each_kinds_results_in_order():
    """A layer's result is its place in the model, and what its stack has for it."""
    stacks = {"a": jnp.arange(5), "b": jnp.arange(10, 12)}
    begin = jnp.zeros((), jnp.int32)
    stack_of = {"a": "a", "b": "b"}
    count, found = scan_layers("aabaaba", stacks, stack_of, lambda kind, place, x: (place + 1, (place, x)), begin)
    assert count == 7
    np.testing.assert_array_equal(found["a"], [[0, 1, 3, 4, 6], stacks["a"]])
    np.testing.assert_array_equal(found["b"], [[2, 5], stacks["b"]])


def test_kinds_of_one_shape_share_a_stack_in_the_order_of_the_model():
    """A window and a rotation change no parameter; each kind still runs as itself."""
    kinds = {"local": dict(sliding_window=8, rope=dict(theta=50.0)), "wide": dict(mlp_size=9)}
    model = small_model(dtype="float32", layers="2x(local,full,wide)", num_layers=6, layer_types=kinds)
    assert model.config.stacks == {"local+full": ("local", "full"), "wide": ("wide",)}
    params = nnx.state(model, nnx.Param)["layers"]
    assert params["local+full"]["up"].shape[0] == 4 and params["wide"]["up"].shape[0] == 2
    of_kinds = stacks_of(model.layers)
    assert {kind: layers.mixer.window for kind, layers in of_kinds.items()} == {"local": 8, "full": 0, "wide": 0}
    assert of_kinds["local"].config.rope.theta == 50.0 != of_kinds["full"].config.rope.theta
    seen: list = []

    def body(kind, carry, x):
        jax.debug.callback(lambda x: seen.append((kind, int(x))), x, ordered=True)
        return carry, x

    stacks = {"local+full": jnp.arange(4), "wide": jnp.arange(4, 6)}
    scan_layers(model.config.type_names, stacks, stack_names(model.layers), body, 0)
    jax.effects_barrier()
    assert seen == [("local", 0), ("full", 1), ("wide", 4), ("local", 2), ("full", 3), ("wide", 5)]


class WindowedLayer(DecoderLayer):
    """A layer with a parameter whose shape depends on the window."""

    def __init__(self, config, *, rngs):
        super().__init__(config, rngs=rngs)
        self.taps = nnx.Param(jnp.zeros((config.sliding_window or 0,)))


def test_kinds_of_a_stack_whose_shapes_differ_are_refused():
    kinds = {"local": dict(sliding_window=8)}
    with pytest.raises(ValueError, match="must have parameters of one shape, got other ones in local, full"):
        small_model(dtype="float32", layers="2x(local,full)", num_layers=4, layer_types=kinds, layer=WindowedLayer)


@pytest.mark.slow
def test_gradients_have_the_tree_of_the_parameters(x64):
    model = small_model(layers=PATTERN, num_layers=7, layer_types=KINDS)
    params = nnx.state(model, nnx.Param)
    assert params["layers"]["local"]["query"].get_value().shape == (5, 24, 6, 4)
    batch = jax.tree.map(jnp.asarray, random_batch(np.random.default_rng(1), 1, 12, 53))
    _, grads = dense_value_and_grad(model)(params, batch)
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(grads))


def test_counts_are_those_of_all_layers():
    model = small_model(dtype="float32", layers=PATTERN, num_layers=7, layer_types=KINDS)
    config, params = model.config, nnx.state(model, nnx.Param)
    assert num_params(config) == sum(leaf.size for leaf in jax.tree.leaves(params)) == num_active_params(config)
    local, full, mean = (layer_costs(one) for one in (config.of_type("local"), config.of_type("full"), config))
    assert 7 * mean.kv_elements == 5 * local.kv_elements + 2 * full.kv_elements
    assert 7 * mean.params == 5 * layer_params(config.of_type("local")) + 2 * layer_params(config.of_type("full"))
