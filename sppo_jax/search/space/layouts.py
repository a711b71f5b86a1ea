"""The layouts that are possible for what is asked: how devices share layers, tokens and sequences."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

from sppo_jax import rules
from sppo_jax.config import ModelConfig
from sppo_jax.hardware import Cluster
from sppo_jax.hardware.tpu_chips import TPU_CHIPS
from sppo_jax.models.state_counts import has_attention, state_counts, state_heads
from sppo_jax.plan.parts import MeshShape
from sppo_jax.predict.group_layers import most_layers
from sppo_jax.predict.seconds.costs import CostModel, cost_model
from sppo_jax.predict.seconds.documents import Documents
from sppo_jax.predict.seconds.stage_shape import Recompute, StageShape, WeightsPlace
from sppo_jax.predict.shape import MemoryShape
from sppo_jax.rules import BREADTH_FIRST, Broken, Facts, divisors, has_tails
from sppo_jax.schedule.turns import collective_counts
from sppo_jax.search.space.advice import Find, nearest_changes, suited_clusters, suited_length
from sppo_jax.search.space.offload import Places
from sppo_jax.search.space.request import USUAL, Request, Way, asks_for_breadth_first, way_for
from sppo_jax.search.space.splits import SequenceSplit, sequence_splits

# A mesh without a layout, and the rules that it breaks.
Refused = tuple[MeshShape, tuple[Broken, ...]]


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
        weights: what a device holds of its stage's layers during a step; see `plan.plan.Plan`.
    """

    request: Request = field(repr=False)
    mesh: MeshShape
    sequences: int
    split: SequenceSplit
    interleave: int
    layers: int
    weights: str = "resident"

    @property
    def mean_layers(self) -> float:
        """Layers of a virtual stage in the mean: the last group may have fewer."""
        layers, parts = self.request.config.model.num_layers, self.mesh.pipe * self.interleave
        return layers / parts if layers % parts else self.layers

    @property
    def again_for_kv(self) -> float:
        """The share of layers that run again for the keys and values of a group's layer that sees all tokens."""
        model = self.request.config.model
        found, names = 0, model.type_names
        for begin in range(0, len(names), self.layers):
            group = [self._is_whole(model.of_type(name)) for name in names[begin : begin + self.layers]]
            found += group.index(True) if True in group else 0
        return found / len(names)

    @cached_property
    def most_whole(self) -> int:
        """The most layers of a group that have neither a window nor a state."""
        return most_layers(self.shape, lambda layer_type: self._is_whole(layer_type) or None).get(True, 0)

    @cached_property
    def window(self) -> int:
        """The window of which a ring must be a divisor; 0: no layer has one."""
        config = self.request.config
        return config.model.shared_window(config.sequence.length)

    def _is_whole(self, layer_type: ModelConfig) -> bool:
        return not layer_type.window_within(self.request.config.sequence.length) and state_counts(layer_type) is None

    @property
    def documents(self) -> Documents | None:
        """How documents lie in the sequences of the pipeline that counts; None: sequences are one document each."""
        documents = self.request.documents
        return None if documents is None else documents.of_slowest(self.mesh.data, self.sequences)

    @property
    def multiple_tokens(self) -> int:
        """Chunk lengths are multiples of so many tokens."""
        return self.mesh.seq * self.request.tile

    @cached_property
    def shape(self) -> MemoryShape:
        """What memory depends on besides table and stash."""
        config, device = self.request.config, self.request.cluster.device
        return MemoryShape(
            model=config.model,
            layers=self.layers,
            seq=self.mesh.seq,
            ulysses=self.split.ulysses,
            compute_bytes=self.request.compute_bytes,
            data=self.mesh.data,
            platform=device.platform,
            groups=config.sequence.groups != "static",
            kernel=self.request.kernel,
            length=config.sequence.length,
            weights=self.weights,
            optimizer=self.request.way.optimizer,
            cores=TPU_CHIPS[device.name].cores if device.name in TPU_CHIPS else 1,
            ring_pass=config.sequence.ring_pass,
            backward_queries=self.request.backward_queries,
            has_one_document=self.request.has_one_document,
        )

    def costs(self, places: Places, kv: str = "keep", wave: int = 0, before: int = 0, ring_pass: str = "") -> CostModel:
        """Returns the seconds of units with these places of inputs, attention outputs, and the rest.

        From a stage's input alone the linear parts are computed twice: for the stash made again, and for the gradients.
        Keys and values that are rebuilt or fetched are exchanged again for all groups of layers but the last; those
        that a backward computes for itself for all. With documents each sequence is the mean of all.

        Args:
            places: of the stash.
            kv: how keys and values reach the backward.
            wave: sequences after which weights are gathered and gradient sums scattered again where these are not
                resident; 0: all.
            before: where attention outputs are stashed, it is those of ticks that reach further than so many tokens.
            ring_pass: what travels on the ring; empty: what the config says.
        """
        request, (inputs, attention, rest) = self.request, places
        # Of a lone layer the backward makes again what it makes from any stashed input.
        runs_again = inputs == "period" and self.layers > 1
        stage = StageShape(
            mesh=self.mesh,
            ulysses=self.split.ulysses,
            ring=self.split.ring,
            layers=self.mean_layers,
            compute_bytes=request.compute_bytes,
            kernel=request.kernel,
            length=request.config.sequence.length,
            ring_pass=ring_pass or request.config.sequence.ring_pass,
            backward_queries=request.backward_queries,
        )
        recompute = Recompute(
            linear=2 if inputs == "recompute" or runs_again else int(rest == "recompute"),
            attention=attention == "recompute" or before > 0,
            reach=math.inf if attention == "recompute" else before,
            rewrite_kv={"keep": 0.0, "recompute": 1.0}.get(kv, (self.interleave - 1) / self.interleave),
            # A backward that computes the linear parts again has keys and values anyway.
            kv=(kv == "rebuild" and inputs != "period") or (kv == "recompute" and rest != "recompute"),
            tails=has_tails(inputs, kv, self.layers, flexible=self.shape.groups),
            whole=runs_again,
            layers=self.again_for_kv if inputs == "period" and kv == "rebuild" else 0.0,
        )
        again = 0.0, 0.0
        if self.weights != "resident":
            counts = collective_counts(self.interleave, self.sequences // wave if wave else 1)
            again = counts[0] / self.interleave - 1, counts[1] / self.interleave - 1
        gathered = self.weights == "gathered"
        weights = WeightsPlace(again=again, gathers_tables=gathered, on_host=request.way.optimizer == "host")
        costs = cost_model(request.config.model, request.cluster, stage, recompute, weights)
        return costs if self.documents is None else replace(costs, attended=self.documents.mean)


def layouts(request: Request) -> list[Layout]:
    """Returns every layout that the config, the model and the devices allow, plainest first.

    Raises:
        ValueError: no layout exists; the message says why.
    """
    try:
        found, refused = find_layouts(request)
    except ValueError as error:
        raise ValueError(f"{error}; {_advice(request)}") from None
    if found:
        return found
    first = refused[0][1][0]
    if len(refused) > 1:
        rules = f"no mesh of {request.cluster.num_devices} devices suits the model and the sequence"
        raise ValueError(f"{rules}: {_rules_of(request, refused)}; {_advice(request)}")
    if math.prod(request.config.mesh.pinned.values()) > request.cluster.num_devices:
        raise first  # a mesh of its own size
    # What the only mesh's rule says to change need not leave a mesh of all devices.
    raise ValueError(f"{first.must}, got {first.got}; {_advice(request)}")


def _rules_of(request: Request, refused: list[Refused]) -> str:
    """Returns the rules that meshes break, and what else limits the meshes."""
    sequence, pinned = request.config.sequence, request.config.mesh.pinned
    limits = [f"mesh.{axis}={size}" for axis, size in pinned.items()]
    if sequence.given_per_step is None and "data" not in pinned:
        limits.insert(0, "mesh.data must be 1 where sequence.per_step is not given")
    broken = [error for _, errors in refused for error in errors]
    broken.sort(key=lambda error: error.number)
    return ", ".join([*dict.fromkeys(error.must for error in broken), *limits])


def find_layouts(request: Request) -> tuple[list[Layout], list[Refused]]:
    """Returns every layout, and the meshes that have none with the rules that each breaks.

    Raises:
        ValueError: no mesh takes all devices.
    """
    config = request.config
    found: list[Layout] = []
    refused: list[Refused] = []
    for mesh, sequences in _meshes(request):
        broken = tuple(rules.broken(_facts(request, mesh, sequences)))
        if broken:
            refused.append((mesh, broken))
            continue
        for interleave in _interleaves(request, mesh.pipe):
            weights = _weights(request, mesh, interleave)
            found += [
                Layout(
                    request=request,
                    mesh=mesh,
                    sequences=sequences,
                    split=split,
                    interleave=interleave,
                    layers=rules.group_size(config.model.num_layers, mesh.pipe * interleave),
                    weights=weights,
                )
                for split in _splits(request, mesh.seq)
            ]
    return found, refused


def _splits(request: Request, seq: int) -> list[SequenceSplit]:
    config, near = request.config, request.cluster.num_linked
    return sequence_splits(config.model, config.sequence, seq, near, request.kernel)


def _facts(request: Request, mesh: MeshShape, sequences: int) -> Facts:
    """Returns what rules may know of a mesh."""
    config, table = request.config, request.table
    sequence, schedule = config.sequence, config.schedule
    interleave = table[0].num_groups if table is not None else None
    if interleave is None and schedule.interleave != "auto":
        interleave = schedule.interleave
    chunks = table[0].chunk_lengths if table is not None else sequence.chunks
    weights = config.mesh.weights
    by_groups, attends = request.way.schedule == BREADTH_FIRST, has_attention(config.model)
    return Facts(
        num_layers=config.model.num_layers,
        layer_types=config.model.type_names if config.model.layers else (),
        stacks=config.model.stack_names if config.model.layers else (),
        num_heads=config.model.shared_heads[0],
        state_heads=state_heads(config.model),
        attends=attends,
        data=mesh.data,
        pipe=mesh.pipe,
        seq=mesh.seq,
        tile=request.tile,
        per_step=sequence.given_per_step,
        sequences=sequences,
        length=sequence.length,
        chunks=None if chunks == "auto" else chunks,
        shapes=() if sequence.shapes == "auto" else sequence.shapes,
        split=None if sequence.split == "auto" else sequence.split,
        ulysses=sequence.given_ulysses,
        window=config.model.shared_window(sequence.length),
        groups=sequence.groups,
        kernel=request.kernel,
        schedule=request.way.schedule,
        one_group_at_a_time=by_groups if weights == "gathered" or request.way.optimizer == "host" else None,
        interleave=interleave,
        wave=None if schedule.wave == "auto" else schedule.wave,
        table_stages=None if table is None else table[0].num_stages,
        weights=None if weights == "auto" else weights,
        optimizer=request.way.optimizer,
        kv=None if attends or config.stash.kv == "auto" else config.stash.kv,
        places=None if attends else (config.stash.inputs, config.stash.attention, config.stash.rest),
        balance_over=config.model.routed.penalty_over,
    )


def _weights(request: Request, mesh: MeshShape, interleave: int) -> str:
    """Returns what a device holds of its stage's layers: as asked, or its share where the schedule allows."""
    asked = request.config.mesh.weights
    if asked != "auto":
        return asked
    shared = mesh.data * mesh.seq > 1 or request.way.optimizer == "host"
    possible = request.way.schedule == BREADTH_FIRST and interleave > 1 and shared
    return "gathered" if possible and request.way.weights != "resident" else "resident"


def _advice(request: Request) -> str:
    """Returns what to change where there is no mesh."""
    changes = nearest_changes(request, _finder(request))
    several = "change several of sequence.length, sequence.per_step, the axes of the mesh and the number of devices"
    return f"use {changes}" if changes else several


def length_for(request: Request) -> int | None:
    """Returns the longest length up to the request's that has a layout, else the next longer one; None: none has."""
    return suited_length(request, _finder(request))


def clusters_for(request: Request) -> list[Cluster]:
    """Returns the nearest clusters that have a layout, one smaller and one larger."""
    return suited_clusters(request, _finder(request))


def _finder(request: Request) -> Find:
    """Returns what tries a changed request."""
    by_choice = request.way.schedule == BREADTH_FIRST and not asks_for_breadth_first(request.config)

    def find(changed: Request) -> list[Layout]:
        way = way_for(changed.config, USUAL if by_choice else Way())
        try:
            return find_layouts(replace(changed, way=way))[0]
        except ValueError:
            return []

    return find


def _meshes(request: Request) -> Iterator[tuple[MeshShape, int]]:
    """Yields the meshes of all devices with the pinned axes, and the sequences of a pipeline on each.

    A mesh that is given may have more devices than there are here: one can plan for a machine one does not sit at.
    """
    config = request.config
    pinned, sequence = dict(config.mesh.pinned), config.sequence
    per_step = sequence.given_per_step
    if per_step is not None and sequence.per_pipeline > 1:
        pinned.setdefault("data", per_step // sequence.per_pipeline)
    if per_step is None:
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
            if all(getattr(mesh, name) == size for name, size in pinned.items()):
                yield mesh, sequence.per_pipeline if per_step is None else max(1, per_step // data)


def _divides(request: Request, pipe: int, interleave: int) -> bool:
    """Returns whether one program serves so many groups of layers of each stage."""
    model = request.config.model
    if not model.layers:
        return True
    facts = Facts(layer_types=model.type_names, stacks=model.stack_names, pipe=pipe, interleave=interleave)
    return not tuple(rules.broken(facts))


def _interleaves(request: Request, pipe: int) -> list[int]:
    """Returns the numbers of virtual stages of a stage to consider: every divisor of a stage's layers."""
    asked, model = request.config.schedule.interleave, request.config.model
    layers = model.num_layers
    name = request.way.schedule
    if request.table is not None:
        return [request.table[0].num_groups]
    if asked != "auto":
        return [int(asked)]
    by_groups = name == BREADTH_FIRST
    if (pipe == 1 and not by_groups) or layers % pipe or name in ("1f1b", "seq1f1b"):
        return [1]
    possible = divisors(layers // pipe) if not model.layers else range(1, layers // pipe + 1)
    depths = [depth for depth in possible if _divides(request, pipe, depth)]
    return depths[1:] or depths if by_groups or name.startswith("interleaved-") else depths
