"""What a candidate comes to: its memory, its simulated step, and its Plan; and what was predicted for a Plan."""

import heapq
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from sppo_jax.config import Config
from sppo_jax.files.format_bytes import format_bytes
from sppo_jax.hardware.capacity import OLD_SPARE, pool_share, spare_share, usable_bytes, usable_host_bytes
from sppo_jax.hardware.cluster import Cluster
from sppo_jax.hardware.device import Device
from sppo_jax.hardware.tpu_chips import num_blocks
from sppo_jax.plan.parts import MeshShape, PlannedFor, Predicted, SchedulePlan, StashPlan, model_shape
from sppo_jax.plan.plan import Plan, schedule_table
from sppo_jax.predict.memory import Memory, predict_memory
from sppo_jax.predict.pinned import Pinned, pinned_of, pinned_reason
from sppo_jax.predict.seconds.copies import tick_copies
from sppo_jax.predict.seconds.costs import CostModel
from sppo_jax.predict.seconds.documents import Documents
from sppo_jax.predict.seconds.expected import expected_seconds
from sppo_jax.predict.seconds.simulate import Simulation, simulate
from sppo_jax.predict.shape import MemoryShape
from sppo_jax.rules import Facts, check, group_size, has_tails
from sppo_jax.schedule.table import Table
from sppo_jax.search.because import Because
from sppo_jax.search.space.layouts import Layout
from sppo_jax.search.space.offload import choose_alpha, largest_alpha
from sppo_jax.search.space.partitions import Candidate, Partition
from sppo_jax.search.space.request import Request, query_heads, read_request
from sppo_jax.search.space.splits import SequenceSplit
from sppo_jax.version import __version__


@dataclass(frozen=True, kw_only=True)
class Sized:
    """What a candidate takes in memory.

    Args:
        candidate: the candidate.
        stash: its stash, with alpha.
        alpha_reason: why alpha is what it is.
        memory: bytes of a device.
        all_away: whether all that may wait on the host does, where inputs or attention outputs do.
    """

    candidate: Candidate
    stash: StashPlan
    alpha_reason: str
    memory: Memory
    all_away: bool


@dataclass(frozen=True, kw_only=True)
class Outcome(Sized):
    """What a candidate comes to.

    Args:
        simulation: the ticks, where all sequences are the mean of those of a run.
        least_s: seconds of such a step: the ticks, and what comes after them once. No step takes less in the mean.
    """

    simulation: Simulation
    least_s: float

    @cached_property
    def step_s(self) -> float:
        """The seconds of a step, with documents in the mean over drawn steps; worked out only where it is asked for."""
        documents = self.candidate.layout.documents
        if documents is None:
            return self.least_s
        table, shape = outline_of(self.candidate), self.candidate.layout.shape
        ticks_s = expected_seconds(table, _costs_of(self.candidate, table), shape, self.stash, documents)
        return max(self.least_s, self.least_s - self.simulation.step_s + ticks_s)

    def of_full_documents(self) -> tuple[Simulation, float]:
        """Returns the ticks and the seconds of a step whose sequences are one document each."""
        if self.candidate.layout.request.documents is None:
            return self.simulation, self.step_s
        table, shape = outline_of(self.candidate), self.candidate.layout.shape
        costs = replace(_costs_of(self.candidate, table), attended=None)
        simulation = _simulate(table, costs, shape, self.stash)
        return simulation, simulation.step_s + costs.step_overhead_s()


def size(candidate: Candidate) -> Sized:
    """Works out alpha and memory of a candidate whose way of keys and values is decided.

    Raises:
        ValueError: the candidate breaks a rule.
    """
    layout, inputs = candidate.layout, candidate.places[0]
    with_tails = has_tails(inputs, candidate.kv, layout.layers, flexible=layout.shape.groups)
    if inputs == "period" or (with_tails and layout.window):
        check(
            Facts(
                places=candidate.places,
                kv=candidate.kv,
                most_whole=layout.most_whole,
                seq=layout.mesh.seq,
                ulysses=layout.split.ulysses,
                window=layout.window,
                has_tails=with_tails,
                kernel=layout.request.kernel,
            )
        )
    if layout.request.kernel == "pallas":
        check(Facts(kernel="pallas", visits=_visits(candidate.partition)))
    table, shape = outline_of(candidate), candidate.layout.shape
    stash, reason = choose_alpha(_stash_of(candidate), candidate.alpha, table, shape, _costs_of(candidate, table))
    return Sized(
        candidate=candidate,
        stash=stash,
        alpha_reason=reason,
        memory=predict_memory(table, shape, stash),
        all_away=stash.alpha == largest_alpha(table),
    )


def _visits(partition: Partition) -> tuple[int, int]:
    """Returns the blocks of queries and of keys of the tick with most pairs of them, on a ring member.

    Its keys are those of a whole sequence where they travel, and else the whole buffer: a longest tick more.
    """
    layout, ticks = partition.layout, set(partition.shapes or partition.chunk_lengths)
    request, ring = layout.request, layout.split.ring
    heads, length = max(query_heads(request.config.model, layout.split.ulysses)), request.config.sequence.length
    keys = (-(-tokens // ring) for tokens in (length, length + max(ticks)))
    found = (num_blocks(-(-queries // ring), most, heads, request.compute_bytes) for most in keys for queries in ticks)
    return max(found, key=math.prod)


def evaluate(candidate: Candidate, sized: Sized | None = None) -> Outcome:
    """Works out alpha, memory and the step of a candidate; its table is not checked here, but where a Plan is made.

    Args:
        candidate: the candidate; its way of keys and values is decided.
        sized: what `size` returns for it, if known.

    Raises:
        ValueError: the candidate breaks a rule.
    """
    table, sized = outline_of(candidate), sized or size(candidate)
    costs = _costs_of(candidate, table)
    simulation = _simulate(table, costs, candidate.layout.shape, sized.stash)
    return Outcome(**vars(sized), simulation=simulation, least_s=simulation.step_s + costs.step_overhead_s())


def by_seconds(outcomes: Iterable[Outcome]) -> Iterator[Outcome]:
    """Yields outcomes by rising seconds of a step, which are worked out as late as can be."""
    heap = [(one.least_s, number, one) for number, one in enumerate(outcomes)]
    heapq.heapify(heap)
    while heap:
        least_s, number, one = heapq.heappop(heap)
        if one.step_s > least_s:
            heapq.heappush(heap, (one.step_s, number, one))
        else:
            yield one


def plan_of(outcome: Outcome, reasons: dict[str, str]) -> Plan:
    """Returns the Plan of an outcome, checked, with the reasons for what was chosen."""
    candidate, layout, memory = outcome.candidate, outcome.candidate.layout, outcome.memory
    split, request = layout.split, layout.request
    config, groups, stages = request.config, layout.interleave, layout.mesh.pipe
    pinned = pinned_of(memory, layout.shape, groups, stages, request.cluster)
    simulation, step_s = outcome.of_full_documents()
    return Plan(
        version=__version__,
        mesh=layout.mesh,
        ulysses=split.ulysses,
        ring=split.ring,
        sequence_kind=split.name,
        sequence_length=config.sequence.length,
        sequences_per_pipeline=layout.sequences,
        chunk_lengths=candidate.partition.chunk_lengths,
        schedule=_schedule_of(candidate.partition),
        stash=outcome.stash,
        kv_slots=outline_of(candidate).kv_peak,
        predicted=Predicted(
            step_s=step_s,
            bubble_fraction=simulation.bubble_fraction,
            hbm_bytes=(memory.hbm_bytes,) * layout.mesh.pipe,
            host_bytes=(memory.host,) * layout.mesh.pipe,
            documents_step_s=None if request.documents is None else outcome.step_s,
        ),
        planned_for=_planned_for(request.documents),
        cluster=request.cluster.name,
        ring_pass=candidate.ring_pass or config.sequence.ring_pass,
        kernel=request.kernel,
        backward_queries=request.backward_queries,
        groups="flex" if config.sequence.groups == "flex" else "static",
        sequence_documents="one" if request.has_one_document else "many",
        weights=layout.weights,
        optimizer=request.way.optimizer,
        saves=pinned.saves,
        host_pieces=pinned.pieces,
        host_arrays=pinned.arrays,
        model=model_shape(config.model),
        reasons={
            **reasons,
            **_groups_reason(config),
            **_one_document_reason(request),
            "alpha": outcome.alpha_reason,
            **_memory_reasons(memory, pinned, request.cluster, request.kernel),
        },
    )


def costs_of(plan: Plan, config: Config, cluster: Cluster | None = None) -> CostModel:
    """Returns the seconds of units that the planner used for a plan; arguments as `make_plan`."""
    layout = _layout_of(plan, read_request(config, cluster))
    places = plan.stash.inputs, plan.stash.attention, plan.stash.rest
    before = sum(plan.chunk_lengths[: plan.stash.attention_from])
    return layout.costs(places, plan.stash.kv, plan.schedule.wave, before, plan.ring_pass)


def documents_step_s(plan: Plan, config: Config, documents: Documents, cluster: Cluster | None = None) -> float:
    """Returns the seconds of a step of a plan with some documents; other arguments as `make_plan`."""
    costs, shape = costs_of(plan, config, cluster), shape_of_plan(plan, config, cluster)
    documents = documents.of_slowest(plan.mesh.data, plan.sequences_per_pipeline)
    return expected_seconds(plan.outline(), costs, shape, plan.stash, documents) + costs.step_overhead_s()


def shape_of_plan(plan: Plan, config: Config, cluster: Cluster | None = None) -> MemoryShape:
    """Returns what the memory of a plan depends on besides table and stash; arguments as `make_plan`."""
    return _layout_of(plan, read_request(config, cluster)).shape


def memory_of(plan: Plan, config: Config, cluster: Cluster | None = None) -> Memory:
    """Returns the bytes of a device that the planner predicted for a plan, by what holds them."""
    return predict_memory(plan.outline(), shape_of_plan(plan, config, cluster), plan.stash)


def simulation_of(plan: Plan, config: Config, cluster: Cluster | None = None) -> Simulation:
    """Returns the step that the planner simulated for a plan, host copies and loops that wait for them charged."""
    shape = shape_of_plan(plan, config, cluster)
    return _simulate(plan.outline(), costs_of(plan, config, cluster), shape, plan.stash)


def _stash_of(candidate: Candidate) -> StashPlan:
    """Returns the stash of a candidate without alpha."""
    inputs, attention, rest = candidate.places
    return StashPlan(
        inputs=inputs,
        attention=attention,
        rest=rest,
        alpha=(),
        kv_grad_dtype=candidate.kv_grad_dtype,
        kv=candidate.kv,
        attention_from=candidate.attention_from,
        waiting=candidate.layout.request.way.waiting,
    )


def _costs_of(candidate: Candidate, table: Table) -> CostModel:
    before, wave = table.chunk_starts[candidate.attention_from], candidate.partition.wave
    return candidate.layout.costs(candidate.places, candidate.kv, wave, before, candidate.ring_pass)


def _simulate(table: Table, costs: CostModel, shape: MemoryShape, stash: StashPlan) -> Simulation:
    return simulate(table, costs.of_chunks(table.chunk_lengths), *tick_copies(table, shape, stash, costs))


def outline_of(candidate: Candidate) -> Table:
    """Returns the outline of the table of a candidate."""
    layout, partition = candidate.layout, candidate.partition
    sizes = layout.mesh.pipe, layout.sequences, partition.chunk_lengths
    late_heads = layout.request.way.waiting == "host"
    return schedule_table(_schedule_of(partition), *sizes, outline=True, late_heads=late_heads)


def _schedule_of(partition: Partition) -> SchedulePlan:
    layout, table = partition.layout, partition.layout.request.table
    csv = table[1] if table is not None else None
    return SchedulePlan(
        name=partition.schedule, interleave=layout.interleave, csv=csv, wave=partition.wave, shapes=partition.shapes
    )


def _layout_of(plan: Plan, request: Request) -> Layout:
    return Layout(
        request=replace(
            request,
            way=replace(request.way, optimizer=plan.optimizer),
            backward_queries=plan.backward_queries,
        ),
        mesh=MeshShape(data=plan.mesh.data, pipe=plan.mesh.pipe, seq=plan.mesh.seq),
        sequences=plan.sequences_per_pipeline,
        split=SequenceSplit(name=plan.sequence_kind, ulysses=plan.ulysses, ring=plan.ring),
        interleave=plan.schedule.interleave,
        layers=group_size(request.config.model.num_layers, plan.mesh.pipe * plan.schedule.interleave),
        weights=plan.weights,
    )


def _planned_for(documents: Documents | None) -> PlannedFor:
    if documents is None:
        return PlannedFor()
    return PlannedFor(documents="known", mean_tokens=documents.mean_tokens, attended=documents.attended)


def _groups_reason(config: Config) -> dict[str, str]:
    """Says what the teams of documents are, unless every document is on all devices as ever."""
    return {
        "static": {},
        "flex": {"groups": "flex: each document of a batch has its own team of devices; sppo flex shows the gain"},
        "auto": {"groups": "static until the documents are read: sppo train chooses, sppo flex shows the gain"},
    }[config.sequence.groups]


def _one_document_reason(request: Request) -> dict[str, str]:
    if not request.has_one_document:
        return {}
    data = request.config.data
    what = "those of a task that is drawn do" if data.is_drawn else "data.pack=none gives each its own"
    return {"sequence_documents": Because.ONE_DOCUMENT(what=what)}


def _memory_reasons(memory: Memory, pinned: Pinned, cluster: Cluster, kernel: str) -> dict[str, str]:
    fits = "fits" if memory.fits(cluster) else "DOES NOT FIT"
    found = _assumed(cluster, kernel)
    assumed = {"hardware": found} if found else {}
    return assumed | {
        "hbm": f"{fits} in {format_bytes(usable_bytes(cluster))}{_of_pool(cluster)}: {memory.describe()}",
        "host": f"of {format_bytes(cluster.device_host_bytes)} per device{_of_optimizer(memory)}",
        **({"pinned": why} if (why := pinned_reason(pinned, cluster)) else {}),
        "saves": _saves_reason(memory, pinned, cluster),
    }


def _of_pool(cluster: Cluster) -> str:
    """Says what the bytes that a plan may take are a part of, and for which compiler."""
    spare, total = spare_share(cluster), format_bytes(cluster.device.hbm_bytes)
    if cluster.device.platform != "gpu":
        return f", {1 - spare:.0%} of {total}"
    pool = f", {1 - spare:.0%} of XLA's pool, which is {pool_share(cluster):.0%} of {total}"
    return pool if spare >= OLD_SPARE else f"{pool}, for jax 0.12 (older ones need hardware.hbm_spare={OLD_SPARE})"


def _saves_reason(memory: Memory, pinned: Pinned, cluster: Cluster) -> str:
    copy = f"a copy of parameters and moments takes {format_bytes(memory.save)} of host memory per device"
    if pinned.saves == "async":
        return f"{copy} until the copy is written"
    left = format_bytes(max(0, usable_host_bytes(cluster) - memory.host))
    return f"{copy}, and the plan leaves {left}; so training waits while each array is written, one after another"


def _of_optimizer(memory: Memory) -> str:
    if not memory.host_optimizer:
        return ""
    return f"; parameters, moments and gradients {format_bytes(memory.host_optimizer)}"


def _assumed(cluster: Cluster, kernel: str) -> str:
    """Returns which rates nobody measured; empty where all were."""
    device, parts = cluster.device, list[str]()
    if device.assumed:
        parts.append(_assumed_efficiencies(device, kernel))
    if cluster.shares_host_link:
        rate = f"{cluster.host_link_bytes_s / 2**30:.0f} GiB/s"
        parts.append(f"ASSUMED: each of {cluster.devices_per_host} devices of a host copies to it at {rate}")
    return "; ".join(parts)


def _assumed_efficiencies(device: Device, kernel: str) -> str:
    matmuls = f"efficiency of matmuls on {device.name} ({device.matmul_efficiency:.0%} of the peak) is"
    if kernel == "pallas" and device.has_bundles:
        what = matmuls
        rest = "attention's seconds come from the compiled kernel and one published run of another one; "
    elif device.kernel == "cudnn" and device.attention_rows:
        what = matmuls
        rest = f"attention's {device.attention_efficiency:.0%} comes from published kernel benchmarks; "
    else:
        what = (
            f"efficiencies of {device.name} (matmul {device.matmul_efficiency:.0%}, attention "
            f"{device.attention_efficiency:.0%} of the peak) are"
        )
        rest = ""
    return f"ASSUMED: the {what} neither measured nor calibrated on published runs; {rest}measure with sppo profile"
