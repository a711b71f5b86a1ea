"""What a token moves beside products, by hand; and where it is charged."""

from dataclasses import replace

import pytest

from sppo_jax.config import ModelConfig
from sppo_jax.hardware import DEVICES, make_cluster
from sppo_jax.models.counts import layer_costs
from sppo_jax.plan.parts import MeshShape
from sppo_jax.predict.seconds.costs import cost_model
from sppo_jax.predict.seconds.elementwise import head_bytes, layer_bytes
from sppo_jax.predict.seconds.stage_shape import Recompute, StageShape

MODEL = ModelConfig(vocab_size=100, hidden_size=8, num_layers=4, num_heads=4, num_kv_heads=2, mlp_size=16)
LAYER = layer_costs(MODEL)
# Hidden state, queries, keys and values, gate and up of a token.
HIDDEN, QUERIES, KEYS, PRODUCTS = 8, 8, 8, 32


def test_a_layer_moves_what_is_counted():
    forward = 2 * (14 * HIDDEN + 8 * QUERIES + 3 * KEYS + 1.5 * PRODUCTS) + 4 * 6 * QUERIES
    assert layer_bytes(LAYER, "F", 2, linear=1, attention=True) == forward
    backward = 2 * (14 * HIDDEN + 14 * QUERIES + 7 * KEYS + 2.5 * PRODUCTS) + 4 * 6 * QUERIES
    assert layer_bytes(LAYER, "B", 2, linear=0, attention=False) == backward
    again = 2 * (9 * HIDDEN + 2 * QUERIES + KEYS + 1.5 * PRODUCTS)
    assert layer_bytes(LAYER, "B", 2, linear=2, attention=False) == backward + 2 * again
    attention = 2 * (6 * QUERIES + 2 * KEYS) + 4 * 6 * QUERIES
    assert layer_bytes(LAYER, "B", 2, linear=0, attention=True) == backward + attention
    assert head_bytes(100, 2) == 100 * 14


def costs(share, **recompute):
    device = replace(DEVICES["h100"], elementwise_efficiency=share, overhead_tokens=7)
    return cost_model(
        MODEL,
        make_cluster(device, 4),
        StageShape(
            mesh=MeshShape(data=1, pipe=2, seq=2),
            ulysses=2,
            ring=1,
            layers=2,
            compute_bytes=2,
            kernel="cudnn",
            length=64,
        ),
        Recompute(**recompute),
    )


@pytest.mark.parametrize("again", [False, True])
def test_units_take_what_a_token_moves_at_a_share_of_the_memorys_rate(again):
    with_it, without = (costs(share, linear=1, attention=again) for share in (0.5, 0.0))
    # Sixteen tokens on two devices, padded to 24; what a tick waits for weights does not grow.
    for kind in "FB":
        more_s = with_it.compute_s(kind, 8, 16, (24, 24, False)) - without.compute_s(kind, 8, 16, (24, 24, False))
        moved = 2 * layer_bytes(LAYER, kind, 2, linear=1, attention=again)
        assert more_s == pytest.approx(12 * moved / (0.5 * 3.35e12), rel=1e-6)
        assert with_it.token_s(kind, again) - without.token_s(kind, again) == pytest.approx(more_s / 12, rel=1e-6)
    more_s = with_it.compute_s("H", 8, 16) - without.compute_s("H", 8, 16)
    assert more_s == pytest.approx(8 * head_bytes(100, 2) / 2 / (0.5 * 3.35e12), rel=1e-6)
