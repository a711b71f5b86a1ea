"""What text, JSON and pages show of a plan besides the plan itself, computed once; imports no jax."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from sppo_jax.config import Config, ModelConfig
from sppo_jax.hardware import DEVICES, Cluster
from sppo_jax.models.counts import flops_per_token
from sppo_jax.plan.parts import StashPlan
from sppo_jax.plan.plan import Plan
from sppo_jax.plan.stall_limit import AUTO
from sppo_jax.predict.seconds.copies import tick_copies
from sppo_jax.predict.seconds.costs import CostModel, without_scores
from sppo_jax.predict.seconds.documents import Documents
from sppo_jax.predict.seconds.simulate import Simulation, simulate
from sppo_jax.predict.shape import MemoryShape
from sppo_jax.report.plan.occupancy import UnitBytes, UnitCopy, host_copies, rebuilt_bytes, unit_bytes, waiting_copies
from sppo_jax.schedule.outline import first_rounds
from sppo_jax.schedule.table import Table, TickShape, Unit
from sppo_jax.search.evaluate import costs_of, documents_step_s, shape_of_plan
from sppo_jax.search.search import Found

# Columns of the stage table, and the holders of device memory that each sums up; the rest is "working".
COLUMNS = {
    "params": ("params", "weights", "grads"),
    "kv": ("kv",),
    "kv_grad": ("kv_grad",),
    "stash": ("stash",),
}
WORKING = "working"
# Cells (a tick of a stage) of the longest table that is drawn whole.
_MOST_CELLS = 30_000
# What a step's seconds go to.
PARTS = (
    "attention",
    "linear",
    "states",
    "head",
    "communication",
    "sums",
    "overhead",
    "padding",
    "copies",
    "waits",
    "bubble",
    "update",
)


@dataclass(frozen=True, kw_only=True)
class StageFigures:
    """A device of one stage over one step.

    Args:
        stage: its number.
        hbm: bytes of device memory by column: parameters with gradients and optimizer, K/V, dK/dV, stash, working.
        hbm_bytes: all of it.
        host_bytes: bytes of host memory.
        forward_s: seconds in forward units.
        backward_s: seconds in backward units.
        head_s: seconds in head units.
        idle_s: seconds in which it computes nothing or waits for a slower stage.
        peak_chunks: most chunks whose stash it holds at once.
    """

    stage: int
    hbm: dict[str, int]
    hbm_bytes: int
    host_bytes: int
    forward_s: float
    backward_s: float
    head_s: float
    idle_s: float
    peak_chunks: int


@dataclass(frozen=True, kw_only=True)
class Figures:
    """A search's answer with everything that a report derives from it.

    Args:
        found: the answer.
        model: the model shape.
        cluster: the devices.
        costs: seconds of units.
        table: what pictures show of the chosen plan's schedule: all of it, or a step of fewer sequences.
        simulation: the run of what pictures show.
        stages: a device of each stage.
        parts: what the step's seconds go to, on the mean of the stages; they sum to the step.
        tokens_s: tokens a second of all devices.
        mfu: share of the datasheet's peak in causal model FLOPs, 0..1; None for a CPU, which has no such peak.
        link_busy_s: seconds for which the busiest device copies to its host, and back.
        stashed: bytes of each unit's stash on the device and on the host, in what pictures show.
        copies: the copies between device and host, in what pictures show.
        num_steps: the config's `train.steps`.
        stall_s: the config's `train.stall_s`.
        documents: how the documents of `data.source` lie in sequences; None where their lengths are not known.
        documents_step_s: seconds of a step of such sequences in the mean; 0 where the documents are not known.
        planned_for: what is to be said of the documents that the plan is for; empty: nothing.
        teams_gain: how many times as fast as packed rows teams make such a step; None: not worked out.
    """

    found: Found
    model: ModelConfig
    cluster: Cluster
    costs: CostModel
    table: Table
    simulation: Simulation
    stages: tuple[StageFigures, ...]
    parts: dict[str, float]
    tokens_s: float
    mfu: float | None
    link_busy_s: tuple[float, float]
    stashed: UnitBytes
    copies: tuple[UnitCopy, ...]
    num_steps: int
    stall_s: float | str = AUTO
    documents: Documents | None = None
    documents_step_s: float = 0.0
    planned_for: str = ""
    teams_gain: float | None = None

    @property
    def plan(self) -> Plan:
        return self.found.plan

    @property
    def num_devices(self) -> int:
        return self.plan.mesh.num_devices

    def copy_s(self, copy: UnitCopy) -> float:
        """Returns the seconds a copy keeps the link to the host busy."""
        return copy.size_bytes / self.cluster.host_link_bytes_s

    @property
    def sequences_left_out(self) -> int:
        """Sequences of a pipeline that pictures leave out."""
        return self.plan.sequences_per_pipeline - self.table.num_sequences


def figures_of(
    found: Found,
    config: Config,
    documents: Documents | None = None,
    planned_for: str = "",
    cluster: Cluster | None = None,
) -> Figures:
    """Derives a report's figures.

    Args:
        found: what the search found.
        config: the settings for which it searched.
        documents: how the documents of `data.source` lie in sequences, if their lengths are known.
        planned_for: see `Figures`.
        cluster: as for `make_plan`.
    """
    plan, outline = found.plan, found.plan.outline()
    costs, shape = costs_of(plan, config, cluster), shape_of_plan(plan, config, cluster)
    seconds_of = costs.of_chunks(outline.chunk_lengths)
    copies = tick_copies(outline, shape, plan.stash, costs)
    step = simulate(outline, seconds_of, *copies)
    table = drawn_table(plan)
    simulation = simulate(table, seconds_of, *tick_copies(table, shape, plan.stash, costs))
    stashed = unit_bytes(table, shape, plan.stash)
    step_s = plan.predicted.step_s
    tokens_s = plan.sequence_length * plan.sequences_per_pipeline * plan.mesh.data / step_s
    return Figures(
        found=found,
        model=config.model,
        cluster=costs.cluster,
        costs=costs,
        table=table,
        simulation=simulation,
        stages=tuple(_stages(found, outline, step, seconds_of)),
        parts=step_parts(outline, costs, step, step_s),
        tokens_s=tokens_s,
        mfu=_mfu(config.model, plan, tokens_s, costs.cluster),
        link_busy_s=_link_busy_s(outline, _copies(outline, shape, plan.stash), costs.cluster),
        stashed=stashed,
        copies=_copies(table, shape, plan.stash),
        num_steps=config.train.steps,
        stall_s=config.train.stall_s,
        documents=documents,
        documents_step_s=_documents_step_s(plan, config, documents, cluster) if documents else 0.0,
        planned_for=planned_for,
    )


def _documents_step_s(plan: Plan, config: Config, documents: Documents, cluster: Cluster | None) -> float:
    """Returns the seconds of a step of some documents, as the search has them where the plan is for these."""
    known_s = plan.predicted.documents_step_s
    return documents_step_s(plan, config, documents, cluster) if known_s is None else known_s


def _copies(table: Table, shape: MemoryShape, stash: StashPlan) -> tuple[UnitCopy, ...]:
    sizes, rebuilt = unit_bytes(table, shape, stash, moved=True), rebuilt_bytes(table, shape, stash)
    return tuple(host_copies(table, sizes, rebuilt, stash.kv) + waiting_copies(table, shape, stash))


def drawn_table(plan: Plan) -> Table:
    """Returns what a picture shows of a plan's schedule: all of it, or a step of fewer sequences where it is too long.

    The ticks that are left out are those of the sequences that are shown, over and over.
    """
    outline = plan.outline()
    if sum(outline.tick_rounds) * outline.num_stages <= _MOST_CELLS:
        return plan.table()
    return first_rounds(outline)


def hbm_columns(hbm: dict[str, int]) -> dict[str, int]:
    """Returns device memory summed by column of the stage table."""
    sums = {name: sum(hbm.get(holder, 0) for holder in holders) for name, holders in COLUMNS.items()}
    return {**sums, WORKING: sum(hbm.values()) - sum(sums.values())}


def step_parts(table: Table, costs: CostModel, simulation: Simulation, step_s: float) -> dict[str, float]:
    """Splits a step's seconds into what they go to, on the mean of the stages.

    A unit's seconds are peeled: what it takes less without padding is padding, then without scores attention, then
    without mixers with a state these, then without matmuls, norms and the like linear layers; what is left of its
    compute is adding up gradients.

    Args:
        table: the schedule, or its outline.
        costs: seconds of units.
        simulation: its run, with the copies to the host and the loops that wait for them.
        step_s: seconds of the step.

    Returns:
        Seconds by part, largest first; they sum to `step_s`.
    """
    layer, cluster, tick_s = costs.layer, costs.cluster, costs.cluster.device.overhead_s
    no_scores = without_scores(costs)
    no_states = replace(no_scores, states=None)
    products_alone = replace(cluster, device=replace(cluster.device, elementwise_efficiency=0.0))
    no_linear = replace(layer, linear_flops=0.0, expert_flops=0.0)
    no_matmuls = replace(no_states, layer=no_linear, experts=None, cluster=products_alone)
    starts = table.chunk_starts
    parts = dict.fromkeys(PARTS, 0.0)
    for (op, chunk, tick), count in _unit_counts(table).items():
        unit, share = (op, starts[chunk], table.chunk_lengths[chunk]), count / table.num_stages
        alone = TickShape(0, 0, tick.has_ends)
        peeled = (which.compute_s(*unit) for which in (costs, no_scores, no_states, no_matmuls))
        compute_s, without_scores_s, without_states_s, rest_s = peeled
        parts["padding"] += share * (costs.seconds(*unit, tick) - costs.seconds(*unit, alone))
        parts["communication"] += share * costs.transfer_s(*unit, alone)
        parts["overhead"] += share * tick_s
        if op == "H":
            parts["head"] += share * compute_s
            continue
        parts["attention"] += share * (compute_s - without_scores_s)
        parts["states"] += share * (without_scores_s - without_states_s)
        parts["linear"] += share * (without_states_s - rest_s)
        parts["sums"] += share * rest_s
    uncopied = simulate(table, costs.of_chunks(table.chunk_lengths))
    parts["waits"] = simulation.waits_s
    parts["copies"] = max(0.0, simulation.step_s - simulation.waits_s - uncopied.step_s)
    parts["bubble"] = uncopied.step_s - sum(uncopied.busy_s) / table.num_stages
    parts["update"] = step_s - simulation.step_s
    return dict(sorted(parts.items(), key=lambda item: -item[1]))


def _stages(
    found: Found, table: Table, simulation: Simulation, seconds: Callable[[Unit, TickShape], float]
) -> Iterable[StageFigures]:
    predicted, columns = found.plan.predicted, hbm_columns(found.memory.hbm)
    ticks = list(zip(table.ticks, table.tick_shapes, table.tick_rounds, strict=True))
    for stage in range(table.num_stages):
        ops = dict.fromkeys("FBH", 0.0)
        for tick, shape, rounds in ticks:
            unit = tick.units[stage]
            if unit is not None:
                ops[tick.op] += rounds * seconds(unit, shape)
        yield StageFigures(
            stage=stage,
            hbm=columns,
            hbm_bytes=predicted.hbm_bytes[stage],
            host_bytes=predicted.host_bytes[stage],
            forward_s=ops["F"],
            backward_s=ops["B"],
            head_s=ops["H"],
            idle_s=max(0.0, simulation.step_s - sum(ops.values())),
            peak_chunks=simulation.peak_in_flight[stage],
        )


def _unit_counts(table: Table) -> Counter[tuple[str, int, TickShape]]:
    """Returns how often each (op, chunk, shape of the tick) occurs, over all stages."""
    counts = Counter[tuple[str, int, TickShape]]()
    for tick, shape, rounds in zip(table.ticks, table.tick_shapes, table.tick_rounds, strict=True):
        for unit in tick.units:
            if unit is not None:
                counts[unit.op, unit.chunk, shape] += rounds
    return counts


def _link_busy_s(table: Table, copies: Iterable[UnitCopy], cluster: Cluster) -> tuple[float, float]:
    """Returns the seconds for which the busiest device copies to its host, and back."""
    ticks, rounds, moved = table.unit_ticks, table.tick_rounds, Counter[tuple[bool, int]]()
    for copy in copies:
        moved[copy.out, copy.stage] += copy.size_bytes * rounds[ticks[copy.unit]]
    out, back = (
        max((size for (goes_out, _), size in moved.items() if goes_out == way), default=0) for way in (True, False)
    )
    return out / cluster.host_link_bytes_s, back / cluster.host_link_bytes_s


def _mfu(model: ModelConfig, plan: Plan, tokens_s: float, cluster: Cluster) -> float | None:
    if cluster.device.platform == "cpu":
        return None
    peak = DEVICES[cluster.device.name].matmul_flops_s
    num_devices = plan.mesh.num_devices
    return tokens_s * flops_per_token(model, plan.sequence_length) / (num_devices * peak)
