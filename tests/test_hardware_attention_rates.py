"""Measured rates of attention: the nearest, and those between."""

import pytest

from sppo_jax.hardware.attention_rates import AttentionCall, make_rates

CALLS = (
    AttentionCall(way="forward", queries=2048, keys=8192, flops_s=400.0),
    AttentionCall(way="forward", queries=8192, keys=8192, flops_s=500.0),
    AttentionCall(way="forward", queries=8192, keys=131072, flops_s=580.0),
    AttentionCall(way="backward", queries=8192, keys=32768, flops_s=520.0),
    AttentionCall(way="backward", queries=8192, keys=32768, flops_s=540.0),
    AttentionCall(way="backward", queries=32768, keys=32768, flops_s=490.0),
)
RATES = make_rates(CALLS)


@pytest.mark.parametrize(
    "way, queries, keys, flops_s",
    [
        ("forward", 2048, 8192, 400.0),
        ("forward", 4096, 8192, 450.0),  # half way by logarithms
        ("forward", 8192, 32768, 540.0),
        ("forward", 4096, 32768, 515.0),  # between 450 and 580, the nearest of the longer keys
        ("forward", 16, 16, 400.0),
        ("forward", 2**20, 2**20, 580.0),
        ("forward", 0, 0, 400.0),
        ("backward", 8192, 32768, 530.0),  # two measurements of one call
        ("backward", 16384, 2**20, 510.0),
        ("backward", 32768, 8, 490.0),
    ],
)
def test_rates_are_measured_or_between_measured_ones(way, queries, keys, flops_s):
    assert RATES.flops_s(way, queries, keys) == pytest.approx(flops_s)


def test_the_fastest_call_of_a_way():
    assert (RATES.fastest("forward"), RATES.fastest("backward")) == (580.0, 530.0)
