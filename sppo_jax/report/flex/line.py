"""The gain of teams on the first documents of a config in one line, where the answer is cheap."""

from __future__ import annotations

import warnings

from sppo_jax.config import Config
from sppo_jax.data.rows.flex import window_pieces
from sppo_jax.data.rows.protocol import Rows
from sppo_jax.flex.choose import LEAST_GAIN, gain
from sppo_jax.flex.of_plan import window_shape
from sppo_jax.plan.plan import Plan
from sppo_jax.search.make import costs_of, make_plan

# A window of more documents takes too long to place beside the rest of `sppo data`.
_MOST_PIECES = 2000
_MORE = "`sppo flex` shows the gain"


def teams_line(config: Config, rows: Rows) -> str:
    """Returns the gain of teams over packed rows on the first window of a run, or why the gain is not known.

    The planner is asked only where its search is short (`mesh.seq` is given, or the config asks for teams) and where
    the config names the devices.

    Args:
        config: the settings.
        rows: the sequences to train on.
    """
    return f"teams (sequence.groups): {_answer(config, rows)}"


def gain_of_teams(config: Config, plan: Plan, rows: Rows | None) -> float | None:
    """Returns how many times as fast as packed rows teams make the first step of a run; None: not worked out.

    Args:
        config: the settings.
        plan: their plan.
        rows: the sequences to train on; None: not known.
    """
    members = plan.mesh.seq
    if config.sequence.groups == "static" or rows is None or members & (members - 1) or members == 1:
        return None
    pieces = window_pieces(rows, 0, plan.num_sequences)
    if len(pieces) > _MOST_PIECES:
        return None
    return gain([pieces], window_shape(plan, costs_of(plan, config)))


def _answer(config: Config, rows: Rows) -> str:
    seq = config.mesh.pinned.get("seq", 0)
    if seq == 1:
        return "nothing to gain, mesh.seq is 1"
    if seq & (seq - 1):
        return f"impossible, mesh.seq must be a power of two, got {seq}"
    if config.sequence.groups == "static" and not seq:
        return f"not simulated, mesh.seq is auto; {_MORE}"
    if not (config.hardware.cluster or config.train.num_simulated_devices):
        return f"not simulated, neither hardware.cluster nor train.devices names the devices; {_MORE}"
    try:
        return _simulated(config, rows)
    except ValueError as error:
        return f"not simulated, the config has no plan: {error}"


def _simulated(config: Config, rows: Rows) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a plan does not fit is for `sppo plan` to say
        plan = make_plan(config)
    members = plan.mesh.seq
    if members & (members - 1) or members == 1:
        return f"nothing to gain, the plan has mesh.seq={members}"
    pieces = window_pieces(rows, 0, plan.num_sequences)
    if len(pieces) > _MOST_PIECES:
        return f"not simulated, a step has {len(pieces):,} documents; {_MORE}"
    gained = gain([pieces], window_shape(plan, costs_of(plan, config)))
    found = f"{gained:.2f}x on the {len(pieces):,} documents of the first step, seq {members}, simulated"
    if gained < LEAST_GAIN:
        return f"gain nothing ({found})"
    return f"gain {found}; {_MORE}"
