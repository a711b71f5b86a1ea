"""All small schedule tables, and a machine that runs a table literally."""

from functools import lru_cache
from itertools import product

from sppo_jax.schedule.generators import GENERATORS, make_table
from sppo_jax.schedule.table import Table, Unit


@lru_cache(maxsize=1)
def all_tables() -> tuple[Table, ...]:
    """Returns every table with at most 6 stages, 8 chunks, 4 sequences and 3 groups that a generator can make."""
    tables = []
    for stages, chunks, sequences, groups in product(range(1, 7), range(1, 9), range(1, 5), range(1, 4)):
        lengths = tuple(range(chunks + 8, 8, -1))
        for name in GENERATORS:
            try:
                tables.append(make_table(name, stages, sequences, lengths, groups))
            except ValueError:
                needs_groups = name.startswith("interleaved") or name == "breadth-first"
                assert groups > 1 or needs_groups or (name == "1f1b" and chunks > 1)
    return tuple(tables)


@lru_cache(maxsize=1)
def wave_tables() -> tuple[Table, ...]:
    """Returns every table of waves with up to 4 stages, 8 sequences, 2 groups, and 1, 2, 3, 5 or 8 chunks."""
    tables = []
    sizes = [
        (sequences, wave) for sequences in range(2, 9) for wave in range(2, sequences + 1) if sequences % wave == 0
    ]
    for stages, chunks, (sequences, wave), groups in product(range(1, 5), (1, 2, 3, 5, 8), sizes, (1, 2)):
        lengths = tuple(range(chunks + 8, 8, -1))
        with_groups = ("breadth-first", "interleaved-seq1f1b")
        for name in ("gpipe", "sppo", *(with_groups if groups > 1 else ("seq1f1b",))):
            try:
                tables.append(make_table(name, stages, sequences, lengths, groups, wave))
            except ValueError:
                assert groups > 1 and chunks * wave % stages
    return tuple(tables)


def runs(table: Table) -> bool:
    """Runs a table on a machine with a register for each stage and direction; returns whether it completes.

    What comes round to the first stage again, or backward to the last, may wait there; for its head too.

    Independent of the checker: it computes nothing but what each unit finds in its registers.
    """
    last = table.num_virtual_stages - 1
    forward, backward = {}, {}
    done = set()
    for tick in table.ticks:
        sent, before = {}, set(done)
        for stage, unit in enumerate(tick.units):
            if unit is None:
                continue
            key = (unit.sequence, unit.chunk)
            if unit.op != tick.op or (unit in done and unit.op != "H"):
                return False
            if unit.op == "H":
                found = Unit("F", *key, last) in before and unit.virtual_stage == last
                found = found and (stage > 0 or unit not in done)
            else:
                found = unit.virtual_stage % table.num_stages == stage and _ready(
                    unit, table, before, forward, backward
                )
                step = 1 if unit.op == "F" else -1
                sent[(stage + step) % table.num_stages] = (*key, unit.virtual_stage)
            if not found:
                return False
            done.add(unit)
        if tick.op == "H" and len(set(tick.units)) != 1 or not any(tick.units):
            return False
        forward, backward = (
            sent if tick.op == "F" else forward,
            sent if tick.op == "B" else backward,
        )
    return len(done) == table.num_sequences * table.num_chunks * (2 * last + 3)


def _ready(unit, table, done, forward, backward) -> bool:
    last = table.num_virtual_stages - 1
    stage = unit.virtual_stage % table.num_stages
    names = {(other.op, other.sequence, other.chunk, other.virtual_stage) for other in done}
    if unit.op == "F":
        waited = stage == 0 and ("F", unit.sequence, unit.chunk, unit.virtual_stage - 1) in names
        came = forward.get(stage) == (unit.sequence, unit.chunk, unit.virtual_stage - 1)
        arrived = unit.virtual_stage == 0 or waited or came
        prefix = unit.chunk == 0 or ("F", unit.sequence, unit.chunk - 1, unit.virtual_stage) in names
        return arrived and prefix
    if unit.virtual_stage == last:
        arrived = ("H", unit.sequence, unit.chunk, last) in names
    else:
        waited = stage == table.num_stages - 1 and ("B", unit.sequence, unit.chunk, unit.virtual_stage + 1) in names
        arrived = waited or backward.get(stage) == (unit.sequence, unit.chunk, unit.virtual_stage + 1)
    final = unit.chunk == table.num_chunks - 1
    return arrived and (final or ("B", unit.sequence, unit.chunk + 1, unit.virtual_stage) in names)
