"""Layers with a state in the pipeline: exact in every plan, and each mask that keeps states apart is needed."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exactness import assert_exact, dense_step, quick_jit, small_model, small_plan
from flax import nnx
from programs import compare
from state_cases import STATE_MLP, Decay, StateCase, draw_states, packed_batches, state_layer

from sppo_jax.models.dense import dense_loss
from sppo_jax.pipeline import api, mixing
from sppo_jax.pipeline.api import evaluate, value_and_grad
from sppo_jax.rules import Broken

KINDS = {"state": {"mlp_size": STATE_MLP}}
HYBRID = dict(num_layers=4, layers="2x(state,full)", kinds=KINDS)
DRAWN_IN_CI = ()
DRAWN_SLOWLY = ()


@pytest.fixture(autouse=True)
def unprobed(monkeypatch):
    """The mixers here are tried by `test_pipeline_probe_mixer.py`, once."""
    monkeypatch.setattr(api, "check_block", lambda *_: None)


def model_of(**changes):
    return small_model(layer=state_layer, **HYBRID | changes)


@pytest.mark.parametrize("seed", DRAWN_IN_CI)
def test_drawn_states_have_the_dense_loss_and_gradients(seed, request):
    compare(draw_states(seed), seed, count=2, batches=packed_batches, request=request)


@pytest.mark.slow
@pytest.mark.parametrize("seed", DRAWN_SLOWLY)
def test_more_drawn_states_have_the_dense_loss_and_gradients(seed, request):
    compare(draw_states(seed), seed, count=2, batches=packed_batches, request=request)
