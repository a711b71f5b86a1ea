"""All published figures, and the figures that are left out with the reason: studies/published.yaml."""

from pathlib import Path
from typing import Any

import yaml

from studies.cells import Cell
from studies.systems import Setup

_DATA = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))


def _setup(values: dict[str, Any]) -> Setup:
    return Setup(**values | {"heads": tuple(values.get("heads", ()))})


def _cell(values: dict[str, Any]) -> Cell:
    setups = {key: _setup(values[key]) for key in ("setup", "base") if key in values}
    return Cell(**values | setups | {"groups": tuple(values.get("groups", ()))})


KERNEL = _cell(_DATA["kernel"])
LEFT_OUT = tuple(_DATA["left_out"].items())


def published_cells() -> list[Cell]:
    """Returns all cells but the kernel's, throughput first."""
    return [_cell(values) for values in _DATA["cells"]]


def out_of_memory() -> list[Setup]:
    """Returns the setups that Seq1F1B's memory figure shows to run out of memory."""
    return [_setup(values) for values in _DATA["out_of_memory"]]
