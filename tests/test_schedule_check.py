"""The checker accepts every generated table and says what is wrong with every other one."""

import random
from dataclasses import replace

import pytest
from schedule_cases import all_tables, runs

from sppo_jax.schedule.check import check
from sppo_jax.schedule.generators import make_table
from sppo_jax.schedule.table import Table, Tick, Unit


def test_every_generated_table_passes():
    tables = all_tables()
    assert len(tables) > 1000
    for table in tables:
        check(table)


def test_the_literal_machine_runs_generated_tables():
    for table in all_tables()[::23]:
        assert runs(table), table.name


def accepts(table: Table) -> bool:
    try:
        check(table)
    except ValueError:
        return False
    return True


def cells(table: Table, ops: str = "FB") -> list[tuple[int, int]]:
    return [
        (index, stage)
        for index, tick in enumerate(table.ticks)
        if tick.op in ops
        for stage, unit in enumerate(tick.units)
        if unit is not None
    ]


def put(table: Table, index: int, stage: int, unit: Unit | None) -> Table:
    units = list(table.ticks[index].units)
    units[stage] = unit
    ticks = list(table.ticks)
    ticks[index] = replace(ticks[index], units=tuple(units))
    return replace(table, ticks=tuple(ticks))


def get(table: Table, cell: tuple[int, int]) -> Unit | None:
    return table.ticks[cell[0]].units[cell[1]]


def idle_like(table: Table, rng: random.Random, cell: tuple[int, int]) -> tuple[int, int] | None:
    op = table.ticks[cell[0]].op
    idle = [
        (index, stage)
        for index, tick in enumerate(table.ticks)
        if tick.op == op
        for stage, unit in enumerate(tick.units)
        if unit is None
    ]
    return rng.choice(idle) if idle else None


def delete(table, rng):
    return put(table, *rng.choice(cells(table, "FBH")), None)


def duplicate(table, rng):
    source = rng.choice(cells(table))
    target = idle_like(table, rng, source)
    return target and put(table, *target, get(table, source))


def move(table, rng):
    source = rng.choice(cells(table))
    target = idle_like(table, rng, source)
    return target and put(put(table, *target, get(table, source)), *source, None)


def swap_units(table, rng):
    first = rng.choice(cells(table))
    op = get(table, first).op
    second = rng.choice(cells(table, op))
    if first == second:
        return None
    return put(put(table, *first, get(table, second)), *second, get(table, first))


def swap_like_ticks(table, rng):
    op = rng.choice("FBH")
    indices = [index for index, tick in enumerate(table.ticks) if tick.op == op]
    if len(indices) < 2:
        return None
    first, second = rng.sample(indices, 2)
    ticks = list(table.ticks)
    ticks[first], ticks[second] = ticks[second], ticks[first]
    return replace(table, ticks=tuple(ticks))


def drop_tick(table, rng):
    index = rng.randrange(len(table.ticks))
    return replace(table, ticks=table.ticks[:index] + table.ticks[index + 1 :])


def repeat_tick(table, rng):
    index = rng.randrange(len(table.ticks))
    return replace(table, ticks=table.ticks[: index + 1] + table.ticks[index:])


def head_late(table, rng):
    heads = [index for index, tick in enumerate(table.ticks) if tick.op == "H"]
    index = rng.choice(heads)
    after = next((other for other in range(index, len(table.ticks)) if table.ticks[other].op == "F"), None)
    if after is None:
        return None
    ticks = list(table.ticks)
    ticks.insert(after, ticks.pop(index))
    return replace(table, ticks=tuple(ticks))


def rename(table, rng):
    cell = rng.choice(cells(table))
    unit = get(table, cell)
    field = rng.choice(("sequence", "chunk", "virtual_stage"))
    return put(table, *cell, unit._replace(**{field: getattr(unit, field) + rng.choice((-1, 1))}))


def change_op(table, rng):
    index = rng.randrange(len(table.ticks))
    tick = table.ticks[index]
    op = rng.choice([op for op in "FB" if op != tick.op])
    units = tuple(unit and unit._replace(op=op) for unit in tick.units)
    return replace(table, ticks=(*table.ticks[:index], Tick(op, units), *table.ticks[index + 1 :]))


def move_head_forward(table, rng):
    heads = [index for index, tick in enumerate(table.ticks) if tick.op == "H"]
    index = rng.choice(heads)
    ticks = list(table.ticks)
    ticks.insert(index - 1, ticks.pop(index))
    return replace(table, ticks=tuple(ticks))


def reverse(table, rng):
    return replace(table, ticks=table.ticks[::-1])


FATAL = [
    delete,
    duplicate,
    move,
    swap_like_ticks,
    swap_units,
    drop_tick,
    repeat_tick,
    rename,
    change_op,
    move_head_forward,
    reverse,
]


@pytest.mark.parametrize("mutate", FATAL, ids=lambda mutate: mutate.__name__)
def test_mutations_that_change_the_meaning_are_rejected(mutate):
    rng = random.Random(mutate.__name__)
    # On one stage chunks may wait between all groups, so some other orders are all right.
    tables = [table for table in all_tables() if table.num_stages > 1]
    tried = 0
    for table in rng.sample(tables, 150):
        mutated = mutate(table, rng)
        if mutated is None:
            continue
        tried += 1
        assert not accepts(mutated), (mutate.__name__, table.name, table.num_stages, table.chunk_lengths)
    assert tried > 50


def test_a_head_may_run_late():
    rng = random.Random(0)
    later = [head_late(table, rng) for table in rng.sample(all_tables(), 150)]
    found = [table for table in later if table is not None]
    right = [accepts(table) for table in found]
    assert right == [runs(table) for table in found] and sum(right) > 50


def test_the_checker_agrees_with_the_literal_machine_on_random_swaps_of_ticks():
    rng = random.Random(7)
    verdicts = set()
    for table in rng.sample([table for table in all_tables() if len(table.ticks) < 60], 400):
        first, second = sorted(rng.sample(range(len(table.ticks)), 2))
        if rng.random() < 0.7:
            second = min(first + 1, len(table.ticks) - 1)
        ticks = list(table.ticks)
        ticks[first], ticks[second] = ticks[second], ticks[first]
        mutated = replace(table, ticks=tuple(ticks))
        verdicts.add(accepts(mutated))
        assert accepts(mutated) == runs(mutated), (table.name, first, second)
    assert verdicts == {True, False}


def test_the_checker_agrees_with_the_literal_machine_on_random_swaps_of_units():
    rng = random.Random(8)
    verdicts = set()
    # Without carries, sequences may change places; everywhere else a swap breaks something.
    small = [table for table in all_tables() if len(table.ticks) < 60]
    single = [table for table in small if table.num_virtual_stages == 1]
    for table in rng.sample(small, 300) + single:
        mutated = swap_units(table, rng)
        if mutated is not None:
            verdicts.add(accepts(mutated))
            assert accepts(mutated) == runs(mutated), table.name
    assert verdicts == {True, False}


BASE = make_table("sppo", 2, 1, (8, 8), 1)


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (replace(BASE, num_stages=0), "num_stages of a schedule table must be at least 1, got 0"),
        (replace(BASE, chunk_lengths=()), "at least one chunk"),
        (replace(BASE, chunk_lengths=(8, 0)), "positive, got"),
        (replace(BASE, ticks=(Tick("X", (None, None)), *BASE.ticks)), "F, B or H, got 'X' in tick 0"),
        (replace(BASE, ticks=(Tick("F", (None,)), *BASE.ticks)), "each of the 2 stages, got 1 in tick 0"),
        (replace(BASE, ticks=(Tick("F", (None, None)), *BASE.ticks)), "only idle stages in tick 0"),
        (put(BASE, 0, 1, Unit("B", 0, 0, 1)), "one op, got B(0,0,1) in tick 0 at stage 1"),
        (put(BASE, 0, 1, Unit("F", 0, 5, 1)), "2 chunks"),
        (put(BASE, 0, 1, Unit("F", 0, 0, 0)), "a unit of virtual stage 0 must be at stage 0"),
        (put(BASE, 0, 1, Unit("F", 0, 0, 1)), "exactly once, got F(0,0,1) 2 times at stage 1"),
        (put(BASE, 2, 1, None), "the same entry in an H tick, for they compute a head together, got in tick 2"),
        (put(BASE, 2, 1, Unit("H", 0, 0, 0)), "an H unit must be of the last virtual stage, 1"),
    ],
)
def test_errors_say_the_rule_and_the_place(table, words):
    with pytest.raises(ValueError) as error:
        check(table)
    assert words in str(error.value)


def reorder(table: Table, order: list[int]) -> Table:
    return replace(table, ticks=tuple(table.ticks[index] for index in order))


def test_errors_of_order_name_both_units():
    # F0 | F0 F1 | H0 | F1 | H1 | B1 | B1 B0 | B0
    for order, words in (
        ([0, 2, 1, 3, 4, 5, 6, 7], "H(0,0,1) must run after F(0,0,1) (tick 2), got tick 1 (all stages)"),
        ([0, 1, 2, 3, 5, 4, 6, 7], "B(0,1,1) must run after H(0,1,1) (tick 5), got tick 4 at stage 1"),
        ([1, 0, 2, 3, 4, 5, 6, 7], "F(0,1,0) must run after F(0,0,0) (tick 1), got tick 0 at stage 0"),
        (
            [0, 1, 2, 3, 4, 6, 5, 7],
            "B(0,1,0) must run in the B tick right after that of B(0,1,1) (tick 6), got tick 5 at stage 0",
        ),
    ):
        with pytest.raises(ValueError) as error:
            check(reorder(BASE, order))
        assert words in str(error.value)


@pytest.mark.parametrize(
    ("order", "words"),
    [
        ([0, 2, 1, 3, 4, 5, 6], "F(0,0,2) must run in the F tick right after that of F(0,0,1) (tick 2), got tick 1"),
        ([0, 1, 2, 3, 4, 6, 5], "B(0,0,0) must run in the B tick right after that of B(0,0,1) (tick 6), got tick 5"),
    ],
)
def test_errors_of_carries_name_both_units(order, words):
    with pytest.raises(ValueError) as error:
        check(reorder(make_table("sppo", 3, 1, (8,)), order))
    assert words in str(error.value)
