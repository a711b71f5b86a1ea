"""The host allocations of a compiled program, from what XLA dumps, and whether a pool of pinned memory has them."""

from dataclasses import replace

import pytest
from exactness import small_plan

from sppo_jax.fit import allocations
from sppo_jax.hardware import parse_cluster
from sppo_jax.hardware.pinned_pool import REFUSED_BYTES
from sppo_jax.plan.host_arrays import HostArrays
from sppo_jax.plan.parts import Predicted

GIB = 2**30
# Lines as jax 0.11.2 and 0.12.0.1 write them.
DUMP = """
allocation 0: size {state}, color 5, page 0, parameter 0, shape |f32[4]| at ShapeIndex {{}}, maybe-live-out:
 value: <13 row.1 @0> (size=1048576,offset=0): f32[4]
allocation 1: size 1048576, page 0, parameter 1, shape |u32[1,262144]| at ShapeIndex {{}}:
allocation 2: size 4, page 0, constant:
allocation 3: size 780, page 0, preallocated-temp:
allocation 9: size 780, color 1, page 0, preallocated-temp:
{temporaries}
"""


def dumped(folder, temporaries, state=10 * GIB):
    lines = [
        f"allocation {4 + k}: size {size}, color 5, page 0, preallocated-temp:" for k, size in enumerate(temporaries)
    ]
    path = folder / "module_0001.jit_step.sm_9.0a_gpu_after_optimizations-buffer-assignment.txt"
    path.write_text(DUMP.format(state=state, temporaries="\n".join(lines)))
    return folder


def a_plan(temporary_gib, pieces=(1024,), state=(10 * GIB,)):
    predicted = Predicted(
        step_s=1.0, bubble_fraction=0.0, hbm_bytes=(0,), host_bytes=(temporary_gib * GIB + sum(state),)
    )
    arrays = HostArrays(state=state, stash_bytes=temporary_gib * GIB)
    plan = small_plan((16,) * 4, mesh=(1, 1, 1))
    return replace(plan, predicted=predicted, host_arrays=arrays, host_pieces=pieces)


@pytest.fixture(autouse=True)
def new_driver(monkeypatch):
    monkeypatch.setattr(allocations, "refused_bytes", lambda: REFUSED_BYTES)


def test_arguments_and_temporaries_on_the_host_are_told_apart(tmp_path):
    found = allocations.host_allocations(dumped(tmp_path, [220 * GIB, GIB]), a_plan(221))
    assert (found.arguments, found.temporaries) == ((10 * GIB,), (220 * GIB, GIB))
    assert (found.limit_gib, found.planned_gib, found.problem) == (231, 231, "")
    assert found.describe() == "the largest of 3 has 220 GiB; a device pins 231 GiB"
    assert found.to_dict() == {"largest_bytes": 220 * GIB, "number": 3, "limit_gib": 231}


def test_an_allocation_that_cannot_be_had_is_named(tmp_path):
    found = allocations.host_allocations(dumped(tmp_path, [727 * GIB]), a_plan(727))
    assert found.limit_gib is None
    words = "an allocation of 727 GiB on the host, for which XLA's pool of pinned memory has no region"
    assert found.problem == words and found.describe() == f"DOES NOT FIT: {words}"


def test_a_program_that_takes_more_than_is_planned_is_named(tmp_path):
    found = allocations.host_allocations(dumped(tmp_path, [300 * GIB]), a_plan(220))
    assert "with which the program takes 310 GiB of pinned memory per device, 230 planned" in found.problem
    assert not allocations.host_allocations(dumped(tmp_path, [100 * GIB]), a_plan(220)).problem


@pytest.mark.parametrize(("host_gib", "allowed"), [(1912, ""), (1900, 230)])
def test_a_host_that_allows_less_than_a_run_pins_is_named(host_gib, allowed, tmp_path):
    cluster = replace(parse_cluster("h100:1x8"), host_bytes=host_gib * GIB)
    found = allocations.host_allocations(dumped(tmp_path, [220 * GIB, GIB]), a_plan(221), cluster)
    text = f"231 GiB of pinned memory per device, of which its host allows {allowed}"
    assert found.problem == (text if allowed else "")


def test_pieces_are_arguments(tmp_path):
    dumped(tmp_path, [20 * GIB])
    path = next(tmp_path.iterdir())
    pieces = [
        f"allocation {7 + k}: size {size * GIB}, color 5, page 0, parameter {2 + k}, shape"
        for k, size in enumerate((460, 60))
    ]
    path.write_text(path.read_text() + "\n".join(pieces))
    plan = replace(a_plan(520, pieces=(906, 118)), saves="blocking")
    plan = replace(plan, predicted=replace(plan.predicted, host_bytes=(550 * GIB,)))
    found = allocations.host_allocations(tmp_path, plan)
    assert found.arguments == (10 * GIB, 460 * GIB, 60 * GIB) and found.temporaries == (20 * GIB,)
    assert found.planned_gib - 1 <= found.limit_gib <= found.planned_gib and not found.problem


def test_a_program_without_host_memory_has_none(tmp_path):
    plan = a_plan(0, state=())
    plan = replace(plan, saves="async", host_arrays=replace(plan.host_arrays, save=(8 * GIB,) * 3))
    found = allocations.host_allocations(tmp_path, plan)
    assert (found.describe(), found.problem, found.to_dict()["largest_bytes"]) == ("none", "", 0)


def test_the_newest_dump_counts(tmp_path):
    import os

    dumped(tmp_path, [300 * GIB])
    old = next(tmp_path.iterdir()).rename(tmp_path / "module_0000.x-buffer-assignment.txt")
    os.utime(old, (1, 1))
    assert allocations.host_allocations(dumped(tmp_path, [220 * GIB]), a_plan(220)).temporaries == (220 * GIB,)
