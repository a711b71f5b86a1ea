"""What a changed length of a run, or a changed optimizer, does to the learning rate of the steps to come."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sppo_jax.config import Config, config_from_dict
from sppo_jax.train.step import make_schedule


def rate_change(before: Mapping[str, Any], config: Config, count: int) -> str:
    """Returns a clause on the learning rate of the next step, before and after a change; "" where nothing changed it.

    Args:
        before: the settings with which the run was saved.
        config: those with which it goes on.
        count: number of updates done, which the schedule counts.
    """
    try:
        old = config_from_dict(before)
    except ValueError:  # settings of another version
        return ""
    names = ("lr", "warmup_steps", "warmup_ratio", "warmup", "decay", "decay_steps", "min_lr_ratio")
    pairs = [("train.steps", old.train.steps, config.train.steps)]
    pairs += [(f"optimizer.{name}", getattr(old.optimizer, name), getattr(config.optimizer, name)) for name in names]
    changes = ", ".join(f"{name} {then} -> {now}" for name, then, now in pairs if then != now)
    if not changes:
        return ""
    then, now, last = (
        float(make_schedule(each.optimizer, each.train.steps)(step))
        for each, step in ((old, count), (config, count), (config, config.train.steps - 1))
    )
    return (
        f"; {changes}: the learning rate of the next step is {now:.3g} instead of {then:.3g}, and "
        f"{'falls to' if last < now else 'is'} {last:.3g} at step {config.train.steps:,}"
    )
