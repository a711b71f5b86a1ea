"""The simulator against closed forms."""

import pytest
from schedule_cases import all_tables

from sppo_jax.predict.seconds.simulate import simulate
from sppo_jax.schedule.generators import make_table

SECONDS = {"F": 1.0, "B": 2.5, "H": 0.25}


def test_step_and_bubble_of_equal_units():
    for table in all_tables():
        chunks, sequences, stages, groups = (
            table.num_chunks,
            table.num_sequences,
            table.num_stages,
            table.num_groups,
        )
        found = simulate(table, lambda unit, tokens, v=groups: SECONDS[unit.op] / (1 if unit.op == "H" else v))
        total = chunks * sequences
        if table.name == "sppo":
            step = sequences * ((chunks + (stages - 1) / groups) * 3.5 + chunks * 0.25)
        elif table.name == "breadth-first":
            ticks = (groups - 1) * max(chunks, stages) + chunks + stages - 1
            step = sequences * (ticks / groups * 3.5 + chunks * 0.25)
        else:
            step = (total + (stages - 1) / groups) * 3.5 + total * 0.25
        assert found.step_s == pytest.approx(step)
        assert found.bubble_fraction == pytest.approx(1 - total * 3.75 / step)
        assert found.busy_s == pytest.approx([total * 3.75] * stages)
        assert sum(found.tick_s) == pytest.approx(step)


def test_one_sequence_has_the_bubble_of_the_papers():
    # (P - 1) / N of the computing time: 3 / 16.
    found = simulate(make_table("sppo", 4, 1, (8,) * 16), lambda unit, tokens: 0.0 if unit.op == "H" else 1.0)
    assert found.bubble_fraction == pytest.approx(3 / 19)
    assert found.step_s / 32 - 1 == pytest.approx(3 / 16)


@pytest.mark.parametrize("lengths", [(9, 7, 4, 4, 1), (1, 4, 4, 7, 9), (2, 5, 9, 3)])
def test_unimodal_chunks_take_the_time_of_a_flow_shop(lengths):
    # The longest chunk of each diagonal is the padded length, so a cost in padded tokens shows the tick's length.
    for stages in range(1, 6):
        table = make_table("sppo", stages, 1, lengths)
        found = simulate(table, lambda unit, tick: float(tick.tokens) if unit.op == "F" else 0.0)
        assert found.step_s == sum(lengths) + (stages - 1) * max(lengths)


def test_a_tick_lasts_as_long_as_its_slowest_unit_and_sees_padded_tokens():
    table = make_table("sppo", 2, 1, (16, 8))
    seen = {}

    def costs(unit, tick):
        seen[str(unit)] = tick.tokens
        return 3.0 if unit.virtual_stage == 1 and unit.op == "F" else 1.0

    found = simulate(table, costs)
    assert found.tick_s == (1.0, 3.0, 1.0, 3.0, 1.0, 1.0, 1.0, 1.0)
    assert found.busy_s == (6.0, 10.0)
    assert seen["F(0,1,0)"] == 16 and seen["F(0,1,1)"] == 8
    assert found.peak_in_flight == (2, 2)


def test_a_tick_lasts_as_long_as_what_goes_on_behind_it():
    table = make_table("sppo", 2, 1, (8, 8, 8))
    free = simulate(table, lambda unit, _: SECONDS[unit.op])
    least = [3.0 if index == 1 else 0.0 for index in range(len(table.ticks))]
    held = simulate(table, lambda unit, _: SECONDS[unit.op], least)
    assert held.step_s == free.step_s + 2.0 and held.busy_s == free.busy_s
    assert held.tick_s[1] == 3.0 and held.bubble_fraction > free.bubble_fraction
