"""The keyed permutation is one, for every size and key, and looks like no other key's."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sppo_jax.data.rows.order import key_of, mix, mix_array, permuted


@given(size=st.integers(1, 300), key=st.integers(0, 2**64 - 1))
@settings(max_examples=60)
def test_every_index_has_a_place_of_its_own(size, key):
    assert sorted(permuted(index, size, key) for index in range(size)) == list(range(size))


def test_a_huge_epoch_starts_at_once():
    size = 10**15
    places = [permuted(index, size, 7) for index in range(100)]
    assert len(set(places)) == 100 and all(0 <= place < size for place in places)


@pytest.mark.parametrize("size", [5, 16, 33])
def test_places_are_even(size):
    """Over many keys each index lands everywhere about equally often (chi-squared, far in the tail)."""
    num_keys = 2000
    for index in (0, size // 2, size - 1):
        counts = np.bincount([permuted(index, size, key_of(1, key)) for key in range(num_keys)], minlength=size)
        expected = num_keys / size
        assert ((counts - expected) ** 2 / expected).sum() < size + 6 * np.sqrt(2 * size)


def test_arrays_mix_like_integers():
    values = [0, 1, 2**40, 2**64 - 1]
    assert mix_array(np.array(values, np.uint64)).tolist() == [mix(value) for value in values]


def test_keys_depend_on_every_part_and_its_place():
    keys = {key_of(*parts) for parts in [(0,), (0, 0), (0, 1), (1, 0), (1, 1), (1,)]}
    assert len(keys) == 6
