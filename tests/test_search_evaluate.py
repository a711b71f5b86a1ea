"""Predicted seconds of the steps that one H100 ran, beside the measured ones: bench/results/gpu_h100.json has both."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from bench.device_row import traced
from sppo_jax.config import config_from_dict
from sppo_jax.hardware import DEVICES, make_cluster
from sppo_jax.plan.plan import Plan
from sppo_jax.predict.seconds.copies import copy_seconds
from sppo_jax.predict.seconds.simulate import simulate
from sppo_jax.search.evaluate import costs_of, shape_of_plan, simulation_of
from sppo_jax.search.space.request import read_request

RESULTS = json.loads((Path(__file__).parents[1] / "bench/results/gpu_h100.json").read_text(encoding="utf-8"))
H100 = DEVICES["h100"]
STEPS = {
    case["key"]: row
    for case in RESULTS["cases"]
    if case["key"].startswith("step/")
    for row in case["rows"]
    if "step_s" in row
}


def rates(way, queries, head_dim=128):
    """Returns the TFLOP/s that calls of the kernel reached, by what was called."""
    return {
        row["what"]: row["flops_s"] / 1e12
        for case in RESULTS["cases"]
        if case["key"].startswith("attention/")
        for row in case["rows"]
        if (row["way"], row["queries"]) == (way, queries) and ("heads of 64" in row["what"]) == (head_dim == 64)
    }


def predicted(row, device, *, waits=False):
    config, cluster = config_from_dict(row["config"]), make_cluster(device)
    plan = Plan.from_dict(row["plan"])
    cluster = replace(cluster, host_bytes=int(config.hardware.host_bytes))
    table, costs, shape = plan.outline(), costs_of(plan, config, cluster), shape_of_plan(plan, config, cluster)
    copies_s = copy_seconds(table, shape, plan.stash, costs)
    simulation = simulate(table, costs.of_chunks(table.chunk_lengths), copies_s)
    if waits:
        simulation = simulation_of(plan, config, cluster)
    return simulation.step_s + costs.step_overhead_s()


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("is_split", [False, True], ids=["products hide the rest", "split"])
def test_measured_steps_are_predicted(name, is_split):
    whole = {} if is_split else {"matmul_efficiency": 0.6, "elementwise_efficiency": 0.0}
    device, measured = replace(H100, **whole), sum(STEPS[name]["step_s"]) / len(STEPS[name]["step_s"])
    assert 0.94 <= predicted(STEPS[name], device) / measured <= 1.02
    # Loops wait for writes that long at most. The trace of one of these steps has 7 ms in which copies alone ran.
    assert 0.94 <= predicted(STEPS[name], device, waits=True) / measured <= 1.03


def test_three_steps_were_measured():
    assert len(STEPS) == 3


def test_the_rates_of_the_device_are_the_measured_ones():
    (forward,), (rectangle,) = (rates(way, 32768).values() for way in ("forward", "backward"))
    triangle = rates("backward", 8192)["cudnn's triangle, heads of 128, beside"]
    assert H100.attention_flops_s(2, "cudnn", 128) / 1e12 == pytest.approx(forward, rel=1e-3)
    backward, in_blocks = (
        2.5 * H100.attention_flops_s(2, "cudnn", 128) / times / 1e12
        for times in (H100.attention_backward, H100.attention_backward_in_blocks)
    )
    assert backward == pytest.approx((rectangle + triangle) / 2, rel=1e-3)
    blocks = [rate for what, rate in rates("backward", H100.backward_queries).items() if "rectangle" in what]
    assert len(blocks) == 2 and in_blocks == pytest.approx(sum(blocks) / 2, rel=1e-3)


def test_blocks_of_queries_are_charged_where_they_were_measured():
    """The measured plans had none. Heads of 64 and teams get none today, as no other device does."""

    def asked(device="h100", head_dim=128, **settings):
        model = {"preset": "llama3-8b", "num_layers": 8, "head_dim": head_dim}
        values = {"model": model, "sequence": {"length": 2**17, **settings}, "train": {"steps": 1}}
        return read_request(config_from_dict(values), make_cluster(DEVICES[device])).backward_queries

    assert asked() == 8192
    assert asked(head_dim=64) == asked(groups="flex") == asked(device="h200") == 0
    row = STEPS["step/8B's widths, 8 layers, at 128K, planned"]
    plan = replace(Plan.from_dict(row["plan"]), backward_queries=8192)
    gain = predicted(row, H100) / predicted({**row, "plan": plan.to_dict()}, H100)
    # Half of the step is attention's backward, which takes 490 / 532 of its time, and reads keys for four blocks.
    assert 1.02 < gain < 1.04


def test_the_parts_of_a_step_are_those_of_its_trace():
    """Of kernels that took little time each the trace has the sum alone: 0.17 s, of products or of the rest."""
    _, seconds, unlisted = traced(RESULTS)
    row = STEPS["step/1B at 128K, all on the host"]
    whole, without = predicted(row, H100), predicted(row, replace(H100, matmul_efficiency=1e9))
    moved = whole - predicted(row, replace(H100, hbm_bytes_s=math.inf))
    assert seconds["products"] <= whole - without <= seconds["products"] + unlisted
    assert seconds["rest"] <= moved <= seconds["rest"] + unlisted
