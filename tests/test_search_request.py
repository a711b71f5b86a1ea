"""Which attention kernel a plan gets."""

import pytest

from sppo_jax.config import ModelConfig
from sppo_jax.hardware import DEVICES
from sppo_jax.rules import Facts
from sppo_jax.search.request import choose_kernel


def model(kernel: str, head_dim: int) -> ModelConfig:
    sizes = dict(vocab_size=40, hidden_size=128, num_layers=2, num_heads=8, num_kv_heads=2, mlp_size=8)
    return ModelConfig(**sizes, head_dim=head_dim, kernel=kernel)


@pytest.mark.parametrize(
    "kernel,device,itemsize,head_dim,want",
    [
        ("auto", "v5p", 2, 128, "pallas"),
        ("auto", "v6e", 4, 256, "pallas"),
        ("auto", "tpu7x", 2, 128, "pallas"),
        ("auto", "v5p", 2, 64, "blockwise"),
        ("auto", "v5p", 8, 128, "blockwise"),
        ("auto", "v4", 2, 128, "blockwise"),
        ("auto", "h100", 2, 128, "cudnn"),
        ("auto", "h100", 4, 128, "blockwise"),
        ("auto", "cpu", 4, 128, "blockwise"),
        ("blockwise", "v5p", 2, 128, "blockwise"),
        ("pallas", "cpu", 4, 128, "pallas"),
    ],
)
def test_the_kernel_is_what_the_device_runs_best(kernel, device, itemsize, head_dim, want):
    assert choose_kernel(model(kernel, head_dim), DEVICES[device], itemsize) == want


@pytest.mark.parametrize(
    "known,want",
    [
        (dict(seq=4, kind="ring", window=1000), "blockwise"),
        (dict(seq=4, kind="ulysses", window=1000), "pallas"),
        (dict(seq=2, kind="ring", chunks=(512, 384)), "blockwise"),
        (dict(seq=2, kind="ring", chunks=(512, 256)), "pallas"),
        (dict(window=1000), "pallas"),
        (dict(groups="flex", window=1024), "blockwise"),
    ],
)
def test_a_kernel_that_does_not_suit_the_sequence_is_not_chosen(known, want):
    assert choose_kernel(model("auto", 128), DEVICES["v5p"], 2, Facts(**known)) == want


@pytest.mark.parametrize(
    "device,itemsize,head_dim", [("h100", 2, 128), ("v4", 2, 128), ("v5p", 8, 128), ("v5p", 2, 64), ("v5p", 2, 192)]
)
def test_a_kernel_that_cannot_run_is_refused(device, itemsize, head_dim):
    got = f"got {device}, {itemsize} bytes an element and model.head_dim={head_dim}; use model.kernel=blockwise"
    with pytest.raises(ValueError, match=f"model.kernel=pallas must have .* of 128 or 256, {got}"):
        choose_kernel(model("pallas", head_dim), DEVICES[device], itemsize)
