"""Which layers of a group see all tokens before a chunk, and what runs again for their keys and values."""

import pytest

from sppo_jax.config import config_from_dict
from sppo_jax.search.space.layouts import layouts
from sppo_jax.search.space.request import read_request

CASES = {
    # Three layers with a state before one with attention: six of eight layers run again.
    "states": ("2x(3xdelta,full)", {}, 1, 6 / 8),
    "windows": ("2x(3xlocal,full)", {"local": {"sliding_window": 64}}, 1, 6 / 8),
    "both": ("2x(delta,local,2xfull)", {"local": {"sliding_window": 64}}, 2, 4 / 8),
    "states alone": ("8xdelta", {}, 0, 0.0),
}


@pytest.mark.parametrize("name", CASES)
def test_layers_with_a_window_or_a_state_run_again_for_the_one_that_sees_all_tokens(name):
    layers, kinds, most, again = CASES[name]
    model = dict(
        vocab_size=256, hidden_size=128, num_layers=8, num_heads=4, mlp_size=256, layers=layers, layer_types=kinds
    )
    asked = dict(
        model=model,
        sequence={"length": 4096},
        hardware={"cluster": "h100:1x1"},
        schedule={"name": "breadth-first", "interleave": 2},
        train={"steps": 10},
    )
    found = layouts(read_request(config_from_dict(asked)))
    assert found and {(layout.layers, layout.most_whole, layout.again_for_kv) for layout in found} == {(4, most, again)}
