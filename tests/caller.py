"""What a caller writes, for a type checker: each public name has a type of its own, none is Any. Nothing runs this."""

from pathlib import Path
from typing import Any, assert_type

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

import sppo_jax
from sppo_jax.attention import dense_attention, make_attention
from sppo_jax.config import Config, config_from_dict
from sppo_jax.models import Decoder, dense_loss, dense_value_and_grad, from_hf, load_hf_params, num_params, to_hf
from sppo_jax.search.search import Found, search


def settings(path: Path) -> Config:
    """Returns a config by both ways."""
    assert_type(config_from_dict({}, ["train.steps=2"]), Config)
    return assert_type(sppo_jax.load_config(path, ["train.steps=2"]), Config)


def planned(config: Config) -> sppo_jax.Plan:
    """Returns a plan that was written and read."""
    plan = assert_type(sppo_jax.make_plan(config), sppo_jax.Plan)
    assert_type(search(config), Found)
    assert_type(plan.describe(), str)
    assert_type(plan.chunk_lengths, tuple[int, ...])
    assert_type(sppo_jax.prepare_process(plan), dict[str, str])
    return assert_type(sppo_jax.Plan.from_json(plan.to_json()), sppo_jax.Plan)


def step(config: Config, batch: dict[str, np.ndarray]) -> float:
    """Returns the loss of a step."""
    plan = planned(config)
    mesh = assert_type(sppo_jax.make_mesh(plan, jax.devices()), Mesh)
    model = assert_type(sppo_jax.build_model(config, seed=0), Decoder)
    params: nnx.State[Any, Any] = nnx.state(model, nnx.Param)
    f = sppo_jax.value_and_grad(plan, model, mesh)
    jitted = jax.jit(f, compiler_options=f.compiler_options)
    loss, grads = f(params, batch)
    assert_type(loss, jax.Array)
    assert_type(grads.keys() == params.keys(), bool)
    assert_type(sppo_jax.stored_shapes(plan, params, mesh).keys() == grads.keys(), bool)
    assert_type(sppo_jax.param_shardings(plan, params, mesh).keys() == grads.keys(), bool)
    assert_type(model(batch["tokens"]), jax.Array)
    return float(loss) + float(jitted(params, batch)[0])


def by_hand(model: Decoder, params: nnx.State[Any, Any], batch: dict[str, jax.Array], folder: Path) -> None:
    """Reads, writes and runs a model without a plan."""
    assert_type(dense_loss(model, params, batch), jax.Array)
    assert_type(dense_value_and_grad(model)(params, batch)[0], jax.Array)
    assert_type(num_params(model.config), int)
    to_hf(model, folder, dtype="bfloat16")
    assert_type(from_hf(folder, dtype="float32"), Decoder)
    assert_type(load_hf_params(folder, params).keys() == params.keys(), bool)


def attend(q: jax.Array, mesh: Mesh, ids: jax.Array) -> jax.Array:
    """Returns attention of one device and of many, added."""
    everywhere = make_attention(mesh, axis="seq", kind="ring")
    return assert_type(dense_attention(q, q, q, ids, ids), jax.Array) + assert_type(
        everywhere(q, q, q, ids, ids), jax.Array
    )


def own_layer() -> tuple[int, object]:
    """Returns what layers of a caller's own are made of."""
    return sppo_jax.Attention(window=32).within(64), sppo_jax.Operands(heads={}, constants={})
