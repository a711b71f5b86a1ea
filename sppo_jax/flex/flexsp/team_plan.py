"""A plan of one microbatch: teams of devices and the documents of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sppo_jax.flex.flexsp.costs import TeamCosts


@dataclass(frozen=True, kw_only=True)
class Team:
    """A team of devices.

    Args:
        degree: its devices.
        documents: indices of its documents in the microbatch, increasing.
    """

    degree: int
    documents: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class TeamPlan:
    """The teams of a microbatch.

    Args:
        teams: teams that have documents, largest degree first.
        time_ns: nanoseconds of the slowest team.
    """

    teams: tuple[Team, ...]
    time_ns: int


def make_plan(
    lengths: np.ndarray, costs: TeamCosts, degrees: Sequence[int], documents: Sequence[Sequence[int]]
) -> TeamPlan:
    """Returns the plan of teams with the given degrees and documents; teams without documents are left out."""
    teams = [
        Team(degree=int(degree), documents=tuple(sorted(int(number) for number in own)))
        for degree, own in zip(degrees, documents, strict=True)
        if len(own)
    ]
    teams.sort(key=lambda team: (-team.degree, team.documents))
    return TeamPlan(teams=tuple(teams), time_ns=max(team_time_ns(team, lengths, costs) for team in teams))


def team_time_ns(team: Team, lengths: np.ndarray, costs: TeamCosts) -> int:
    """Returns the nanoseconds of a team."""
    times_KD = costs.times_KD(lengths[list(team.documents)])
    return costs.fixed_ns + int(times_KD[:, costs.degrees.index(team.degree)].sum())


def problem(plan: TeamPlan, lengths: np.ndarray, costs: TeamCosts) -> str:
    """Returns the first rule that a plan breaks, in words; "" if the plan keeps all rules."""
    placed = sorted(number for team in plan.teams for number in team.documents)
    if placed != list(range(len(lengths))):
        return "a document is missing or is in two teams"
    if sum(team.degree for team in plan.teams) > costs.num_devices:
        return "the teams need more devices than there are"
    for team in plan.teams:
        if team.degree not in costs.degrees:
            return f"degree {team.degree} is not allowed"
        if lengths[list(team.documents)].sum() > team.degree * costs.device_tokens:
            return f"a team of {team.degree} devices has too many tokens"
    if plan.time_ns != max(team_time_ns(team, lengths, costs) for team in plan.teams):
        return "the time is not that of the slowest team"
    return ""
