"""What one choice of layout, chunks, schedule and stash costs: a Plan with its memory and its simulated step."""

from dataclasses import dataclass, replace
from typing import NamedTuple

from sppo_jax.config import Config
from sppo_jax.hardware.capacity import OLD_SPARE, pool_share, spare_share, usable_bytes, usable_host_bytes
from sppo_jax.hardware.cluster import Cluster
from sppo_jax.plan.parts import MeshShape, Predicted, SchedulePlan, StashPlan, model_shape
from sppo_jax.plan.plan import Plan, schedule_table
from sppo_jax.predict.costs import CostModel
from sppo_jax.predict.memory import Memory, predict_memory
from sppo_jax.predict.pinned import Pinned, pinned_of, pinned_reason
from sppo_jax.predict.shape import MemoryShape
from sppo_jax.predict.simulate import Simulation, simulate
from sppo_jax.rules import layers_per_virtual_stage
from sppo_jax.schedule.table import Table
from sppo_jax.search.layouts import Layout, SequenceSplit
from sppo_jax.search.offload import Places, choose_alpha, copy_seconds, largest_alpha
from sppo_jax.search.request import Request, read_request
from sppo_jax.units import format_bytes
from sppo_jax.version import __version__


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Everything that a planner decides about a layout.

    Args:
        layout: how devices share the work.
        chunk_lengths: tokens of each chunk over all devices of a stage.
        schedule: name of the schedule.
        places: of layer inputs, attention outputs and the rest.
        kv: how keys and values reach the backward.
        alpha: "hidden", "all", one value for all diagonals, or a value each.
        kv_grad_dtype: dtype in which dK and dV are accumulated.
        wave: sequences that run as one.
        shapes: the tokens that a tick may have, rising; none: those of its longest chunk.
        attention_from: the first chunk whose attention outputs are stashed, where they are.
        waiting: where chunks wait between two groups of layers.
    """

    layout: Layout
    chunk_lengths: tuple[int, ...]
    schedule: str
    places: Places
    alpha: str | float | tuple[float, ...]
    kv_grad_dtype: str
    wave: int = 1
    shapes: tuple[int, ...] = ()
    kv: str = "keep"
    attention_from: int = 0
    waiting: str = "keep"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a choice comes to.

    Args:
        choice: the choice.
        stash: its stash, with alpha.
        alpha_reason: why alpha is what it is.
        memory: bytes of a device.
        simulation: the ticks.
        step_s: seconds of a step: the ticks, and what comes after them once.
        all_away: whether all that may wait on the host does, where inputs or attention outputs do.
    """

    choice: Choice
    stash: StashPlan
    alpha_reason: str
    memory: Memory
    simulation: Simulation
    step_s: float
    all_away: bool


class Sized(NamedTuple):
    """The stash of a choice with its alpha, why alpha is what it is, the bytes of a device, and whether all is away."""

    stash: StashPlan
    alpha_reason: str
    memory: Memory
    all_away: bool


def size(choice: Choice) -> Sized:
    """Works out alpha and memory of a choice, as `evaluate` does, and not its step.

    Raises:
        ValueError: the choice breaks a rule.
    """
    table, shape = outline_of(choice), choice.layout.shape
    stash, reason = choose_alpha(_stash_of(choice), choice.alpha, table, shape, _costs_of_choice(choice, table))
    return Sized(stash, reason, predict_memory(table, shape, stash), stash.alpha == largest_alpha(table))


def evaluate(choice: Choice, sized: Sized | None = None) -> Outcome:
    """Works out alpha, memory and the step of a choice; its table is not checked here, but where a Plan is made.

    Args:
        choice: the choice.
        sized: what `size` returns for the choice, if known.

    Raises:
        ValueError: the choice breaks a rule.
    """
    table, sized = outline_of(choice), sized or size(choice)
    costs = _costs_of_choice(choice, table)
    simulation = _simulate(table, costs, choice.layout.shape, sized.stash)
    return Outcome(
        choice=choice,
        stash=sized.stash,
        alpha_reason=sized.alpha_reason,
        memory=sized.memory,
        simulation=simulation,
        step_s=simulation.step_s + costs.step_overhead_s(),
        all_away=sized.all_away,
    )


def plan_of(outcome: Outcome, reasons: dict[str, str]) -> Plan:
    """Returns the Plan of an outcome, checked, with the reasons for what was chosen."""
    choice, memory = outcome.choice, outcome.memory
    layout, split, request = choice.layout, choice.layout.split, choice.layout.request
    config, groups, stages = request.config, layout.interleave, layout.mesh.pipe
    pinned = pinned_of(memory, layout.shape, groups, stages, request.cluster)
    return Plan(
        version=__version__,
        mesh=layout.mesh,
        ulysses=split.ulysses,
        ring=split.ring,
        sequence_kind=split.kind,
        sequence_length=config.sequence.length,
        sequences_per_pipeline=layout.sequences,
        chunk_lengths=choice.chunk_lengths,
        schedule=_schedule_of(choice),
        stash=outcome.stash,
        kv_slots=outline_of(choice).kv_peak,
        predicted=Predicted(
            step_s=outcome.step_s,
            bubble_fraction=outcome.simulation.bubble_fraction,
            hbm_bytes=(memory.hbm_bytes,) * layout.mesh.pipe,
            host_bytes=(memory.host,) * layout.mesh.pipe,
        ),
        ring_pass=config.sequence.ring_pass,
        kernel=request.kernel,
        groups="flex" if config.sequence.groups == "flex" else "static",
        weights=layout.weights,
        optimizer=request.optimizer,
        saves=pinned.saves,
        host_pieces=pinned.pieces,
        host_arrays=pinned.arrays,
        model=model_shape(config.model),
        reasons={
            **reasons,
            **_groups_reason(config),
            "alpha": outcome.alpha_reason,
            **_memory_reasons(memory, pinned, request.cluster),
        },
    )


def costs_of(plan: Plan, config: Config, cluster: Cluster | None = None) -> CostModel:
    """Returns the seconds of units that the planner used for a plan; arguments as `make_plan`."""
    layout = _layout_of(plan, read_request(config, cluster))
    places = plan.stash.inputs, plan.stash.attention, plan.stash.rest
    before = sum(plan.chunk_lengths[: plan.stash.attention_from])
    return layout.costs(places, plan.stash.kv, plan.schedule.wave, before)


def shape_of_plan(plan: Plan, config: Config, cluster: Cluster | None = None) -> MemoryShape:
    """Returns what the memory of a plan depends on besides table and stash; arguments as `make_plan`."""
    return _layout_of(plan, read_request(config, cluster)).shape


def memory_of(plan: Plan, config: Config, cluster: Cluster | None = None) -> Memory:
    """Returns the bytes of a device that the planner predicted for a plan, by what holds them."""
    return predict_memory(plan.outline(), shape_of_plan(plan, config, cluster), plan.stash)


def simulation_of(plan: Plan, config: Config, cluster: Cluster | None = None) -> Simulation:
    """Returns the step that the planner simulated for a plan, host copies charged."""
    shape = shape_of_plan(plan, config, cluster)
    return _simulate(plan.outline(), costs_of(plan, config, cluster), shape, plan.stash)


def _stash_of(choice: Choice) -> StashPlan:
    """Returns the stash of a choice without alpha."""
    inputs, attention, rest = choice.places
    return StashPlan(
        inputs=inputs,
        attention=attention,
        rest=rest,
        alpha=(),
        kv_grad_dtype=choice.kv_grad_dtype,
        kv=choice.kv,
        attention_from=choice.attention_from,
        waiting=choice.waiting,
    )


def _costs_of_choice(choice: Choice, table: Table) -> CostModel:
    before = table.chunk_starts[choice.attention_from]
    return choice.layout.costs(choice.places, choice.kv, choice.wave, before)


def _simulate(table: Table, costs: CostModel, shape: MemoryShape, stash: StashPlan) -> Simulation:
    return simulate(table, costs.of_chunks(table.chunk_lengths), copy_seconds(table, shape, stash, costs))


def outline_of(choice: Choice) -> Table:
    """Returns the outline of the table of a choice."""
    layout = choice.layout
    sizes = layout.mesh.pipe, layout.sequences, choice.chunk_lengths
    return schedule_table(_schedule_of(choice), *sizes, outline=True, late_heads=choice.waiting == "host")


def _schedule_of(choice: Choice) -> SchedulePlan:
    table = choice.layout.request.table
    csv = table[1] if table is not None else None
    return SchedulePlan(
        name=choice.schedule, interleave=choice.layout.interleave, csv=csv, wave=choice.wave, shapes=choice.shapes
    )


def _layout_of(plan: Plan, request: Request) -> Layout:
    # The search may have chosen what travels on the ring.
    sequence = replace(request.config.sequence, ring_pass=plan.ring_pass)  # type: ignore[arg-type]
    way = replace(request.way, optimizer=plan.optimizer)
    return Layout(
        request=replace(request, config=replace(request.config, sequence=sequence), way=way),
        mesh=MeshShape(data=plan.mesh.data, pipe=plan.mesh.pipe, seq=plan.mesh.seq),
        sequences=plan.sequences_per_pipeline,
        split=SequenceSplit(kind=plan.sequence_kind, ulysses=plan.ulysses, ring=plan.ring, reason=""),
        interleave=plan.schedule.interleave,
        layers=layers_per_virtual_stage(request.config.model.num_layers, plan.mesh.pipe, plan.schedule.interleave),
        weights=plan.weights,
    )


def _groups_reason(config: Config) -> dict[str, str]:
    """Says what the teams of documents are, unless every document is on all devices as ever."""
    return {
        "static": {},
        "flex": {"groups": "flex: each document of a batch has its own team of devices; sppo flex shows the gain"},
        "auto": {"groups": "static until the documents are read: sppo train chooses, sppo flex shows the gain"},
    }[config.sequence.groups]


def _memory_reasons(memory: Memory, pinned: Pinned, cluster: Cluster) -> dict[str, str]:
    fits = "fits" if memory.fits(cluster) else "DOES NOT FIT"
    assumed = {"hardware": _assumed(cluster)} if cluster.device.assumed else {}
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


def _assumed(cluster: Cluster) -> str:
    device = cluster.device
    if device.attention_rows:
        what = f"efficiency of matmuls on {device.name} ({device.matmul_efficiency:.0%} of the peak) is"
        rest = f"attention's {device.attention_efficiency:.0%} comes from published kernel benchmarks; "
    else:
        what = (
            f"efficiencies of {device.name} (matmul {device.matmul_efficiency:.0%}, attention "
            f"{device.attention_efficiency:.0%} of the peak) are"
        )
        rest = ""
    return f"ASSUMED: the {what} neither measured nor calibrated on published runs; {rest}measure with sppo profile"
