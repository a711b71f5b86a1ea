"""What a config asks for, resolved against the devices: the layouts that are possible and their limits."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

from sppo_jax import hardware
from sppo_jax.config import Config, ModelConfig
from sppo_jax.hardware import DEVICES, Cluster, Device, installed_spare, local_cluster, make_cluster, parse_cluster
from sppo_jax.paths import local_path
from sppo_jax.plan.check import check
from sppo_jax.plan.csv_format import from_csv
from sppo_jax.plan.layers import divisors, layers_per_virtual_stage
from sppo_jax.plan.plan import MeshShape, cudnn_takes
from sppo_jax.plan.shapes import check_shapes
from sppo_jax.plan.table import BREADTH_FIRST, Table
from sppo_jax.plan.waves import check_wave
from sppo_jax.planner.advice import nearest_changes
from sppo_jax.planner.chunks import check_length, equal_lengths, given_lengths
from sppo_jax.planner.dials import Dials
from sppo_jax.planner.memory import Shape
from sppo_jax.planner.rules import rules_of
from sppo_jax.planner.splits import SequenceSplit, sequence_splits

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
        by_groups: whether a schedule that the config leaves open is breadth-first, which holds the least; else it is
            any of the others.
        dials: what a breadth-first plan does where the config leaves that open.
    """

    config: Config
    cluster: Cluster
    compute_bytes: int
    table: tuple[Table, str] | None
    by_groups: bool = False
    dials: Dials = Dials()

    @property
    def schedule_name(self) -> str:
        """The name of the schedule, or "auto" where it is open."""
        asked = self.config.schedule.name
        return BREADTH_FIRST if asked == "auto" and self.by_groups else asked

    @property
    def may_go_by_groups(self) -> bool:
        """Whether the config allows a breadth-first schedule, and does not ask for it."""
        config = self.config
        open_choice = config.schedule.name == "auto" and config.schedule.interleave != 1 and config.stash.kv != "keep"
        return open_choice and not self.by_groups and self.table is None

    @property
    def waiting(self) -> str:
        """Where chunks wait between two groups of layers, "keep" or "host"."""
        asked = self.config.stash.waiting
        return self.dials.waiting if asked == "auto" else asked

    @property
    def optimizer(self) -> str:
        """Where parameters and moments wait, "device" or "host"."""
        asked = self.config.optimizer.place
        return self.dials.optimizer if asked == "auto" else asked

    @property
    def compares_orders(self) -> bool:
        """Whether a breadth-first schedule that fits competes with others that fit."""
        return self.cluster.device.platform == "gpu" and self.config.sequence.groups == "static"

    @cached_property
    def kernel(self) -> str:
        """The attention kernel; see `choose_kernel`."""
        return choose_kernel(self.config.model, self.cluster.device, self.compute_bytes)


# Equal if the same: two requests may have layouts of the same numbers.
@dataclass(frozen=True, kw_only=True, eq=False)
class Layout:
    """How devices share layers, tokens and sequences.

    Args:
        request: what the layout is for.
        mesh: devices along each axis.
        sequences: sequences of a pipeline in a step.
        split: sequence parallelism.
        interleave: virtual stages of a stage.
        layers: layers of a virtual stage.
        weights: what a device holds of its stage's layers during a step; see `plan.Plan`.
    """

    request: Request = field(repr=False)
    mesh: MeshShape
    sequences: int
    split: SequenceSplit
    interleave: int
    layers: int
    weights: str = "resident"

    @property
    def multiple_tokens(self) -> int:
        """Chunk lengths are multiples of so many tokens."""
        return _multiple_tokens(self.request, self.mesh)

    @cached_property
    def shape(self) -> Shape:
        """What memory depends on besides table and stash."""
        return Shape(
            model=self.request.config.model,
            layers=self.layers,
            seq=self.mesh.seq,
            ulysses=self.split.ulysses,
            compute_bytes=self.request.compute_bytes,
            data=self.mesh.data,
            platform=self.request.cluster.device.platform,
            groups=self.request.config.sequence.groups != "static",
            kernel=self.request.kernel,
            weights=self.weights,
            optimizer=self.request.optimizer,
        )


def read_request(config: Config, cluster: Cluster | None = None) -> Request:
    """Resolves the cluster and a table given by hand.

    Args:
        config: the settings.
        cluster: the devices; None: `hardware.cluster`, `train.devices` if simulated, else those of this machine.

    Raises:
        ValueError: a setting is wrong by itself.
    """
    cluster = resolve_cluster(config, cluster)
    chunks, seq = config.sequence.chunks, config.mesh.pinned.get("seq", 1)
    if isinstance(chunks, tuple):
        given_lengths(config.sequence.length, chunks, seq)
    if config.mesh.weights == "gathered" and config.schedule.name not in ("auto", BREADTH_FIRST):
        raise ValueError(
            f"mesh.weights=gathered must have schedule.name={BREADTH_FIRST}, got schedule.name={config.schedule.name}; "
            "use mesh.weights=auto"
        )
    if config.optimizer.place == "host":
        _check_host_optimizer(config, cluster)
    return Request(
        config=config,
        cluster=cluster,
        compute_bytes=COMPUTE_BYTES.get(config.model.compute_dtype, cluster.device.compute_bytes),
        table=_read_table(config) if config.schedule.table is not None else None,
        by_groups=_asks_for_groups(config),
    )


def _asks_for_groups(config: Config) -> bool:
    """Returns whether a config asks for what no schedule but a breadth-first one has."""
    asked = config.stash.waiting == "host" or config.mesh.weights == "gathered" or config.optimizer.place == "host"
    return asked or config.stash.kv in ("rebuild", "host")


def _check_host_optimizer(config: Config, cluster: Cluster) -> None:
    """Checks what parameters and moments on the host need.

    Raises:
        ValueError: another setting, or the kind of device, rules them out.
    """
    if cluster.device.platform == "tpu":
        raise ValueError(
            f"optimizer.place=host must have GPUs (or CPUs, to try it), got {cluster.name}, for which no program was "
            "compiled; use optimizer.place=device"
        )
    if config.schedule.name not in ("auto", BREADTH_FIRST):
        raise ValueError(
            f"optimizer.place=host must have schedule.name={BREADTH_FIRST}, got schedule.name={config.schedule.name}; "
            "use optimizer.place=device"
        )
    if config.mesh.weights == "resident":
        raise ValueError(
            "optimizer.place=host must have mesh.weights=gathered, got mesh.weights=resident; use mesh.weights=auto, "
            "or optimizer.place=device"
        )


def resolve_cluster(config: Config, cluster: Cluster | None = None) -> Cluster:
    """Returns the devices to plan for, with measured figures and those that the `hardware` group pins.

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


def layouts(request: Request) -> list[Layout]:
    """Returns every layout that the config, the model and the devices allow, plainest first.

    Raises:
        ValueError: no layout exists; the message says why.
    """
    config, devices = request.config, request.cluster.num_devices
    several = "change several of sequence.length, sequence.per_step, the axes of the mesh and the number of devices"
    try:
        found, errors = _find(request)
    except ValueError as error:
        raise ValueError(f"{error}; {_advice(request) or several}") from None
    if found:
        return found
    if len(errors) > 1:
        rules = f"no mesh of {devices} devices suits the model and the sequence: {rules_of(request, errors)}"
        raise ValueError(f"{rules}; {_advice(request) or several}")
    if math.prod(config.mesh.pinned.values()) > devices:
        raise errors[0][1]  # a mesh of its own size
    # What the error of the only mesh says to change need not leave a mesh of all devices.
    raise ValueError(f"{str(errors[0][1]).partition('; ')[0]}; {_advice(request) or several}")


def choose_kernel(model: ModelConfig, device: Device, compute_bytes: int) -> str:
    """Returns the attention kernel: what the device runs best, where it takes the model's dtype and heads.

    Raises:
        ValueError: a kernel is asked for that does not take them.
    """
    possible = cudnn_takes(compute_bytes, model.head_dim)
    if model.kernel == "cudnn" and not (possible and device.platform == "gpu"):
        raise ValueError(
            "model.kernel=cudnn must have a GPU, bfloat16, and a model.head_dim up to 128 that is a multiple of 8, "
            "got "
            f"{device.name}, {compute_bytes} bytes an element and model.head_dim={model.head_dim}; use "
            "model.kernel=blockwise"
        )
    if model.kernel != "auto":
        return model.kernel
    return device.kernel if possible else "blockwise"


def _multiple_tokens(request: Request, mesh: MeshShape) -> int:
    """Returns the tokens that chunk lengths are multiples of."""
    return mesh.seq * request.cluster.device.tile


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


def _find(request: Request) -> tuple[list[Layout], list[tuple[MeshShape, ValueError]]]:
    """Returns every layout, and the meshes that have none with the first rule that each breaks.

    Raises:
        ValueError: no mesh takes all devices and shares out the sequences.
    """
    config, meshes = request.config, list(_meshes(request))
    if not meshes:
        shown = " * ".join(f"mesh.{name}={size}" for name, size in config.mesh.pinned.items())
        raise ValueError(
            f"sequence.per_step must be a multiple of the number of pipelines, got {config.sequence.per_step} "
            f"sequences and {shown} on {request.cluster.num_devices} devices"
        )
    found: list[Layout] = []
    errors: list[tuple[MeshShape, ValueError]] = []
    for mesh, sequences in meshes:
        try:
            splits = sequence_splits(config.model, config.sequence, mesh.seq, request.cluster.devices_per_host)
            _check_tokens(request, mesh)
            if config.schedule.wave != "auto":
                check_wave(config.schedule.name, sequences, config.schedule.wave)
                _check_one_wave(request, sequences)
            for interleave in _interleaves(request, mesh.pipe):
                layers = layers_per_virtual_stage(config.model.num_layers, mesh.pipe, interleave)
                found += [
                    Layout(
                        request=request,
                        mesh=mesh,
                        sequences=sequences,
                        split=split,
                        interleave=interleave,
                        layers=layers,
                        weights=_weights(request, mesh, interleave),
                    )
                    for split in splits
                ]
        except ValueError as error:
            errors.append((mesh, error))
    return found, errors


def _check_one_wave(request: Request, sequences: int) -> None:
    wave = request.config.schedule.wave
    if request.optimizer == "host" and wave != sequences:
        raise ValueError(
            f"optimizer.place=host must have all {sequences} sequences of a pipeline in one wave, got schedule.wave="
            f"{wave}; use schedule.wave=auto, or optimizer.place=device"
        )


def _weights(request: Request, mesh: MeshShape, interleave: int) -> str:
    """Returns what a device holds of its stage's layers: as asked, or its share where the schedule allows."""
    asked, members = request.config.mesh.weights, mesh.data * mesh.seq
    asked = "resident" if asked == "auto" and request.dials.weights == "resident" else asked
    on_host = request.optimizer == "host"
    possible = request.schedule_name == BREADTH_FIRST and interleave > 1 and (members > 1 or on_host)
    if on_host and not possible:
        raise ValueError(
            f"optimizer.place=host must have at least 2 groups of layers a stage, got {interleave}; change mesh.pipe "
            "or schedule.interleave, or use optimizer.place=device"
        )
    if asked == "gathered" and not possible:
        raise ValueError(
            "mesh.weights=gathered must have at least 2 groups of layers and at least 2 devices a stage, got "
            f"{interleave} and {members}; use mesh.weights=auto, or change mesh.pipe"
        )
    return asked if asked != "auto" else "gathered" if possible else "resident"


def _advice(request: Request) -> str:
    """Returns what to change where there is no mesh; empty if no change that was tried leaves one."""

    by_choice = request.by_groups and not _asks_for_groups(request.config)

    def find(changed: Request) -> list[Layout]:
        try:
            return _find(replace(changed, by_groups=by_choice or _asks_for_groups(changed.config)))[0]
        except ValueError:
            return []

    changes = nearest_changes(request, find)
    return f"use {changes}" if changes else ""


def _meshes(request: Request) -> Iterator[tuple[MeshShape, int]]:
    """Yields the meshes of all devices with the pinned axes, and the sequences of a pipeline on each.

    A mesh that is given may have more devices than there are here: one can plan for a machine one does not sit at.
    """
    config = request.config
    pinned, sequence = dict(config.mesh.pinned), config.sequence
    if sequence.per_step and sequence.per_pipeline > 1:
        pinned.setdefault("data", sequence.per_step // sequence.per_pipeline)
    if not sequence.per_step:
        pinned.setdefault("data", 1)
    given, total = math.prod(pinned.values()), request.cluster.num_devices
    if len(pinned) == 3 or given > total:
        total = given
    elif total % given:
        shown = " * ".join(f"mesh.{name}={size}" for name, size in pinned.items() if size > 1)
        raise ValueError(f"the given axes of the mesh must divide the {total} devices, got {shown}")
    for data in divisors(total):
        for pipe in divisors(total // data):
            mesh = MeshShape(data=data, pipe=pipe, seq=total // data // pipe)
            if sequence.per_step % data == 0 and all(getattr(mesh, name) == size for name, size in pinned.items()):
                yield mesh, sequence.per_step // data or sequence.per_pipeline


def _interleaves(request: Request, pipe: int) -> list[int]:
    """Returns the numbers of virtual stages of a stage to consider: every divisor of a stage's layers."""
    asked, layers = request.config.schedule.interleave, request.config.model.num_layers
    name = request.schedule_name
    if request.table is not None:
        return [request.table[0].num_groups]
    if asked != "auto":
        return [int(asked)]
    by_groups = name == BREADTH_FIRST
    if (pipe == 1 and not by_groups) or layers % pipe or name in ("1f1b", "seq1f1b"):
        return [1]
    depths = divisors(layers // pipe)
    if by_groups and len(depths) == 1:
        raise ValueError(
            f"schedule {BREADTH_FIRST} must have at least 2 layers a stage, got {layers} layers on {pipe} stages; use "
            "fewer stages, or schedule.name=sppo"
        )
    return depths[1:] or depths if by_groups or name.startswith("interleaved-") else depths


def _check_tokens(request: Request, mesh: MeshShape) -> None:
    shapes = request.config.sequence.shapes
    if shapes != "auto":
        check_shapes(shapes, multiple=_multiple_tokens(request, mesh))
    chunks = request.table[0].chunk_lengths if request.table is not None else request.config.sequence.chunks
    if isinstance(chunks, tuple):
        given_lengths(request.config.sequence.length, chunks, mesh.seq, warn=False)
    elif chunks == "auto":
        check_length(request.config.sequence.length, _multiple_tokens(request, mesh))
    else:
        equal_lengths(request.config.sequence.length, chunks, _multiple_tokens(request, mesh))
    if request.table is not None and request.table[0].num_stages != mesh.pipe:
        raise ValueError(
            f"mesh.pipe must be {request.table[0].num_stages}, the number of stages of schedule.table, "
            f"got mesh.pipe={mesh.pipe}"
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
