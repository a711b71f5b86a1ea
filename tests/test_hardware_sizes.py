"""Larger and smaller clusters: each exists, is read back by its name, and has the devices asked for."""

import math

import pytest

from sppo_jax.hardware import DEVICES, make_cluster, parse_cluster
from sppo_jax.hardware.existing import nearest_shapes, shape_of_chips, slice_shapes
from sppo_jax.hardware.sizes import doubled_sizes, every_size, resized

TPUS = [name for name, device in DEVICES.items() if device.platform == "tpu"]


@pytest.mark.parametrize("name", TPUS)
def test_every_shape_is_a_cluster_and_every_other_names_those_that_are(name):
    shapes = slice_shapes(name)
    assert len(set(shapes)) == len(shapes) and list(map(math.prod, shapes)) == sorted(map(math.prod, shapes))
    for shape in shapes:
        text = f"{name}:{'x'.join(map(str, shape))}"
        assert parse_cluster(text).name == text
        assert shape_of_chips(name, math.prod(shape)) in shapes
    for sides in range(1, 4):
        for size in range(1, 40):
            shape = (size,) * sides
            near = nearest_shapes(name, shape)
            assert near and set(near) <= set(shapes) and (shape not in shapes or shape in near)


def test_the_largest_slices_are_those_of_the_pages():
    assert {name: math.prod(slice_shapes(name)[-1]) for name in TPUS} == {
        "v4": 4096, "v5e": 256, "v5p": 6144, "v6e": 256, "tpu7x": 9216,
    }  # fmt: skip
    assert (16, 16, 24) in slice_shapes("v5p") and (16, 24, 24) in slice_shapes("tpu7x")
    assert (4, 8, 4) not in slice_shapes("v4") and (3, 3, 3) not in slice_shapes("v4")


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("count", [1, 3, 4, 16])
def test_a_cluster_of_another_size_has_that_many_devices_and_a_name(name, count):
    device = DEVICES[name]
    start = make_cluster(device, count * device.devices_per_chip)
    found = [one for size in range(1, 100) if (one := resized(start, size))]
    assert found and all(one.device == start.device for one in found)
    for one in found:
        if device.most_per_host == 0 or one.devices_per_host <= device.most_per_host:
            assert parse_cluster(one.name).num_devices == one.num_devices
    assert {one.num_devices for one in found} >= {start.num_devices} - (set() if device.platform != "tpu" else {3, 6})


def test_a_lone_host_grows_to_a_usual_one_and_then_to_several():
    alone, several = parse_cluster("h100:1x6"), parse_cluster("h100:2x6")
    assert [one and one.name for one in (resized(alone, n) for n in (5, 8, 9, 12))] == [
        "h100:1x5", "h100:1x8", "h100:3x3", "h100:2x6",
    ]  # fmt: skip
    assert [one and one.name for one in (resized(several, n) for n in (5, 6, 18))] == [None, "h100:1x6", "h100:3x6"]
    assert resized(parse_cluster("cpu:1x3"), 70).name == "cpu:1x70"
    assert resized(parse_cluster("v5p:2x2x1"), 12) is None
    assert resized(parse_cluster("tpu7x:2x2x1"), 16).name == "tpu7x:2x2x2"


def test_sizes_are_doubled_and_some_are_multiples():
    gpus = parse_cluster("h100:1x8")
    assert doubled_sizes(gpus, 8, 1) == [2**power for power in range(11)]
    assert doubled_sizes(gpus, 8, 3)[:9] == [1, 2, 3, 4, 6, 8, 16, 24, 32]
    assert doubled_sizes(parse_cluster("v5e:2x2"), 4, 1) == [1, 4, 8, 16, 32, 64, 128, 256]
    assert set(doubled_sizes(parse_cluster("v5p:2x2x1"), 4, 3)) > {64, 192, 384}
    assert every_size(gpus, 8)[6:10] == [7, 8, 16, 24]
