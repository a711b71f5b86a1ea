"""What is aimed at on one H200, beside what was measured; and the planner's seconds with measured figures. No jax."""

from __future__ import annotations

import statistics
from typing import Any

from bench.gpu_parts.results import Results
from sppo_jax.config import config_from_dict
from sppo_jax.hardware import DEVICES, Device, make_cluster, with_profile
from sppo_jax.hardware.measured_figures import profile_from_dict
from sppo_jax.plan.plan import Plan
from sppo_jax.search.evaluate import costs_of, simulation_of

FORWARD_SHARE, BACKWARD_SHARE, LONG_QUERIES = 0.70, 0.55, 8192
LONG_TOKENS, MFU, PEER_SPEED, PEER_LENGTH, OFFLOAD_COST, PLANNER_ERROR = 131072, 0.50, 1.6, 3.0, 0.03, 0.15
Row = dict[str, Any]


def ceiling_flops_s(results: Results) -> float | None:
    """Return the best FLOP/s of a matrix product of this run; None where none was measured."""
    found = [row["flops_s"] for row in results.rows("health") if row.get("what", "").startswith("matmul")]
    return max(found, default=None)


def aim_rows(results: Results) -> list[Row]:
    """Return a row for each aim of which something was measured; none for a run on a CPU."""
    if DEVICES[results.machine["device"]].platform == "cpu":
        return []
    found = [*_attention_aims(results), *_step_aims(results), *_peer_aims(results)]
    return [{"aim": aim, "measured": measured, "holds": "yes" if holds else "NO"} for aim, measured, holds in found]


def _attention_aims(results: Results) -> list[tuple[str, str, bool]]:
    ceiling, found = ceiling_flops_s(results), []
    for way, share in (("forward", FORWARD_SHARE), ("backward", BACKWARD_SHARE)):
        rates = [
            row["flops_s"]
            for row in results.rows("attention")
            if row.get("way") == way and row["queries"] >= LONG_QUERIES and row["what"].startswith("cudnn behind")
        ]
        if ceiling and rates:
            least = min(rates) / ceiling
            name = f"attention {way} at least {share:.0%} of the matmul ceiling from {LONG_QUERIES} queries on"
            found.append((name, f"{least:.1%} to {max(rates) / ceiling:.1%}", least >= share))
    return found


def _step_aims(results: Results) -> list[tuple[str, str, bool]]:
    rows = [row for row in results.rows("step") if "step_s" in row]
    long = [row for row in rows if row["length"] >= LONG_TOKENS]
    found = []
    if long:
        least = min(row["mfu"] for row in long)
        name = f"causal MFU at least {MFU:.0%} at {LONG_TOKENS} tokens and more"
        found.append((name, f"{least:.1%} to {max(row['mfu'] for row in long):.1%}", least >= MFU))
    by_case = {(row["stash"], *_same_step(row)): statistics.median(row["step_s"]) for row in long}
    costs = [
        by_case["all on the host", *same] / kept_s - 1
        for (stash, *same), kept_s in by_case.items()
        if stash == "kept" and ("all on the host", *same) in by_case
    ]
    if costs:
        name = f"all on the host costs less than {OFFLOAD_COST:.0%} of kept at {LONG_TOKENS} tokens and more"
        found.append((name, f"{min(costs):.1%} to {max(costs):.1%}", max(costs) < OFFLOAD_COST))
    errors = [(measured_prediction_s(results, row), statistics.median(row["step_s"])) for row in rows]
    errors = [predicted_s / step_s - 1 for predicted_s, step_s in errors if predicted_s]
    if errors:
        worst = max(errors, key=abs)
        name = f"planner with measured figures within {PLANNER_ERROR:.0%} of every step"
        found.append((name, f"{min(errors):+.1%} to {max(errors):+.1%}", abs(worst) <= PLANNER_ERROR))
    return found


def _same_step(row: Row) -> tuple[int, int, str]:
    """Return what steps share that differ in their stash alone."""
    return row["num_layers"], row["length"], row.get("variant", "")


def _peer_aims(results: Results) -> list[tuple[str, str, bool]]:
    ours = {
        (row["num_layers"], row["length"]): row["tokens_per_s"]
        for row in results.rows("step")
        if row.get("stash") == "planned" and "tokens_per_s" in row
    }
    torch = [row for row in results.rows("peer") if row.get("framework") == "torch"]
    timed = [row for row in torch if row.get("tokens_per_s") and "longest" not in row["case"]]
    ratios = [
        ours[row["num_layers"], row["length"]] / row["tokens_per_s"]
        for row in timed
        if (row["num_layers"], row["length"]) in ours
    ]
    found = []
    if ratios:
        name = f"tokens/s at least {PEER_SPEED} times the PyTorch peer's at equal length"
        found.append((name, f"{min(ratios):.2f} to {max(ratios):.2f}", min(ratios) >= PEER_SPEED))
    reached = [row["length"] for row in torch if "longest" in row["case"] and row["status"] == "ran"]
    ended = any("longest" in row["case"] and row["status"] != "ran" for row in torch)
    longest = [row["length"] for row in results.rows("step") if row.get("fits")]
    if reached and longest:
        ratio = max(longest) / max(reached)
        name = f"{PEER_LENGTH:.0f} times the PyTorch peer's longest length (ours compiled, not run)"
        caveat = "" if ended else "; the peer was not tried longer"
        found.append((name, f"{ratio:.1f} ({max(longest)} against {max(reached)}{caveat})", ratio >= PEER_LENGTH))
    return found


def measured_prediction_s(results: Results, row: Row) -> float | None:
    """Return the planner's seconds of a measured step with the figures of this run's profile; None without one.

    Args:
        results: of the run.
        row: of part `step`, with its config and Plan.
    """
    device = _profiled_device(results)
    if device is None:
        return None
    config, plan, cluster = config_from_dict(row["config"]), Plan.from_dict(row["plan"]), make_cluster(device)
    return simulation_of(plan, config, cluster).step_s + costs_of(plan, config, cluster).step_overhead_s()


def _profiled_device(results: Results) -> Device | None:
    profiles = [row["profile"] for row in results.rows("attention") if "profile" in row]
    if not profiles:
        return None
    return with_profile(DEVICES[results.machine["device"]], profile_from_dict(profiles[-1]))
