"""Why no plan fits: what takes the bytes, in words, and advice that makes just this smaller."""

import pytest

from sppo_jax.config import config_from_dict
from sppo_jax.hardware import parse_cluster
from sppo_jax.search.no_fit import HOLDERS
from sppo_jax.search.search import search

TINY = dict(vocab_size=256, hidden_size=32, num_layers=4, num_heads=4, mlp_size=64)


def problem(cluster, model, length=8192, **groups):
    sequence = {"length": length, **groups.pop("sequence", {})}
    config = config_from_dict({"model": model, "sequence": sequence, "train": {"steps": 1}, **groups})
    found = search(config, parse_cluster(cluster))
    assert not found.fits and "\n" not in found.problem
    # What is faster or slower is of no interest then.
    assert "this plan is the smallest that was found" in found.plan.reasons["mesh"]
    held, _, rest = found.problem.partition("(")[2].partition(") of ")
    return found, held, rest.partition("; ")[2]


@pytest.mark.parametrize(
    ("cluster", "model", "groups", "holders", "advice"),
    [
        (
            "h100:1x8",
            {"preset": "llama2-70b"},
            {"hardware": {"host_bytes": 2**36}},  # the optimizer has no room there, either
            ["parameters and optimizer", "gradients"],
            "use more devices, whose stages share the parameters (sppo plan --min-devices), or a smaller model",
        ),
        (
            "h100:1x8",
            {"preset": "llama3-8b", "num_layers": 1, "num_kv_heads": 32},
            {"length": 2**24},
            ["K/V", "dK/dV", "pipeline registers"],
            "use more devices, which share K/V (sppo plan --min-devices), or a shorter sequence (sppo plan --max-",
        ),
        (
            "h100:1x1",
            TINY,
            {"length": 4096, "sequence": {"per_step": 2**12}, "hardware": {"hbm_bytes": 2**29}},
            ["batch"],
            "use fewer sequences in a step than sequence.per_step=4096, more devices, which share the batch",
        ),
        (
            "a100-80g:16x8",
            {"preset": "gpt-7b"},
            {"length": 2**22, "sequence": {"chunks": 1}, "schedule": {"interleave": 1}},
            ["temporaries of a tick", "stash", "K/V", "dK/dV"],
            "change sequence.chunks=1: a plan of ",
        ),
    ],
    ids=["parameters", "K/V", "batch", "work"],
)
def test_the_largest_holders_are_named_and_the_advice_is_for_them(cluster, model, groups, holders, advice):
    found, held, change = problem(cluster, model, **groups)
    names = [name for part in held.split(", ") for name in holders if part.startswith(f"{name} ")]
    assert names == holders and held.count(", ") == len(holders) - 1, held
    assert change.startswith(advice), change
    sizes = sorted(found.memory.hbm.values(), reverse=True)
    assert sum(sizes[: len(holders)]) >= 0.8 * sum(sizes) > sum(sizes[: len(holders) - 1])


def test_every_holder_has_words():
    found, _, _ = problem("h100:1x1", {"preset": "llama3-8b"}, hardware={"host_bytes": 2**36})
    assert {*found.memory.hbm, "experts"} == set(HOLDERS)  # this model has no experts


def test_the_smallest_plan_is_that_of_either_order():
    """Bounds of breadth-first plans are far below their memory where the host is full; others are tried too."""
    cluster, model, groups = parse_cluster("h100:1x1"), {"preset": "llama3-70b"}, {"optimizer": {"place": "device"}}
    depth_first, _, _ = problem("h100:1x1", model, 2**22, schedule={"name": "sppo"}, **groups)
    found, _, _ = problem("h100:1x1", model, 2**22, **groups)
    assert found.memory.excess(cluster) <= depth_first.memory.excess(cluster)
    assert found.plan.schedule.name == "sppo"
