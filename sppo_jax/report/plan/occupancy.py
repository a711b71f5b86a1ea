"""The memory that a device has in use and the copies between device and host, tick by tick."""

from dataclasses import dataclass

from sppo_jax.plan.parts import StashPlan
from sppo_jax.predict import waiting
from sppo_jax.predict.memory import Memory
from sppo_jax.predict.shape import MemoryShape
from sppo_jax.predict.stash_bytes import refetch_bytes, token_bytes
from sppo_jax.program.host_rows import refetching_tick
from sppo_jax.program.stash import merged_classes, slot_bytes, stash_classes
from sppo_jax.schedule.table import Table, Unit

UnitKey = tuple[int, int, int]  # sequence, chunk, virtual stage
# Bytes that a device stashes for each unit: in its own memory, and on the host.
UnitBytes = dict[UnitKey, tuple[int, int]]


@dataclass(frozen=True, kw_only=True)
class UnitCopy:
    """One unit's activations, or its input, on their way to the host or back.

    Args:
        tick: the tick with which the copy starts, and which runs beside the copy.
        stage: the stage.
        out: whether the copy goes to the host.
        size_bytes: bytes that a device copies.
        unit: the forward unit that wrote the activations, or the backward unit that reads them; a forward unit whose
            layer inputs come back is one whose keys and values are made again. Of a chunk that waits between two groups
            of layers, the unit that reads the chunk.
    """

    tick: int
    stage: int
    out: bool
    size_bytes: int
    unit: Unit


@dataclass(frozen=True, kw_only=True)
class Occupancy:
    """Bytes that a device of one stage has in use during each tick.

    Args:
        stage: the stage.
        fixed: bytes that are always in use.
        kv: bytes of keys and values.
        kv_grad: bytes of the gradients of keys and values.
        stash: bytes of stashes on the device.
        host: bytes of stashes on the host.
        host_fixed: bytes that are always in use there: those of the optimizer.
    """

    stage: int
    fixed: int
    kv: tuple[int, ...]
    kv_grad: tuple[int, ...]
    stash: tuple[int, ...]
    host: tuple[int, ...]
    host_fixed: int = 0


def unit_bytes(table: Table, shape: MemoryShape, stash: StashPlan, *, moved: bool = False) -> UnitBytes:
    """Returns the bytes that a device stashes for each (sequence, chunk, virtual stage): on itself, and on the host.

    With `moved` those on the host are the bytes of a copy, which may be more; see `stash.merged_classes`.
    """
    bundles, token, classes = table.diagonal_bundles, token_bytes(shape, stash), stash_classes(table, stash, shape.seq)
    merged = merged_classes(table, stash, classes) if moved else {}
    sizes = [slot_bytes(merged.get(of_class, of_class), token) for of_class in classes]
    return {key: sizes[bundles[diagonal]] for key, diagonal in table.unit_diagonals.items()}


def rebuilt_bytes(table: Table, shape: MemoryShape, stash: StashPlan) -> dict[UnitKey, int]:
    """Returns for each unit the bytes that come back so that its keys and values are there again."""
    bundles, classes = table.diagonal_bundles, list(stash_classes(table, stash, shape.seq))
    diagonals = table.unit_diagonals.items()
    return {key: refetch_bytes(classes[bundles[diagonal]], shape, stash) for key, diagonal in diagonals}


def host_copies(table: Table, sizes: UnitBytes, rebuilt: dict[UnitKey, int], kv_place: str) -> list[UnitCopy]:
    """Returns all copies of a step, each with the tick beside which it runs; see `program.stash.StashRows`.

    Args:
        table: the schedule.
        sizes: bytes from `unit_bytes`, moved.
        rebuilt: bytes from `rebuilt_bytes`.
        kv_place: how keys and values reach the backward. Those on the host are a part of the stash that leaves, and
            not of the stash that comes back for the backward.
    """
    compute = [index for index, tick in enumerate(table.ticks) if tick.is_compute]
    after = dict(zip(compute, compute[1:], strict=False))
    before = dict(zip(compute[1:], compute, strict=False))
    copies = []
    for unit, tick in table.unit_ticks.items():
        key = unit.sequence, unit.chunk, unit.virtual_stage
        size = sizes[key][1] - (rebuilt[key] if unit.op == "B" and kv_place == "host" else 0)
        behind = {"F": after, "B": before}.get(unit.op, {}).get(tick)
        if size and behind is not None:
            stage = unit.virtual_stage % table.num_stages
            copies.append(UnitCopy(tick=behind, stage=stage, out=unit.op == "F", size_bytes=size, unit=unit))
    for (sequence, chunk, virtual_stage), size in rebuilt.items():
        if not size or virtual_stage >= table.num_virtual_stages - table.num_stages:
            continue
        tick = table.unit_ticks[Unit("B", sequence, chunk, virtual_stage + table.num_stages)]
        behind = refetching_tick(table, tick)
        unit, stage = Unit("F", sequence, chunk, virtual_stage), virtual_stage % table.num_stages
        copies.append(UnitCopy(tick=behind, stage=stage, out=False, size_bytes=size, unit=unit))
    return copies


def waiting_copies(table: Table, shape: MemoryShape, stash: StashPlan) -> list[UnitCopy]:
    """Returns the copies of chunks that wait on the host between two groups of layers."""
    size_bytes = waiting.chunk_bytes(table, shape)
    return [
        UnitCopy(tick=tick, stage=table.waits_at(unit), out=out, size_bytes=size_bytes, unit=unit)
        for tick, unit, out in waiting.copies(table, stash)
    ]


def occupancy(table: Table, memory: Memory, sizes: UnitBytes, stage: int, kv_place: str) -> Occupancy:
    """Follows one device through a step.

    Buffers are allocated once, for the whole step. The result counts the bytes that hold data that is still needed.

    Args:
        table: the schedule.
        memory: what is allocated.
        sizes: bytes from `unit_bytes`.
        stage: the stage of the device.
        kv_place: how keys and values reach the backward; see `StashPlan`.
    """
    of_stage = [tick.units[stage] if tick.is_compute else None for tick in table.ticks]
    length, peaks = sum(table.chunk_lengths), table.prefix_peaks
    num_kv = peaks.kept if kv_place == "keep" else peaks.rebuilt
    kv, grads = memory.most("kv"), memory.most("kv_grad")
    tokens, grad_tokens = _prefix_tokens(table, of_stage, kv_place)
    device, host = _stash(of_stage, sizes)
    return Occupancy(
        stage=stage,
        fixed=memory.hbm_bytes - kv - grads - memory.most("stash"),
        kv=tuple(kv * count // (length * num_kv) for count in tokens),
        kv_grad=tuple(grads * count // (length * peaks.grads) for count in grad_tokens),
        stash=device,
        host=host,
        host_fixed=memory.host_optimizer,
    )


def _prefix_tokens(table: Table, of_stage: list[Unit | None], kv_place: str) -> tuple[list[int], list[int]]:
    """Returns, for each tick, tokens with K/V and tokens with dK/dV, added up over sequences and groups of layers."""
    starts, ends, rebuilds = table.chunk_starts, table.chunk_starts[1:], kv_place in ("rebuild", "host")
    last_group = table.num_virtual_stages - table.num_stages
    last = {(unit.sequence, unit.virtual_stage): index for index, unit in enumerate(of_stage) if unit is not None}
    written: dict[tuple[int, int], int] = {}
    summed: dict[tuple[int, int], int] = {}
    tokens, grad_tokens = [], []
    for index, unit in enumerate(of_stage):
        if unit is not None:
            key = unit.sequence, unit.virtual_stage
            if unit.op == "F":
                written[key] = ends[unit.chunk]
            else:
                summed[key] = ends[unit.chunk]
                if kv_place == "recompute":
                    written[key] = ends[unit.chunk]
                if rebuilds and unit.virtual_stage >= table.num_stages:
                    # Those of the group before are made again, last chunk first.
                    written[unit.sequence, unit.virtual_stage - table.num_stages] = ends[-1] - starts[unit.chunk]
        tokens.append(sum(written.values()))
        grad_tokens.append(sum(summed.values()))
        if unit is not None and kv_place != "keep" and unit.op == "F" and ends[unit.chunk] == ends[-1]:
            if unit.virtual_stage < last_group or kv_place == "recompute":
                written.pop((unit.sequence, unit.virtual_stage))
        if unit is not None and last[unit.sequence, unit.virtual_stage] == index:
            written.pop((unit.sequence, unit.virtual_stage), None)
            summed.pop((unit.sequence, unit.virtual_stage), None)
    return tokens, grad_tokens


def _stash(of_stage: list[Unit | None], sizes: UnitBytes) -> tuple[tuple[int, ...], tuple[int, ...]]:
    device, host, curve = 0, 0, []
    for unit in of_stage:
        here, away = sizes[unit.sequence, unit.chunk, unit.virtual_stage] if unit is not None else (0, 0)
        if unit is not None and unit.op == "F":
            device, host = device + here, host + away
        curve.append((device, host))
        if unit is not None and unit.op == "B":
            device, host = device - here, host - away
    return tuple(here for here, _ in curve), tuple(away for _, away in curve)
