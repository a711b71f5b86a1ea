"""The plan of an evaluation: forwards and heads alone, on any devices that hold weights, keys and values.

What trains on many devices is evaluated on few: there are no gradients, no moments of the optimizer and no stash. A
plan of an evaluation is a Plan, so the program that evaluates takes it like any other. Its places of activations say
nothing, its seconds and bytes are those of a batch of forwards, and each pipeline has one row of the batch.
"""

import heapq
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from sppo_jax.config import Config, MeshConfig, SequenceConfig
from sppo_jax.config.sections import ScheduleConfig, StashConfig
from sppo_jax.files.format_bytes import format_bytes
from sppo_jax.hardware import Cluster, usable_bytes
from sppo_jax.plan.parts import StashPlan
from sppo_jax.plan.plan import Plan
from sppo_jax.predict.forward import predict_forward_memory, weight_holders
from sppo_jax.predict.memory import Memory
from sppo_jax.predict.seconds.costs import CostModel
from sppo_jax.predict.seconds.forward import forward_seconds, gather_s, head_s
from sppo_jax.predict.seconds.simulate import simulate
from sppo_jax.rules import BREADTH_FIRST, divisors
from sppo_jax.schedule.table import TickShape, chunk_starts
from sppo_jax.search.evaluate import Outcome, costs_of, outline_of, plan_of
from sppo_jax.search.space.layouts import Layout, find_layouts, layouts
from sppo_jax.search.space.partitions import Candidate, Partition, chunk_counts
from sppo_jax.search.space.request import USUAL, Request, Way, read_request, resolve_cluster

# One sequence at a time with all layers at once, or group by group with weights gathered or resident.
_WAYS = (Way(schedule="sppo"), USUAL, replace(USUAL, weights="resident"))
_KEPT = ("keep", "keep", "keep")
# The most tokens of a chunk on one device; longer chunks are no faster, and compilers take more memory for them.
_MOST_TOKENS = 32768
# Of counts of chunks at least so many times as many are tried next, up to so many.
_STEP, _MOST_CHUNKS = 1.9, 64
# Plans of which one takes at most this share longer tie; of these the simplest is chosen.
_TIE = 0.005
# Where none fits, so many with the least weights are worked out.
_SMALLEST_TRIED = 64


@dataclass(frozen=True, kw_only=True)
class EvaluationPlan:
    """What a search for the plan of an evaluation found.

    Args:
        plan: of the plans that fit, the simplest one that ties with the fastest; where none fits, the smallest.
        memory: its bytes a device, by what holds them.
        fits: whether it fits.
        num_wanted: rows to evaluate.
        considered: plans considered.
        seconds: seconds the search took.
        problem: empty if it fits; else by how much it does not, what takes the memory, and what to change.
    """

    plan: Plan
    memory: Memory
    fits: bool
    num_wanted: int
    considered: int
    seconds: float
    problem: str

    @property
    def num_batches(self) -> int:
        """Batches that hold all rows."""
        return -(-self.num_wanted // self.plan.num_sequences)

    @property
    def evaluation_s(self) -> float:
        """Predicted seconds of all rows, without compiling and reading."""
        return self.num_batches * self.plan.predicted.step_s


def for_evaluation(config: Config, mesh: MeshConfig | None = None) -> Config:
    """Returns a config without what only training steps have: how they share the work, and their sequences.

    Args:
        config: of a training run.
        mesh: axes to pin; None: none, because the devices of an evaluation may be others than those of the run.
    """
    return replace(
        config,
        planner="search",
        mesh=mesh or MeshConfig(),
        sequence=SequenceConfig(length=config.sequence.length),
        schedule=ScheduleConfig(),
        stash=StashConfig(),
        optimizer=replace(config.optimizer, place="device"),
    )


def plan_evaluation(config: Config, cluster: Cluster | None = None, num_wanted: int = 1) -> EvaluationPlan:
    """Searches the shortest simulated evaluation that fits.

    Args:
        config: from `for_evaluation`; model, `sequence.length` and pinned axes of the mesh count.
        cluster: the devices; None: `hardware.cluster`, `train.devices` if simulated, else those of this machine.
        num_wanted: rows to evaluate; a batch has a row a pipeline, so more rows may share the devices better.

    Raises:
        ValueError: no mesh of these devices suits the model and the length.
    """
    start_s = time.perf_counter()
    cluster = resolve_cluster(config, cluster)
    candidates = list(_candidates(config, cluster))
    if not candidates:
        layouts(read_request(_of_rows(config, 1), cluster))  # says why there is none
        raise ValueError(
            f"an evaluation must have a mesh of the {cluster.num_devices} devices of {cluster.name} for "
            f"sequence.length={config.sequence.length}, got none; change sequence.length or the devices"
        )
    found = _fastest(candidates, cluster, num_wanted)
    chosen, fits = found or _smallest(candidates), found is not None
    plan = plan_of(chosen, {"schedule": "an evaluation: forwards and heads alone"})
    told = ("schedule", "hbm", *["hardware"] * cluster.device.assumed)
    reasons = {name: reason for name, reason in plan.reasons.items() if name in told}
    return EvaluationPlan(
        plan=replace(plan, reasons=reasons),
        memory=chosen.memory,
        fits=fits,
        num_wanted=num_wanted,
        considered=len(candidates),
        seconds=time.perf_counter() - start_s,
        problem="" if fits else _problem(chosen, cluster),
    )


def forward_batch_s(plan: Plan, config: Config, cluster: Cluster | None = None) -> float:
    """Returns the predicted seconds of a batch that a plan evaluates, be it one of an evaluation or of a training step.

    Args:
        plan: the plan.
        config: the model, as for `plan_evaluation`.
        cluster: the devices, as for `plan_evaluation`.
    """
    costs, table = costs_of(plan, for_evaluation(config), cluster), plan.outline()
    waves = plan.sequences_per_pipeline // plan.schedule.wave if plan.weights == "gathered" else 1
    return simulate(table, forward_seconds(costs, table.chunk_lengths)).step_s + waves * gather_s(costs)


class _Bounded(NamedTuple):
    """A candidate, and the seconds of all wanted rows: no evaluation of them takes less."""

    least_s: float
    candidate: Candidate

    @property
    def complexity(self) -> tuple[int, int, int]:
        """Of two candidates that tie the lower is simpler; fewer rows a batch leave less to pad."""
        mechanisms, chunks = self.candidate.complexity
        return mechanisms, self.candidate.layout.mesh.data, chunks


def _bounded(candidate: Candidate, num_wanted: int) -> _Bounded:
    costs = candidate.layout.costs(_KEPT, candidate.kv)
    batch_s = _least_ticks_s(candidate, costs) + gather_s(costs)
    return _Bounded(_batches(candidate.layout, num_wanted) * batch_s, candidate)


def _batches(layout: Layout, num_wanted: int) -> int:
    return -(-num_wanted // layout.mesh.data)


def _candidates(config: Config, cluster: Cluster) -> Iterator[Candidate]:
    """Yields the candidates of all meshes, each pipeline with one row."""
    asked = config.mesh.pinned.get("data")
    total = math.prod(config.mesh.pinned.values()) if len(config.mesh.pinned) == 3 else cluster.num_devices
    for num_rows in (asked,) if asked else divisors(total):
        request = read_request(_of_rows(config, num_rows), cluster)
        for way in _WAYS:
            if config.mesh.weights not in ("auto", way.weights if way.schedule == BREADTH_FIRST else "resident"):
                continue
            for layout in _layouts(replace(request, way=way)):
                if (layout.interleave > 1) == (way.schedule == BREADTH_FIRST):
                    yield from _of_layout(layout)


def _layouts(request: Request) -> list[Layout]:
    try:
        return find_layouts(request)[0]
    except ValueError:
        return []


def _of_layout(layout: Layout) -> Iterator[Candidate]:
    model, length = layout.request.config.model, layout.request.config.sequence.length
    possible = chunk_counts(layout)
    if layout.weights == "gathered" and len(possible) > 1:
        # In the ticks of a lone chunk XLA holds the gathered weights of two groups, so compiled.
        possible = [count for count in possible if count > 1]
    for count in _counts(possible, length // layout.mesh.seq):
        partition = Partition(
            layout=layout, schedule=layout.request.way.schedule, num_chunks=count, balance="equal", wave=1
        )
        # Layers with a window have the keys and values of a tail where a step would make them again.
        tails = partition.is_breadth_first and count > 1 and any(k.window_within(length) for k in model.attention_types)
        yield Candidate(partition, _KEPT, 0.0, "float32", "rebuild" if tails else "keep")


def _counts(possible: list[int], tokens: int) -> Iterator[int]:
    """Yields the numbers of chunks to consider of a row of so many tokens on a device."""
    last = 0
    for count in possible:
        too_long = tokens > count * _MOST_TOKENS and count != possible[-1]
        if not too_long and (not last or _STEP * last <= count <= _MOST_CHUNKS):
            last = count
            yield count


def _of_rows(config: Config, num_rows: int) -> Config:
    """Returns the config of an evaluation whose batches have so many rows, each of a pipeline of its own."""
    mesh, sequence = replace(config.mesh, data=num_rows), replace(config.sequence, per_step=num_rows)
    return replace(config, mesh=mesh, sequence=sequence)


def _least_ticks_s(candidate: Candidate, costs: CostModel) -> float:
    """Returns the least seconds of the ticks of a batch, as if none met the vocabulary or waited for a longer chunk.

    Each chunk passes each group of layers, then its head. The last stage waits for the first chunk.
    """
    partition, layout = candidate.partition, candidate.layout
    lengths, behind = partition.chunk_lengths, layout.mesh.pipe - 1
    without_ends, chunks = TickShape(0, 0, has_ends=False), zip(chunk_starts(lengths), lengths, strict=False)
    forwards = [costs.seconds("F", start, tokens, without_ends) for start, tokens in chunks]
    passes = layout.interleave * sum(forwards) + behind * min(forwards)
    return passes + len(lengths) * head_s(costs, min(lengths))


def _fastest(candidates: list[Candidate], cluster: Cluster, num_wanted: int) -> Outcome | None:
    """Returns the simplest plan that ties with the fastest one that fits; None if none fits.

    Args:
        candidates: all.
        cluster: the devices.
        num_wanted: rows to evaluate.
    """
    most, best_s = usable_bytes(cluster), math.inf
    fitting: list[tuple[float, _Bounded, Outcome]] = []
    possible = [_bounded(one, num_wanted) for one in candidates if _least_bytes(one.layout) <= most]
    for one in sorted(possible, key=lambda one: one.least_s):
        if one.least_s > best_s * (1 + _TIE):
            break
        outcome = _outcome(one.candidate)
        if outcome.memory.hbm_bytes <= most:
            seconds = _batches(one.candidate.layout, num_wanted) * outcome.least_s
            fitting.append((seconds, one, outcome))
            best_s = min(best_s, seconds)
    ties = [(one.complexity, seconds, outcome) for seconds, one, outcome in fitting if seconds <= best_s * (1 + _TIE)]
    return min(ties, key=lambda tie: tie[:2])[2] if ties else None


def _smallest(candidates: list[Candidate]) -> Outcome:
    """Returns the plan with the least memory, of those with the least weights."""
    tried = heapq.nsmallest(_SMALLEST_TRIED, candidates, key=lambda one: _least_bytes(one.layout))
    return min(map(_outcome, tried), key=lambda one: one.memory.hbm_bytes)


@lru_cache(maxsize=4096)
def _least_bytes(layout: Layout) -> int:
    """Returns the bytes of parameters and working weights of a device."""
    sizes = layout.interleave, layout.mesh.pipe
    return sum(int(holder.size_bytes) for holder in weight_holders(layout.shape, *sizes))


def _outcome(candidate: Candidate) -> Outcome:
    """Returns a candidate with the memory and the seconds of a batch of forwards."""
    table, layout = outline_of(candidate), candidate.layout
    places = StashPlan(
        inputs="keep",
        attention="keep",
        rest="keep",
        alpha=(0.0,) * len(table.diagonal_bundles),
        kv=candidate.kv,
    )
    costs = layout.costs(_KEPT, candidate.kv)
    simulation = simulate(table, forward_seconds(costs, table.chunk_lengths))
    return Outcome(
        candidate=candidate,
        stash=places,
        alpha_reason="",
        memory=predict_forward_memory(table, layout.shape, places),
        all_away=False,
        simulation=simulation,
        least_s=simulation.step_s + gather_s(costs),
    )


def _problem(smallest: Outcome, cluster: Cluster) -> str:
    over, memory = smallest.memory.hbm_bytes - usable_bytes(cluster), smallest.memory
    return (
        f"the smallest evaluation must fit in {format_bytes(usable_bytes(cluster))} of a device, got "
        f"{format_bytes(memory.hbm_bytes)}, {format_bytes(over)} too much ({memory.describe()}); use more devices "
        "(--cluster) or a shorter sequence.length"
    )
