"""A plan as JSON: the keys of plan.json and those that a report adds."""

import dataclasses
from typing import Any

from sppo_jax.plan.json_format import REPORT_KEYS
from sppo_jax.plan.stall_limit import stall_limit_s
from sppo_jax.report.plan.figures import Figures


def plan_dict(figures: Figures, **answers: Any) -> dict[str, Any]:
    """Returns plan.json's keys and those of the report, REPORT_KEYS, which a reader of plans ignores.

    Args:
        figures: the figures of the plan.
        answers: limits that were asked for, by key.
    """
    found = figures.found
    report = {
        "fits": found.fits,
        "problem": found.problem,
        "rejected": [
            {
                "why": item.why,
                "step_s": item.step_s,
                "mesh": dataclasses.asdict(item.plan.mesh),
                "chunks": len(item.plan.chunk_lengths),
                "schedule": dataclasses.asdict(item.plan.schedule),
                "stash": dataclasses.asdict(item.plan.stash),
            }
            for item in found.rejected
        ],
        "stages": [dataclasses.asdict(stage) for stage in figures.stages],
        "memory": {
            "hbm": dict(found.memory.hbm),
            "moments": found.memory.moments,
            "host": found.memory.host,
            "save": found.memory.save,
        },
        "parts": figures.parts,
        "throughput": {
            "tokens_s": figures.tokens_s,
            "tokens_s_device": figures.tokens_s / figures.num_devices,
            "mfu": figures.mfu,
        },
        "documents": figures.documents
        and {
            "mean_tokens": figures.documents.mean_tokens,
            "attended": figures.documents.attended,
            "step_s": figures.documents_step_s,
            "teams_gain": figures.teams_gain,
        },
        "search": {
            "considered": found.num_considered,
            "seconds": found.seconds,
            "fastest_step_s": found.fastest_s,
        },
        "stall_s": stall_limit_s(figures.plan, figures.stall_s),
        **answers,
    }
    assert set(report) <= set(REPORT_KEYS)
    return figures.plan.to_dict() | report
