"""What a step computes: matrix products outside attention, and pairs of attention blocks."""

from collections import Counter
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from exactness import quick_options, random_batch, small_model, small_plan
from flax import nnx
from no_attention import replace_attention

from sppo_jax.attention import blockwise
from sppo_jax.attention.kernels import MergedKernel
from sppo_jax.attention.spreading import ring
from sppo_jax.fit.hlo.products import Products
from sppo_jax.fit.hlo.text import computations_of
from sppo_jax.pipeline.api import value_and_grad

CHUNKS, SIZES = (32, 32, 32), dict(hidden_size=64, mlp_size=96, vocab_size=96, num_layers=4)
HOST = dict(places=("host", "host", "recompute"), alpha=1.0)
BREADTH_FIRST = dict(schedule="breadth-first", kv="rebuild", weights="gathered", **HOST)
PLANS = {
    "depth-first": dict(mesh=(1, 2, 2), **HOST),
    "groups-of-one-layer": dict(mesh=(1, 1, 2), interleave=4, **BREADTH_FIRST),
    "groups-of-two-layers": dict(mesh=(1, 1, 2), interleave=2, **BREADTH_FIRST),
    "two-stages": dict(mesh=(1, 2, 2), interleave=2, **BREADTH_FIRST),
}


@pytest.fixture
def no_products_in_attention(monkeypatch):
    replace_attention(monkeypatch)


def step_flops(plan, model):
    """Returns the FLOPs of a device's matrix products in a step, read from the compiled program."""
    batch = random_batch(np.random.default_rng(0), plan.mesh.data, plan.sequence_length, model.config.vocab_size)
    step = jax.jit(value_and_grad(plan, model)).lower(nnx.state(model, nnx.Param), batch).compile()
    computations, entry = computations_of(step.as_text())
    return Products(computations).flops(computations[entry])


def ideal_flops(plan, config):
    """Returns what the busy and the idle ticks of a stage have to compute, and nothing else.

    A tick takes 6 FLOPs a parameter and token. Again: what is not stashed of a layer and what a later product of its
    backward needs (queries, output projection, gate and up), and keys and values of the groups that are rebuilt.
    """
    pipe, groups, num_chunks = plan.mesh.pipe, plan.schedule.interleave, len(plan.chunk_lengths)
    hidden, heads = config.hidden_size, config.num_heads * config.head_dim
    key_value, gate_up = 2 * hidden * config.num_kv_heads * config.head_dim, 2 * hidden * config.mlp_size
    layer = 2 * hidden * heads + key_value + gate_up * 3 // 2
    tokens = plan.chunk_lengths[0] // plan.mesh.seq
    layers = config.num_layers // (pipe * groups)
    idle = pipe - 1
    found = (num_chunks * groups + idle) * tokens * layers * (6 * layer + 2 * (2 * hidden * heads + gate_up))
    if plan.stash.kv == "rebuild":
        found += (num_chunks * (groups - 1) + idle) * tokens * layers * 2 * key_value
    return found + num_chunks * tokens * 6 * hidden * config.vocab_size // pipe


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "two-stages")) for name in PLANS]
)
def test_products_outside_attention_are_those_of_the_model_and_of_what_is_made_again(name, no_products_in_attention):
    plan, model = small_plan(CHUNKS, **PLANS[name]), small_model(dtype="float32", **SIZES)
    assert 0.98 < step_flops(plan, model) / ideal_flops(plan, model.config) < 1.02


def block_pairs(plan, monkeypatch):
    """Returns how many pairs of query and key blocks all devices work on, forward and backward, by running a step."""
    found, real = Counter(), blockwise

    def counted(kind, attend):
        def run(q_TNH, prefix, mask, *others):
            pairs = (mask.meets.last - mask.meets.first).clip(0).sum()
            jax.debug.callback(lambda count: found.update({kind: int(count)}), pairs)
            return attend(q_TNH, prefix, mask, *others)

        return run

    kernel = MergedKernel(SimpleNamespace(forward=counted("F", real.forward), backward=counted("B", real.backward)))
    with monkeypatch.context() as patch:
        patch.setattr(blockwise, "BLOCK_Q", 4)
        patch.setattr(blockwise, "BLOCK_K", 8)
        patch.setattr(ring, "kernel_of", lambda _: kernel)
        model = small_model(dtype="float32")
        batch = random_batch(np.random.default_rng(1), 1, plan.sequence_length, model.config.vocab_size)
        step = jax.jit(value_and_grad(plan, model), compiler_options=quick_options())
        jax.block_until_ready(step(nnx.state(model, nnx.Param), batch))
        jax.effects_barrier()
    return found


@pytest.mark.slow
def test_breadth_first_works_on_the_block_pairs_of_depth_first(monkeypatch):
    for mesh in ((1, 1, 2), (1, 2, 2)):
        breadth_first = dict(mesh=mesh, interleave=2, **BREADTH_FIRST)
        first, found = (
            block_pairs(small_plan(CHUNKS, **changes), monkeypatch)
            for changes in (dict(mesh=mesh, **HOST), breadth_first)
        )
        assert found == first and found["F"] == found["B"] > 0
