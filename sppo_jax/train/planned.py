"""The plan that a run follows: that with which it began, or a new one for the documents of its data."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

from sppo_jax.config import Config
from sppo_jax.data.summary.known import known_documents, made_known, plans_for_lengths
from sppo_jax.hardware import Cluster
from sppo_jax.plan.plan import Plan
from sppo_jax.search.evaluate import memory_of
from sppo_jax.search.feasible import Feasibility
from sppo_jax.search.given import without_effect
from sppo_jax.search.make import check_plan, resolve_cluster
from sppo_jax.search.search import Found, search
from sppo_jax.train.checkpoints.run_dir import changed_settings

# The settings on which a plan depends besides the data, which stay those of the run.
_PLANNING = (
    "planner",
    "model",
    "mesh",
    "sequence",
    "schedule",
    "stash",
    "hardware",
    "optimizer.place",
    "train.devices",
)


# Entries of a plan that follow from the others, or are for certain documents.
_FOLLOWS = ("predicted", "planned_for", "reasons")


def plan_of_run(
    config: Config,
    cluster: Cluster | None,
    run_dir: Path,
    say: Callable[[str], None],
    show: Callable[[Found], None],
) -> tuple[Plan, str]:
    """Returns the plan of a run, and why it does not fit; empty where it does.

    A run that goes on keeps its plan as long as neither the settings nor the devices that it was made for change. A
    new plan is for the documents of the data. Their lengths are made known first, but not where no plan fits anyway:
    what fits does not depend on documents.

    Args:
        config: all settings.
        cluster: as for `make_plan`.
        run_dir: the directory of the run, which need not be there.
        say: prints a line.
        show: prints a plan: that of the run, or, where text must be tokenized first, the one for full documents.

    Raises:
        ValueError: settings contradict each other, or the data cannot be read.
    """
    kept, why_not = _kept(config, cluster, run_dir)
    if kept is not None:
        show(found_again(kept, config, cluster))
        return kept, ""
    if why_not:
        say(f"plans again, because {why_not}")
    reads = plans_for_lengths(config) and Feasibility(config, cluster).found is not None
    documents = known_documents(config) if reads else None
    if reads and documents is None:
        full = search(config, cluster)
        show(full)
        found = search(config, cluster, made_known(config))
        _say_of_lengths(full.plan, found.plan, say)
    else:
        found = search(config, cluster, documents)
        show(found)
    for line in without_effect(config, found.plan):
        warnings.warn(line, stacklevel=2)
    return found.plan, "" if found.fits else found.problem


def found_again(plan: Plan, config: Config, cluster: Cluster | None = None) -> Found:
    """Returns a plan as a search would have found it, which considered no other.

    Args:
        plan: of a run, or of a file.
        config: all settings.
        cluster: as for `make_plan`.
    """
    return Found(
        plan=plan,
        memory=memory_of(plan, config, cluster),
        fits=True,
        rejected=(),
        num_considered=1,
        seconds=0.0,
        problem="",
        fastest_s=plan.predicted.step_s,
    )


def _say_of_lengths(before: Plan, after: Plan, say: Callable[[str], None]) -> None:
    """Says in a line what the lengths of the documents changed in a plan for full ones."""
    old, new = before.to_dict(), after.to_dict()
    changed = [name for name in new if name not in _FOLLOWS and old[name] != new[name]]
    if changed:
        step_s = after.predicted.documents_step_s or after.predicted.step_s
        names = ", ".join(name.replace("_", " ") for name in changed)
        say(f"the lengths of the documents changed the plan ({names}); their step takes {step_s:.4g} s (simulated)")


def _kept(config: Config, cluster: Cluster | None, run_dir: Path) -> tuple[Plan | None, str]:
    """Returns the plan in a run's directory if the run may go on with it, else why it may not; empty for a new run."""
    path = run_dir / "plan.json"
    if not path.exists() or not (run_dir / "config.yaml").exists():
        return None, ""
    changed = [name for name, _, _ in changed_settings(run_dir, config) if _decides(name)]
    if changed:
        return None, f"{', '.join(changed)} changed since the run began"
    try:
        plan = Plan.from_json(path.read_text(encoding="utf-8"))
        check_plan(plan, config)
    except (ValueError, OSError) as error:
        return None, f"the plan of the run cannot be followed: {error}"
    now = resolve_cluster(config, cluster).name
    if plan.cluster != now:
        return None, f"the run was planned for {plan.cluster or 'devices that its plan does not name'}, and is on {now}"
    return plan, ""


def _decides(name: str) -> bool:
    """Returns whether a plan depends on a setting."""
    return any(name == one or name.startswith(f"{one}.") for one in _PLANNING)
