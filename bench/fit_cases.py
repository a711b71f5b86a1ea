"""The plans on which the planner's bytes are compared with the compiler's; see fit.py."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

K = 1024


@dataclass(frozen=True, kw_only=True)
class Case:
    """One plan to compile.

    Args:
        cluster: to compile for.
        model: a preset.
        mesh: pipe and seq, and data if several.
        length: tokens of a sequence.
        chunks: their number; "auto" where the planner may choose everything.
        stash: places of inputs, attention, rest by first letter (keep, host, recompute).
        more: other settings by group.
        calibrated: whether the planner's constants were counted in this case's program.
    """

    cluster: str
    model: str
    mesh: tuple[int, ...] = ()
    length: int
    chunks: int | str = "auto"
    stash: str = ""
    more: dict[str, dict[str, Any]] = field(default_factory=dict)
    calibrated: bool = False

    @property
    def unequal(self) -> bool:
        """Whether chunks of several lengths were asked for."""
        return self.more.get("sequence", {}).get("balance") == "flops"

    @property
    def name(self) -> str:
        """The words that tell the case from others."""
        parts = [self.model, self.cluster, "x".join(map(str, self.mesh)) or "auto", f"{self.length // K}K", self.stash]
        settings = [f"{key}={value}" for group in self.more.values() for key, value in group.items()]
        return " ".join([part for part in parts if part] + settings)

    def config(self) -> dict[str, Any]:
        """Return the case as the settings of a config."""
        settings: dict[str, Any] = {
            "model": {"preset": self.model},
            "sequence": {"length": self.length, "chunks": self.chunks},
            "schedule": {"interleave": 1},  # as the stored plans were compiled
            "train": {"steps": 10},
        }
        if self.mesh:
            settings["mesh"] = dict(zip(("pipe", "seq", "data"), (*self.mesh, 1)[:3], strict=True))
        if self.stash:
            places = {"k": "keep", "h": "host", "r": "recompute"}
            names = ("inputs", "attention", "rest")
            settings["stash"] = {name: places[letter] for name, letter in zip(names, self.stash, strict=True)}
            settings["stash"] |= {"alpha": 1.0, "kv_grad_dtype": "float32"}
        for group, values in self.more.items():
            settings[group] = {**settings.get(group, {}), **values}
        return settings

    def config_of_row(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return the settings whose prediction is comparable with a stored row's compiled bytes.

        Rows that do not name cuDNN's workspace were compiled without it: the plain kernel has none.
        """
        settings = self.config()
        settings["model"]["kernel"] = row["kernel"] if "workspace_bytes" in row else "blockwise"
        return settings


def _case(values: dict[str, Any]) -> Case:
    return Case(**values | {"mesh": tuple(values.get("mesh", ()))})


CASES = tuple(map(_case, yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))))
