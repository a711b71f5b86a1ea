"""What a config asks for, resolved against the devices."""

import math
from dataclasses import dataclass, replace
from functools import cached_property

from sppo_jax import hardware
from sppo_jax.config import Config, ModelConfig
from sppo_jax.hardware import DEVICES, Cluster, Device, installed_spare, local_cluster, make_cluster, parse_cluster
from sppo_jax.paths import local_path
from sppo_jax.plan.parts import cudnn_takes
from sppo_jax.rules import BREADTH_FIRST, Facts
from sppo_jax.rules import check as check_rules
from sppo_jax.schedule.check import check
from sppo_jax.schedule.csv_format import from_csv
from sppo_jax.schedule.table import Table
from sppo_jax.search.chunks import given_lengths
from sppo_jax.search.splits import shared_window
from sppo_jax.search.ways import Way

PINNABLE = ("hbm_bytes", "host_link_bytes_s", "link_bytes_s", "network_bytes_s", "matmul_flops_s")
COMPUTE_BYTES = {"bfloat16": 2, "float32": 4, "float64": 8}


@dataclass(frozen=True, kw_only=True)
class Request:
    """A config with the devices it is planned for.

    Args:
        config: the config.
        cluster: the devices.
        compute_bytes: bytes of an activation.
        table: the table given by hand, and its text, if any.
        way: what a plan does where the config leaves it open.
    """

    config: Config
    cluster: Cluster
    compute_bytes: int
    table: tuple[Table, str] | None
    way: Way = Way()

    @property
    def schedule_name(self) -> str:
        """The name of the schedule; "auto": any but a breadth-first one."""
        asked = self.config.schedule.name
        return BREADTH_FIRST if asked == "auto" and self.way.breadth_first else asked

    @property
    def asks_for_breadth_first(self) -> bool:
        """Whether the config asks for a breadth-first schedule, or for what no other schedule has."""
        config = self.config
        asked = config.stash.waiting == "host" or config.mesh.weights == "gathered" or config.optimizer.place == "host"
        return config.schedule.name == BREADTH_FIRST or asked or config.stash.kv in ("rebuild", "host")

    @property
    def allows_breadth_first(self) -> bool:
        """Whether the config allows a breadth-first schedule, and does not ask for it."""
        config = self.config
        open_choice = config.schedule.name == "auto" and config.schedule.interleave != 1 and config.stash.kv != "keep"
        return open_choice and not self.asks_for_breadth_first and self.table is None

    @property
    def waiting(self) -> str:
        """Where chunks wait between two groups of layers, "keep" or "host"."""
        asked = self.config.stash.waiting
        return self.way.waiting if asked == "auto" else asked

    @property
    def optimizer(self) -> str:
        """Where parameters and moments wait, "device" or "host"."""
        asked = self.config.optimizer.place
        return self.way.optimizer if asked == "auto" else asked

    @property
    def compares_orders(self) -> bool:
        """Whether a breadth-first schedule that fits competes with others that fit."""
        return self.cluster.device.platform == "gpu" and self.config.sequence.groups == "static"

    @cached_property
    def kernel(self) -> str:
        """The attention kernel; see `choose_kernel`."""
        sequence = self.config.sequence
        window = shared_window(self.config.model, sequence.length) if sequence.groups != "static" else 0
        return choose_kernel(self.config.model, self.cluster.device, self.compute_bytes, window)


def read_request(config: Config, cluster: Cluster | None = None) -> Request:
    """Resolves the cluster and a table given by hand.

    Args:
        config: the settings.
        cluster: the devices; None: `hardware.cluster`, `train.devices` if simulated, else those of this machine.

    Raises:
        ValueError: a setting is wrong by itself.
    """
    cluster = resolve_cluster(config, cluster)
    _check_rules(config, cluster)
    request = Request(
        config=config,
        cluster=cluster,
        compute_bytes=COMPUTE_BYTES.get(config.model.compute_dtype, cluster.device.compute_bytes),
        table=_read_table(config) if config.schedule.table is not None else None,
    )
    return replace(request, way=Way(breadth_first=request.asks_for_breadth_first))


def _check_rules(config: Config, cluster: Cluster) -> None:
    """Checks what can be known before there is a mesh.

    Raises:
        ValueError: a setting, or the kind of device, rules out another setting.
    """
    chunks, name, weights = config.sequence.chunks, config.schedule.name, config.mesh.weights
    if isinstance(chunks, tuple):
        given_lengths(config.sequence.length, chunks, config.mesh.pinned.get("seq", 1))
    if config.optimizer.place == "host" and cluster.device.platform == "tpu":
        raise ValueError(
            f"optimizer.place=host must have GPUs (or CPUs, to try it), got {cluster.name}, for which no program was "
            "compiled; use optimizer.place=device"
        )
    check_rules(
        Facts(
            schedule=name,
            one_group_at_a_time=None if name == "auto" else name == BREADTH_FIRST,
            weights=None if weights == "auto" else weights,
            optimizer=config.optimizer.place,
        )
    )


def resolve_cluster(config: Config, cluster: Cluster | None = None) -> Cluster:
    """Returns the devices to plan for, with measured figures and those that the section `hardware` pins.

    Raises:
        ValueError: the cluster is unknown, or has fewer devices than the mesh.
    """
    settings, simulated = config.hardware, config.train.num_simulated_devices
    if cluster is None:
        cluster = parse_cluster(settings.cluster) if settings.cluster else None
        if cluster is not None:
            _check_enough(config, cluster)
    if cluster is None:
        cluster = make_cluster(DEVICES["cpu"], simulated) if simulated else local_cluster()
        cluster = replace(cluster, spare=installed_spare(cluster.device))
    device = cluster.device
    if settings.measured is not None:
        device = hardware.measured(device, local_path(settings.measured, "hardware.measured"))
    pinned = {name: getattr(settings, name) for name in PINNABLE if getattr(settings, name) != "auto"}
    if "matmul_flops_s" in pinned:
        # A figure the user gives is what the device reaches, not its datasheet's peak.
        pinned.update(matmul_efficiency=1.0, attention_efficiency=1.0, assumed=False)
    if "host_link_bytes_s" in pinned:
        pinned["host_memory_bytes_s"] = math.inf
    host_bytes = cluster.host_bytes if settings.host_bytes == "auto" else int(settings.host_bytes)
    spare = cluster.spare if settings.hbm_spare == "auto" else float(settings.hbm_spare)
    return replace(cluster, device=replace(device, **pinned), host_bytes=host_bytes, spare=spare)


def choose_kernel(model: ModelConfig, device: Device, compute_bytes: int, window: int = 0) -> str:
    """Returns the attention kernel: what the device runs best, where it takes the model's dtype and heads.

    Args:
        model: the model shape.
        device: the kind of device.
        compute_bytes: bytes of an activation.
        window: tokens that a token attends to where documents have devices of their own; 0: no such window.

    Raises:
        ValueError: a kernel is asked for that does not take them.
    """
    if window:
        check_rules(Facts(window=window, groups="flex", kernel=None if model.kernel == "auto" else model.kernel))
        return "blockwise"
    head_dim = max((kind.head_dim for kind, _ in model.counts(model.num_layers)), key=lambda x: (x % 8 > 0, x))
    possible = cudnn_takes(compute_bytes, head_dim)
    if model.kernel == "cudnn" and not (possible and device.platform == "gpu"):
        raise ValueError(
            "model.kernel=cudnn must have a GPU, bfloat16, and a model.head_dim up to 128 that is a multiple of 8, "
            "got "
            f"{device.name}, {compute_bytes} bytes an element and model.head_dim={head_dim}; use "
            "model.kernel=blockwise"
        )
    if model.kernel != "auto":
        return model.kernel
    return device.kernel if possible else "blockwise"


def _check_enough(config: Config, cluster: Cluster) -> None:
    pinned = config.mesh.pinned
    given = math.prod(pinned.values())
    if given > cluster.num_devices:
        shown = " * ".join(f"mesh.{name}={size}" for name, size in pinned.items())
        total = f" = {given}" if len(pinned) > 1 else ""
        raise ValueError(
            f"the mesh must have at most the {cluster.num_devices} devices of {cluster.name}, got {shown}{total}; "
            "lower an axis, set an axis to auto, or name a larger hardware.cluster"
        )


def _read_table(config: Config) -> tuple[Table, str]:
    path = local_path(config.schedule.table or "", "schedule.table")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"schedule.table must be a readable CSV file, got {path} ({type(error).__name__}); name another file"
        ) from None
    try:
        table = from_csv(text)
        check(table)
    except ValueError as error:
        raise ValueError(f"schedule.table: {error}; correct {config.schedule.table}") from None
    chunks, interleave = config.sequence.chunks, config.schedule.interleave
    for what, key, got, wanted in (
        ("number of sequences", "sequence.per_pipeline", table.num_sequences, config.sequence.per_pipeline),
        ("number of tokens", "sequence.length", sum(table.chunk_lengths), config.sequence.length),
    ):
        if got != wanted:
            raise ValueError(f"{key} must be {got}, the {what} of schedule.table, got {wanted}; change one of the two")
    if chunks not in ("auto", table.num_chunks, table.chunk_lengths):
        raise ValueError(
            f"sequence.chunks must be auto or the chunks of schedule.table, {list(table.chunk_lengths)}, got {chunks}; "
            "set sequence.chunks=auto"
        )
    if interleave not in ("auto", table.num_groups):
        raise ValueError(
            f"schedule.interleave must be {table.num_groups}, the virtual stages of a stage in schedule.table, got "
            f"{interleave}; set schedule.interleave=auto"
        )
    if config.schedule.wave not in ("auto", table.wave):
        raise ValueError(
            f"schedule.wave must be {table.wave}, the wave of schedule.table, got {config.schedule.wave}; set "
            "schedule.wave=auto"
        )
    return table, text
