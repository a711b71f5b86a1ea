"""`sppo check`: whether this machine runs a config right, and how fast, before a run."""

import contextlib
import os
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sppo_jax.commands.command import (
    DOES_NOT_FIT,
    DONE,
    FAILED,
    Parser,
    load,
    num_simulated_devices,
    simulate,
    some_path,
)
from sppo_jax.commands.outputs import CHECKED, Output, check_outputs
from sppo_jax.config import Config, config_from_dict
from sppo_jax.files.paths import local_path
from sppo_jax.hardware import Cluster, local_cluster, visible_gpus
from sppo_jax.plan.plan import Plan
from sppo_jax.processes import distributed
from sppo_jax.processes.environment import (
    compile_soon,
    gpus_may_start,
    set_limits,
    set_waiting_limits,
    simulate_devices,
    skip_cuda_without_driver,
)
from sppo_jax.search.make import make_plan, resolve_cluster

# Of a parameter and its two moments in a checkpoint, all in float32.
_SAVED_BYTES = 12


def run(words: Sequence[str]) -> int:
    """Checks, and prints a line for each row; returns the exit code."""
    args = _parser().parse_intermixed_args(words)
    num_simulated = num_simulated_devices(args.devices)
    if args.overrides and not args.config:
        raise ValueError(f"settings must follow a config, got {args.overrides[0]}; name the config first")
    check_outputs(Output(option="--out", path=args.out, head=CHECKED), inputs=[args.config and Path(args.config)])
    config = _given(args, num_simulated)
    skip_cuda_without_driver()
    _refuse_cpu(config, num_simulated)
    distributed.start(config or _any_config(num_simulated))
    return _checked(args, config, num_simulated)


def _parser() -> Parser:
    parser = Parser(prog="sppo check", description="Check that this machine computes, copies and sends right.")
    parser.add_argument("config", metavar="CONFIG.yaml", nargs="?", help="a config whose run is checked, made small")
    parser.add_argument("overrides", metavar="key=value", nargs="*", default=[], help="settings of the config")
    parser.add_argument("--quick", action="store_true", help="shorter runs and fewer sizes")
    parser.add_argument("--devices", default="auto", help="auto, or cpu:N for N devices simulated on the CPU")
    parser.add_argument("--no-collectives", action="store_true", help="leave out what devices send to each other")
    parser.add_argument("--out", type=some_path, help="the JSON file of all figures, which hardware.measured reads")
    return parser


def _given(args: Namespace, num_simulated: int) -> Config | None:
    """Returns the config that is named, and simulates devices; None where none is named."""
    if num_simulated:
        compile_soon()  # rates of CPUs are not judged
    if args.config is None:
        if num_simulated:
            simulate_devices(distributed.local_devices(num_simulated))
        return None
    if num_simulated:
        args.overrides += [f"train.devices=cpu:{num_simulated}", "hardware.cluster=null", "hardware.measured=null"]
    config = load(args)
    simulate(config, together=True)
    return config


def _refuse_cpu(config: Config | None, num_simulated: int) -> None:
    """Refuses to check a CPU that nobody asked for."""
    if num_simulated or (config is not None and config.train.num_simulated_devices):
        return
    if os.environ.get("JAX_PLATFORMS", "").lower().startswith("cpu") or not (visible_gpus() or _has_tpu()):
        raise ValueError(
            "sppo check must find a GPU or a TPU, got none that this process may use; look at nvidia-smi and "
            "CUDA_VISIBLE_DEVICES, or give --devices cpu:4 to try the command on simulated devices"
        )


def _has_tpu() -> bool:
    return (
        bool(os.environ.get("TPU_ACCELERATOR_TYPE")) or os.path.exists("/dev/accel0") or os.path.exists("/dev/vfio/0")
    )


def _any_config(num_simulated: int) -> Config:
    """Returns a config with which processes meet before it is known what their devices are."""
    from sppo_jax.check.small import own_settings

    return config_from_dict(own_settings("cpu", num_simulated or 1, 16))


def _checked(args: Namespace, config: Config | None, num_simulated: int) -> int:
    from sppo_jax.check.processes import Board
    from sppo_jax.check.run import CheckRows, check_before_devices, check_devices, remove, temporary_folder, wanted_of

    has_gpus = bool(not num_simulated and gpus_may_start() and visible_gpus())
    directory = config.checkpoint.dir if config is not None else None
    where = local_path(directory, "checkpoint.dir") if directory else Path()
    with Board() as board:
        rows = CheckRows(board, _wanted_of_host(config, where, num_simulated, has_gpus=has_gpus), distributed.say)
        check_before_devices(rows, where, has_gpus=has_gpus)
        if not rows.has_failed:
            cluster = _cluster(config, num_simulated)
            other = _other_devices(config, cluster)
            config, plan, problem = (config, None, other) if other else _planned(config, cluster, num_simulated)
            if problem:
                distributed.say(f"{args.config} cannot run here: {problem}")
                return DOES_NOT_FIT
            uses_host = max(plan.predicted.host_bytes) > 0
            rows.wanted = wanted_of(cluster, plan, is_given=args.config is not None, uses_host=uses_host)
            set_waiting_limits(plan)
            set_limits(plan)
            folder = temporary_folder(where)
            try:
                check_devices(rows, _asked(args, config, plan, cluster, folder))
            finally:
                remove(folder)
    if distributed.is_main():
        _store(args.out, rows)
    return FAILED if rows.has_failed else DONE


def _wanted_of_host(config: Config | None, where: Path, num_simulated: int, *, has_gpus: bool) -> Any:
    """Returns what is known before there is a plan: devices, and room for two checkpoints of a config on its devices.

    Args:
        config: given, or None.
        where: checkpoints go.
        num_simulated: devices in the place of those of the config, which get a small model; 0: its own.
        has_gpus: whether this process may use GPUs.
    """
    from sppo_jax.check.row import Wanted
    from sppo_jax.models.counts import num_params
    from sppo_jax.train.checkpoints.read import bytes_to_save

    simulated = num_simulated or (config.train.num_simulated_devices if config else 0)
    here = len(visible_gpus() or ()) if has_gpus else 1
    saved = 0 if config is None or num_simulated else _SAVED_BYTES * num_params(config.model)
    return Wanted(
        is_timed=has_gpus,
        checkpoint_bytes=bytes_to_save(where, saved),
        num_devices=simulated or max(here, distributed.num_processes()),
    )


def _cluster(config: Config | None, num_simulated: int) -> Cluster:
    """Returns the devices of all processes."""
    given = config or _any_config(num_simulated)
    if num_simulated and config is None:
        given = replace(given, train=replace(given.train, devices=f"cpu:{num_simulated}"))
    found = distributed.cluster(given)
    return found or resolve_cluster(replace(given, hardware=replace(given.hardware, measured=None)))


def _other_devices(config: Config | None, cluster: Cluster) -> str:
    """Returns why a config is for other devices than those that are here; empty where it is for these."""
    if config is None or config.hardware.cluster is None:
        return ""
    free = replace(config, hardware=replace(config.hardware, cluster=None, measured=None))
    simulated = resolve_cluster(free) if config.train.num_simulated_devices else None
    here = distributed.cluster(free) or simulated or local_cluster()
    if (here.device.name, here.num_devices) == (cluster.device.name, cluster.num_devices):
        return ""
    return f"it is for hardware.cluster={config.hardware.cluster}, got {here.name}; set hardware.cluster={here.name}"


def _planned(config: Config | None, cluster: Cluster, num_simulated: int) -> tuple[Config, Plan, str]:
    """Returns config and plan of process 0, and why the plan cannot run here; empty where it can."""
    from sppo_jax.check.small import own_settings

    if config is None:
        settings: dict[str, Any] = own_settings(cluster.device.platform, cluster.num_devices, cluster.device.tile)
        settings["train"] |= {"devices": f"cpu:{num_simulated}"} if num_simulated else {}
        config = config_from_dict(settings)
        return config, make_plan(config, cluster), ""
    from sppo_jax.search.search import search

    def planned() -> tuple[str, str]:
        if not distributed.is_main():
            return "", ""
        found = search(config, cluster)
        # Simulated devices run the config with its widths cut.
        return found.plan.to_json(), "" if found.fits or num_simulated else found.problem

    text, problem = distributed.together(planned, is_long=True)
    return config, Plan.from_json(distributed.share_text(text)), distributed.share_text(problem)


def _asked(args: Namespace, config: Config, plan: Plan, cluster: Cluster, folder: Path) -> Any:
    from sppo_jax.check.run import Asked
    from sppo_jax.check.small import shrunk, sizes_of

    small: tuple[Config, Plan] | str = (config, plan)
    if args.config is not None:
        try:
            few = shrunk(config, plan, cluster)
            small = few, make_plan(few, cluster)
        except ValueError as error:
            small = str(error)
    return Asked(
        config=config,
        plan=plan,
        small=small,
        cluster=cluster,
        sizes=sizes_of(cluster.device.platform, quick=args.quick),
        with_collectives=not args.no_collectives,
        is_quick=args.quick,
        folder=folder,
    )


def _store(path: Path | None, rows: Any) -> None:
    """Writes what was found, by process 0: where the user says, and where a run of the same devices looks."""
    from sppo_jax.check.rates import place_of, profile_of, to_json
    from sppo_jax.files.whole import json_text, write_whole

    text = json_text(to_json(rows.rows, rows.found), indent=1) + "\n"
    if path is not None:
        write_whole(path, text)
    profile = profile_of(rows.found)
    if profile is None or rows.has_failed:
        return
    kept = place_of(profile.device, profile.driver, profile.cudnn, profile.num_devices)
    with contextlib.suppress(OSError):
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_whole(kept, text)
