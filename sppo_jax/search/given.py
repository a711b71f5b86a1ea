"""What a plan does with the settings that were given: where it says otherwise, and where they change nothing."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sppo_jax.config import Config
from sppo_jax.plan.plan import Plan

# What a plan says of a setting, in the setting's own words.
_SAID: dict[str, Callable[[Plan], Any]] = {
    "mesh.data": lambda plan: plan.mesh.data,
    "mesh.pipe": lambda plan: plan.mesh.pipe,
    "mesh.seq": lambda plan: plan.mesh.seq,
    "mesh.weights": lambda plan: plan.weights,
    "sequence.shapes": lambda plan: plan.schedule.shapes,
    "sequence.split": lambda plan: plan.sequence_kind,
    "sequence.ulysses": lambda plan: plan.ulysses,
    "sequence.ring_pass": lambda plan: plan.ring_pass,
    "schedule.name": lambda plan: plan.schedule.name,
    "schedule.interleave": lambda plan: plan.schedule.interleave,
    "schedule.wave": lambda plan: plan.schedule.wave,
    "stash.inputs": lambda plan: plan.stash.inputs,
    "stash.attention": lambda plan: plan.stash.attention,
    "stash.rest": lambda plan: plan.stash.rest,
    "stash.kv_grad_dtype": lambda plan: plan.stash.kv_grad_dtype,
    "stash.kv": lambda plan: "rebuild" if plan.stash.kv == "recompute" else plan.stash.kv,
    "stash.waiting": lambda plan: plan.stash.waiting,
    "optimizer.place": lambda plan: plan.optimizer,
}
# What leaves a setting to the planner; an alpha of 0 asks for what a plan without one does.
_OPEN = ("auto", 0)


@dataclass(frozen=True)
class _Acts:
    """Where a setting can make a difference.

    Args:
        setting: its dotted name.
        acts: whether it does in a plan.
        why: why not, where it does not.
    """

    setting: str
    acts: Callable[[Plan], bool]
    why: str


_SEVERAL_CHUNKS = (lambda plan: len(plan.chunk_lengths) > 1, "sequences are in one chunk")
_SEVERAL_MEMBERS = (lambda plan: plan.mesh.seq > 1, "mesh.seq is 1")
_ACTS = (
    _Acts("sequence.balance", *_SEVERAL_CHUNKS),
    _Acts("sequence.longest", *_SEVERAL_CHUNKS),
    _Acts("sequence.split", *_SEVERAL_MEMBERS),
    _Acts("sequence.ulysses", *_SEVERAL_MEMBERS),
    _Acts("sequence.ring_pass", lambda plan: plan.ring > 1, "there is no ring"),
    _Acts(
        "stash.alpha",
        lambda plan: any(plan.stash.alpha),
        "neither inputs nor attention outputs are offloaded",
    ),
)


def given(config: Config, setting: str) -> Any:
    """Returns the value of a setting by its dotted name; None where it leaves the choice to the planner."""
    section, _, name = setting.partition(".")
    value = getattr(getattr(config, section), name)
    return None if not isinstance(value, tuple) and value in _OPEN else value


def contradicted(config: Config, plan: Plan) -> dict[str, tuple[Any, Any]]:
    """Returns the settings of which a plan says something else: what was given, and what the plan says.

    Args:
        config: the settings.
        plan: a plan that may have been made for others.
    """
    said: dict[str, Any] = {setting: says(plan) for setting, says in _SAID.items()}
    chunks = config.sequence.chunks
    said["sequence.chunks"] = plan.chunk_lengths if isinstance(chunks, tuple) else len(plan.chunk_lengths)
    asked = {setting: given(config, setting) for setting in said}
    return {
        setting: (value, said[setting])
        for setting, value in asked.items()
        if value is not None and value != said[setting]
    }


def without_effect(config: Config, plan: Plan) -> list[str]:
    """Returns a line for each setting that was given and changes nothing in the plan.

    Args:
        config: the settings.
        plan: the plan that was made for them.
    """
    lines = []
    for row in _ACTS:
        value = given(config, row.setting)
        if value is not None and not row.acts(plan):
            shown = list(value) if isinstance(value, tuple) else value
            lines.append(f"{row.setting}={shown} changes nothing in this plan, because {row.why}; leave it out")
    return lines
