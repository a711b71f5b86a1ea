"""Why a plan is what it is: for each choice, what the best plans with another one would have taken."""

import dataclasses
from collections.abc import Callable, Hashable

from sppo_jax.planner.evaluate import Outcome
from sppo_jax.planner.frames import schedule_reason
from sppo_jax.planner.hunt import Hunt
from sppo_jax.planner.nodes import Node
from sppo_jax.planner.request import Request

# What each choice is, to tell it from others and to name it.
_CHOICES: dict[str, Callable[[Node], Hashable]] = {
    "mesh": lambda node: node.frame.layout.mesh,
    "sequence_kind": lambda node: node.frame.layout.split.ulysses,
    "chunks": lambda node: (node.frame.num_chunks, node.frame.balance),
    "schedule": lambda node: (node.frame.schedule, node.frame.layout.interleave),
    "stash": lambda node: node.places,
}
# What another plan must have in common with the chosen one to be compared with it.
_ALIKE: dict[str, Callable[[Node], Hashable]] = {
    "mesh": lambda node: None,
    "sequence_kind": lambda node: node.frame.layout.mesh,
    "chunks": lambda node: (node.frame.layout.mesh, node.frame.layout.interleave),
    "schedule": lambda node: node.frame.layout.mesh,
    "stash": lambda node: node.frame.layout.mesh,
}
_LABELS: dict[str, Callable[[Node], str]] = {
    "mesh": lambda node: "data {} x pipe {} x seq {}".format(*dataclasses.astuple(node.frame.layout.mesh)),
    "sequence_kind": lambda node: f"ulysses {node.frame.layout.split.ulysses} x ring {node.frame.layout.split.ring}",
    "chunks": lambda node: f"{node.frame.num_chunks} of equal {'FLOPs' if node.frame.balance == 'flops' else 'length'}",
    "schedule": lambda node: f"{node.frame.schedule} with interleave {node.frame.layout.interleave}",
    "stash": lambda node: "/".join(node.places),
}


def reasons_of(request: Request, hunt: Hunt, best: Outcome, num_considered: int) -> dict[str, str]:
    """Returns the reason of each choice.

    Args:
        request: what was asked for.
        hunt: the search, over.
        best: what it found.
        num_considered: choices considered in all.
    """
    layout = best.choice.layout
    reasons = {key: _against_rivals(hunt, best, key) for key in _CHOICES}
    if request.config.stash.kv_grad_dtype != "auto":
        reasons["kv_grad_dtype"] = "as requested"
    else:
        wide = best.choice.kv_grad_dtype == "float32"
        reasons["kv_grad_dtype"] = "sums over many chunks" if wide else "nothing fits with float32 sums"
    reasons["mesh"] = f"of {num_considered} choices on {request.cluster.name}; {reasons['mesh']}"
    reasons["sequence_kind"] = f"{layout.split.reason}; {reasons['sequence_kind']}"
    reasons["schedule"] = f"{schedule_reason(request, layout, best.choice.schedule)}; {reasons['schedule']}"
    return reasons


def times_slower(step_s: float, best_s: float) -> str:
    """Returns how much slower a step is than the best one; a tie where no digit that is shown tells them apart."""
    times = f"{step_s / best_s:.3f}"
    return "a tie: as fast to 0.1%" if times == "1.000" else f"{times}x slower"


def _against_rivals(hunt: Hunt, best: Outcome, key: str) -> str:
    of, alike, label = _CHOICES[key], _ALIKE[key], _LABELS[key]
    slower, larger = hunt.rivals(best, of, alike)
    texts = []
    if slower is not None:
        node, bound = slower
        # A bound is refined only as far as it takes to lose.
        times = f"{max(1.0, bound / best.step_s):.3f}"
        longer = "may be as fast, to 0.1%" if times == "1.000" else f"takes at least {times}x as long"
        texts.append(f"the next one, {label(node)}, {longer}")
    if larger is not None:
        texts.append(f"{label(larger[0])} might be faster, but does not fit")
    return "; ".join(texts) or "as requested, or the only one possible"
