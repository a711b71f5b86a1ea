"""Whether documents get their own teams of devices: what `sequence.groups=auto` answers, and why."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from sppo_jax.flex.cells import plan_cells, today
from sppo_jax.flex.placement import Pieces
from sppo_jax.flex.shape import WindowShape
from sppo_jax.plan.plan import Plan

# A step must be so much shorter, in simulation, before teams are worth their larger program.
LEAST_GAIN = 1.02


def gain(windows: Sequence[Pieces], shape: WindowShape) -> float:
    """Returns how many times longer the steps are with packed rows than with teams, in simulation.

    Args:
        windows: documents of some windows.
        shape: of each window.
    """
    static = sum(today(pieces, shape).cost for pieces in windows)
    flex = sum(plan_cells(pieces, shape).cost for pieces in windows)
    return static / flex if flex else 1.0


def with_teams(plan: Plan, gained: float) -> Plan:
    """Returns the plan with teams if they are worth it, and with the reason either way.

    Args:
        plan: without teams.
        gained: from `gain`.
    """
    found = f"{gained:.3f} of the time with teams, simulated on the first documents of the run"
    if gained < LEAST_GAIN:
        text = f"static: steps take {found}; below {LEAST_GAIN} a larger program is not worth it"
        return dataclasses.replace(plan, reasons={**plan.reasons, "groups": text})
    reasons = {name: reason for name, reason in plan.reasons.items() if name != "sequence_documents"}
    reasons["groups"] = f"flex: static takes {found}"
    # Teams move documents between sequences.
    return dataclasses.replace(plan, groups="flex", sequence_documents="many", reasons=reasons)
