"""The best published figures of other systems, each with the setting for which this project plans; see records.py."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from sppo_jax.config import Config, config_from_dict

K, M = 1024, 1024**2


@dataclass(frozen=True, kw_only=True)
class Record:
    """One published record, and the setting for which this project plans.

    Args:
        cell: the setting in words.
        theirs: the system.
        figure: tokens per second per device, or the longest sequence in tokens.
        source: where the figure comes from, with its mark.
        cluster: the cluster to plan for.
        model: settings of the model.
        length: tokens of a sequence; 0: the figure is the longest sequence, and the search finds ours.
        per_step: sequences of a step.
        remark: a caveat of the comparison.
        more: other settings by group.
    """

    cell: str
    theirs: str
    figure: float
    source: str
    cluster: str
    model: dict[str, Any]
    length: int = 0
    per_step: int = 1
    remark: str = ""
    more: dict[str, Any] = field(default_factory=dict)

    def config(self) -> Config:
        """Returns the settings to plan with; the planner chooses all others."""
        sequence = {"length": self.length or 512 * K, "per_step": self.per_step}
        return config_from_dict(
            {
                "model": self.model,
                "sequence": sequence,
                "train": {"steps": 1},
                **self.more,
            }
        )


def _read() -> dict[str, list[dict[str, Any]]]:
    return yaml.safe_load(Path(__file__).with_name("records.yaml").read_text(encoding="utf-8"))


THROUGHPUT, LENGTHS = (tuple(Record(**values) for values in _read()[key]) for key in ("throughput", "lengths"))
PEOPLE = _read()["people"]
