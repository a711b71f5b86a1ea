"""The pools of pinned host memory that a run fills, on a CPU, which has no such pools but runs the program."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest
from exactness import small_plan
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sppo_jax.processes import environment, host_pool, prepare

MIB = 2**20


def test_a_program_takes_what_it_is_asked_for_and_writes_a_row():
    sharding = NamedSharding(Mesh(np.array(jax.devices()[:1]), ("device",)), PartitionSpec())
    row = np.arange(2**18, dtype=np.uint32)[None]
    taken = host_pool.taker(3, sharding)(row, np.int32(1))
    assert taken.nbytes == 3 * MIB and taken.sharding.memory_kind == "pinned_host"
    assert np.array_equal(np.asarray(taken)[1], row[0])


def test_all_regions_are_held_until_the_last_is_there(monkeypatch):
    """One that is given back would be taken for the next request, and no region would come."""
    made, alive = [], []

    def taker(num_rows, sharding):
        def take(row, place):
            alive.append([array.is_deleted() for array in made])
            made.append(jax.numpy.zeros((num_rows,)))
            return made[-1]

        return take

    monkeypatch.setattr(host_pool, "taker", taker)
    host_pool.fill([3 * MIB, 2 * MIB, MIB], jax.devices()[0])
    assert [array.size for array in made] == [3, 2, 1] and alive == [[], [False], [False, False]]
    assert all(array.is_deleted() for array in made)


def test_only_gpus_have_pools(monkeypatch):
    filled = []
    monkeypatch.setattr(host_pool, "pool_requests", lambda plan: (4 * MIB,))
    monkeypatch.setattr(host_pool, "fill", lambda requests, device, **_: filled.append((requests, device)))
    cpu, gpus = SimpleNamespace(platform="cpu"), [SimpleNamespace(platform="gpu") for _ in range(2)]
    host_pool.fill_pools(None, [cpu])
    assert not filled
    host_pool.fill_pools(None, gpus)
    assert [device for _, device in filled] == gpus and filled[0][0] == (4 * MIB,)


@pytest.mark.parametrize(("lockable", "told"), [(8 * MIB, True), (2**50, False), (None, False)])
def test_a_system_that_pins_no_more_is_told_of_in_one_line(lockable, told, monkeypatch):
    def refuse(requests, device, **_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of pinned memory\nmore")

    monkeypatch.setattr(host_pool, "pool_requests", lambda plan: (221 * 2**30,))
    monkeypatch.setattr(host_pool, "fill", refuse)
    monkeypatch.setattr(host_pool.machine, "lockable_bytes", lambda: lockable)
    words = "must let XLA pin 221 GiB for each of 1 devices, got: RESOURCE_EXHAUSTED: out of pinned memory; free memory"
    with pytest.raises(ValueError, match=words) as error:
        host_pool.fill_pools(None, [SimpleNamespace(platform="gpu")])
    assert "\n" not in str(error.value) and ("ulimit -l is 8 MiB" in str(error.value)) == told


@pytest.mark.parametrize(("new", "trains"), [(True, True), (True, False), (False, True)])
def test_a_process_that_trains_fills_the_new_pools_of_its_own_devices(new, trains, monkeypatch):
    filled = []
    monkeypatch.setattr(environment, "set_limits", lambda plan: new)
    monkeypatch.setattr(host_pool, "fill_pools", lambda plan, devices: filled.append((plan, list(devices))))
    plan = small_plan((16,) * 4, mesh=(1, 1, 2))
    assert prepare.prepare_process(plan, trains=trains) == {}
    assert filled == ([(plan, jax.local_devices()[:2])] if new and trains else [])


def test_pinning_says_how_far_it_is(capsys):
    with host_pool._Progress(4 * 2**30, 2) as progress:
        progress.add(2**30)
        progress.add(2**30)
        assert progress.text().startswith("pinned 2 GiB of 8 GiB of host memory, ")
    assert capsys.readouterr().out == ""  # within seconds
