"""Seconds without progress after which a run counts as stuck, and the seconds of pinning host memory in them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sppo_jax.plan.plan import Plan

AUTO = "auto"
# Bytes of fresh host memory that a host pins a second. One thread was reported to pin 2 to 3 GiB/s (8 GiB in 2.7 s,
# ai-dynamo/dynamo#13710). The threads of one process share a lock, so all devices of a host count as one thread.
PINNED_BYTES_S = 2 * 2**30
# The most devices of a host; a plan does not say how many of its devices are on one host.
_HOST_DEVICES = 8
# A run waits for at most two steps between two signs of progress (a validation follows the step under way). The rest
# is for steps that are slower than predicted.
_STEPS = 4
_LEAST_S = 1800.0


def pinning_s(host_bytes: int) -> float:
    """Returns the predicted seconds in which a host pins fresh memory.

    Args:
        host_bytes: bytes that all devices of the host pin.
    """
    return host_bytes / PINNED_BYTES_S


def first_step_pinning_s(plan: Plan) -> float:
    """Returns the predicted seconds in which a host pins the memory that the first step of a plan needs."""
    return pinning_s(max(plan.predicted.host_bytes, default=0) * min(plan.mesh.num_devices, _HOST_DEVICES))


def stall_limit_s(plan: Plan, given: float | str = AUTO) -> float:
    """Returns the seconds without progress after which a run of a plan counts as stuck; 0: never.

    Args:
        plan: its predicted step and host memory make the limit.
        given: `train.stall_s`; a number is the limit itself.
    """
    if not isinstance(given, str):
        return given
    return max(_LEAST_S, float(math.ceil(_STEPS * plan.predicted.step_s + first_step_pinning_s(plan))))


def stall_text(plan: Plan, given: float | str = AUTO) -> str:
    """Returns the limit in words, and what makes the limit.

    Args:
        plan: the plan of the run.
        given: `train.stall_s`.
    """
    limit_s = stall_limit_s(plan, given)
    if not isinstance(given, str):
        return f"ends after {limit_s:g} s without progress, as given" if limit_s else "never ends, as given"
    parts = f"{_STEPS} steps and {first_step_pinning_s(plan):.0f} s to pin host memory; at least {_LEAST_S:.0f} s"
    return f"ends after {limit_s:.0f} s without progress ({parts})"


def stall_problem(plan: Plan, given: float | str) -> str | None:
    """Returns a warning if a limit that was given would end a healthy run of a plan; None if it would not.

    Args:
        plan: the plan of the run.
        given: `train.stall_s`.
    """
    limit_s, step_s = stall_limit_s(plan, given), plan.predicted.step_s
    if not 0 < limit_s < step_s:
        return None
    return (
        f"train.stall_s must be above the predicted step of {step_s:.4g} s, got {limit_s:g} s, after which the run "
        f"ends in a healthy step; set train.stall_s=auto ({stall_limit_s(plan):.0f} s), a larger number, or 0: never"
    )
