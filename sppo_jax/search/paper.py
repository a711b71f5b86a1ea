"""The heuristic of the SPPO paper (arXiv 2503.10377, sections 4 and 5), for comparison with the search.

The heuristic chooses the mesh and the number of chunks N that minimise `(p - 1 + N) / N F(N)`, where F(N) is the time
of all chunks, forward and backward, on one of p stages. Three rules limit the choice. Sequence parallelism stays inside
a host. A pipeline stays inside a host if it can. A chunk has 2K to 16K tokens; the paper means the tokens of one device
and layer, but its own settings keep this rule only for the chunk before sequence parallelism. Chunks have equal FLOPs,
nothing is recomputed, and the share `alpha_i = min(1, bandwidth T_i / A_i)` of a chunk's activations goes to the host.

A Plan cannot express two parts of the paper. A Plan's alpha divides layer inputs and attention outputs alone; the other
activations of a layer have one place for all tokens. And a Plan has no multiplexed partitioning of the first and last
chunks. If the paper's choice does not fit, the other activations are recomputed, and dK and dV are summed in bfloat16.
"""

from collections.abc import Iterator
from dataclasses import replace

from sppo_jax.search.because import Because
from sppo_jax.search.bounds.least_seconds import UnitTimes
from sppo_jax.search.evaluate import Outcome, evaluate
from sppo_jax.search.explain import float32_reason, schedule_reason, split_reason
from sppo_jax.search.space.layouts import Layout, layouts
from sppo_jax.search.space.offload import Places, place_options
from sppo_jax.search.space.partitions import Candidate, Partition, chunk_counts, longest_chunks, schedules, waves
from sppo_jax.search.space.request import Request

_MIN_CHUNK, _MAX_CHUNK = 2048, 16384
# In the order of the paper's preference: recompute only where nothing else fits.
_PLACES: tuple[Places, ...] = (("host", "host", "host"), ("host", "host", "keep"), ("host", "host", "recompute"))
# How many of the best meshes and counts are tried until one fits.
_MOST_TRIED = 8


def paper_outcome(request: Request) -> tuple[Outcome, dict[str, str], int]:
    """Returns the choice of the paper's rules, its reasons, and the number of meshes and counts that were ranked.

    If no choice fits, the result is the choice that is least too large.

    Raises:
        ValueError: the settings do not fit together.
    """
    request = _without_waves(request)
    ranked = _ranked(request)
    tried: list[Outcome] = []
    errors: list[ValueError] = []
    for partition in ranked[:_MOST_TRIED]:
        try:
            fitting = _first_that_fits(request, partition, tried)
        except ValueError as error:
            errors.append(error)
            continue
        if fitting is not None:
            return fitting, _reasons(fitting, len(ranked)), len(ranked)
    if not tried:
        raise errors[0]
    least = min(tried, key=lambda outcome: outcome.memory.excess(request.cluster))
    return least, _reasons(least, len(ranked)), len(ranked)


def _without_waves(request: Request) -> Request:
    """Returns the request with waves of one sequence, as in the paper, where the config leaves the wave open."""
    config = request.config
    if config.schedule.wave != "auto":
        return request
    return replace(request, config=replace(config, schedule=replace(config.schedule, wave=1)))


def _ranked(request: Request) -> list[Partition]:
    """Returns the partitions that the rules allow; the one with the shortest step by the paper's formula is first."""
    times = UnitTimes()
    found = [
        (partition, _formula_s(times, partition))
        for layout in _allowed(layouts(request), request)
        for partition in _partitions(request, layout)
    ]
    return [partition for partition, _ in sorted(found, key=lambda item: item[1])]


def _allowed(every: list[Layout], request: Request) -> list[Layout]:
    """Returns the layouts that the rules on hosts allow; a rule that would allow no layout is dropped."""
    host = request.cluster.num_linked
    plain = [layout for layout in every if layout.interleave == min(other.interleave for other in every)]
    # Each mesh keeps one split of sequences: the first one, which exchanges the fewest bytes.
    first: dict[object, Layout] = {}
    for layout in plain:
        first.setdefault(layout.mesh, layout)
    inside = [layout for layout in first.values() if layout.mesh.seq <= host]
    if not inside:
        least = min(layout.mesh.seq for layout in first.values())
        inside = [layout for layout in first.values() if layout.mesh.seq == least]
    whole = [layout for layout in inside if layout.mesh.seq * layout.mesh.pipe <= host]
    shortest = min(layout.mesh.pipe for layout in inside)
    return whole or [layout for layout in inside if layout.mesh.pipe == shortest]


def _partitions(request: Request, layout: Layout) -> Iterator[Partition]:
    sequence, table = request.config.sequence, request.table
    if table is not None or isinstance(sequence.chunks, tuple):
        chunks = table[0].chunk_lengths if table is not None else sequence.chunks
        counts, balance = [len(chunks)], "given"  # type: ignore[arg-type]
    elif sequence.chunks != "auto":
        counts, balance = [int(sequence.chunks)], sequence.asked_balance
    else:
        counts, balance = chunk_counts(layout), sequence.asked_balance
        within = [count for count in counts if _MIN_CHUNK <= sequence.length / count <= _MAX_CHUNK]
        counts = within or counts[-1:]
    for count in counts:
        schedule = schedules(layout, count)[0]
        yield Partition(
            layout=layout,
            schedule=schedule,
            num_chunks=count,
            balance="flops" if balance == "auto" else balance,
            wave=waves(layout, schedule, count)[0],
            longest=longest_chunks(request)[0] if balance == "cost" else 0.0,
        )


def _formula_s(times: UnitTimes, partition: Partition) -> float:
    """Returns `(p - 1 + N) / N F(N)` for one sequence; with several, the pipeline fills once."""
    layout, work_s = partition.layout, 0.0
    for op in "FB":
        with_ends, between = times.of_chunks(layout, _PLACES[0], op, partition.padded_chunks)
        work_s += layout.sequences * (sum(with_ends) + (layout.interleave - 1) * sum(between))
    return work_s * (1 + (layout.mesh.pipe - 1) / (partition.num_chunks * layout.sequences))


def _first_that_fits(request: Request, partition: Partition, tried: list[Outcome]) -> Outcome | None:
    asked = request.config.stash
    options = place_options(request.config)
    places = [option for option in _PLACES if option in options] or options
    dtypes = ("float32", "bfloat16") if asked.kv_grad_dtype == "auto" else (asked.kv_grad_dtype,)
    for dtype in dtypes:
        fitting = []
        for option in places:
            candidate = Candidate(
                partition=partition,
                places=option,
                alpha="hidden" if asked.alpha == "auto" else asked.alpha,
                kv_grad_dtype=dtype,
                # The paper keeps keys and values on the device.
                kv="keep" if asked.kv == "auto" else asked.kv,
            )
            tried.append(evaluate(candidate))
            if tried[-1].memory.fits(request.cluster):
                fitting.append(tried[-1])
        if fitting:
            # If some copies outlast the compute, alpha is below 1, and the rest stays on the device as in the paper.
            return min(fitting, key=lambda outcome: outcome.step_s)
    return None


def _reasons(outcome: Outcome, num_ranked: int) -> dict[str, str]:
    candidate, request = outcome.candidate, outcome.candidate.layout.request
    places = Because.PAPER_KEEPS()
    if candidate.places[2] == "recompute":
        places = Because.PAPER_RECOMPUTES()
    if candidate.places not in _PLACES:
        places = Because.PAPER_OTHER()
    return {
        "planner": Because.PAPER(),
        "mesh": Because.PAPER_MESH(count=num_ranked, cluster=request.cluster.name),
        "sequence_kind": split_reason(candidate.layout),
        "chunks": Because.PAPER_CHUNKS(),
        "schedule": schedule_reason(candidate.partition),
        "stash": places,
        **({"waiting": Because.ASKED()} if request.way.waiting == "host" else {}),
        "kv_grad_dtype": float32_reason(candidate) if candidate.kv_grad_dtype == "float32" else Because.NARROW(),
    }
