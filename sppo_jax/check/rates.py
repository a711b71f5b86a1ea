"""What `sppo check` measured, as the planner reads it; and where a run of the same devices finds it."""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from sppo_jax.check.row import Figures
from sppo_jax.config import Config
from sppo_jax.files.paths import local_path
from sppo_jax.files.whole import cache_directory
from sppo_jax.hardware import Cluster, with_profile
from sppo_jax.hardware.attention_rates import AttentionCall
from sppo_jax.hardware.measured_figures import CopyFigure, Profile, profile_from_dict, read_profile
from sppo_jax.plan.plan import Plan
from sppo_jax.search.evaluate import costs_of, simulation_of

# The row that measures what `sppo profile` measures.
RATES = "rates"


def profile_of(found: Mapping[str, Sequence[Figures]]) -> Profile | None:
    """Returns the figures of all rows for the planner: the slowest device counts; None without the row of rates.

    Args:
        found: the figures of all processes, by the row's name.
    """
    rates = found.get(RATES)
    if not rates or any("error" in one for one in rates):
        return None
    profile = profile_from_dict(rates[0]["profile"])
    facts = _good(found, "software")[0].get("facts", {}) if _good(found, "software") else {}
    products = [rate for one in _good(found, "products") for rate in one["flops_s"]]
    return replace(
        profile,
        driver=facts.get("driver", ""),
        cudnn=facts.get("cuDNN", ""),
        attention_calls=_calls(_good(found, "attention rates")) or profile.attention_calls,
        copies=_copies(_good(found, "host copies")),
        host_link_bytes_s=_slowest_copy(_good(found, "host copies")) or profile.host_link_bytes_s,
        link_bytes_s=_least(_good(found, "collectives in a host"), "ring") or profile.link_bytes_s,
        all_to_all_bytes_s=_least(_good(found, "collectives in a host"), "all-to-all"),
        network_bytes_s=_network(_good(found, "collectives between hosts")),
        loop_wait_share=max((one["wait_share"] for one in _good(found, "loops wait")), default=None),
        beside_copies_share=_share(_least(_good(found, "collectives beside copies"), "left")),
        pinning_bytes_s=min((one["pinning_bytes_s"] for one in _good(found, "pinning")), default=None),
        slowest_share=min(products) / statistics.median(products) if products else None,
    )


def _good(found: Mapping[str, Sequence[Figures]], name: str) -> Sequence[Figures]:
    """Returns the figures of a row; none where it was left out or failed."""
    figures = found.get(name, ())
    return () if any("error" in one for one in figures) else figures


def _least(figures: Sequence[Figures], key: str) -> float | None:
    return min((value for one in figures for value in one.get(key, ())), default=None)


def _share(value: float | None) -> float | None:
    return None if value is None else min(1.0, value)


def _network(figures: Sequence[Figures]) -> float | None:
    return min((rate for one in figures if "steps" in one for rate in one["steps"][0]), default=None)


def _calls(figures: Sequence[Figures]) -> tuple[AttentionCall, ...]:
    found = []
    for number, call in enumerate(figures[0]["attention"] if figures else ()):
        flops_s = min(rate for one in figures for rate in one["attention"][number]["flops_s"])
        found.append(AttentionCall(way=call["way"], queries=call["queries"], keys=call["keys"], flops_s=flops_s))
    return tuple(found)


def _copies(figures: Sequence[Figures]) -> tuple[CopyFigure, ...]:
    if not figures:
        return ()
    alone = [CopyFigure(way=way, devices="one", bytes_s=rate) for way, rate in figures[0]["alone"].items()]
    together = [
        CopyFigure(way=way, devices="all", bytes_s=min(rate for one in figures for rate in one["all"][way]))
        for way in figures[0]["all"]
    ]
    return (*alone, *together)


def _slowest_copy(figures: Sequence[Figures]) -> float | None:
    return min((copy.bytes_s for copy in _copies(figures) if copy.devices == "all"), default=None)


def to_json(rows: Mapping[str, Any], found: Mapping[str, Sequence[Figures]]) -> dict[str, Any]:
    """Returns what `--out` stores: the planner's figures where all were measured, and every row.

    Args:
        rows: by their names.
        found: their figures.
    """
    profile = profile_of(found)
    stored = {
        name: {"verdict": row.verdict, "value": row.value, "figures": list(found[name])} for name, row in rows.items()
    }
    return {"sppo_check": 1, **(asdict(profile) if profile else {}), "rows": stored}


def place_of(device: str, driver: str, cudnn: str, num_devices: int) -> Path:
    """Returns the user's file of the figures of such devices, which need not exist."""
    name = hashlib.sha256(json.dumps([device, driver, cudnn, num_devices]).encode()).hexdigest()[:16]
    return cache_directory("check") / f"{name}.json"


def measured_line(config: Config, plan: Plan, cluster: Cluster, facts: Mapping[str, str]) -> str:
    """Returns a line on a plan's step with the rates that were measured on the same devices; "" where none were.

    With `hardware.measured` the plan has measured rates already: a line where other software measured them.

    Args:
        config: all settings.
        plan: of the run.
        cluster: the devices of all processes.
        facts: from `software`: the driver and cuDNN.
    """
    if config.hardware.measured is not None:
        return _other_software(config.hardware.measured, facts)
    if cluster.device.platform == "cpu":
        return ""
    driver, cudnn = facts.get("driver", ""), facts.get("cuDNN", "")
    path = place_of(cluster.device.name, driver, cudnn, cluster.num_devices)
    try:
        profile = read_profile(path)
    except ValueError:
        return ""
    found = (profile.device, profile.driver, profile.cudnn, profile.num_devices)
    if found != (cluster.device.name, driver, cudnn, cluster.num_devices):
        return ""
    here = replace(cluster, device=with_profile(cluster.device, profile))
    seconds = simulation_of(plan, config, here).step_s + costs_of(plan, config, here).step_overhead_s()
    return (
        f"predicted {seconds:.2f} s a step with the rates that sppo check measured here, {plan.predicted.step_s:.2f} s "
        f"from the datasheet; hardware.measured={path} plans with them"
    )


def _other_software(path: str, facts: Mapping[str, str]) -> str:
    """Returns a line on measured figures of another driver or cuDNN than those of this run; "" where both agree."""
    try:
        profile = read_profile(local_path(path, "hardware.measured"))
    except ValueError:  # a run that goes on has its plan, and no need of the file
        return ""
    for name, measured, here in (
        ("driver", profile.driver, facts.get("driver", "")),
        ("cuDNN", profile.cudnn, facts.get("cuDNN", "")),
    ):
        if measured and here and measured != here:
            return (
                f"hardware.measured should be of the {name} of this run, {here}, got {path}, measured with {measured}; "
                "run sppo check again"
            )
    return ""
