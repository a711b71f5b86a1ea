"""Settings that have another name since version 0.2, and those of which 0 has another name: the old ones are read.

`config/renamed.py` applies this table to settings, and `model_of_today` to the model of a plan.
"""

import re
from dataclasses import dataclass
from typing import Any

# The version that reads no old name but those that are accepted for good.
UNTIL = "0.3"


@dataclass(frozen=True)
class Renamed:
    """A setting, or a section of them, that has another name now.

    Args:
        section: dotted name of the section that holds it.
        old: the name in this section before.
        new: the name in this section now.
        for_good: whether the old name is accepted for good, without a line.
    """

    section: str
    old: str
    new: str
    for_good: bool = False

    @property
    def line(self) -> str:
        """What a user who writes the old name is told; "" for nothing."""
        now = f"{self.section}.{self.old} is now {self.section}.{self.new}"
        return "" if self.for_good else f"{now}; the old name is read until version {UNTIL}"


RENAMED = (
    Renamed("sequence", "kind", "split", for_good=True),
    Renamed("model", "kinds", "layer_types"),
)


# Settings of which 0 once said that none is given, and what says so now: `auto` is worked out, null is none.
_ZEROS: dict[str, str | None] = {
    "sequence.ulysses": "auto",
    "sequence.per_step": "auto",
    "model.num_kv_heads": "auto",
    "model.head_dim": "auto",
    "model.mlp_size": None,
    "model.query_scale": None,
    "model.logit_cap": None,
    "model.sliding_window": None,
    "model.delta.value_heads": "auto",
    "model.delta.key_heads": "auto",
    "model.delta.key_size": "auto",
    "model.delta.value_size": "auto",
    "model.experts.size": "auto",
    "model.experts.shared_size": None,
    "model.rope.original_length": None,
}
_OF_TYPE = re.compile(r"model\.layer_types\.[^.]+\.")


def find_renamed(name: str) -> Renamed | None:
    """Returns the entry of a dotted name that is an old one, or lies within one; None for a name of today."""
    return next((each for each in RENAMED if f"{name}.".startswith(f"{each.section}.{each.old}.")), None)


def new_name(name: str) -> str:
    """Returns the dotted name of today of a setting, which may have an old one."""
    found = find_renamed(name)
    if found is None:
        return name
    return f"{found.section}.{found.new}{name.removeprefix(f'{found.section}.{found.old}')}"


def new_value(name: str, value: Any) -> Any:
    """Returns what a value says today: that of a setting that is not given is no 0.

    Args:
        name: dotted name of today.
        value: of any version.
    """
    of_model = _OF_TYPE.sub("model.", name)
    if isinstance(value, bool) or not isinstance(value, int | float) or value != 0 or of_model not in _ZEROS:
        return value
    # A layer type has null for the model's own setting.
    if of_model != name and of_model.count(".") == 1 and _ZEROS[of_model] is None:
        return "none"
    return _ZEROS[of_model]


def model_of_today(model: Any) -> Any:
    """Returns the settings of a plan's model, of any version, under their names and with their values of today."""
    if not isinstance(model, dict):
        return model
    names = {new_name(f"model.{name}"): value for name, value in model.items()}
    return {name.removeprefix("model."): new_value(name, value) for name, value in names.items()}


def zero_line(name: str) -> str:
    """Returns what a user who writes 0 is told, where `new_value` has another value."""
    new = new_value(name, 0)
    return f"{name}=0 is now {'null' if new is None else new}; 0 is read until version {UNTIL}"
