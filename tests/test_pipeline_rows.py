"""Numbers of a tick within nested loops: looked up, counted, or known."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from sppo_jax.pipeline.rows import HostRow, rows_of


def in_all_iterations(field, values_XS, counts, me=0):
    """Returns the numbers of the only tick in the body of nested loops, in the order in which the iterations run."""
    found = []

    def run(rows, left):
        if not left:
            found.append(rows.of_tick())
        for iteration in range(left[0] if left else 0):
            run(rows.in_iteration(jnp.int32(iteration), left[0]), left[1:])

    run(rows_of(field, np.asarray(values_XS, np.int32), jnp.int32(me)), counts)
    return found


@pytest.mark.parametrize("counts", [(6,), (2, 3), (3, 2, 1)])
def test_numbers_are_those_of_the_iteration(counts):
    values = np.random.default_rng(0).integers(0, 9, (6, 2))
    np.testing.assert_array_equal(in_all_iterations("sequence", values, counts), values)


@pytest.mark.parametrize(
    "values, counts, is_counted",
    [
        ([4, 6, 8, 10, 12, 14], (6,), True),
        ([5, 4, 3, 2, 1, 0], (6,), True),
        ([3, 3, 3], (3,), True),
        ([0, 1, 2, 0, 1, 2], (2, 3), True),  # the same in every iteration of the outer loop
        ([0, 1, 2, 3, 4, 5], (2, 3), False),  # of two counters
        ([0, 1, 3], (3,), True),  # no line
        ([0, 1, 3, 0, 1, 3], (2, 3), True),
        ([0, 1, 3, 0, 1, 4], (2, 3), False),
    ],
)
def test_a_row_on_the_host_is_counted_where_the_innermost_counter_alone_tells_the_row(values, counts, is_counted):
    rows = in_all_iterations("stash.fetch_row", np.repeat(np.array(values)[:, None], 3, 1), counts, me=2)
    assert [int(row.number) for row in rows] == values and {row.is_counted for row in rows} == {is_counted}


def test_a_row_that_depends_on_the_stage_is_that_of_this_stage():
    rows = in_all_iterations("stash.write_row", [[0, 5], [1, 6]], (2,), me=1)
    assert [(int(row.number), row.is_counted) for row in rows] == [(5, False), (6, False)]
    alone = rows_of("stash.write_row", np.array([[7, 7]], np.int32), jnp.int32(0))
    assert alone.of_tick() == HostRow(7, is_counted=False)


@pytest.mark.parametrize("is_line", [True, False])
def test_a_row_that_is_a_line_needs_no_table(is_line):
    """Before jaxlib 0.12 the compiler has to see the line."""
    values = np.arange(8, dtype=np.int32) if is_line else np.array([0, 1, 2, 3, 0, 1, 2, 7], np.int32)

    def last(me):
        rows = rows_of("stash.fetch_row", np.repeat(values[:, None], 2, 1), me)
        return lax.fori_loop(0, 8, lambda i, _: rows.in_iteration(i, 8).of_tick().number, jnp.int32(0))

    assert last(jnp.int32(1)) == 7
    assert ("dynamic_slice" in str(jax.make_jaxpr(last)(jnp.int32(1)))) != is_line


def test_a_flag_is_known_where_it_is_the_same_in_all_iterations():
    ones, some = np.ones((4, 2)), np.array([[1, 1], [0, 0], [0, 0], [1, 1]])
    assert (
        in_all_iterations("weights.gathers", ones, (4,))
        == [1] * 4
        == in_all_iterations("weights.scatters", ones, (2, 2))
    )
    found = in_all_iterations("weights.gathers", some, (4,))
    assert [int(x) for x in found] == [1, 0, 0, 1] and all(isinstance(x, jax.Array) for x in found)
