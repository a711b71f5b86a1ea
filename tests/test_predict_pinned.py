"""What a plan pins on its hosts: the pieces of the stash, the limit of the pool, and the refusal of a run."""

from dataclasses import replace

import pytest

from sppo_jax.config import config_from_dict
from sppo_jax.hardware import DEVICES
from sppo_jax.hardware.pinned_pool import REFUSED_BYTES
from sppo_jax.predict import pinned
from sppo_jax.predict.holders import optimizer_bytes
from sppo_jax.search.evaluate import memory_of, shape_of_plan
from sppo_jax.search.search import search
from sppo_jax.search.space.request import read_request

GIB = 2**30


@pytest.fixture(autouse=True)
def new_driver(monkeypatch):
    monkeypatch.setattr(pinned, "refused_bytes", lambda: REFUSED_BYTES)


def planned(length, cluster="h100:1x1", place="auto", **hardware):
    settings = {
        "model": {"preset": "llama3-8b"},
        "sequence": {"length": length},
        "data": {"source": "synthetic"},
        "train": {"steps": 1},
        "optimizer": {"place": place},
        "hardware": {"cluster": cluster, **hardware},
    }
    config = config_from_dict(settings)
    return config, search(config)


@pytest.fixture(scope="module")
def million():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pinned, "refused_bytes", lambda: REFUSED_BYTES)
        return planned(2**20, place="host", host_bytes=700 * GIB)


def test_the_stash_of_one_device_is_cut_where_no_region_holds_it(million):
    config, found = million
    plan = found.plan
    assert found.fits and len(plan.host_pieces) == 2 and plan.saves == "blocking"
    cluster = read_request(config).cluster
    limit = pinned.limit_of(plan, REFUSED_BYTES)
    # The bytes of a device, and no more than the rounding up to GiB and to 1024ths.
    assert 0 <= limit * GIB - plan.predicted.host_bytes[0] < 2 * GIB
    assert not pinned.refusal(plan, cluster)
    assert "632 GiB of a host's 700 GiB; the stash is cut into pieces of 461 GiB, 54.9 GiB" in plan.reasons["pinned"]
    assert "because drivers since r580 register less than 512 GiB at once" in plan.reasons["pinned"]


def test_a_stash_in_pieces_leaves_room_for_a_copy_where_the_host_has_it():
    config, found = planned(2**20, place="host")  # a host with 1.82 TiB
    plan = found.plan
    assert plan.saves == "async" and len(plan.host_pieces) == 2
    needed = plan.predicted.host_bytes[0] + sum(plan.host_arrays.save)
    assert 0 <= pinned.limit_of(plan, REFUSED_BYTES) * GIB - needed < 0.01 * needed


def test_older_drivers_take_the_stash_in_one_piece(million, monkeypatch):
    config, found = million
    monkeypatch.setattr(pinned, "refused_bytes", lambda: None)
    memory, request = memory_of(found.plan, config), read_request(config)
    shape = shape_of_plan(found.plan, config)
    got = pinned.pinned_of(memory, shape, found.plan.schedule.interleave, 1, request.cluster)
    assert got.pieces == (1024,) and got.limit_gib == 632


def test_the_arrays_are_those_that_the_memory_counts(million):
    config, found = million
    plan, memory = found.plan, memory_of(found.plan, config)
    shape = shape_of_plan(plan, config)
    gradients = optimizer_bytes(shape, plan.schedule.interleave, 1)[1] - sum(plan.host_arrays.state)
    assert memory.host_optimizer == sum(plan.host_arrays.state) + gradients and len(plan.host_arrays.state) == 27
    # Gradients of the layers' matrices: a float32 for each, where parameters and moments have three.
    assert gradients == (sum(plan.host_arrays.state) - 6 * 128256 * 4096 * 4) // 3
    assert plan.host_arrays.stash_bytes == memory.host_stash == memory.host - memory.host_optimizer
    # The pieces are made before the first step; what a step makes itself is one allocation.
    pieces, step = plan.host_arrays.of_step(plan.predicted.host_bytes[0], plan.host_pieces)
    assert sum(pieces) == pytest.approx(memory.host_stash, abs=2) and step == (gradients,)
    rest = plan.predicted.host_bytes[0] - sum(plan.host_arrays.state)
    assert plan.host_arrays.of_step(plan.predicted.host_bytes[0], (1024,)) == ((), (rest,))
    # A blocking save copies what lies on the device.
    assert set(plan.host_arrays.save) == {32 * 2 * 4096 * 4}


def test_eight_devices_of_a_host_keep_the_stash_whole():
    config, found = planned(3 * 2**19, "h100:1x8")
    plan, cluster = found.plan, read_request(config).cluster
    assert plan.host_pieces == (1024,) and plan.saves == "async"
    assert sum(plan.host_arrays.save) == pytest.approx(found.memory.save, rel=1e-3)
    limit = pinned.limit_of(plan, REFUSED_BYTES)
    assert limit * GIB >= plan.predicted.host_bytes[0] + sum(plan.host_arrays.save) > (limit - 1) * GIB
    assert f"{8 * limit} GiB of a host's 1.82 TiB" in plan.reasons["pinned"]
    # Without the room of the copy the saves are blocking.
    little = replace(cluster, host_bytes=int(8 * (plan.predicted.host_bytes[0] + GIB) / 0.95))
    got = pinned.pinned_of(found.memory, shape_of_plan(plan, config), plan.schedule.interleave, 1, little)
    assert (got.saves, got.arrays.save) == ("blocking", plan.host_arrays.save)


def test_a_host_with_less_memory_than_is_pinned_is_refused(million):
    config, found = million
    cluster = read_request(config).cluster
    assert not pinned.refusal(found.plan, replace(cluster, host_bytes=660 * GIB))
    line = pinned.refusal(found.plan, replace(cluster, host_bytes=650 * GIB))
    assert "\n" not in line and line.startswith("does not fit: the plan pins 632 GiB of a host (632 GiB for each of 1")
    assert "got a host with 650 GiB" in line and "shorter sequence" in line


def test_no_cut_is_chosen_that_a_host_cannot_pin(million):
    config, found = million
    plan, cluster = found.plan, read_request(config).cluster
    shape = shape_of_plan(plan, config)
    for host_gib, limit in ((655, 632), (645, None)):  # 97% of which are 635 and 625
        little = replace(cluster, host_bytes=host_gib * GIB)
        got = pinned.pinned_of(found.memory, shape, plan.schedule.interleave, 1, little)
        assert got.limit_gib == limit and (len(got.pieces) == 2) == bool(limit)
        assert pinned.pinned_reason(got, little).startswith(
            "632 GiB of" if limit else "DOES NOT FIT: of a host's 645 GiB"
        )


def test_two_processes_on_one_host_share_its_memory(million):
    """The count of devices of a host matters, whatever the number of processes."""
    config, found = million
    cluster = replace(read_request(config).cluster, devices_per_host=2, host_bytes=700 * GIB)
    plan = replace(found.plan, mesh=replace(found.plan.mesh, data=2))
    assert "pins 1.23 TiB of a host (632 GiB for each of 2 devices)" in pinned.refusal(plan, cluster)
    assert not pinned.refusal(plan, replace(cluster, host_bytes=1400 * GIB))


def test_pieces_of_another_driver_are_refused_where_they_do_not_fit(million):
    config, found = million
    whole = replace(found.plan, host_pieces=(1024,))
    line = pinned.refusal(whole, read_request(config).cluster)
    assert "in regions below 512 GiB, got host_pieces [1024] that fit no regions; plan again" in line


def test_only_gpus_have_pools(million):
    config, found = million
    cluster = read_request(config).cluster
    cpu = replace(cluster, device=DEVICES["cpu"])
    got = pinned.pinned_of(found.memory, shape_of_plan(found.plan, config), found.plan.schedule.interleave, 1, cpu)
    assert (got.pieces, got.limit_gib) == ((1024,), 0)
    assert not pinned.refusal(found.plan, replace(cpu, host_bytes=GIB))
