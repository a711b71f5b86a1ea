"""What a run gets of a device's memory, against known figures."""

from dataclasses import replace

import pytest

from sppo_jax.config import config_from_dict
from sppo_jax.hardware import DEVICES, make_cluster, parse_cluster, pool_bytes, usable_bytes
from sppo_jax.hardware.capacity import installed_spare, pool_share
from sppo_jax.search.space.request import resolve_cluster

GIB, MIB = 2**30, 2**20


@pytest.mark.parametrize(
    ("cluster", "outside_mib", "share"),
    [
        ("h100:1x1", 2048, 0.95),  # 97% would be left; XLA gets no more than 95%
        ("h100:1x2", 3072 + 448, 0.95),
        ("h100:1x4", 3072 + 3 * 448, 0.94),
        ("h100:1x8", 3072 + 7 * 448, 0.92),
        ("h100:4x8", 4096 + 7 * 448, 0.91),
        ("a100-40g:1x8", 3072 + 7 * 448, 0.84),
        ("h200:1x8", 3072 + 7 * 448, 0.95),
        ("h200:4x8", 4096 + 7 * 448, 0.94),
    ],
)
def test_contexts_and_nccl_have_their_place_outside_the_pool(cluster, outside_mib, share):
    known = parse_cluster(cluster)
    total = known.device.hbm_bytes
    assert pool_share(known) == share
    assert pool_bytes(known) == int(total * share) <= total - outside_mib * MIB
    assert share == 0.95 or int(total * (share + 0.01)) > total - outside_mib * MIB


def test_known_programs_against_the_pool():
    """A step that takes 76.1 GiB was said to fit 79; one H100 gives a run 75."""
    assert pool_bytes(parse_cluster("h100:1x1")) == pytest.approx(75.05 * GIB, abs=0.01 * GIB)
    gpt_65b = int(76.1 * GIB)
    assert gpt_65b > pool_bytes(parse_cluster("a100-80g:1x1")) > pool_bytes(parse_cluster("a100-80g:16x8"))


def test_plans_leave_a_part_of_the_pool_free():
    cluster = parse_cluster("h100:1x8")
    assert usable_bytes(cluster) == int(pool_bytes(cluster) * 0.97)
    assert usable_bytes(replace(cluster, spare=0.1)) == int(pool_bytes(cluster) * 0.9)
    # HBM on jax 0.11 is up to 11% above the prediction.
    assert usable_bytes(replace(cluster, spare=0.1)) * 1.11 < pool_bytes(cluster)
    for name in ("cpu", "v5p"):
        other = make_cluster(DEVICES[name], 4)
        assert (pool_bytes(other), usable_bytes(other)) == (other.device.hbm_bytes, int(other.device.hbm_bytes * 0.94))


def test_a_small_device_of_the_users_own_is_no_smaller_than_its_least_share():
    tiny = replace(parse_cluster("h100:1x8"), device=replace(DEVICES["h100"], hbm_bytes=GIB))
    assert pool_share(tiny) == 0.8


def config(**hardware):
    return config_from_dict(
        {
            "model": {"preset": "llama3-8b"},
            "sequence": {"length": 4096},
            "train": {"steps": 1},
            "hardware": hardware,
        }
    )


@pytest.mark.parametrize(("version", "here"), [((0, 10, 2), 0.1), ((0, 11, 2), 0.1), ((0, 12, 0), None), ((), None)])
def test_the_jax_of_this_machine_counts_for_its_own_devices_alone(version, here, monkeypatch):
    monkeypatch.setattr("sppo_jax.hardware.capacity.jaxlib_version", lambda: version)
    assert installed_spare(DEVICES["h100"]) == here and installed_spare(DEVICES["cpu"]) is None
    monkeypatch.setattr("sppo_jax.search.space.request.local_cluster", lambda: make_cluster(DEVICES["h100"], 8))
    assert resolve_cluster(config()).spare == here
    assert resolve_cluster(config(cluster="h100:1x8")).spare is None
    assert resolve_cluster(config(cluster="h100:1x8", hbm_spare=0.2)).spare == 0.2
    assert resolve_cluster(config(hbm_spare=0.0)).spare == 0.0
