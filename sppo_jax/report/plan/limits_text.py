"""The longest sequence and the smallest cluster in a few lines."""

from sppo_jax.files.format_bytes import format_bytes
from sppo_jax.hardware import Cluster
from sppo_jax.report.draw.columns import paragraph
from sppo_jax.report.plan.words import chunks_of, mesh_of, schedule_of, seconds, stash_of
from sppo_jax.search.limits import Bound, Trial

_LABEL = 6


def max_length_text(bound: Bound, cluster: Cluster) -> str:
    """Returns the answer to --max-length.

    Args:
        bound: the result of `max_length`.
        cluster: the devices.
    """
    if bound.best is None:
        title = f"No sequence fits {cluster.name}"
    elif bound.stopped is None:
        title = f"Longest sequence on {cluster.name}: at least {bound.best.size:,} tokens; no longer sequence was tried"
    else:
        step = bound.stopped.size - bound.best.size
        title = f"Longest sequence on {cluster.name}: {bound.best.size:,} tokens (to within {step:,})"
    return _text(title, bound, cluster, " tokens")


def min_devices_text(bound: Bound, cluster: Cluster, length: int) -> str:
    """Returns the answer to --min-devices.

    Args:
        bound: the result of `min_devices`.
        cluster: the devices that were given.
        length: tokens of a sequence.
    """
    if bound.best is None:
        most = max(trial.size for trial in bound.tried)
        title = f"No cluster of up to {most} {cluster.device.name} fits {length:,} tokens"
    else:
        size, name = bound.best.size, bound.best.name
        devices = "device" if size == 1 else "devices"
        title = f"Smallest cluster for {length:,} tokens: {size} {devices}, {name}"
    return _text(title, bound, cluster, "")


def bound_dict(bound: Bound) -> dict:
    """Returns a bound as dicts, lists, strings and numbers, for JSON."""

    def trial(item: Trial) -> dict:
        return {"size": item.size, "name": item.name, "fits": not item.problem, "problem": item.problem}

    best = None
    if bound.best is not None and bound.best.found is not None:
        plan = bound.best.found.plan.to_dict()
        keys = ("mesh", "sequence_length", "chunk_lengths", "schedule", "stash", "predicted")
        best = trial(bound.best) | {"plan": {key: plan[key] for key in keys}}
    return {
        "value": None if bound.best is None else bound.best.size,
        "best": best,
        "stopped": None if bound.stopped is None else trial(bound.stopped),
        "tried": [trial(item) for item in bound.tried],
        "seconds": bound.seconds,
    }


def _text(title: str, bound: Bound, cluster: Cluster, unit: str) -> str:
    lines = [title]
    if bound.best is not None:
        lines += _reached(bound.best, cluster)
    if bound.stopped is not None:
        # If nothing fits, the search advises a size that was just tried.
        problem = bound.stopped.problem.partition("; use ")[0]
        lines.append(paragraph("next", f"{bound.stopped.name}{unit}: {problem}", width=_LABEL))
    tried = ", ".join(f"{item.name} {_status(item)}" for item in bound.tried)
    lines.append(paragraph("tried", f"{tried}; {bound.seconds:.1f} s", width=_LABEL))
    return "\n".join(lines)


def _status(trial: Trial) -> str:
    """Returns the result of a trial; where none is possible, the settings allow no mesh or chunks of this size."""
    if not trial.is_possible:
        return "no mesh"
    return "too large" if trial.problem else "fits"


def _reached(trial: Trial, cluster: Cluster) -> list[str]:
    assert trial.found is not None
    plan, memory = trial.found.plan, trial.found.memory
    return [
        paragraph(
            "plan",
            f"mesh {mesh_of(plan)} (data x pipe x seq), chunks {chunks_of(plan)}, {schedule_of(plan)}, "
            f"stash {stash_of(plan)}",
            width=_LABEL,
        ),
        paragraph(
            "takes",
            f"{seconds(plan.predicted.step_s)} s per step, {format_bytes(memory.hbm_bytes)} of "
            f"{format_bytes(cluster.device.hbm_bytes)} HBM and {format_bytes(memory.host)} host memory per device",
            width=_LABEL,
        ),
    ]
