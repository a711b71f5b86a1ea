"""FlexSP's own problem for the documents of a report: its planner's groups, and one degree for all documents."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from sppo_jax.flex.flexsp.bound import lower_bound_ns
from sppo_jax.flex.flexsp.costs import MODELS, GroupCosts, flexsp_costs
from sppo_jax.flex.flexsp.group_plan import GroupPlan
from sppo_jax.flex.flexsp.solver import plan_batch
from sppo_jax.flex.flexsp.systems import PADDING, batch_ns
from sppo_jax.flex.lengths import padded
from sppo_jax.flex.placement import Pieces
from sppo_jax.report.draw.columns import aligned, paragraph

_LEAST_KILOTOKENS = 192
_MOST_SHOWN = 6
FLEXSP = "flexsp"
SYSTEMS = {
    "static": "one degree for all documents of all steps",
    "batch": "the best degree of each step",
    FLEXSP: "groups of many degrees, planned for each microbatch",
}


@dataclass(frozen=True, kw_only=True)
class FlexspFigures:
    """FlexSP's plan of each window; all seconds are simulated with FlexSP's released cost model.

    Args:
        model: key of `MODELS`.
        costs: times and limits of groups.
        batches: lengths of the documents of each window, padded, int64 [documents] each.
    """

    model: str
    costs: GroupCosts
    batches: tuple[np.ndarray, ...]

    @cached_property
    def plans(self) -> tuple[tuple[list[np.ndarray], list[GroupPlan]], ...]:
        """The documents of the microbatches of each window, and their plans."""
        return tuple(plan_batch(lengths, self.costs) for lengths in self.batches)

    @cached_property
    def seconds(self) -> dict[str, float]:
        """Seconds of a step, the mean of the windows: one degree for all windows, for each window, and FlexSP."""
        fixed = [
            [batch_ns("static", lengths, self.costs, static_degree=degree) for lengths in self.batches]
            for degree in self.costs.degrees
            if max(int(lengths.max()) for lengths in self.batches) <= degree * self.costs.device_tokens
        ]
        best = [min(times) for times in zip(*fixed, strict=True)]
        flexsp = [sum(plan.time_ns for plan in plans) for _, plans in self.plans]
        totals = dict(zip(SYSTEMS, (min(map(sum, fixed)), sum(best), sum(flexsp)), strict=True))
        return {name: total / len(self.batches) / 1e9 for name, total in totals.items()}

    @cached_property
    def over_bound(self) -> float:
        """How far the plans of the first window are above a lower bound on their microbatches, as a share."""
        microbatches, plans = self.plans[0]
        total = sum(plan.time_ns for plan in plans)
        bounds = [
            lower_bound_ns(self.batches[0][own], self.costs, plan.time_ns)
            for own, plan in zip(microbatches, plans, strict=True)
        ]
        return total / sum(bounds) - 1


def flexsp_figures(model: str, num_devices: int, windows: Sequence[Pieces]) -> FlexspFigures:
    """Returns FlexSP's own problem for the documents of some windows.

    Args:
        model: key of `MODELS`.
        num_devices: devices: a power of two, 2 to 64.
        windows: the documents of each window. Windows without documents are left out.

    Raises:
        ValueError: no window has a document, FlexSP has no costs for so many devices, or the model or a document does
            not fit.
    """
    batches = tuple(padded(pieces.size, PADDING) for pieces in windows if len(pieces))
    if not batches:
        raise ValueError("--flexsp must get at least one document, got none; use other documents")
    longest = max(int(lengths.max()) for lengths in batches)
    max_kilotokens = max(_LEAST_KILOTOKENS, math.ceil(longest / 1000))
    costs = flexsp_costs(MODELS[model], num_devices=num_devices, max_kilotokens=max_kilotokens)
    if longest > costs.cluster_tokens:
        raise ValueError(
            f"FlexSP holds a document of at most {costs.cluster_tokens:,} tokens on {num_devices} devices for "
            f"{model}, got {longest:,}; use more devices or shorter sequences"
        )
    return FlexspFigures(model=model, costs=costs, batches=batches)


def flexsp_text(figures: FlexspFigures) -> str:
    """Returns FlexSP's plan as text: its seconds, those of one degree for all, and the groups of the first window."""
    costs, seconds = figures.costs, figures.seconds
    title = f"FlexSP's own problem: {MODELS[figures.model].name} on {costs.num_devices} A100-40GB (simulated)"
    about = (
        "documents stay whole, without chunks or a pipeline; the costs are FlexSP's released ones; a device holds at "
        f"most {costs.device_tokens:,} tokens"
    )
    rows = [
        (name, f"{value:.2f}", "" if name == FLEXSP else f"{value / seconds[FLEXSP]:.2f}x", SYSTEMS[name])
        for name, value in seconds.items()
    ]
    microbatches, plans = figures.plans[0]
    lines = [title, paragraph("", about, width=0)]
    lines.append(aligned(("", "seconds", "FlexSP's gain", ""), rows, left=(0, 3), wrap=3))
    lines.append(
        f"  microbatches of the first step: {len(plans)}; their time is {figures.over_bound:.1%} above a lower bound"
    )
    for number, (own, plan) in enumerate(zip(microbatches[:_MOST_SHOWN], plans, strict=False)):
        lines.append(paragraph(f"microbatch {number}", _groups(plan, figures.batches[0][own])))
    if len(plans) > _MOST_SHOWN:
        lines.append(f"  {len(plans) - _MOST_SHOWN} more microbatches; --json has all")
    return "\n".join(lines)


def _groups(plan: GroupPlan, lengths: np.ndarray) -> str:
    """Returns the groups of a microbatch in words, e.g. "0.52 s; 1 x 32 devices: 3 of 9,216 to 48,000 tokens"."""
    own: dict[int, list[int]] = {}
    for group in plan.groups:
        own.setdefault(group.degree, []).extend(lengths[list(group.documents)].tolist())
    blocks = Counter(group.degree for group in plan.groups)
    texts = [
        f"{blocks[degree]} x {degree} devices: {len(found)} of {min(found):,} to {max(found):,} tokens"
        for degree, found in own.items()
    ]
    return f"{plan.time_ns / 1e9:.2f} s; " + "; ".join(texts)


def flexsp_dict(figures: FlexspFigures) -> dict[str, object]:
    """Returns FlexSP's plans as JSON; seconds are simulated."""
    return {
        "model": figures.model,
        "devices": figures.costs.num_devices,
        "device_tokens": figures.costs.device_tokens,
        "seconds": figures.seconds,
        "above_lower_bound": figures.over_bound,
        "microbatches": [
            {
                "seconds": plan.time_ns / 1e9,
                "groups": [
                    {"degree": group.degree, "tokens": figures.batches[0][own][list(group.documents)].tolist()}
                    for group in plan.groups
                ],
            }
            for own, plan in zip(*figures.plans[0], strict=True)
        ],
    }
