"""Settings that have another name since version 0.2: configs, overrides, checkpoints and plans may have the old one.

`config/renamed.py` applies this table to settings, and `plan/json_format.py` to the model of a plan.
"""

from dataclasses import dataclass

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


def find_renamed(name: str) -> Renamed | None:
    """Returns the entry of a dotted name that is an old one, or lies within one; None for a name of today."""
    return next((each for each in RENAMED if f"{name}.".startswith(f"{each.section}.{each.old}.")), None)


def new_name(name: str) -> str:
    """Returns the dotted name of today of a setting, which may have an old one."""
    found = find_renamed(name)
    if found is None:
        return name
    return f"{found.section}.{found.new}{name.removeprefix(f'{found.section}.{found.old}')}"
