"""In one line: how many tokens that are learned a plan trains on in a second."""

from __future__ import annotations

import warnings

from sppo_jax.config import Config
from sppo_jax.data.summary.summary import Summary
from sppo_jax.search.make import make_plan


def trained_line(config: Config, summary: Summary) -> str:
    """Returns the predicted tokens per second that are learned, or why they are not known; "" if all are learned.

    Args:
        config: the settings; the planner is asked only if they name the devices.
        summary: the result of `summarize`.
    """
    if not any(source.learned for source in summary.sources):
        return ""
    if not (config.hardware.cluster or config.train.num_simulated_devices):
        return "trained tokens per second: not predicted, neither hardware.cluster nor train.devices names the devices"
    try:
        step_s = _step_s(config)
    except ValueError as error:
        return f"trained tokens per second: not predicted, the config has no plan: {error}"
    places = config.num_sequences * config.sequence.length
    share = trained_share(summary)
    return (
        f"trained tokens per second: {share * places / step_s:,.0f} of {places / step_s:,.0f} places ({share:.1%}; "
        f"predicted, {step_s:.4g} s per step)"
    )


def known_step_s(config: Config) -> float | None:
    """Returns the simulated seconds of a step; None where the settings do not name the devices, or have no plan."""
    if not (config.hardware.cluster or config.train.num_simulated_devices):
        return None
    try:
        return _step_s(config)
    except ValueError:
        return None


def _step_s(config: Config) -> float:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a plan does not fit is for `sppo plan` to say
        return make_plan(config).predicted.step_s


def trained_share(summary: Summary) -> float:
    """Returns the share of the sequences' places whose token is learned."""
    return sum(
        source.weight * source.filled * (source.learned.trained_tokens / source.learned.kept_tokens)
        if source.learned
        else source.weight * source.filled
        for source in summary.sources
    ) / max(1e-12, sum(source.weight for source in summary.sources))
