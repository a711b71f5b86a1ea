"""The layouts that are possible for what is asked: how devices share layers, tokens and sequences."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

from sppo_jax.plan.layers import divisors, layers_per_virtual_stage
from sppo_jax.plan.parts import MeshShape
from sppo_jax.plan.shapes import check_shapes
from sppo_jax.plan.table import BREADTH_FIRST
from sppo_jax.plan.waves import check_wave
from sppo_jax.planner.advice import nearest_changes
from sppo_jax.planner.chunks import check_length, equal_lengths, given_lengths
from sppo_jax.planner.request import Request
from sppo_jax.planner.rules import rules_of
from sppo_jax.planner.shape import Shape
from sppo_jax.planner.splits import SequenceSplit, sequence_splits


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


def _multiple_tokens(request: Request, mesh: MeshShape) -> int:
    """Returns the tokens that chunk lengths are multiples of."""
    return mesh.seq * request.cluster.device.tile


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
    asked = "resident" if asked == "auto" and request.way.weights == "resident" else asked
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

    by_choice = request.way.breadth_first and not request.asks_for_breadth_first

    def find(changed: Request) -> list[Layout]:
        way = replace(changed.way, breadth_first=by_choice or changed.asks_for_breadth_first)
        try:
            return _find(replace(changed, way=way))[0]
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
