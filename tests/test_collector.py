"""The garbage collector rests during a search, and only then."""

import gc

import pytest

from sppo_jax.search.collector import without_collector


@pytest.mark.parametrize("is_on", [True, False])
def test_the_collector_is_left_as_it_was(is_on):
    try:
        (gc.enable if is_on else gc.disable)()
        with pytest.raises(ValueError, match="stop"), without_collector():
            with without_collector():
                assert not gc.isenabled()
            assert not gc.isenabled()
            raise ValueError("stop")
        assert gc.isenabled() == is_on
    finally:
        gc.enable()
