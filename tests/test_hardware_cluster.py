"""Devices, clusters and measured figures: what is read, and what is refused in one line."""

import json
import math
from dataclasses import replace

import pytest

from sppo_jax.hardware import DEVICES, Cluster, make_cluster, measured, parse_cluster


@pytest.mark.parametrize("device", DEVICES.values(), ids=list(DEVICES))
def test_figures_make_sense(device):
    assert 0 < device.matmul_efficiency <= 1 and 0 < device.attention_efficiency <= 1
    assert device.network_bytes_s <= device.link_bytes_s <= device.hbm_bytes_s < device.matmul_flops_s
    assert device.host_link_bytes_s < device.hbm_bytes_s and device.hbm_bytes <= device.host_bytes
    assert device.platform == ("cpu" if device.name == "cpu" else "gpu" if device.kernel == "cudnn" else "tpu")


@pytest.mark.parametrize(
    "text, hosts, per_host, topology",
    [
        ("a100-80g:16x8", 16, 8, ()),
        (" h200:1x1 ", 1, 1, ()),
        ("cpu:1x2", 1, 2, ()),
        ("v5p:4x4x4", 16, 4, (4, 4, 4)),
        ("v5e:2x2", 1, 4, (2, 2)),
        ("v6e:1x1", 1, 1, (1, 1)),
        ("gb200:18x4", 18, 4, ()),
        ("tpu7x:2x2x1", 1, 8, (2, 2, 1)),
        ("tpu7x:4x4x4", 16, 8, (4, 4, 4)),
    ],
)
def test_clusters_are_read_and_written_back(text, hosts, per_host, topology):
    cluster = parse_cluster(text)
    assert (cluster.num_hosts, cluster.devices_per_host, cluster.topology) == (hosts, per_host, topology)
    assert cluster.num_devices == hosts * per_host
    assert cluster.name == text.strip()
    assert parse_cluster(cluster.name) == cluster
    assert cluster.device_host_bytes * per_host <= cluster.host_bytes


def test_two_devices_of_a_chip_count_once_in_a_shape():
    device = DEVICES["tpu7x"]
    assert device.platform == "tpu" and device.kernel == "pallas"
    one_host = replace(parse_cluster("tpu7x:4x4x4"), num_hosts=1, topology=())
    assert one_host.num_devices == 8 and parse_cluster(one_host.name).num_devices == 8


@pytest.mark.parametrize(
    "text, why",
    [
        ("abacus:1x1", "name one of the devices cpu, a100-40g"),
        ("h200", "every size at least 1, got 'h200'"),
        ("h200:", "every size at least 1"),
        ("h200:0x8", "every size at least 1, got 'h200:0x8'"),
        ("h200:8x0", "every size at least 1"),
        ("h200:-1x8", "every size at least 1"),
        ("h200:1.5x8", "every size at least 1"),
        ("h200:8", "with 1 sizes; give hosts and devices"),
        ("h200:2x2x2", "with 3 sizes; give hosts and devices"),
        ("v5p:4xx4", "every size at least 1"),
    ],
)
def test_wrong_clusters_are_refused_in_one_line(text, why):
    with pytest.raises(ValueError) as error:
        parse_cluster(text)
    assert why in str(error.value) and "NAME:HOSTSxDEVICES" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "text, named",
    [
        ("v5e:3x3", "got v5e:3x3, 9 chips; name v5e:2x4 or v5e:4x4"),
        ("v5e:16x4", "name v5e:8x8"),
        ("v5e:4x2", "name v5e:2x4"),
        ("v6e:1", "name v6e:1x1"),
        ("v6e:32x16", "512 chips; name v6e:16x16"),
        ("v5p:4x4", "name v5p:2x2x4"),
        ("v5p:8x4x4", "name v5p:4x4x8"),
        ("tpu7x:3x3x3", "27 chips; name tpu7x:2x2x4 or tpu7x:2x4x4"),
        ("h100:1x9", "a host of h100 must have at most 8 devices, got h100:1x9; name h100:3x3"),
        ("h100:2x12", "name h100:3x8"),
        ("b200:1x11", "name b200:11x1"),
        ("gb200:1x72", "a host of gb200 must have at most 4 devices, got gb200:1x72; name gb200:18x4"),
        ("gh200:1x8", "name gh200:2x4"),
    ],
)
def test_a_cluster_that_does_not_exist_is_refused_and_those_that_are_named_exist(text, named):
    with pytest.raises(ValueError) as error:
        parse_cluster(text)
    assert named in str(error.value) and "\n" not in str(error.value)
    assert all(parse_cluster(name) for name in str(error.value).partition("; name ")[2].split(" or "))


def test_a_rack_of_trays_is_joined_by_the_links_of_a_tray():
    rack, two = parse_cluster("gb200:18x4"), parse_cluster("gb200:36x4")
    device = rack.device
    assert [two.link_bytes_s(span) for span in (4, 72, 144)] == [device.link_bytes_s] * 2 + [device.network_bytes_s]
    assert rack.num_linked == 72 and parse_cluster("b200:9x8").num_linked == 8
    # Four GPUs share the memory of two CPUs, which is slower than their links.
    assert rack.host_link_bytes_s == 2 * 384e9 / 8 < device.host_link_bytes_s
    assert DEVICES["b200"].link_bytes_s == device.link_bytes_s


def test_links_within_a_host_are_faster_than_between_hosts():
    cluster = parse_cluster("a100-80g:2x8")
    assert cluster.link_bytes_s(8) == cluster.device.link_bytes_s
    assert cluster.link_bytes_s(16) == cluster.device.network_bytes_s


@pytest.mark.parametrize("name, count, hosts, per_host", [("h100", 20, 3, 8), ("h100", 3, 1, 3), ("cpu", 6, 1, 6)])
def test_usual_hosts_hold_the_devices_asked_for(name, count, hosts, per_host):
    cluster = make_cluster(DEVICES[name], count)
    assert (cluster.num_hosts, cluster.devices_per_host) == (hosts, per_host)


PROFILE = {
    "schema_version": 1,
    "device": "h200",
    "jax": "0.11.2",
    "date": "2026-11-21",
    "dtype": "bfloat16",
    "kernel": "cudnn",
    "num_devices": 2,
    "matmul_flops_s": 8e14,
    "layer_flops_s": 6e14,
    "matmul": [{"rows": 8192, "inner": 4096, "columns": 4096, "flops_s": 8e14}],
    "attention": [
        {"chunk_tokens": 4096, "prefix_tokens": 0, "forward_s": 1e-3, "backward_s": 3e-3, "flops_s": 2e14},
        {"chunk_tokens": 4096, "prefix_tokens": 65536, "forward_s": 1e-2, "backward_s": 3e-2, "flops_s": 5e14},
    ],
    "host_link_bytes_s": 5.5e10,
    "link_bytes_s": None,
    "hbm_bytes_s": 4e12,
    "overhead_s": 2e-4,
    "overhead_tokens": 200.4,
}


def write(tmp_path, values):
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(values))
    return path


def test_measured_figures_take_the_place_of_the_datasheet(tmp_path):
    sheet = DEVICES["h200"]
    device = measured(sheet, write(tmp_path, PROFILE))
    assert device.matmul_flops_s * device.matmul_efficiency == pytest.approx(6e14)
    # Of 40 ms forward and backward, 10 are the forward's, which has 2 of the 7 products.
    assert device.matmul_flops_s * device.attention_efficiency == pytest.approx(5e14 * 4 / 3.5)
    assert (device.attention_backward, device.attention_block) == (3.0, 0)
    assert make_cluster(device, 8).host_link_bytes_s == 5.5e10  # no other card slows what was measured beside them
    assert (device.host_link_bytes_s, device.hbm_bytes_s, device.overhead_s) == (5.5e10, 4e12, 2e-4)
    assert device.overhead_tokens == 200
    # What was not measured stays: capacities, and the link where there was one device.
    assert (device.link_bytes_s, device.hbm_bytes, device.host_bytes) == (
        sheet.link_bytes_s,
        sheet.hbm_bytes,
        sheet.host_bytes,
    )
    assert isinstance(make_cluster(device, 2), Cluster)


def test_figures_of_another_device_are_refused(tmp_path):
    with pytest.raises(
        ValueError,
        match="the plan is for, h100, got .*profile.json, measured on h200; run sppo profile or sppo check on h100",
    ):
        measured(DEVICES["h100"], write(tmp_path, PROFILE))


def test_float32_is_slower_than_bfloat16_on_a_gpu_and_not_on_a_tpu():
    gpu, tpu, cpu = (DEVICES[name] for name in ("a100-80g", "v5p", "cpu"))
    assert gpu.linear_flops_s(4) == gpu.linear_flops_s(2) / 2 == 312e12 * 0.641 / 2
    assert tpu.linear_flops_s(4) == tpu.linear_flops_s(2)
    assert cpu.linear_flops_s(8) == cpu.linear_flops_s(4) / 2
    assert gpu.linear_flops_s(8) == gpu.linear_flops_s(2) / 16


def test_the_blockwise_kernel_is_bound_by_the_scores_it_moves():
    device = DEVICES["h200"]
    assert device.attention_flops_s(2, "cudnn", 128) == 619e12
    # Measured on one H100 with heads of 64 and of 128: seconds of forward and backward together.
    share = (1 / 586 + 2.5 / 541) / (1 / 427 + 2.5 / 425)
    assert device.attention_flops_s(2, "cudnn", 64) == pytest.approx(share * 619e12, rel=0.01)
    assert replace(device, attention_head_dim=64).attention_flops_s(2, "cudnn", 64) == 619e12
    # 4 * 128 FLOPs a score, 12 bytes of it in float32 and 4 of its exponential in bfloat16.
    assert device.attention_flops_s(2, "blockwise", 128) == 512 * 4.8e12 / 16
    assert DEVICES["v5p"].attention_flops_s(4, "blockwise", 64) == 256 * 2.765e12 / 20
    # What was measured, or a CPU's figure, is of the blockwise kernel already.
    assert replace(device, attention_block=512).attention_flops_s(2, "blockwise", 128) == 619e12
    assert DEVICES["cpu"].attention_flops_s(4, "blockwise", 64) == 5e10


@pytest.mark.parametrize(
    "text, bytes_s, is_assumed",
    [
        ("h100:1x8", 33 * 2**30, True),
        ("h200:2x5", 33 * 2**30, True),
        ("b300:1x8", 33 * 2**30, True),
        ("h100:2x4", 50e9, False),
        ("h100:1x1", 50e9, False),
        ("a100-80g:1x8", 13e9, False),
        ("l40s:1x8", 25e9, False),
        ("gh200:2x4", 4 * 384e9 / 8, False),
        ("gb200:2x4", 96e9, False),
        ("v5p:2x2x1", 16e9, False),
    ],
)
def test_more_than_four_cards_of_an_x86_host_slow_each_others_copies(text, bytes_s, is_assumed):
    cluster = parse_cluster(text)
    assert (cluster.host_link_bytes_s, cluster.shares_host_link) == (bytes_s, is_assumed)
    fast = replace(cluster, device=replace(cluster.device, host_link_bytes_s=1e12, host_memory_bytes_s=1e15))
    of_many = {"h100": (47, 33), "h200": (47, 33), "b300": (47, 33), "a100-80g": (47, 33), "l40s": (47, 33)}
    few, many = (size * 2**30 for size in of_many.get(cluster.device.name, (math.inf, math.inf)))
    assert fast.host_link_bytes_s == min(1e12, few if cluster.devices_per_host <= 4 else many)


@pytest.mark.parametrize(
    "text, bytes_s",
    [
        ("h100:2x8", 50e9),
        ("a100-80g:2x8", 25e9),
        ("b300:2x8", 77e9),
        ("l40s:2x4", 25e9),
        ("h100:1x8", math.inf),
        ("gh200:2x4", math.inf),
        ("v5p:4x4x4", math.inf),
        ("cpu:2x2", math.inf),
    ],
)
def test_a_card_copies_and_sends_to_other_hosts_on_one_link(text, bytes_s):
    assert parse_cluster(text).slot_bytes_s == bytes_s


def test_one_h100_has_rates_of_its_own_and_other_cards_those_of_the_published_table():
    own, table = DEVICES["h100"], DEVICES["h200"]
    assert own.attention_flops_s(2, "cudnn", 128) == 580e12 and own.linear_flops_s(2) == 0.73 * 989e12
    assert not own.assumed and own.elementwise_bytes_s == 0.57 * 3.35e12
    for name in ("h100-pcie", "h100-nvl", "h200-nvl", "h800", "h20", "gh200"):
        device = DEVICES[name]
        same = [(one.attention_efficiency, one.attention_backward, one.matmul_efficiency) for one in (device, table)]
        assert same[0] == same[1] and device.assumed and device.elementwise_bytes_s == math.inf


def test_the_devices_of_a_host_share_its_memory():
    assert parse_cluster("a100-80g:2x8").host_link_bytes_s == 13e9
    slow = replace(DEVICES["h100"], host_memory_bytes_s=400e9)
    assert make_cluster(slow, 8).host_link_bytes_s == 400e9 / 16
    assert make_cluster(DEVICES["cpu"], 2).host_link_bytes_s == 10e9
