"""Which attention kernel a plan gets."""

import pytest

from sppo_jax.config import ModelConfig, config_from_dict
from sppo_jax.hardware import DEVICES, parse_cluster
from sppo_jax.rules import Facts
from sppo_jax.search.make import make_plan
from sppo_jax.search.space.request import choose_kernel


def model(kernel: str, head_dim: int) -> ModelConfig:
    sizes = dict(vocab_size=40, hidden_size=128, num_layers=2, num_heads=8, num_kv_heads=2, mlp_size=8)
    return ModelConfig(**sizes, head_dim=head_dim, kernel=kernel)


@pytest.mark.parametrize(
    "kernel,device,itemsize,head_dim,want",
    [
        ("auto", "v5p", 2, 128, "pallas"),
        ("auto", "v6e", 4, 256, "pallas"),
        ("auto", "tpu7x", 2, 128, "pallas"),
        ("auto", "v5p", 2, 64, "pallas"),
        ("auto", "v5p", 2, 62, "blockwise"),
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
        (dict(seq=4, split="ring", window=1000), "blockwise"),
        (dict(seq=4, split="ulysses", window=1000), "pallas"),
        (dict(seq=2, split="ring", chunks=(512, 384)), "blockwise"),
        (dict(seq=2, split="ring", chunks=(512, 256)), "pallas"),
        (dict(window=1000), "pallas"),
        (dict(groups="flex", window=1024), "blockwise"),
    ],
)
def test_a_kernel_that_does_not_suit_the_sequence_is_not_chosen(known, want):
    assert choose_kernel(model("auto", 128), DEVICES["v5p"], 2, Facts(**known)) == want


def test_a_kernel_whose_blocks_are_too_large_is_not_chosen():
    """A step has all query heads of a key-value head."""
    heads = dict(num_heads=128, num_kv_heads=1, head_dim=128)
    sizes = dict(vocab_size=64, hidden_size=256, num_layers=1, mlp_size=64)
    asked, free = (ModelConfig(**sizes, **heads, kernel=kernel) for kernel in ("pallas", "auto"))
    assert [choose_kernel(free, DEVICES[name], 2) for name in ("v5p", "v6e")] == ["blockwise", "pallas"]
    assert choose_kernel(free, DEVICES["v5p"], 2, Facts(ulysses=2)) == "pallas"
    with pytest.raises(ValueError, match="of model.kernel=pallas must fit into the 56 MiB .*, got 74.* MiB; use"):
        choose_kernel(asked, DEVICES["v5p"], 2)


@pytest.mark.parametrize(
    "device,itemsize,head_dim", [("h100", 2, 128), ("v4", 2, 128), ("v5p", 8, 128), ("v5p", 2, 62), ("v5p", 2, 264)]
)
def test_a_kernel_that_cannot_run_is_refused(device, itemsize, head_dim):
    got = f"got {device}, {itemsize} bytes an element and model.head_dim={head_dim}; use model.kernel=blockwise"
    with pytest.raises(ValueError, match=f"model.kernel=pallas must have .* of 64 to 256, {got}"):
        choose_kernel(model("pallas", head_dim), DEVICES[device], itemsize)


@pytest.mark.parametrize(
    "sections,message",
    [
        (
            {"optimizer": {"place": "host"}},
            "place=host must have GPUs .*, got v5p:2x2x1, .*; use optimizer.place=device",
        ),
        ({"sequence": {"length": 131000}}, r"mesh.seq \* 128 \(the tile of a device\) must divide .*; use .*=130944"),
    ],
)
def test_what_no_program_for_tpus_does_is_refused(sections, message):
    config = {"model": {"preset": "qwen3-0.6b"}, "sequence": {"length": 2**17}, "train": {"steps": 1}, **sections}
    with pytest.raises(ValueError, match=message):
        make_plan(config_from_dict(config), parse_cluster("v5p:2x2x1"))
