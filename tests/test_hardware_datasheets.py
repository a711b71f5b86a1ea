"""The table of devices: each figure has a source, and a figure that a device must have is in its row."""

from dataclasses import MISSING, fields

import pytest

from sppo_jax.hardware.datasheets import DEVICES, ROWS, SOURCES
from sppo_jax.hardware.device import Device

NEEDED = {field.name for field in fields(Device) if field.default is MISSING} - {"name"}
# What a row says without a source: what its programs are, and no figure of a datasheet.
FACTS = {
    "kernel",
    "platform",
    "tile",
    "smallest_chunk",
    "compute_bytes",
    "has_bundles",
    "devices_per_chip",
    "attention_rows",
}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_each_figure_of_a_device_has_a_source(row):
    assert row.figures.keys() >= NEEDED and row.facts.keys() <= FACTS
    assert {figure.source for figure in row.figures.values()} <= SOURCES.keys()
    assert {name: getattr(DEVICES[row.name], name) for name in row.figures} == {
        name: figure.value for name, figure in row.figures.items()
    }


def test_each_source_is_of_some_figure_and_names_are_unique():
    assert {figure.source for row in ROWS for figure in row.figures.values()} == SOURCES.keys()
    assert len(DEVICES) == len(ROWS)


@pytest.mark.parametrize(
    ("name", "field", "source"),
    [
        ("h100", "matmul_efficiency", "h100-step"),
        ("a800-80g", "link_bytes_s", "page"),
        ("l4", "matmul_flops_s", "memory"),
        ("a40", "attention_efficiency", "assumed"),
        ("tpu7x", "hbm_bytes", "tpu7x"),
    ],
)
def test_the_source_of_a_figure(name, field, source):
    (row,) = (row for row in ROWS if row.name == name)
    assert row.figures[field].source == source


def test_a_device_whose_products_nobody_measured_is_assumed():
    known = {name for name, device in DEVICES.items() if not device.assumed}
    assert known == {"cpu", "a100-40g", "a100-80g", "h100"}
