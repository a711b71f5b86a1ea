"""What layers with a window hold where they have tails."""

import pytest

from sppo_jax.config import config_from_dict
from sppo_jax.predict.shape import MemoryShape
from sppo_jax.predict.tails import ends_in_windows

LOCAL = {"local": {"sliding_window": 64}}


@pytest.mark.parametrize(
    ("layers", "of_group", "ends"),
    [
        ("2x(5xlocal,full),2xlocal", 6, True),
        ("2x(5xlocal,full)", 6, False),
        ("3x(full,local)", 1, True),
        ("6xlocal", 2, False),  # every group has windows alone
    ],
)
def test_the_last_group_may_have_windows_alone(layers, of_group, ends):
    num_layers = {"2x(5xlocal,full),2xlocal": 14, "2x(5xlocal,full)": 12}.get(layers, 6)
    model = {"preset": "llama3-8b", "num_layers": num_layers, "layers": layers, "layer_types": LOCAL}
    config = config_from_dict({"model": model, "sequence": {"length": 4096}, "train": {"steps": 1}})
    shape = MemoryShape(model=config.model, layers=of_group, seq=1, ulysses=1, compute_bytes=2, length=4096)
    assert ends_in_windows(shape) is ends
