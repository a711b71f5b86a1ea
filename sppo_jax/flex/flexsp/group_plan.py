"""A plan of one microbatch: groups of devices and the documents of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sppo_jax.flex.flexsp.costs import GroupCosts


@dataclass(frozen=True, kw_only=True)
class Group:
    """A group of devices.

    Args:
        degree: its devices.
        documents: indices of its documents in the microbatch, increasing.
    """

    degree: int
    documents: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class GroupPlan:
    """The groups of a microbatch.

    Args:
        groups: groups that have documents, largest degree first.
        time_ns: nanoseconds of the slowest group.
    """

    groups: tuple[Group, ...]
    time_ns: int


def make_plan(
    lengths: np.ndarray, costs: GroupCosts, degrees: Sequence[int], documents: Sequence[Sequence[int]]
) -> GroupPlan:
    """Returns the plan of groups with the given degrees and documents; groups without documents are left out."""
    groups = [
        Group(degree=int(degree), documents=tuple(sorted(int(number) for number in own)))
        for degree, own in zip(degrees, documents, strict=True)
        if len(own)
    ]
    groups.sort(key=lambda group: (-group.degree, group.documents))
    return GroupPlan(groups=tuple(groups), time_ns=max(group_time_ns(group, lengths, costs) for group in groups))


def group_time_ns(group: Group, lengths: np.ndarray, costs: GroupCosts) -> int:
    """Returns the nanoseconds of a group."""
    times_KD = costs.times_KD(lengths[list(group.documents)])
    return costs.fixed_ns + int(times_KD[:, costs.degrees.index(group.degree)].sum())


def problem(plan: GroupPlan, lengths: np.ndarray, costs: GroupCosts) -> str:
    """Returns the first rule that a plan breaks, in words; "" if the plan keeps all rules."""
    placed = sorted(number for group in plan.groups for number in group.documents)
    if placed != list(range(len(lengths))):
        return "a document is missing or is in two groups"
    if sum(group.degree for group in plan.groups) > costs.num_devices:
        return "the groups need more devices than there are"
    for group in plan.groups:
        if group.degree not in costs.degrees:
            return f"degree {group.degree} is not allowed"
        if lengths[list(group.documents)].sum() > group.degree * costs.device_tokens:
            return f"a group of {group.degree} devices has too many tokens"
    if plan.time_ns != max(group_time_ns(group, lengths, costs) for group in plan.groups):
        return "the time is not that of the slowest group"
    return ""
