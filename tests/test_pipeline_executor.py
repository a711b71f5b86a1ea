"""Ticks in pairs, as on GPUs, do what ticks one by one do."""

import jax
import numpy as np
from exactness import quick_jit, random_batch, small_model, small_plan
from flax import nnx

from sppo_jax.pipeline.api import Step
from sppo_jax.plan.fold import num_segments


def test_ticks_in_pairs_have_the_bits_of_ticks_one_by_one(x64, monkeypatch):
    plan, model = small_plan((8,) * 7, places=("host", "host", "recompute"), alpha=0.7), small_model(num_layers=2)
    batch = random_batch(np.random.default_rng(0), 1, 56, model.config.vocab_size)
    params = nnx.state(model, nnx.Param)
    alone = Step(plan, model, None, train=True)
    want = quick_jit(alone)(params, batch)
    monkeypatch.setattr(Step, "in_pairs", True)
    pairs = Step(plan, model, None, train=True)
    assert num_segments(pairs.program.items) > num_segments(alone.program.items)
    jax.tree.map(np.testing.assert_array_equal, quick_jit(pairs)(params, batch), want)
