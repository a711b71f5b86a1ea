"""The examples' own blocks and mixer: the pipeline's loss and gradients against the dense model's."""

import dataclasses
import importlib.util
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import sppo_jax
from sppo_jax.config import SequenceConfig
from sppo_jax.models import Decoder, dense_value_and_grad


def load_example(name):
    path = Path(__file__).parents[1] / "examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("name", "layer"),
    [("custom_block", "ParallelBlock"), pytest.param("custom_mixer", "RecurrentBlock", marks=pytest.mark.slow)],
)
def test_pipeline_equals_dense_for_a_users_block(name, layer, x64):
    example = load_example(name)
    config = example.make_config()
    shape = dataclasses.replace(
        config.model, hidden_size=16, head_dim=4, mlp_size=24, compute_dtype="float64", init_scale=0.3
    )
    config = dataclasses.replace(
        config, model=shape, sequence=SequenceConfig(length=32, chunks=4, split="ring", per_pipeline=1)
    )
    model = Decoder(shape, rngs=nnx.Rngs(params=0), layer=getattr(example, layer))
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), nnx.state(model, nnx.Param))
    batch = jax.tree.map(jnp.asarray, example.text_batch(np.random.default_rng(0), config))
    loss, grads = sppo_jax.value_and_grad(sppo_jax.make_plan(config), model)(params, batch)
    expected, expected_grads = jax.jit(dense_value_and_grad(model))(params, batch)
    np.testing.assert_allclose(loss, expected, rtol=1e-12)
    assert jax.tree.structure(grads) == jax.tree.structure(params)
    chex.assert_trees_all_close(grads, expected_grads, rtol=1e-9, atol=1e-11)
