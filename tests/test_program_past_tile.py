"""Keys of the past in one call of a fused kernel, by hand."""

import pytest

from sppo_jax.program.past_tile import past_tile


@pytest.mark.parametrize(
    ("num_keys", "row_bytes", "wanted"),
    # 64 MiB hold 131072 keys of 512 bytes, 8192 of 8 KiB, and one of 64 MiB.
    [(10**6, 512, 32768), (10**6, 8192, 8192), (10**6, 12000, 4096), (100, 512, 100), (10**6, 2**26, 1), (7, 2**27, 1)],
)
def test_a_tile_is_a_power_of_two_within_its_bytes(num_keys, row_bytes, wanted):
    assert past_tile(num_keys, row_bytes) == wanted
    assert past_tile(num_keys, row_bytes, 512) == min(wanted, 512)
