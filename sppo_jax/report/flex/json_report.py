"""The report on teams as JSON."""

from __future__ import annotations

import dataclasses
from typing import Any

from sppo_jax.report.flex.cells import cells_of
from sppo_jax.report.flex.figures import NAMES, TeamFigures
from sppo_jax.report.flex.text import gain_line


def flex_dict(figures: TeamFigures) -> dict[str, Any]:
    """Returns all figures of a report on teams; seconds are simulated.

    Args:
        figures: the figures of the windows.
    """
    plan, first = figures.plan, figures.first
    unit_s = figures.shape.weights.unit_s
    return {
        "simulated": True,
        "source": figures.source,
        "cluster": figures.cluster.name,
        "mesh": dataclasses.asdict(plan.mesh),
        "sequence_kind": plan.sequence_kind,
        "sequence_length": plan.sequence_length,
        "chunk_lengths": list(plan.chunk_lengths),
        "rows": figures.shape.rows,
        "fill": figures.fill,
        "helps": figures.helps,
        "verdict": gain_line(figures),
        "why": figures.why(),
        "exchange_share": figures.exchange_share,
        "uneven_share": figures.uneven_share,
        "stream_share": figures.stream_share,
        "baselines": {
            name: {"seconds": figures.seconds[name], "rows": figures.rows[name], "flex_gains": figures.gain[name]}
            for name in NAMES
        },
        "windows": [
            {
                "documents": len(pieces),
                "placement": found["flex"].windows[0].winner,
                "seconds": {name: found[name].cost * unit_s for name in NAMES},
            }
            for pieces, found in zip(figures.windows, figures.placed, strict=True)
        ],
        "first_window": {
            "cells": [dataclasses.asdict(cell) for cell in cells_of(first)],
            "levels": [{"kind": op, "level": level} for op, level in figures.levels()],
            "bytes_a_layer": {**dataclasses.asdict(figures.sent), "flex": figures.sent.flex},
        },
    }
