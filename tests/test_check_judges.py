"""Every judge of `sppo check`, with the figures of healthy devices and with faults among them."""

import json

import pytest

from sppo_jax.check import (
    attention,
    collectives,
    host_copies,
    host_rows,
    machine,
    processes,
    products,
    run,
    software,
    steps,
)
from sppo_jax.check.row import FAILS, NOT_JUDGED, OK, SLOW, UNKNOWN, Row, Wanted, worst
from sppo_jax.hardware.gpu_health import GpuHealth

GPUS = Wanted(
    is_timed=True,
    matmul_flops_s=989e12,
    hbm_bytes_s=3.35e12,
    attention_flops_s=(580e12, 490e12),
    host_link_bytes_s=(50e9, 33e9),
    link_bytes_s=350e9,
    network_bytes_s=50e9,
    pool_bytes=72 * 2**30,
    plan_bytes=60 * 2**30,
    checkpoint_bytes=10 * 2**30,
    num_devices=8,
)
CPUS = Wanted(is_timed=False)


def processes_of(*figures, **shared):
    """Returns the figures of processes, each on a host of its own."""
    return [{"host": f"node{number}", **shared, **one} for number, one in enumerate(figures)]


def changed(values, **changes):
    return {**values, **changes}


PRODUCTS = {"flops_s": [700e12] * 4, "digests": ["a1"] * 4, "wrong_rows": [0] * 4, "finite": [True] * 4}


@pytest.mark.parametrize(
    ("change", "verdict", "names"),
    [
        ({}, OK, "checksum a1"),
        ({"flops_s": [700e12, 700e12, 600e12, 700e12]}, SLOW, "device 2 of process 1 on node1 600 TFLOP/s"),
        ({"flops_s": [500e12] * 4}, SLOW, "500 TFLOP/s"),
        ({"digests": ["a1", "b2", "a1", "a1"]}, FAILS, "device 1 of process 1 on node1 with another checksum than a1"),
        ({"wrong_rows": [0, 0, 0, 1]}, FAILS, "device 3 of process 1 on node1 has 1 wrong rows"),
        (
            {"finite": [False, True, True, True]},
            FAILS,
            "device 0 of process 1 on node1 has products that are not finite",
        ),
    ],
)
def test_products(change, verdict, names):
    row = products.judge(processes_of(PRODUCTS, changed(PRODUCTS, **change)), GPUS)
    assert (row.verdict, names in row.value) == (verdict, True), row


def test_rates_of_cpus_are_not_judged_and_their_values_are():
    slow = changed(PRODUCTS, flops_s=[1e9] * 4)
    assert products.judge(processes_of(slow), CPUS).verdict == OK
    wrong = changed(slow, wrong_rows=[0, 1, 0, 0])
    assert products.judge(processes_of(wrong), CPUS).verdict == FAILS
    assert products.judge_stream(processes_of({"bytes_s": [1e9]}), CPUS).verdict == NOT_JUDGED


def test_memory_that_is_slow():
    assert products.judge_stream(processes_of({"bytes_s": [3e12, 2.9e12]}), GPUS).verdict == OK
    row = products.judge_stream(processes_of({"bytes_s": [3e12, 2.2e12]}), GPUS)
    assert row.verdict == SLOW and "device 1 2.2e+03 GB/s" in row.value


ATTENTION = {"differs": "", "calls": 2, "kernel": "cudnn"}


def test_attention_that_differs_is_named_with_its_process():
    assert attention.judge(processes_of(ATTENTION, ATTENTION), GPUS).verdict == OK
    wrong = changed(ATTENTION, differs="dK of the causal triangle off by 31 times what rounding does on device 5")
    row = attention.judge(processes_of(ATTENTION, wrong), GPUS)
    assert row.verdict == FAILS and "on device 5, in process 1 on node1" in row.value
    assert "cuDNN" in row.change


def test_attention_that_is_slow_is_named_by_its_call():
    def calls(forward, backward):
        rates = (("forward", forward), ("backward", backward))
        return {"attention": [{"way": way, "queries": 8192, "keys": 32768, "flops_s": x} for way, x in rates]}

    good, slow = calls([575e12, 570e12], [480e12] * 2), calls([575e12] * 2, [480e12, 400e12])
    assert attention.judge_rates(processes_of(good), GPUS).verdict == OK
    row = attention.judge_rates(processes_of(good, slow), GPUS)
    assert row.verdict == SLOW and row.value == "backward 8192 x 32768 400 TFLOP/s on device 1 of process 1 on node1"
    assert attention.judge_rates(processes_of(slow), CPUS).verdict == NOT_JUDGED


ROWS = {"orders": dict.fromkeys(host_rows.ORDERS, [0, 0]), "digests": ["c3", "c3"]}


def test_rows_on_the_host_that_are_reversed_or_differ():
    assert host_rows.judge(processes_of(ROWS), GPUS).verdict == OK
    reversed_rows = changed(ROWS, orders=changed(ROWS["orders"], **{"in reverse": [0, 4096]}))
    row = host_rows.judge(processes_of(reversed_rows), GPUS)
    assert row.verdict == FAILS and row.value == "4096 wrong elements of rows read in reverse on device 1"
    row = host_rows.judge(processes_of(ROWS, changed(ROWS, digests=["c3", "d4"])), GPUS)
    assert row.verdict == FAILS and "device 1 of process 1" in row.value


def copies(out, back, both):
    return {"all": {"out": out, "back": back, "both": both}, "alone": {"out": 48e9}}


@pytest.mark.parametrize(
    ("figures", "verdict", "names"),
    [
        (copies([33e9, 34e9], [34e9, 34e9], [32e9, 33e9]), OK, "all at once: out 33 GB/s"),
        (copies([22e9, 22e9], [34e9, 34e9], [32e9, 33e9]), SLOW, "out 22 GB/s"),
        (copies([33e9, 33e9, 24e9], [34e9] * 3, [32e9] * 3), SLOW, "device 2 is slowest"),
        (copies([33e9, 33e9, 6e9], [34e9] * 3, [32e9] * 3), FAILS, "device 2 is slowest"),
    ],
)
def test_host_copies(figures, verdict, names):
    row = host_copies.judge(processes_of(figures), GPUS)
    assert (row.verdict, names in row.value) == (verdict, True), row
    assert host_copies.judge(processes_of(figures), CPUS).verdict == NOT_JUDGED


def test_pinning_that_is_slow_or_refused():
    good = {"pinning_bytes_s": 2e9, "plan_bytes": 120e9, "lockable_bytes": None}
    row = host_copies.judge_pinning(processes_of(good), GPUS)
    assert row.verdict == OK and "1.0 minutes" in row.value
    assert host_copies.judge_pinning(processes_of(changed(good, pinning_bytes_s=5e8)), GPUS).verdict == SLOW
    row = host_copies.judge_pinning(processes_of(good, {"error": "cuMemHostAlloc failed"}), GPUS)
    assert (
        row.verdict == FAILS and "process 1 on node1: cuMemHostAlloc failed" in row.value and "ulimit -l" in row.change
    )


EXCHANGED = {
    **{f"{name}_values": [0, 0] for name in collectives.OPERATIONS},
    "ring": [340e9, 330e9],
    "all-to-all": [300e9, 310e9],
    "free_bytes": 3 * 2**30,
}


@pytest.mark.parametrize(
    ("change", "verdict", "names"),
    [
        ({}, OK, "3.00 GiB of a device free"),
        ({"ring_values": [0, 64]}, FAILS, "ring: 64 wrong elements on device 1"),
        ({"reduce-scatter_values": [3, 0]}, FAILS, "reduce-scatter: 3 wrong elements on device 0"),
        ({"all-to-all": [300e9, 100e9]}, SLOW, "all-to-all 100 GB/s"),
    ],
)
def test_collectives_in_a_host(change, verdict, names):
    row = collectives.judge_values(processes_of(changed(EXCHANGED, **change)), GPUS)
    assert (row.verdict, names in row.value) == (verdict, True), row


def test_a_host_that_is_slow_with_all_others_is_named():
    values = {f"{name}_values": [0] for name in collectives.OPERATIONS}

    def host(*steps):
        return {**values, "steps": [[step] for step in steps]}

    good = [host(48e9, 48e9, 47e9) for _ in range(3)]
    assert collectives.judge_between(processes_of(*good), GPUS).verdict == OK
    # The second meets the slow one in its first pair alone.
    row = collectives.judge_between(processes_of(*good[:2], host(30e9, 30e9, 48e9), host(30e9, 31e9, 30e9)), GPUS)
    assert row.verdict == SLOW and "node3 at best 31 GB/s" in row.value
    wrong = changed(good[0], ring_values=[9])
    row = collectives.judge_between(processes_of(*good[:2], wrong), GPUS)
    assert row.verdict == FAILS and "9 wrong elements on device 0 of process 2 on node2" in row.value
    assert collectives.judge_between(processes_of({}), GPUS).value == "one host"


def test_hosts_meet_in_a_ring_and_then_in_pairs():
    ring, first, second = collectives.host_steps(4, 8)
    assert ring == [(0, 2), (1, 3), (2, 4), (3, 5), (4, 6), (5, 7), (6, 0), (7, 1)]
    assert {(a // 2, b // 2) for a, b in first} == {(0, 1), (1, 0), (2, 3), (3, 2)}
    assert {(a // 2, b // 2) for a, b in second} == {(0, 2), (2, 0), (1, 3), (3, 1)}
    for count in (2, 3, 5, 16):
        for step in collectives.host_steps(count, count):
            assert sorted(to for _, to in step) == list(range(count))
        assert len(collectives.host_steps(count, count)) <= max(2, 2 * (count - 1).bit_length())


def test_what_is_left_beside_copies():
    assert collectives.judge_beside(processes_of({"left": [0.9, 0.85]}), GPUS).verdict == OK
    assert collectives.judge_beside(processes_of({"left": [0.9, 0.7]}), GPUS).verdict == SLOW


LOSSES = {
    "losses": [4.2, 4.1, 4.0],
    "twin": [4.2, 4.1, 4.0],
    "next": 3.9,
    "restored_next": 3.9,
    "problem": "",
    "kernel": "cudnn",
}


@pytest.mark.parametrize(
    ("change", "verdict", "names"),
    [
        ({}, OK, "as with all buffers on the device; saved, restored"),
        ({"losses": [4.2, float("nan"), 4.0]}, FAILS, "nan"),
        ({"losses": [4.2, 4.1, 4.01]}, FAILS, "losses of process 1 on node1 differ"),
        ({"problem": "No space left on device"}, FAILS, "No space left on device in process 1"),
        ({"restored_next": 3.901}, FAILS, "next loss 3.901000 after a restore in process 1"),
    ],
)
def test_three_steps(change, verdict, names):
    one = changed(LOSSES, **change) if "nan" in names else LOSSES
    row = steps.judge(processes_of(one, changed(LOSSES, **change)), GPUS)
    assert (row.verdict, names in row.value) == (verdict, True), row


def test_a_twin_without_the_host_must_be_near():
    far, near = changed(LOSSES, twin=[4.2, 4.1, 4.1]), changed(LOSSES, twin=[4.2, 4.1, 4.001])
    assert steps.judge(processes_of(far), GPUS).verdict == SLOW
    assert steps.judge(processes_of(near), GPUS).verdict == OK
    assert steps.judge(processes_of(changed(near, kernel="blockwise")), GPUS).verdict == SLOW
    assert steps.judge(processes_of({"left_out": "the config cannot be made small"}), GPUS).verdict == UNKNOWN


def test_another_program_is_named_with_its_process():
    same = [{"digits": "00ff"}] * 3
    assert run.judge_program(processes_of(*same), GPUS).value == "00ff in 3 processes"
    row = run.judge_program(processes_of(*same, {"digits": "11ee"}), GPUS)
    assert (row.verdict, row.value, row.expected) == (FAILS, "another program in process 3 on node3", "00ff")
    row = run.judge_program(processes_of({"error": "line 7 is 'a', and 'b' in process 0"}), GPUS)
    assert row.verdict == FAILS and row.value.startswith("line 7")


def test_shipped_losses():
    right = json.loads(steps._REFERENCE.read_text())["losses"]
    assert len(right) == 10 and right[-1] < right[0] - 1

    def verdict(dtype, off):
        return steps.judge_reference(processes_of({"losses": {dtype: [*right[:-1], right[-1] + off]}}), GPUS).verdict

    assert [verdict("float32", off) for off in (9e-4, 2e-3)] == [OK, FAILS]
    assert [verdict("bfloat16", off) for off in (0.019, 0.021, float("nan"))] == [OK, FAILS, FAILS]


FACTS = {"jax": "0.12.0.1", "jaxlib": "0.12.0.1", "cuDNN": "9.20.0", "NCCL": "2.29.1", "driver": "580.1"}


@pytest.mark.parametrize(
    ("change", "wanted", "verdict", "names"),
    [
        ({}, {}, OK, "cuDNN 9.20.0"),
        ({"cuDNN": "9.14.0"}, {}, FAILS, "cuDNN 9.14.0"),
        ({"cuDNN": "9.17.1"}, {}, SLOW, "cuDNN 9.17.1"),
        ({"jaxlib": "0.11.0"}, {"uses_host": True}, FAILS, "jaxlib 0.11.0"),
        ({"jaxlib": "0.11.0"}, {}, OK, "jaxlib 0.11.0"),
        ({"XLA_FLAGS": "--xla_gpu_experimental_enable_nvshmem=true"}, {}, FAILS, "nvshmem=true with 8 devices"),
        ({"XLA_FLAGS": "--xla_gpu_experimental_enable_nvshmem=true"}, {"num_devices": 1}, OK, "jax"),
        ({"XLA_FLAGS": "--xla_gpu_experimental_parallel_collective_overlap_limit=4"}, {}, FAILS, "limit=4"),
        ({"XLA_FLAGS": "--xla_gpu_experimental_parallel_collective_overlap_limit=1"}, {}, OK, "jax"),
    ],
)
def test_software(change, wanted, verdict, names):
    facts = {"facts": changed(FACTS, **change)}
    limits = Wanted(is_timed=True, **{"num_devices": 8, **wanted})
    row = software.judge(processes_of(facts, facts), limits)
    assert (row.verdict, names in row.value) == (verdict, True), row


def test_software_that_differs_between_processes():
    row = software.judge(processes_of({"facts": FACTS}, {"facts": changed(FACTS, NCCL="2.28.3")}), GPUS)
    assert row.verdict == FAILS and row.value == "NCCL: 2.28.3 in process 1 on node1, 2.29.1 in process 0"


HEALTHY = GpuHealth(
    name="NVIDIA H100 80GB HBM3",
    uuid="GPU-0",
    driver="580.1",
    is_divided=False,
    uncorrected=0,
    remap_pending=False,
    remap_failed=False,
    sm_mhz=1980.0,
    most_sm_mhz=1980.0,
    power_w=90.0,
    power_limit_w=700.0,
    default_power_limit_w=700.0,
    temperature_c=35.0,
    slowed_by=(),
    process_ids=(),
    used_bytes=2**20,
    free_bytes=79 * 2**30,
)


def host(*gpus, **changes):
    found = {
        "lockable_bytes": None,
        "host_bytes": 2**40,
        "free_disk_bytes": 2**40,
        "disk": "/data",
        "has_gpus": True,
        "gpus": [gpu.to_dict() for gpu in gpus],
    }
    return changed(found, **changes)


def with_changes(**changes):
    return GpuHealth(**{**HEALTHY.__dict__, **changes})


@pytest.mark.parametrize(
    ("gpu", "changes", "verdict", "names"),
    [
        ({}, {}, OK, "2 GPUs without errors"),
        ({"uncorrected": 2}, {}, FAILS, "GPU 1 of process 0 on node0 has 2 uncorrected errors"),
        ({"remap_pending": True}, {}, FAILS, "has to be reset"),
        ({"remap_failed": True}, {}, FAILS, "could not replace a row"),
        ({"slowed_by": ("hw thermal slowdown",)}, {}, SLOW, "slowed down by hw thermal slowdown"),
        ({"power_limit_w": 400.0}, {}, SLOW, "may take 400 W"),
        ({"process_ids": (4711,)}, {}, SLOW, "process 4711 uses GPU 1"),
        ({"used_bytes": 30 * 2**30}, {}, SLOW, "another program uses GPU 1"),
        ({"is_divided": True}, {}, UNKNOWN, "divided (MIG)"),
        ({"uncorrected": None}, {}, UNKNOWN, "does not tell its errors of memory"),
        ({"name": "NVIDIA H200"}, {}, FAILS, "NVIDIA H200 in process 0"),
        ({}, {"gpus": None}, UNKNOWN, "nvidia-smi of process 0 on node0 says nothing"),
        ({}, {"free_disk_bytes": 2**30}, FAILS, "1 GiB free at /data"),
        ({}, {"lockable_bytes": 65536}, SLOW, "ulimit -l of process 0 on node0 is 64 KiB"),
    ],
)
def test_machines(gpu, changes, verdict, names):
    row = machine.judge(processes_of(host(HEALTHY, with_changes(**gpu), **changes)), GPUS)
    assert (row.verdict, names in row.value) == (verdict, True), row


def test_processes_on_hosts_and_their_clocks():
    def judge(*figures):
        return processes.judge([{"host": name, "clock_s": clock} for name, clock in figures], GPUS)

    assert judge(("a", 100.0), ("b", 101.0)).value == "2 processes on 2 hosts"
    late = judge(("a", 100.0), ("b", 93.0))
    assert late.verdict == SLOW and "process 1 on b is off by -7 s" in late.value
    uneven = judge(("a", 100.0), ("a", 100.0), ("b", 100.0))
    assert uneven.verdict == FAILS and uneven.value == "2 on a, 1 on b"


def test_devices_and_their_memory():
    def judge(*pools, kinds=("H100", "H100")):
        found = [{"kind": kind, "pool_bytes": [int(pool * 2**30)]} for kind, pool in zip(kinds, pools, strict=True)]
        return processes.judge_devices(processes_of(*found), GPUS)

    assert judge(72, 72).verdict == OK and judge(72, 70).verdict == SLOW and judge(72, 50).verdict == FAILS
    assert "H200 in process 1" in judge(72, 72, kinds=("H100", "H200")).value
    unlimited = processes_of({"kind": "H100", "pool_bytes": [None]})
    assert processes.judge_devices(unlimited, GPUS).verdict == UNKNOWN


@pytest.mark.parametrize(
    ("places", "want"),
    [
        ([(5, False), (4, True), (5, False)], ["process 1 on n1 (has not begun)"]),
        ([(5, True), (5, True), (5, False)], ["process 2 on n2 (hangs)"]),
        ([(5, True), (6, False), (3, False)], ["process 2 on n2 (has not begun)"]),
        ([(5, True), (5, True), (5, True)], []),
    ],
)
def test_who_holds_a_row_up(places, want):
    posts = {process: (number, done, f"n{process}", "") for process, (number, done) in enumerate(places)}
    assert processes.late_ones(posts, 5) == want


def test_an_error_fails_every_row_and_the_worst_verdict_counts():
    broken = processes_of({"error": "out of memory"}, {"error": "no driver"})
    judges = (products.judge, attention.judge, host_rows.judge, collectives.judge_values, steps.judge, machine.judge)
    for judge in judges:
        row = judge(broken, GPUS)
        assert row.verdict == FAILS and row.value.endswith("process 1 on node1: no driver")
    assert worst([OK, SLOW, UNKNOWN]) == SLOW and worst([]) == OK
    line = Row(value="a\nb", expected="c", verdict=FAILS, change="d").line("products")
    assert line.split() == ["products", "FAILS", "a", "b", "(expected:", "c);", "d"]
