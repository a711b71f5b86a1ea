"""The row of the H100 in the devices' table is what its results give, to the letter."""

import copy
import json

import pytest

from bench import device_row
from sppo_jax.hardware import DEVICES

RESULTS = json.loads(device_row.SOURCE.read_text(encoding="utf-8"))


def test_the_stored_row_is_made_from_the_results():
    again = "make it again: python -m bench.device_row"
    assert device_row.STORED.read_text(encoding="utf-8") == device_row.text_of(RESULTS), again


def test_the_table_has_the_stored_row():
    row, device = device_row.row_of(RESULTS), DEVICES["h100"]
    assert device.attention_efficiency * device.matmul_flops_s == pytest.approx(row["forward_flops_s"])
    assert 2.5 * row["forward_flops_s"] / device.attention_backward == pytest.approx(row["backward_flops_s"])
    assert (device.attention_fixed, device.backward_queries) == (row["attention_fixed"], row["backward_queries"])
    assert (device.matmul_efficiency, device.elementwise_efficiency) == (0.73, 0.57) and not device.assumed
    assert row["fitted"]["case"] == "overlap/1B at 128K, all on the host"
    assert row["fitted"]["seconds"] == {"products": [1.56, 1.73], "rest": [0.85, 1.02]}


@pytest.mark.parametrize(
    ("what", "way", "changes"),
    [
        ("cudnn's rectangle of 32K keys", "forward", {"forward_flops_s"}),
        ("cudnn's rectangle of 32K keys", "backward", {"backward_flops_s", "backward_in_blocks_flops_s"}),
        ("cudnn's rectangle of 32K keys, heads of 64", "backward", {"attention_fixed"}),
        ("cudnn's triangle, heads of 64", "backward", set()),
    ],
)
def test_other_results_give_another_row(what, way, changes):
    other = copy.deepcopy(RESULTS)
    for case in other["cases"]:
        for row in case["rows"]:
            if (row.get("what"), row.get("way")) == (what, way):
                row["flops_s"], row["seconds"] = row["flops_s"] / 2, 2 * row["seconds"]
    before, after = device_row.row_of(RESULTS), device_row.row_of(other)
    assert {name for name in before if before[name] != after[name]} == changes
