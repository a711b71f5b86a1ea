"""Rows that a loop's counter tells, as a line or by a table, and loops that are short enough for a table."""

import numpy as np
import pytest
from exactness import small_plan

from sppo_jax.program import counters
from sppo_jax.program.counters import needs_tables, numbers_of_iterations, step_of, with_short_loops
from sppo_jax.program.fold import Loop, unfold
from sppo_jax.program.program import lower
from sppo_jax.program.ring import AttentionShape

SHAPE = AttentionShape(num_heads=2, num_kv_heads=1, head_dim=6, itemsize=8)
ORDER = dict(chunks=(8,) * 8, schedule="breadth-first", interleave=4, kv="rebuild", mesh=(1, 1, 2))
HOST = dict(places=("host", "host", "recompute"), alpha=1.0)
LATE = ORDER | HOST | dict(attention_from=6)


def test_the_innermost_counter_tells_a_number_that_is_the_same_on_all_stages_and_in_all_outer_iterations():
    values = np.array([[[0, 0], [1, 1], [3, 3]]] * 2)
    assert numbers_of_iterations(values).tolist() == [0, 1, 3] and step_of(numbers_of_iterations(values)) is None
    assert numbers_of_iterations(values[0]).tolist() == [0, 1, 3]
    assert step_of(np.array([5, 3, 1])) == -2 and step_of(np.array([7])) == 0
    values[1, 2] = 4
    assert numbers_of_iterations(values) is None
    assert numbers_of_iterations(np.array([[0, 0], [1, 2]])) is None
    assert numbers_of_iterations(np.array([0, 0])) is None  # no loop


@pytest.mark.parametrize(
    ("plan", "needs"),
    [
        (ORDER | dict(places=("keep", "keep", "recompute")), False),
        (ORDER | HOST, False),
        (LATE, True),
        (ORDER | HOST | dict(waiting="host"), True),
        (dict(chunks=(8,) * 8, mesh=(1, 2, 1), **HOST), False),
    ],
)
def test_short_rows_and_the_waiting_room_need_tables(plan, needs):
    program = lower(small_plan(**plan), SHAPE)
    assert needs_tables(program.items, program.rows) == needs


def test_a_loop_with_tables_has_no_more_iterations_than_a_table(monkeypatch):
    whole, other = lower(small_plan(**LATE), SHAPE), lower(small_plan(**ORDER, **HOST), SHAPE)
    assert [item.count for item in whole.items if isinstance(item, Loop)] == [7, 16, 7, 7, 15, 7]
    monkeypatch.setattr(counters, "MOST_ITERATIONS", 6)
    cut = with_short_loops(whole.items, whole.rows)
    assert unfold(cut) == unfold(whole.items) and with_short_loops(other.items, other.rows) == other.items
    # Rows of the first and the last group of layers are lines.
    assert [item.count for item in cut if isinstance(item, Loop)] == [7, 5, 5, 6, 3, 4, 3, 4, 5, 5, 5, 7]
    assert lower(small_plan(**LATE), SHAPE).items == cut
    # The same within a loop over sequences.
    (several,) = lower(small_plan(**LATE, sequences=3), SHAPE).items
    assert several == Loop(3, cut)
