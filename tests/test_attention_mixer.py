"""What a layer says of its attention: a window, or none."""

import dataclasses
from types import SimpleNamespace

import pytest
from exactness import small_model, small_plan

from sppo_jax.attention.mixer import Attention, mixer_of
from sppo_jax.models.layers import DecoderLayer
from sppo_jax.pipeline.api import value_and_grad


def test_a_layer_without_a_mixer_attends_to_all():
    assert mixer_of(object()) == Attention() and mixer_of(SimpleNamespace(mixer=Attention(3))).window == 3
    assert mixer_of(small_model(dtype="float32", sliding_window=5).layers) == Attention(window=5)


def test_a_window_counts_where_it_is_shorter_than_a_sequence():
    assert [Attention(8).within(length) for length in (7, 8, 9)] == [0, 0, 8]
    with pytest.raises(ValueError, match="a layer's window must be at least 0, got -1; use 0 for no window"):
        Attention(-1)


class Forgetful(DecoderLayer):
    def __init__(self, config, *, rngs):
        super().__init__(dataclasses.replace(config, sliding_window=None), rngs=rngs)


def test_a_block_must_have_the_window_of_its_model():
    """Or the plan would be for other work than the program's."""
    with pytest.raises(ValueError, match="the window of model.sliding_window=5, got 0; set its attribute mixer"):
        value_and_grad(small_plan((8,)), small_model(dtype="float32", sliding_window=5, layer=Forgetful))


def test_a_ring_must_divide_the_window():
    with pytest.raises(ValueError, match="model.sliding_window must be a multiple of the 2 devices on the ring, got 5"):
        value_and_grad(small_plan((8,), mesh=(1, 1, 2), kind="ring"), small_model(dtype="float32", sliding_window=5))
