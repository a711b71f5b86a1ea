"""The numbers that divide another."""

from sppo_jax.plan.layers import divisors


def test_divisors_rise_and_are_all():
    for value in range(1, 200):
        assert divisors(value) == [count for count in range(1, value + 1) if value % count == 0]
    assert len(divisors(2**30)) == 31
