"""The proof that a schedule table can run in lock-step, with one carry register in each direction.

A chunk that comes round to the first stage again (backward: to the last) may wait there, in the waiting room: for the
next group of layers, or for its head.
"""

from collections import Counter

from sppo_jax import rules
from sppo_jax.schedule.table import OPS, Table, Tick, Unit


def check(table: Table) -> None:
    """Checks that every unit runs once, in its place, after what it needs, and that carries arrive in time.

    A stage hands its output to the next one in a single register which the next tick of the same op
    overwrites. So within a group of layers a chunk moves on by exactly one virtual stage in each forward tick, and back
    by one in each backward tick. Between two groups it may wait.

    Raises:
        ValueError: says the rule, what was found, and the tick and stage where.
    """
    _check_sizes(table)
    for index, tick in enumerate(table.ticks):
        _check_tick(table, index, tick)
    _check_every_unit_once(table)
    _check_forward(table)
    _check_head(table)
    _check_backward(table)


def _check_sizes(table: Table) -> None:
    for field in ("num_stages", "num_groups", "num_sequences"):
        value = getattr(table, field)
        if value < 1:
            raise ValueError(f"{field} of a schedule table must be at least 1, got {value}")
    rules.check(rules.Facts(sequences=table.num_sequences, wave=table.wave))
    if not table.chunk_lengths:
        raise ValueError("a schedule table must have at least one chunk, got no chunk lengths")
    if min(table.chunk_lengths) < 1:
        raise ValueError(f"chunk lengths must be positive, got {list(table.chunk_lengths)}")


def _check_tick(table: Table, index: int, tick: Tick) -> None:
    if tick.op not in OPS:
        raise ValueError(f"the op of a tick must be F, B or H, got {tick.op!r} in tick {index}")
    if len(tick.units) != table.num_stages:
        raise ValueError(
            f"a tick must have one entry for each of the {table.num_stages} stages, got {len(tick.units)} in tick "
            f"{index}"
        )
    if all(unit is None for unit in tick.units):
        raise ValueError(f"a tick must hold a unit, got only idle stages in tick {index}; remove the tick")
    for stage, unit in enumerate(tick.units):
        if unit is not None:
            _check_unit(table, index, tick, stage, unit)
    if tick.op == "H" and len(set(tick.units)) != 1:
        raise ValueError(
            f"all stages must have the same entry in an H tick, for they compute a head together, got in tick {index} "
            f"{', '.join(str(unit) if unit else 'idle' for unit in tick.units)}"
        )


def _check_unit(table: Table, index: int, tick: Tick, stage: int, unit: Unit) -> None:
    where = f"in tick {index} at stage {stage}"
    if unit.op != tick.op:
        raise ValueError(f"all units of a tick must be of one op, got {unit} {where}, a tick of op {tick.op}")
    if not (
        0 <= unit.sequence < table.num_sequences
        and 0 <= unit.chunk < table.num_chunks
        and 0 <= unit.virtual_stage < table.num_virtual_stages
    ):
        raise ValueError(
            f"a unit must be of one of {table.num_sequences} sequences, {table.num_chunks} chunks and "
            f"{table.num_virtual_stages} virtual stages, counted from 0, got {unit} {where}"
        )
    if unit.op == "H":
        if unit.virtual_stage != table.num_virtual_stages - 1:
            last = table.num_virtual_stages - 1
            raise ValueError(f"an H unit must be of the last virtual stage, {last}, got {unit} {where}")
    elif unit.virtual_stage % table.num_stages != stage:
        home = unit.virtual_stage % table.num_stages
        raise ValueError(f"a unit of virtual stage {unit.virtual_stage} must be at stage {home}, got {unit} {where}")


def _check_every_unit_once(table: Table) -> None:
    # An H unit fills its tick, so it counts once there and not once a stage.
    counts: Counter[Unit] = Counter()
    for tick in table.ticks:
        counts.update({unit for unit in tick.units if unit is not None})
    last = table.num_virtual_stages - 1
    for sequence in range(table.num_sequences):
        for chunk in range(table.num_chunks):
            wanted = [Unit(op, sequence, chunk, vs) for op in "FB" for vs in range(last + 1)]
            wanted.append(Unit("H", sequence, chunk, last))
            for unit in wanted:
                if counts[unit] != 1:
                    stage = unit.virtual_stage % table.num_stages
                    raise ValueError(
                        f"every unit must run exactly once, got {unit} {counts[unit]} times at stage {stage}"
                    )


def _positions(table: Table, op: str) -> tuple[dict[Unit, int], dict[Unit, int]]:
    """Returns, for the units of one op, the index of their tick among its op and among all ticks."""
    ordinal: dict[Unit, int] = {}
    absolute: dict[Unit, int] = {}
    number = 0
    for index, tick in enumerate(table.ticks):
        if tick.op != op:
            continue
        for unit in tick.units:
            if unit is not None:
                ordinal[unit], absolute[unit] = number, index
        number += 1
    return ordinal, absolute


def _check_chain(ordinal: dict[Unit, int], absolute: dict[Unit, int], table: Table, unit: Unit, before: Unit) -> None:
    if unit.virtual_stage // table.num_stages != before.virtual_stage // table.num_stages:
        _check_after(absolute, table, unit, before, absolute[before])
    elif ordinal[unit] != ordinal[before] + 1:
        raise ValueError(
            f"{unit} must run in the {unit.op} tick right after that of {before} (tick {absolute[before]}), "
            f"got tick {absolute[unit]} at stage {unit.virtual_stage % table.num_stages}"
        )


def _check_after(absolute: dict[Unit, int], table: Table, unit: Unit, before: Unit, before_tick: int) -> None:
    if absolute[unit] <= before_tick:
        raise ValueError(
            f"{unit} must run after {before} (tick {before_tick}), got tick {absolute[unit]} "
            f"at stage {unit.virtual_stage % table.num_stages}"
        )


def _check_forward(table: Table) -> None:
    ordinal, absolute = _positions(table, "F")
    for unit in ordinal:
        if unit.virtual_stage > 0:
            before = Unit("F", unit.sequence, unit.chunk, unit.virtual_stage - 1)
            _check_chain(ordinal, absolute, table, unit, before)
        if unit.chunk > 0:
            before = Unit("F", unit.sequence, unit.chunk - 1, unit.virtual_stage)
            _check_after(absolute, table, unit, before, absolute[before])


def _check_head(table: Table) -> None:
    forward = _positions(table, "F")[1]
    for unit, tick in _positions(table, "H")[1].items():
        source = Unit("F", unit.sequence, unit.chunk, unit.virtual_stage)
        if tick < forward[source]:
            raise ValueError(f"{unit} must run after {source} (tick {forward[source]}), got tick {tick} (all stages)")


def _check_backward(table: Table) -> None:
    heads = _positions(table, "H")[1]
    ordinal, absolute = _positions(table, "B")
    last = table.num_virtual_stages - 1
    for unit in ordinal:
        if unit.virtual_stage < last:
            before = Unit("B", unit.sequence, unit.chunk, unit.virtual_stage + 1)
            _check_chain(ordinal, absolute, table, unit, before)
        else:
            head = Unit("H", unit.sequence, unit.chunk, last)
            _check_after(absolute, table, unit, head, heads[head])
        if unit.chunk + 1 < table.num_chunks:
            before = Unit("B", unit.sequence, unit.chunk + 1, unit.virtual_stage)
            _check_after(absolute, table, unit, before, absolute[before])
