"""The plan of an evaluation, for a terminal and as JSON."""

from typing import Any

from sppo_jax.config import ModelConfig
from sppo_jax.files.format_bytes import format_bytes
from sppo_jax.hardware import Cluster, usable_bytes
from sppo_jax.report.draw.columns import paragraph
from sppo_jax.report.plan.words import chunks_of, holder_of, name_of, schedule_of, seconds
from sppo_jax.search.evaluation import EvaluationPlan

# An evaluation has no optimizer.
_NAMES = {"params": "parameters", "batch": "batch and results"}


def evaluation_text(found: EvaluationPlan, model: ModelConfig, cluster: Cluster) -> str:
    """Returns whether an evaluation fits, how long it takes, what takes the memory, and the plan.

    Args:
        found: the answer of the search.
        model: the model shape.
        cluster: the devices.
    """
    plan, memory = found.plan, found.memory
    rows, mesh = plan.num_sequences, plan.mesh
    count = "1 device" if cluster.num_devices == 1 else f"{cluster.num_devices} devices"
    holders = sorted(((name, size) for name, size in memory.hbm.items() if size), key=lambda one: -one[1])
    of_holders = ", ".join(f"{_NAMES.get(name, holder_of(name))} {format_bytes(size)}" for name, size in holders)
    split = f", {plan.sequence_kind}" if mesh.seq > 1 else ""
    answer = [
        f"{name_of(model)}, evaluation of rows of {plan.sequence_length:,} tokens, on {cluster.name} ({count})",
        paragraph("verdict", "fits" if found.fits else "DOES NOT FIT"),
        paragraph("seconds", _seconds_text(found)),
        paragraph(
            "memory",
            f"HBM {format_bytes(memory.hbm_bytes)} of {format_bytes(usable_bytes(cluster))} per device: {of_holders}",
        ),
    ]
    chosen = [
        "Plan",
        paragraph("mesh", f"data {mesh.data} x pipe {mesh.pipe} x seq {mesh.seq}{split}"),
        paragraph("rows", f"{rows} in a batch"),
        paragraph("schedule", schedule_of(plan)),
        paragraph("chunks", chunks_of(plan)),
        paragraph("weights", plan.weights),
        *([paragraph("hardware", plan.reasons["hardware"])] if "hardware" in plan.reasons else []),
    ]
    return "\n".join([*answer, "", *chosen])


def _seconds_text(found: EvaluationPlan) -> str:
    batch_s, rows = found.plan.predicted.step_s, found.plan.num_sequences
    of_rows = "1 row" if rows == 1 else f"{rows} rows"
    tokens_s = found.plan.sequence_length * rows / batch_s
    return (
        f"{seconds(batch_s)} s for a batch of {of_rows} (simulated), {tokens_s:,.0f} tokens/s; "
        f"{found.num_wanted:,} rows take {seconds(found.evaluation_s)} s"
    )


def evaluation_dict(found: EvaluationPlan, cluster: Cluster) -> dict[str, Any]:
    """Returns the plan of an evaluation and its figures as JSON values; arguments as `evaluation_text`."""
    return {
        "fits": found.fits,
        "problem": found.problem,
        "cluster": cluster.name,
        "rows_per_batch": found.plan.num_sequences,
        "batch_s": found.plan.predicted.step_s,
        "rows": found.num_wanted,
        "evaluation_s": found.evaluation_s,
        "hbm_bytes": found.memory.hbm_bytes,
        "usable_bytes": usable_bytes(cluster),
        "memory": dict(found.memory.hbm),
        "search": {"considered": found.considered, "seconds": found.seconds},
        "plan": found.plan.to_dict(),
    }
