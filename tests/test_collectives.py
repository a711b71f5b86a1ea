"""The order of a program's collectives, read from what the compiler made of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hlo_order import overtaking
from jax import lax
from jax.sharding import PartitionSpec as P
from quick_flags import NORMAL_LEVEL

from sppo_jax.pipeline.cpu_order import in_order

RING = [(i, (i + 1) % 8) for i in range(8)]


def shift(x):
    return lax.ppermute(x, "ring", RING)


def around(x, times=3):
    """Sends an array on, so many times, in a loop."""
    return lax.scan(lambda x, _: (jnp.sin(shift(x)), None), x, None, length=times)[0]


def loop_then_collective(x, y):
    return around(x), lax.all_to_all(y, "ring", 0, 0)


def collective_then_loop(x, y):
    moved = lax.all_to_all(y, "ring", 0, 0)
    return around(x), moved


def collective_then_loop_that_all_results_need(x, y):
    moved = lax.all_to_all(y, "ring", 0, 0)
    looped = around(x)
    return looped, looped + moved


def two_loops(x, y):
    return around(x), around(y, 5)


def behind_a_barrier(x, y):
    """The compiler drops the barrier, so that it orders nothing."""
    x, y = lax.optimization_barrier((around(x), y))
    return x, around(y)


def through_a_loop(x, y):
    """What a loop hands on behind a barrier is there before the loop is over, so it tells nothing of the loop's end."""

    def step(carry, _):
        x, y = lax.optimization_barrier(carry)
        return (jnp.sin(shift(x)), y), None

    (x, y), _ = lax.scan(step, (x, y), None, length=3)
    return x, around(y)


def inside_a_loop(x, y):
    def step(carry, _):
        x, y = carry
        return (around(x), lax.all_to_all(y, "ring", 0, 0)), y.sum()

    (x, y), sums = lax.scan(step, (x, y), None, length=2)
    return x, y + sums[0]


def in_loops_of_one_step(x, y):
    """The compiler takes such a loop apart: what is in it comes to stand beside the rest."""

    def step(carry, row):
        x, y = carry
        return (around(x), around(y) + row), y

    (x, y), (seen,) = lax.scan(step, (x, y), jnp.arange(1.0))
    return x, y + seen


def of_numbers(x, y):
    """Whole numbers make no witness that is no number."""
    counts = lax.scan(lambda n, _: (shift(n) + 1, None), jnp.arange(8), None, length=3)[0]
    return x + counts.sum().astype(x.dtype), lax.psum(y, "ring")


def in_loops_of_unknown_length(x, y):
    """The lengths come with the data; a reduction over all devices makes them equal."""
    times = lax.pmax((x[0, 0] > 0).astype(jnp.int32), "ring")
    return lax.fori_loop(0, times, lambda _, x: around(x), x), lax.fori_loop(0, times + 1, lambda _, y: shift(y), y)


def the_same_in_every_turn(x, y):
    """The compiler takes what no turn changes out of the loop, where another loop comes before."""
    times = lax.pmax((x[0, 0] > 0).astype(jnp.int32), "ring") + 1
    moved = around(x)
    return moved, lax.fori_loop(0, times, lambda _, z: z + lax.all_to_all(y, "ring", 0, 0), jnp.sin(moved))


def the_same_in_every_step(x, y):
    def step(z, _):
        return jnp.sin(z) + lax.all_to_all(y, "ring", 0, 0), None

    moved = around(x)
    return moved, lax.scan(step, jnp.sin(moved), None, length=3)[0]


def the_same_loop_in_every_step(x, y):
    def step(z, _):
        return jnp.sin(z) + around(y), None

    moved = around(x)
    return moved, lax.scan(step, jnp.sin(moved), None, length=3)[0]


def the_same_beside_another(x, y):
    """The sums of several arrays are a collective each."""

    def step(z, _):
        of_z, of_y = lax.psum((jnp.sin(z), y), "ring")
        return of_z + of_y, None

    moved = around(x)
    return moved, lax.scan(step, jnp.sin(moved), None, length=3)[0]


def the_same_in_loops_of_one_step(x, y):
    def once(z, _):
        return jnp.sin(shift(z)), lax.all_to_all(y, "ring", 0, 0)

    def step(z, _):
        z, (of_y,) = lax.scan(once, z, None, length=1)
        return z + of_y, None

    moved = around(x)
    return moved, lax.scan(step, jnp.sin(moved), None, length=3)[0]


def read_from_the_only_slot(x, y):
    """A slot that is the whole buffer is the same at every index."""

    def step(i, z):
        return jnp.sin(z) + lax.all_to_all(lax.dynamic_index_in_dim(y[None], i, keepdims=False), "ring", 0, 0)

    moved = around(x)
    return moved, lax.fori_loop(0, 3, step, jnp.sin(moved))


def gathered_from_the_only_slot(x, y):
    def step(i, z):
        return jnp.sin(z) + lax.all_to_all(y[None][jnp.stack([i, i])][1], "ring", 0, 0)

    moved = around(x)
    return moved, lax.fori_loop(0, 3, step, jnp.sin(moved))


def written_over(x, y):
    """What is written over whole tells nothing of the loop that it came from."""
    moved = around(x)
    return moved, lax.all_to_all(lax.dynamic_update_slice(moved, y, (0, 0)), "ring", 0, 0)


def beside_another_in_a_call(x, y):
    """The compiler inlines a call: each result needs only what it is made of."""
    moved, y = jax.jit(lambda x, y: (jnp.sin(x), jnp.cos(y)))(around(x), y)
    return moved, lax.all_to_all(y, "ring", 0, 0)


def beside_another_that_is_dropped(x, y):
    """The compiler drops the part of a loop whose result nothing reads."""

    def step(carry, _):
        x, y = carry
        return (jnp.sin(x), jnp.cos(y)), None

    moved = around(x)
    (_, y), _ = lax.scan(step, (moved, y), None, length=3)
    return moved, lax.all_to_all(y, "ring", 0, 0)


def chosen_by_a_table(x, y):
    """Where the compiler knows the choice, it drops what is not chosen."""
    moved = around(x)
    return moved, lax.all_to_all(jnp.where(jnp.asarray([1, 0])[0] == 1, y, moved), "ring", 0, 0)


def chosen_by_a_table_of_one_number(x, y):
    """Such a table has the same number at every index."""
    moved, here = around(x), jnp.asarray([1] * 8)[lax.axis_index("ring")]
    return moved, lax.all_to_all(jnp.where(here == 1, y, moved), "ring", 0, 0)


def chosen_by_the_place_on_an_axis_of_one(x, y):
    moved = around(x)
    return moved, lax.all_to_all(jnp.where(lax.axis_index("one") == 0, y, moved), "ring", 0, 0)


def chosen_by_two_of_which_one_is_known(x, y):
    moved, never = around(x), jnp.asarray([1, 0])[1] == 1
    return moved, lax.all_to_all(jnp.where(never & (x[0, 0] > 0), moved, y), "ring", 0, 0)


def a_branch_that_is_known(x, y):
    moved = around(x)
    chosen = lax.cond(jnp.asarray([1, 0])[0] == 1, lambda x, y: jnp.cos(y), lambda x, y: jnp.sin(x), moved, y)
    return moved, lax.all_to_all(chosen, "ring", 0, 0)


def kept_by_a_choice_that_is_known(x, y):
    keeps = jnp.asarray([1, 0])[0] == 1

    def step(carry, _):
        x, y = carry
        x = jnp.sin(shift(x))
        return (x, jnp.where(keeps, y, x)), None

    (x, y), _ = lax.scan(step, (x, y), None, length=3)
    return x, lax.all_to_all(y, "ring", 0, 0)


def changed_round_in_one_step(x, y):
    """A loop of one step is no loop: what comes round the second time does not come."""

    def step(carry, _):
        return (jnp.sin(carry[1]), moved), None

    moved = around(x)
    (y, again), _ = lax.scan(step, (x, y), None, length=1)
    return again, lax.all_to_all(y, "ring", 0, 0)


def handed_on_by_a_loop_of_unknown_length(x, y):
    keeps = jnp.asarray([1, 0])[0] == 1

    def step(_, carry):
        x, y = carry
        return jnp.sin(x), jnp.where(keeps, y, x)

    moved, y = lax.fori_loop(0, (x[0, 0] > 0).astype(jnp.int32), step, (around(x), y))
    return moved, lax.all_to_all(y, "ring", 0, 0)


PROGRAMS = (
    loop_then_collective,
    collective_then_loop,
    collective_then_loop_that_all_results_need,
    two_loops,
    behind_a_barrier,
    through_a_loop,
    inside_a_loop,
    in_loops_of_one_step,
    of_numbers,
    in_loops_of_unknown_length,
    the_same_in_every_turn,
    the_same_in_every_step,
    the_same_loop_in_every_step,
    the_same_beside_another,
    the_same_in_loops_of_one_step,
    read_from_the_only_slot,
    gathered_from_the_only_slot,
    written_over,
    beside_another_in_a_call,
    beside_another_that_is_dropped,
    chosen_by_a_table,
    chosen_by_a_table_of_one_number,
    chosen_by_the_place_on_an_axis_of_one,
    chosen_by_two_of_which_one_is_known,
    a_branch_that_is_known,
    kept_by_a_choice_that_is_known,
    changed_round_in_one_step,
    handed_on_by_a_loop_of_unknown_length,
)


def compiled(body):
    mesh = jax.make_mesh((8, 1), ("ring", "one"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    spec = P("ring")
    step = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    return step.lower(*inputs()).compile(compiler_options=NORMAL_LEVEL)


def inputs():
    return [jnp.asarray(np.random.default_rng(i).normal(size=(64, 16)), jnp.result_type(float)) for i in range(2)]


def on_one_device(body):
    split = [x.reshape(1, 8, 8, 16) for x in inputs()]
    return [x.reshape(64, 16) for x in jax.vmap(jax.vmap(body, axis_name="ring"), axis_name="one")(*split)]


@pytest.mark.parametrize("body", PROGRAMS, ids=lambda body: body.__name__)
def test_nothing_overtakes_a_loop_and_the_results_are_the_same(x64, body):
    """In float64, because machines round the sums of float32 by more than the bound."""
    program = compiled(in_order(body))
    assert overtaking(program.as_text()) == []
    for got, want in zip(program(*inputs()), on_one_device(body), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


MAY_OVERTAKE = (
    "two_loops",
    "behind_a_barrier",
    "through_a_loop",
    "in_loops_of_one_step",
    "in_loops_of_unknown_length",
    "the_same_in_every_turn",
    "the_same_in_every_step",
    "the_same_loop_in_every_step",
    "the_same_beside_another",
    "the_same_in_loops_of_one_step",
    "read_from_the_only_slot",
    "gathered_from_the_only_slot",
    "written_over",
    "beside_another_in_a_call",
    "beside_another_that_is_dropped",
    "chosen_by_a_table",
    "chosen_by_a_table_of_one_number",
    "chosen_by_the_place_on_an_axis_of_one",
    "chosen_by_two_of_which_one_is_known",
    "a_branch_that_is_known",
    "kept_by_a_choice_that_is_known",
    "changed_round_in_one_step",
    "handed_on_by_a_loop_of_unknown_length",
)
IN_CI = ("two_loops", "written_over", "chosen_by_a_table")


@pytest.mark.parametrize("names", [IN_CI, pytest.param(MAY_OVERTAKE, marks=pytest.mark.slow)], ids=["three", "all"])
def test_without_an_order_they_may_overtake(names):
    bodies = [body for body in PROGRAMS if body.__name__ in names]
    assert len(bodies) == len(names) and all(overtaking(compiled(body).as_text()) for body in bodies)


@pytest.mark.parametrize("inside", ["a branch", "a condition"])
def test_collectives_elsewhere_are_refused(inside):
    def body(x, y):
        if inside == "a branch":
            return lax.cond(x[0, 0] > 0, shift, jnp.sin, x), y
        return lax.while_loop(lambda x: lax.pmax(x[0, 0], "ring") < 1, jnp.sin, x), y

    with pytest.raises(NotImplementedError, match="have no order on CPUs; move them out of it"):
        compiled(in_order(body))


def test_a_program_that_is_in_order_stays_as_it_is():
    """What needs the loop anyway is not made to wait again."""

    def body(x, y):
        return lax.psum(around(x), "ring"), y

    jaxpr = str(jax.make_jaxpr(in_order(body), axis_env=[("ring", 8)])(*inputs()))
    assert jaxpr.count("cond[") == 1  # y waits for the loop
