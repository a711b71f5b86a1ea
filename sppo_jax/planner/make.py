"""From a config to a Plan: takes what is pinned, chooses the rest by closed forms, and says why."""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import sppo_jax
from sppo_jax.config import Config, ModelConfig
from sppo_jax.hardware import DEVICES, Cluster, Device, local_cluster, make_cluster, parse_cluster
from sppo_jax.planner import costs
from sppo_jax.planner.costs import CostModel, balance_weights
from sppo_jax.planner.lengths import check_length, equal_lengths, flops_balanced_lengths, given_lengths
from sppo_jax.planner.memory import Memory, Shape, predict_memory
from sppo_jax.planner.parallel import SequenceSplit, layers_per_virtual_stage, split_sequence
from sppo_jax.planner.plan import MODEL_FIELDS, MeshShape, Plan, Predicted, SchedulePlan
from sppo_jax.planner.stash import check_host_layers, choose_alpha, choose_places
from sppo_jax.schedule.check import check
from sppo_jax.schedule.csv_format import from_csv
from sppo_jax.schedule.registry import make_table
from sppo_jax.schedule.simulate import simulate
from sppo_jax.schedule.slots import kv_slots
from sppo_jax.schedule.table import Table
from sppo_jax.units import format_bytes

PINNABLE = ("hbm_bytes", "host_link_bytes_s", "link_bytes_s", "network_bytes_s", "matmul_flops_s")
_COMPUTE_BYTES = {"bfloat16": 2, "float32": 4, "float64": 8}
# Numbers of chunks worth considering: the largest, and how many even ones make uneven ones needless.
_MAX_COUNT, _ENOUGH_EVEN = 512, 4


@dataclass(frozen=True, kw_only=True)
class Request:
    """A config with what follows from it before anything is chosen.

    Args:
        config: the config.
        cluster: the devices.
        layers: layers of a virtual stage.
        interleave: virtual stages of a stage.
        split: sequence parallelism.
        compute_bytes: bytes of an activation.
        table: the table given by hand, and its text, if any.
    """

    config: Config
    cluster: Cluster
    layers: int
    interleave: int
    split: SequenceSplit
    compute_bytes: int
    table: tuple[Table, str] | None


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What a planner decides: the chunks and the schedule, with reasons. `evaluate` makes it a Plan."""

    chunk_lengths: tuple[int, ...]
    schedule: SchedulePlan
    reasons: dict[str, str]


def make_plan(config: Config, cluster: Cluster | None = None) -> Plan:
    """Decides everything static about a training step.

    Args:
        config: the settings; what is "auto" is chosen.
        cluster: the devices; None: `hardware.cluster`, `train.devices` if simulated, else those of this machine.

    Raises:
        ValueError: the settings do not fit together; says the rule, what was got and what to change.
    """
    request = read_request(config, cluster)
    least: tuple[Plan, Memory] | None = None
    for choice in candidates(request):
        plan, memory = evaluate(request, choice)
        if memory.fits(request.cluster):
            return plan
        if least is None or memory.hbm_bytes < least[1].hbm_bytes:
            least = plan, memory
    assert least is not None
    warnings.warn(
        f"no plan fits: the smallest takes {format_bytes(least[1].hbm_bytes)} of device memory and "
        f"{format_bytes(least[1].host)} of host memory, got {format_bytes(request.cluster.device.hbm_bytes)} and "
        f"{format_bytes(request.cluster.device_host_bytes)} a device; raise mesh.pipe or mesh.seq, "
        "or send more to the host",
        stacklevel=2,
    )
    return least[0]


def read_request(config: Config, cluster: Cluster | None = None) -> Request:
    """Resolves cluster, layers, sequence parallelism and a table given by hand; arguments as `make_plan`."""
    cluster = resolve_cluster(config, cluster)
    table = _read_table(config) if config.schedule.table is not None else None
    interleave = table[0].num_groups if table else config.schedule.interleave
    dtype = config.model.compute_dtype
    return Request(
        config=config,
        cluster=cluster,
        layers=layers_per_virtual_stage(config.model.num_layers, config.mesh.pipe, interleave),
        interleave=interleave,
        split=split_sequence(config.model, config.sequence, config.mesh.seq),
        compute_bytes=_COMPUTE_BYTES.get(dtype, cluster.device.compute_bytes),
        table=table,
    )


def resolve_cluster(config: Config, cluster: Cluster | None = None) -> Cluster:
    """Returns the devices to plan for, with the figures that the `hardware` group pins."""
    settings, devices = config.hardware, config.mesh.num_devices
    if cluster is None:
        cluster = parse_cluster(settings.cluster) if settings.cluster else None
    if cluster is None:
        cluster = make_cluster(DEVICES["cpu"], devices) if config.train.num_simulated_devices else local_cluster()
    pinned = {name: getattr(settings, name) for name in PINNABLE if getattr(settings, name) != "auto"}
    if "matmul_flops_s" in pinned:
        # A figure the user gives is what the device reaches, not its datasheet's peak.
        pinned.update(matmul_efficiency=1.0, attention_efficiency=1.0)
    host_bytes = cluster.host_bytes if settings.host_bytes == "auto" else int(settings.host_bytes)
    return replace(cluster, device=replace(cluster.device, **pinned), host_bytes=host_bytes)


def candidates(request: Request) -> Iterator[Choice]:
    """Yields the chunks and schedules to consider, best first, memory left aside.

    Where the number of chunks is free they are ordered by the closed form of the step's time: with P stages of v
    groups and M sequences of chunks that cost c_i, `M sum(c_i) + (P - 1) / v max(c_i)`, which for equal costs is
    `(P - 1 + N) / N F(N)`; SPPO's order drains the pipeline after each sequence, so there the second term comes M
    times. F(N) grows with N by what each tick costs whatever its length.
    """
    config = request.config
    if request.table is not None:
        yield _table_choice(request, *request.table)
        return
    chunks = config.sequence.chunks
    if isinstance(chunks, tuple):
        yield _choice(request, given_lengths(config.sequence.length, chunks, config.mesh.seq), "as requested")
        return
    if chunks != "auto":
        yield _choice(request, _lengths(request, int(chunks)), f"{chunks} as requested, {_balance(request)}")
        return
    counts = _counts(request)
    why = (
        f"of {len(counts)} counts up to {counts[-1]} (chunks of at least {_smallest_chunk(request)} tokens), "
        f"the one with the shortest step that fits; {_balance(request)}"
    )
    counts.sort(key=lambda count: _step_estimate(request, count))
    for count in counts:
        yield _choice(request, _lengths(request, count), why)


def evaluate(request: Request, choice: Choice) -> tuple[Plan, Memory]:
    """Fills in the stash, the predictions and the reasons of a choice.

    Returns:
        The plan and its memory, by what holds it.

    Raises:
        ValueError: the choice breaks a rule.
    """
    config, cluster = request.config, request.cluster
    mesh = config.mesh
    table = request.table[0] if request.table else _make_table(request, choice)
    shape = Shape(
        model=config.model,
        layers=request.layers,
        seq=mesh.seq,
        ulysses=request.split.ulysses,
        compute_bytes=request.compute_bytes,
    )
    stash = choose_places(config.stash, table, request.layers)
    recompute_linear, recompute_attention = stash.stash.rest == "recompute", stash.stash.attention == "recompute"
    costs = cost_model(request, recompute_linear=recompute_linear, recompute_attention=recompute_attention)
    stash = choose_alpha(stash, config.stash.alpha, table, shape, costs)
    check_host_layers(stash.stash, request.layers)
    simulation = simulate(table, costs.of_table(choice.chunk_lengths))
    memory = predict_memory(table, shape, stash.stash)
    plan = Plan(
        version=sppo_jax.__version__,
        mesh=MeshShape(data=mesh.data, pipe=mesh.pipe, seq=mesh.seq),
        ulysses=request.split.ulysses,
        ring=request.split.ring,
        sequence_kind=request.split.kind,
        sequence_length=config.sequence.length,
        sequences_per_pipeline=config.sequence.per_pipeline,
        chunk_lengths=choice.chunk_lengths,
        schedule=choice.schedule,
        stash=stash.stash,
        kv_slots=kv_slots(table)[0],
        predicted=Predicted(
            step_s=simulation.step_s,
            bubble_fraction=simulation.bubble_fraction,
            hbm_bytes=(memory.hbm_bytes,) * mesh.pipe,
            host_bytes=(memory.host,) * mesh.pipe,
        ),
        ring_pass=config.sequence.ring_pass,
        kernel=choose_kernel(config.model, cluster.device, request.compute_bytes),
        model={name: getattr(config.model, name) for name in MODEL_FIELDS},
        reasons={
            "mesh": f"as requested, on {cluster.name}",
            "sequence_kind": request.split.reason,
            **choice.reasons,
            **stash.reasons,
            "kv_grad_dtype": "as requested" if config.stash.kv_grad_dtype != "auto" else "sums over many chunks",
            **_memory_reasons(memory, cluster),
        },
    )
    return plan, memory


def cost_model(request: Request, *, recompute_linear: bool = True, recompute_attention: bool = False) -> CostModel:
    """Returns the seconds of units for a request."""
    mesh = request.config.mesh
    return costs.cost_model(
        request.config.model,
        cluster=request.cluster,
        mesh=MeshShape(data=mesh.data, pipe=mesh.pipe, seq=mesh.seq),
        ulysses=request.split.ulysses,
        ring=request.split.ring,
        layers=request.layers,
        compute_bytes=request.compute_bytes,
        recompute_linear=recompute_linear,
        recompute_attention=recompute_attention,
    )


def choose_kernel(model: ModelConfig, device: Device, compute_bytes: int) -> str:
    """Returns the attention kernel: what the device runs best, where it takes the model's dtype and heads.

    Raises:
        ValueError: a kernel is asked for that does not take them.
    """
    possible = compute_bytes == 2 and model.head_dim % 8 == 0 and model.head_dim <= 128
    if model.kernel == "cudnn" and not (possible and device.platform == "gpu"):
        raise ValueError(
            f"model.kernel=cudnn needs a GPU, bfloat16 and heads of a multiple of 8 up to 128, got {device.name}, "
            f"{compute_bytes} bytes an element and model.head_dim={model.head_dim}: use model.kernel=blockwise"
        )
    if model.kernel != "auto":
        return model.kernel
    return device.kernel if possible else "blockwise"


def _read_table(config: Config) -> tuple[Table, str]:
    path = Path(config.schedule.table or "")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"schedule.table must be a readable CSV file, got {path} ({type(error).__name__})") from None
    try:
        table = from_csv(text)
        check(table)
    except ValueError as error:
        raise ValueError(f"schedule.table: {error}; mend {config.schedule.table}") from None
    chunks = config.sequence.chunks
    for what, key, got, wanted in (
        ("stages", "mesh.pipe", table.num_stages, config.mesh.pipe),
        ("sequences", "sequence.per_pipeline", table.num_sequences, config.sequence.per_pipeline),
        ("tokens", "sequence.length", sum(table.chunk_lengths), config.sequence.length),
    ):
        if got != wanted:
            raise ValueError(f"schedule.table and the config must agree in {what}, got {got} and {key}={wanted}")
    if chunks not in ("auto", table.num_chunks, table.chunk_lengths):
        raise ValueError(
            f"schedule.table brings its chunks, got {list(table.chunk_lengths)} and sequence.chunks={chunks}: "
            "leave sequence.chunks auto"
        )
    if config.schedule.interleave not in (1, table.num_groups):
        raise ValueError(
            f"schedule.table has {table.num_groups} virtual stages a stage, got "
            f"schedule.interleave={config.schedule.interleave}: leave it out"
        )
    return table, text


def _table_choice(request: Request, table: Table, text: str) -> Choice:
    lengths = given_lengths(request.config.sequence.length, table.chunk_lengths, request.config.mesh.seq)
    schedule = SchedulePlan(name="table", interleave=table.num_groups, csv=text)
    return Choice(
        chunk_lengths=lengths,
        schedule=schedule,
        reasons={"chunks": "of the given table", "schedule": f"{table.name}, from {request.config.schedule.table}"},
    )


def _choice(request: Request, lengths: tuple[int, ...], why: str) -> Choice:
    name, reason = _schedule_name(request, len(lengths))
    schedule = SchedulePlan(name=name, interleave=request.interleave)
    return Choice(chunk_lengths=lengths, schedule=schedule, reasons={"chunks": why, "schedule": reason})


def _schedule_name(request: Request, num_chunks: int) -> tuple[str, str]:
    config = request.config
    if config.schedule.name != "auto":
        return config.schedule.name, "as requested"
    several = config.sequence.per_pipeline > 1
    plain = "1f1b" if num_chunks == 1 else "seq1f1b" if several else "sppo"
    reason = {
        "1f1b": "sequences are not cut",
        "seq1f1b": "several sequences a pipeline overlap, so the pipeline fills and drains once",
        "sppo": "one sequence a pipeline goes forward over its chunks and back",
    }[plain]
    if request.interleave > 1 and plain != "sppo":
        return f"interleaved-{plain}", f"{reason}; {request.interleave} virtual stages a stage"
    return plain, reason


def _make_table(request: Request, choice: Choice) -> Table:
    return make_table(
        choice.schedule.name,
        request.config.mesh.pipe,
        request.config.sequence.per_pipeline,
        choice.chunk_lengths,
        choice.schedule.interleave,
    )


def _multiple(request: Request) -> int:
    return request.config.mesh.seq * request.cluster.device.tile


def _smallest_chunk(request: Request) -> int:
    return max(request.cluster.device.smallest_chunk, _multiple(request))


def _counts(request: Request) -> list[int]:
    """Returns the numbers of chunks to consider, from 1 up.

    Equal chunks have one length, which compiles least, so those that divide the sequence evenly are preferred.
    """
    length, multiple, config = request.config.sequence.length, _multiple(request), request.config
    check_length(length, multiple)
    units = length // multiple
    counts = range(1, min(_MAX_COUNT, max(1, length // _smallest_chunk(request))) + 1)
    if config.schedule.name in ("1f1b", "interleaved-1f1b"):
        counts = range(1, 2)
    elif request.interleave > 1:
        # Chunks travel in groups of one a stage; a shorter sequence than that is cut as little as possible.
        pipe = config.mesh.pipe
        counts = range(pipe, max(counts[-1] // pipe * pipe, pipe) + 1, pipe)
    even = [count for count in counts if units % count == 0]
    if len(even) >= min(_ENOUGH_EVEN, len(counts)):
        return even
    step = max(1, len(counts) // 32)
    return list(counts)[::step]


def _lengths(request: Request, count: int) -> tuple[int, ...]:
    length, multiple = request.config.sequence.length, _multiple(request)
    if request.config.sequence.balance == "equal":
        return equal_lengths(length, count, multiple)
    pair_flops, token_flops = balance_weights(request.config.model)
    return flops_balanced_lengths(length, count, multiple, pair_flops=pair_flops, token_flops=token_flops)


def _balance(request: Request) -> str:
    return "of equal length" if request.config.sequence.balance == "equal" else "of about equal FLOPs"


def _step_estimate(request: Request, count: int) -> float:
    config, costs = request.config, cost_model(request)
    sequences, pipe, interleave = config.sequence.per_pipeline, config.mesh.pipe, request.interleave
    start, chunk_s, head_s = 0, [], 0.0
    for tokens in equal_lengths(config.sequence.length, count, _multiple(request)):
        chunk_s.append(interleave * costs.chunk_seconds(start, tokens))
        head_s += costs.seconds("H", start, tokens)
        start += tokens
    longest = max(chunk_s) if config.sequence.balance == "equal" else sum(chunk_s) / count
    drains = sequences if _schedule_name(request, count)[0] == "sppo" else 1
    return sequences * (sum(chunk_s) + head_s) + drains * (pipe - 1) / interleave * longest


def _memory_reasons(memory: Memory, cluster: Cluster) -> dict[str, str]:
    fits = "fits" if memory.fits(cluster) else "DOES NOT FIT"
    return {
        "hbm": f"{fits} in {format_bytes(cluster.device.hbm_bytes)}: {memory.describe()}",
        "host": f"of {format_bytes(cluster.device_host_bytes)} a device",
    }
