"""All rows of `sppo check`, in order; each is measured in every process, and judged from the figures of all."""

from __future__ import annotations

import json
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from sppo_jax.check import machine, processes, software
from sppo_jax.check.processes import Board
from sppo_jax.check.rates import RATES
from sppo_jax.check.row import FAILS, NOT_JUDGED, Figures, Row, Wanted, errors, odd_ones, rate
from sppo_jax.check.small import CheckSizes
from sppo_jax.config import Config
from sppo_jax.files.whole import json_text
from sppo_jax.hardware import Cluster
from sppo_jax.hardware.capacity import pool_bytes
from sppo_jax.plan.plan import Plan
from sppo_jax.processes import distributed

# Seconds after which a row is held up: one that compiles and trains, and one that exchanges.
LIMIT_S, EXCHANGE_LIMIT_S = 600.0, 60.0
_HEAD_DIM = 128


@dataclass
class CheckRows:
    """The rows so far.

    Args:
        board: posts of the processes.
        wanted: what judges compare with.
        say: prints a line.
        rows: each by its name, in order.
        found: the figures of all processes, by the row's name.
    """

    board: Board
    wanted: Wanted
    say: Callable[[str], None]
    rows: dict[str, Row] = field(default_factory=dict)
    found: dict[str, list[Figures]] = field(default_factory=dict)

    @property
    def has_failed(self) -> bool:
        """Whether a row fails."""
        return any(row.verdict == FAILS for row in self.rows.values())

    @property
    def hosts(self) -> list[str]:
        """The host of each process, known since the first row."""
        return [one["host"] for one in next(iter(self.found.values()))]

    def add(
        self,
        name: str,
        measure: Callable[[], Figures],
        judge: Callable[[Sequence[Figures], Wanted], Row],
        *,
        limit_s: float = LIMIT_S,
    ) -> None:
        """Measures a row here, judges it by what all processes found, and prints it.

        Args:
            name: of the row.
            measure: returns JSON values; an error of the system or of a device fails the row.
            judge: pure.
            limit_s: seconds after which the row is held up.
        """
        self.board.begin(name, limit_s)
        begin = time.perf_counter()
        mine = {"seconds": 0.0, **_measured(measure)}
        mine["seconds"] = round(time.perf_counter() - begin, 3)
        self.board.end(mine.get("error", ""))
        posts = distributed.exchange(json_text({"host": socket.gethostname(), **mine}))
        self.board.judged()
        self.found[name] = [json.loads(post) for post in posts]
        self.rows[name] = judge(self.found[name], self.wanted)
        self.say(self.rows[name].line(name))


def _measured(measure: Callable[[], Figures]) -> Mapping[str, Any]:
    try:
        return measure()
    except (OSError, ValueError, MemoryError, RuntimeError) as error:  # jax's errors are RuntimeErrors
        text = " ".join(str(error).split()) or type(error).__name__
        return {"error": text[:300]}


def check_before_devices(rows: CheckRows, checkpoint_dir: Path, *, has_gpus: bool) -> None:
    """Adds the rows that touch no device.

    Args:
        rows: to which they are added.
        checkpoint_dir: where checkpoints go.
        has_gpus: whether this process may use GPUs.
    """
    rows.add("software", software.measure, software.judge)
    rows.add("machine", lambda: machine.measure(checkpoint_dir, has_gpus=has_gpus), machine.judge)
    rows.add("processes", processes.measure_clock, processes.judge)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What is checked on the devices.

    Args:
        config: given, or one of check's own.
        plan: of it.
        small: the config made small, and its plan; a text where that cannot be.
        cluster: the devices of all processes.
        sizes: of the rows.
        with_collectives: whether devices exchange.
        is_quick: whether rows are short.
        folder: for a checkpoint of all processes.
    """

    config: Config
    plan: Plan
    small: tuple[Config, Plan] | str
    cluster: Cluster
    sizes: CheckSizes
    with_collectives: bool
    is_quick: bool
    folder: Path


def wanted_of(cluster: Cluster, plan: Plan, *, is_given: bool, uses_host: bool) -> Wanted:
    """Returns what judges compare with: the planner's figures.

    Args:
        cluster: the devices of all processes.
        plan: gives the kernel, and what it takes.
        is_given: whether the plan is that of a user's config.
        uses_host: whether a plan copies to the host.
    """
    device = cluster.device
    forward = device.attention_flops_s(device.compute_bytes, plan.kernel, device.attention_head_dim or _HEAD_DIM)
    return Wanted(
        is_timed=device.platform != "cpu",
        matmul_flops_s=device.matmul_flops_s,
        hbm_bytes_s=device.hbm_bytes_s,
        attention_flops_s=(forward, 2.5 * forward / device.attention_backward),
        host_link_bytes_s=(device.host_link_bytes_s, cluster.host_link_bytes_s),
        link_bytes_s=device.link_bytes_s,
        network_bytes_s=device.network_bytes_s,
        pool_bytes=int(pool_bytes(cluster)),
        plan_bytes=max(plan.predicted.hbm_bytes) if is_given else 0,
        uses_host=uses_host,
        num_devices=cluster.num_devices,
    )


def check_devices(rows: CheckRows, asked: Asked) -> None:
    """Adds the rows of devices, which start now; none behind that of the devices themselves, if it fails.

    Args:
        rows: to which they are added.
        asked: what is checked.
    """
    rows.add("devices", _devices, processes.judge_devices)
    if rows.has_failed:
        return
    import jax
    import jax.numpy as jnp

    from sppo_jax.arrays.dtypes import compute_dtype
    from sppo_jax.check import attention, host_copies, host_rows, products, steps
    from sppo_jax.profile.timing import Timer

    sizes, local = asked.sizes, tuple(jax.local_devices())
    timer = Timer(devices=local, run_s=sizes.run_s, runs=sizes.runs)
    platform, model = local[0].platform, asked.config.model
    is_cpu, is_gpu = platform == "cpu", platform in ("gpu", "cuda", "rocm")
    dtype = jnp.dtype(compute_dtype(model.compute_dtype))

    exact = lambda: products.measure(timer, sizes.side, dtype)  # noqa: E731
    rows.add("products", lambda: _with_clocks(exact), products.judge)
    rows.add("device memory", lambda: products.measure_stream(timer, sizes.stream_bytes), products.judge_stream)
    rows.add("attention", lambda: attention.measure(model, asked.plan, local), attention.judge)
    if not is_cpu:
        calls = attention.QUICK_CALLS if asked.is_quick else attention.CALLS
        measure = lambda: attention.measure_rates(timer, model, asked.plan, calls)  # noqa: E731
        rows.add("attention rates", lambda: _with_clocks(measure), attention.judge_rates)
    if is_gpu:
        pinned = max(asked.plan.predicted.host_bytes)
        pin = lambda: host_copies.measure_pinning(local, sizes.pinned_bytes, pinned)  # noqa: E731
        rows.add("pinning", pin, host_copies.judge_pinning)
    alone = replace(timer, devices=local[:1]) if _is_first_of_host(rows.hosts) and len(jax.devices()) > 1 else None
    copy = (sizes.copy_ways, sizes.copy_rows, sizes.copy_row_bytes)
    rows.add("host copies", lambda: host_copies.measure(timer, alone, *copy), host_copies.judge)
    if is_gpu:
        loops = lambda: host_copies.measure_loops(timer, sizes.loop_turns, sizes.loop_side)  # noqa: E731
        rows.add("loops wait", loops, host_copies.judge_loops)
    rows.add("host rows", lambda: host_rows.measure(timer, sizes.row_elements), host_rows.judge)
    if asked.with_collectives:
        _collectives(rows, asked, timer)
    if not is_cpu:
        rows.add(RATES, lambda: _rates(model, platform, quick=asked.is_quick), judge_rates)
    _program_and_steps(rows, asked, local[0])
    dtypes = ("float32",) if is_cpu else ("float32", "bfloat16")
    rows.add("losses", lambda: steps.measure_reference(dtypes, asked.cluster, local[0]), steps.judge_reference)


def _rates(model: Any, platform: str, *, quick: bool) -> Figures:
    """Returns what `sppo profile` measures, on all devices at once."""
    from sppo_jax.profile.measure import default_sizes, measure

    return {"profile": asdict(measure(model, default_sizes(platform, quick=quick), lambda _: None))}


def judge_rates(found: Sequence[Figures], wanted: Wanted) -> Row:
    """Returns the row of the rates that the planner takes: never wrong."""
    if problem := errors(found):
        return Row(value=problem, verdict=FAILS)
    one = found[0]["profile"]
    text = f"layers {rate(one['layer_flops_s'], 'FLOP')}, a tick {one['overhead_s'] * 1e6:.0f} us, for the planner"
    return Row(value=text, verdict=NOT_JUDGED)


def judge_program(found: Sequence[Figures], wanted: Wanted) -> Row:
    """Returns the row of the program that all processes lower; where programs differ, `check_same` has said how."""
    if "error" in found[0]:
        return Row(value=found[0]["error"], verdict=FAILS)
    digits = [(f"process {process} on {one['host']}", one.get("digits", "none")) for process, one in enumerate(found)]
    names, most = odd_ones(digits)
    if names:
        change = "use one version of the code, one config and one environment"
        return Row(value=f"another program in {', '.join(names)}", expected=most, verdict=FAILS, change=change)
    return Row(value=f"{most} in {len(found)} processes")


def _with_clocks(measure: Callable[[], Figures]) -> Figures:
    """Returns the figures of a timed row, and what nvidia-smi says of the GPUs before and behind it."""
    before = _clocks()
    found = {**measure()}
    return {**found, "clocks": [before, _clocks()]} if before else found


def _clocks() -> list[dict[str, Any]]:
    from sppo_jax.hardware import visible_gpus
    from sppo_jax.hardware.gpu_health import read_gpus

    visible = [gpu.uuid for gpu in visible_gpus() or ()]
    names = ("sm_mhz", "most_sm_mhz", "power_w", "temperature_c", "slowed_by")
    return [{name: gpu.to_dict()[name] for name in names} for gpu in read_gpus() or () if gpu.uuid in visible]


def _devices() -> Figures:
    import jax

    from sppo_jax.processes.software import device_facts

    devices = jax.local_devices()
    limits = [device_facts(device).get("device memory") for device in devices]
    return {"kind": devices[0].device_kind, "pool_bytes": [None if one is None else int(one) for one in limits]}


def _is_first_of_host(hosts: Sequence[str]) -> bool:
    return hosts.index(socket.gethostname()) == distributed.process_id()


def _collectives(rows: CheckRows, asked: Asked, timer: Any) -> None:
    """Adds the rows of exchanges: within each host, between hosts, and beside copies."""
    import jax

    from sppo_jax.check import collectives

    hosts = rows.hosts
    names, elements = list(dict.fromkeys(hosts)), asked.sizes.exchanged
    of_host = {name: [device for device in jax.devices() if hosts[device.process_index] == name] for name in names}
    mine = replace(timer, devices=tuple(of_host[socket.gethostname()]))
    everyone = replace(timer, devices=tuple(device for name in names for device in of_host[name]))
    is_cpu, is_alone = timer.devices[0].platform == "cpu", len(mine.devices) == 1

    def within() -> Figures:
        if is_alone:
            return {}
        values = {f"{name}_values": x for name, x in collectives.measure_values(mine, elements).items()}
        return {**values, **collectives.measure_rates(mine, elements), "free_bytes": _free_bytes()}

    def between() -> Figures:
        if len(names) == 1:
            return {}
        values = {f"{name}_values": x for name, x in collectives.measure_values(everyone, elements).items()}
        return {**values, **collectives.measure_between(everyone, len(names), elements)}

    def beside() -> Figures:
        # As much as is copied while the ring sends, by the planner's rates.
        share = asked.cluster.host_link_bytes_s / asked.cluster.device.link_bytes_s
        return {} if is_alone else collectives.measure_beside(mine, elements, max(1, int(0.8 * share * elements)))

    rows.add("collectives in a host", within, collectives.judge_values, limit_s=EXCHANGE_LIMIT_S)
    rows.add("collectives between hosts", between, collectives.judge_between, limit_s=EXCHANGE_LIMIT_S)
    if not is_cpu:
        rows.add("collectives beside copies", beside, collectives.judge_beside, limit_s=EXCHANGE_LIMIT_S)


def _free_bytes() -> int | None:
    """Returns the memory of the fullest GPU of this process that nobody uses: NCCL's buffers lie outside of XLA's."""
    from sppo_jax.hardware import visible_gpus
    from sppo_jax.hardware.gpu_health import read_gpus

    visible = [gpu.uuid for gpu in visible_gpus() or ()]
    found = [gpu.free_bytes for gpu in read_gpus() or () if gpu.uuid in visible and gpu.free_bytes is not None]
    return min(found, default=None)


def _program_and_steps(rows: CheckRows, asked: Asked, device: Any) -> None:
    """Adds the rows of the program that all lower, and of three steps; of a config that cannot be small, no steps."""
    from sppo_jax.check import steps
    from sppo_jax.processes.same_program import check_same, digits_of
    from sppo_jax.processes.software import device_facts, software

    prepared: list[tuple[steps.Small, Any]] = []

    def same() -> Figures:
        small = steps.prepare(*(asked.small if not isinstance(asked.small, str) else (asked.config, asked.plan)))
        prepared.append((small, small.lower()))
        text = prepared[0][1].as_text()
        check_same("training step", text, software() | device_facts(device))
        return {"digits": digits_of(text)}

    def three_steps() -> Figures:
        if isinstance(asked.small, str):
            return {"left_out": f"the config cannot be made small: {asked.small}"}
        return steps.measure(*prepared[0], asked.folder)

    rows.add("one program", same, judge_program)
    if asked.with_collectives or asked.cluster.num_devices == 1:
        rows.add("three steps", three_steps, steps.judge)


def temporary_folder(within: Path) -> Path:
    """Returns a new folder that all processes see, of process 0's making; remove it with `remove`.

    Args:
        within: a folder that all processes share.
    """
    path = ""
    if distributed.is_main():
        within.mkdir(parents=True, exist_ok=True)
        path = tempfile.mkdtemp(prefix=".sppo-check-", dir=within)
    return Path(distributed.share_text(path))


def remove(folder: Path) -> None:
    """Removes a folder, by process 0, when all processes have left it."""
    distributed.exchange("")
    if distributed.is_main():
        shutil.rmtree(folder, ignore_errors=True)
