"""Figures as people read them."""

import pytest

from sppo_jax.files.format_bytes import format_bytes


@pytest.mark.parametrize(
    "value,text",
    [
        (0, "0 B"),
        (999, "999 B"),
        (1536, "1.5 KiB"),
        (340 * 2**20, "340 MiB"),
        (16.1 * 2**30, "16.1 GiB"),
        (5000 * 2**40, "5000 TiB"),
    ],
)
def test_format_bytes(value, text):
    assert format_bytes(value) == text
