"""What a config asks for, resolved against the devices, and the ways that compete where it leaves them open."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from sppo_jax import hardware
from sppo_jax.config import Config, ModelConfig
from sppo_jax.files.paths import local_path
from sppo_jax.hardware import (
    DEVICES,
    Cluster,
    Device,
    installed_spare,
    local_cluster,
    make_cluster,
    parse_cluster,
)
from sppo_jax.hardware.device import LONG_HEAD_DIM
from sppo_jax.hardware.tpu_chips import SPILLED, TPU_CHIPS, block_bytes
from sppo_jax.plan.parts import cudnn_takes, pallas_takes
from sppo_jax.predict.seconds.documents import Documents
from sppo_jax.rules import BREADTH_FIRST, KERNEL_TILE, Facts, broken
from sppo_jax.rules import check as check_rules
from sppo_jax.schedule.check import check
from sppo_jax.schedule.csv_format import from_csv
from sppo_jax.schedule.table import Table
from sppo_jax.search.space.chunks import given_lengths

PINNABLE = ("hbm_bytes", "host_link_bytes_s", "link_bytes_s", "network_bytes_s", "matmul_flops_s")
COMPUTE_BYTES = {"bfloat16": 2, "float32": 4, "float64": 8}


@dataclass(frozen=True, kw_only=True)
class Way:
    """What a search decides before layouts: as the config asks, or one of several where it leaves the choice open.

    Args:
        schedule: name of the schedule; "auto": any but a breadth-first one.
        weights: what a device holds of its stage's layers in a breadth-first schedule, "gathered" or "resident".
        waiting: where chunks wait between two groups of layers, "keep" or "host".
        optimizer: where parameters and moments wait, "device" or "host".
    """

    schedule: str = "auto"
    weights: str = "gathered"
    waiting: str = "keep"
    optimizer: str = "device"


_NOTHING_KNOWN = Facts()
# The breadth-first way that holds the least.
USUAL = Way(schedule=BREADTH_FIRST)


@dataclass(frozen=True, kw_only=True)
class Request:
    """A config with the devices it is planned for.

    Args:
        config: the config.
        cluster: the devices.
        compute_bytes: bytes of an activation.
        kernel: the attention kernel.
        table: the table given by hand, and its text, if any.
        way: what a plan does before it has a layout.
        documents: how documents lie in sequences, if the plan is for these; None: for sequences of one document each.
        backward_queries: see `plan.plan.Plan`.
    """

    config: Config
    cluster: Cluster
    compute_bytes: int
    kernel: str
    table: tuple[Table, str] | None
    way: Way
    documents: Documents | None = None
    backward_queries: int = 0

    @property
    def whom(self) -> str:
        """What follows a comparison of seconds: the documents that it is for, unless these are full."""
        return " for the documents of data.source" if self.documents is not None else ""

    @property
    def tile(self) -> int:
        """The tokens of which a device's part of each chunk is a multiple."""
        tile = self.cluster.device.tile
        return math.lcm(tile, KERNEL_TILE) if self.kernel == "pallas" else tile

    @property
    def has_one_document(self) -> bool:
        """Whether each sequence holds one document at most; teams move documents between sequences."""
        return self.config.data.has_one_document and self.config.sequence.groups != "flex"

    @property
    def allows_breadth_first(self) -> bool:
        """Whether the config allows a breadth-first schedule, and does not ask for it."""
        config = self.config
        open_choice = config.schedule.name == "auto" and config.schedule.interleave != 1 and config.stash.kv != "keep"
        return open_choice and not asks_for_breadth_first(config) and self.table is None

    @property
    def compares_orders(self) -> bool:
        """Whether a breadth-first schedule that fits competes with others that fit."""
        return self.cluster.device.platform == "gpu" and self.config.sequence.groups == "static"


def asks_for_breadth_first(config: Config) -> bool:
    """Returns whether a config asks for a breadth-first schedule, or for what no other schedule has."""
    asked = config.stash.waiting == "host" or config.mesh.weights == "gathered" or config.optimizer.place == "host"
    return config.schedule.name == BREADTH_FIRST or asked or config.stash.kv in ("rebuild", "host")


def plans_for_documents(config: Config) -> bool:
    """Returns whether documents count, where their lengths are known."""
    return config.planner == "search" and config.sequence.plan_for == "documents"


def way_for(config: Config, chosen: Way) -> Way:
    """Returns the way that a config asks for, and what is chosen where it leaves the choice open."""
    name, waiting, optimizer = config.schedule.name, config.stash.waiting, config.optimizer.place
    schedule = BREADTH_FIRST if asks_for_breadth_first(config) else chosen.schedule
    return Way(
        schedule=schedule if name == "auto" else name,
        weights=chosen.weights,
        waiting=chosen.waiting if waiting == "auto" else waiting,
        optimizer=chosen.optimizer if optimizer == "auto" else optimizer,
    )


def read_request(config: Config, cluster: Cluster | None = None, documents: Documents | None = None) -> Request:
    """Resolves the cluster and a table given by hand.

    Args:
        config: the settings.
        cluster: the devices; None: `hardware.cluster`, `train.devices` if simulated, else those of this machine.
        documents: see `Request`.

    Raises:
        ValueError: a setting is wrong by itself.
    """
    cluster = resolve_cluster(config, cluster)
    _check_rules(config, cluster)
    compute_bytes = COMPUTE_BYTES.get(config.model.compute_dtype, cluster.device.compute_bytes)
    sequence = config.sequence
    facts = Facts(
        chunks=sequence.chunks if isinstance(sequence.chunks, tuple) else None,
        window=config.model.shared_window(sequence.length),
        groups=sequence.groups,
        seq=config.mesh.pinned.get("seq"),
        split=None if sequence.split == "auto" else sequence.split,
        ulysses=sequence.given_ulysses,
    )
    kernel = choose_kernel(config.model, cluster.device, compute_bytes, facts)
    return Request(
        config=config,
        cluster=cluster,
        compute_bytes=compute_bytes,
        kernel=kernel,
        table=_read_table(config) if config.schedule.table is not None else None,
        way=way_for(config, Way()),
        documents=documents,
        backward_queries=_backward_queries(config, cluster.device, kernel),
    )


def _backward_queries(config: Config, device: Device, kernel: str) -> int:
    """Returns the queries of a call of attention's backward at most; 0: any number.

    Shorter heads were not measured so. A team's calls are those of documents.
    """
    sizes = [layer_type.head_dim for layer_type in config.model.attention_types]
    if kernel != "cudnn" or config.sequence.groups != "static" or min(sizes, default=0) < LONG_HEAD_DIM:
        return 0
    return device.backward_queries


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
        pinned.update(matmul_efficiency=1.0, attention_efficiency=1.0, assumed=False, has_bundles=False)
        pinned.update(elementwise_efficiency=0.0, attention_rates=None)
    if "host_link_bytes_s" in pinned:
        # Nor is this one divided among the devices of a host.
        pinned.update(host_memory_bytes_s=math.inf, host_links_bytes_s=(math.inf, math.inf))
    host_bytes = cluster.host_bytes if settings.host_bytes == "auto" else int(settings.host_bytes)
    spare = cluster.spare if settings.hbm_spare == "auto" else float(settings.hbm_spare)
    return replace(cluster, device=replace(device, **pinned), host_bytes=host_bytes, spare=spare)


def choose_kernel(model: ModelConfig, device: Device, compute_bytes: int, facts: Facts = _NOTHING_KNOWN) -> str:
    """Returns the attention kernel: what the device runs best, where it takes the model's dtype and heads.

    Args:
        model: the model shape.
        device: the kind of device.
        compute_bytes: bytes of an activation.
        facts: what is known of chunks, window, groups and devices.

    Raises:
        ValueError: a kernel is asked for that does not take them.
    """
    if facts.window and facts.groups == "flex":
        check_rules(replace(facts, kernel=None if model.kernel == "auto" else model.kernel))
        return "blockwise"
    sizes = [layer_type.head_dim for layer_type in model.attention_types or [model]]
    head_dim = max(sizes, key=lambda x: (x % 8 > 0, x))
    is_taken = cudnn_takes(compute_bytes, head_dim, device.fused_head_dim)
    possible = {"blockwise": True, "cudnn": is_taken, "pallas": all(pallas_takes(compute_bytes, x) for x in sizes)}
    if model.kernel == "pallas" and not (possible["pallas"] and device.name in TPU_CHIPS):
        raise ValueError(
            "model.kernel=pallas must have a TPU (v5e or later), bfloat16 or float32, and a model.head_dim of 64 to "
            f"256, got {device.name}, {compute_bytes} bytes an element and model.head_dim="
            f"{', '.join(map(str, dict.fromkeys(sizes)))}; use model.kernel=blockwise"
        )
    if model.kernel == "cudnn" and not (is_taken and device.platform == "gpu"):
        raise ValueError(
            f"model.kernel=cudnn must have a GPU, bfloat16, and a model.head_dim up to {device.fused_head_dim} that is "
            f"a multiple of 8, got {device.name}, {compute_bytes} bytes an element and model.head_dim={head_dim}; use "
            "model.kernel=blockwise"
        )
    blocks = _blocks_of_kernel(model, device, compute_bytes, facts.ulysses or 1)
    if model.kernel != "auto":
        check_rules(Facts(kernel=model.kernel, blocks=blocks))
        return model.kernel
    is_suited = possible[device.kernel] and not any(broken(replace(facts, kernel=device.kernel, blocks=blocks)))
    return device.kernel if is_suited else "blockwise"


def _blocks_of_kernel(model: ModelConfig, device: Device, compute_bytes: int, ulysses: int) -> tuple[int, int] | None:
    """Returns the bytes of a step of the kernel for TPUs, and those that a core has for it; None for other devices."""
    if device.name not in TPU_CHIPS:
        return None
    needed = (
        block_bytes(heads, layer_type.head_dim, compute_bytes)
        for heads, layer_type in zip(query_heads(model, ulysses), model.attention_types or [model], strict=True)
    )
    return int(SPILLED * max(needed)), TPU_CHIPS[device.name].vmem_bytes


def query_heads(model: ModelConfig, ulysses: int) -> list[int]:
    """Returns the query heads of a key-value head on a device, of each layer type with attention."""
    layer_types = model.attention_types or [model]
    return [max(1, layer_type.num_heads // math.lcm(layer_type.num_kv_heads, ulysses)) for layer_type in layer_types]


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


class Trial(NamedTuple):
    """A way, and the dtype in which dK and dV are summed."""

    way: Way
    kv_grad_dtype: str


def preferences(request: Request) -> Iterator[tuple[Trial, ...]]:
    """Yields the trials that compete for the fastest step, a set at a time; the next set is for where none fits.

    The preferences are not about speed: sums in float32 before bfloat16; on CPUs and TPUs other schedules before
    breadth-first ones; chunks and the optimizer on the device before the host.
    """
    asked = request.config.stash.kv_grad_dtype
    dtypes = ("float32", "bfloat16") if asked == "auto" else (asked,)
    for ways in _ways(request):
        for dtype in dtypes if ways else ():
            yield tuple(Trial(way_for(request.config, way), dtype) for way in ways)


def _ways(request: Request) -> Iterator[list[Way]]:
    plain, breadth_first = [Way()], [replace(USUAL, weights=weights) for weights in _weights(request)]
    if asks_for_breadth_first(request.config):
        yield breadth_first
    elif not request.allows_breadth_first:
        yield plain
        return
    elif request.compares_orders:
        yield plain + breadth_first
    else:
        yield plain
        yield breadth_first
    waiting = request.config.stash.waiting == "auto"
    optimizer = _may_have_optimizer_on_host(request)
    on_host = [replace(USUAL, waiting="host")] if waiting else []
    yield on_host + ([replace(USUAL, optimizer="host")] if optimizer else [])
    yield [replace(USUAL, waiting="host", optimizer="host")] if waiting and optimizer else []


def _weights(request: Request) -> tuple[str, ...]:
    """Returns what a device may hold of its stage's layers in a breadth-first schedule, as far as this is open."""
    config = request.config
    is_open = config.mesh.weights == "auto" and config.optimizer.place != "host"
    return ("gathered", "resident") if is_open else ("gathered",)


def _may_have_optimizer_on_host(request: Request) -> bool:
    """Returns whether config and devices leave open that parameters and moments wait on the host."""
    config = request.config
    asked = config.schedule.name not in ("auto", BREADTH_FIRST) or config.mesh.weights == "resident"
    # Where the schedule is open, keys and values that are kept leave breadth-first plans out.
    asked |= config.schedule.interleave == 1 or (config.schedule.name == "auto" and config.stash.kv == "keep")
    is_open = config.optimizer.place == "auto" and not asked
    return is_open and request.cluster.device.platform == "gpu" and request.table is None
