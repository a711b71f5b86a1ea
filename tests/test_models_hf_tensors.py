"""Parts of parameters cut straight from tensors: any part of any layout is what cutting the whole gives."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sppo_jax.config import ModelConfig
from sppo_jax.models.counts import num_params
from sppo_jax.models.hf_tensors import (
    RULES,
    parameter_shapes,
    places,
    read_parameter,
    sizes_of,
    tensor_shapes,
    to_tensor,
)

MODEL = ModelConfig(
    vocab_size=11, hidden_size=6, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=10, mlp_size=7,
    qkv_bias=True, qk_norm=True,
)  # fmt: skip
TENSORS = {
    name: np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + 1000 * number
    for number, (name, shape) in enumerate(tensor_shapes(MODEL).items())
}


def read(name, part):
    return TENSORS[name][part]


def by_hand(rule):
    """The parameters whose layout differs from their tensors', written out."""
    split = {"query": 4, "key": 2, "value": 2}
    name = rule.ours.removeprefix("layers/")
    layers = [TENSORS[rule.theirs.format(layer)] for layer in range(3 if rule.stacked else 1)]
    if name in split:
        layers = [x.T.reshape(6, split[name], 10) for x in layers]
    elif name.endswith("_bias"):
        layers = [x.reshape(split[name.removesuffix("_bias")], 10) for x in layers]
    elif name == "output":
        layers = [x.T.reshape(4, 10, 6) for x in layers]
    elif name in ("gate", "up", "down", "head"):
        layers = [x.T for x in layers]
    return np.stack(layers) if rule.stacked else layers[0]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.ours)
@settings(max_examples=25)
@given(data=st.data())
def test_a_part_is_cut_from_the_whole(rule, data):
    want = by_hand(rule)
    assert want.shape == parameter_shapes(MODEL)[rule.ours]
    ends = [sorted((data.draw(st.integers(0, size - 1)), data.draw(st.integers(1, size)))) for size in want.shape]
    index = tuple(slice(start, max(stop, start + 1)) for start, stop in ends)
    got = read_parameter(rule, read, index, sizes_of(MODEL), np.dtype(np.float64))
    assert got.dtype == np.float64
    np.testing.assert_array_equal(got, want[index])


def test_every_tensor_comes_back_from_its_parameter():
    seen = []
    for name, rule, layer in places(MODEL):
        whole = by_hand(rule)
        np.testing.assert_array_equal(to_tensor(rule, whole if layer is None else whole[layer]), TENSORS[name])
        seen.append(name)
    assert seen == list(TENSORS)
    assert sum(x.size for x in TENSORS.values()) == num_params(MODEL)
