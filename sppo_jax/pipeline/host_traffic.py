"""What is under way between a device and its host in a tick: stashes, waiting chunks, weights and gradients.

Copies start at the top of a tick. What they bring is held back until most of the tick's compute is done, so that the
compute is beside them.

Letters: T tokens of a tick on one device, D hidden size.
"""

import jax
from jax import lax

from sppo_jax import buffers
from sppo_jax.compat import to_device, to_host
from sppo_jax.pipeline.rows import HostRow
from sppo_jax.pipeline.run import Run
from sppo_jax.pipeline.stash import HostPlace
from sppo_jax.pipeline.state import Coming, TrainingState, begun
from sppo_jax.pipeline.turn import when
from sppo_jax.program.program import TickSpec


def start(run: Run, spec: TickSpec, row, state: TrainingState) -> Coming | None:
    """Starts copies: from the host a stash, what a rebuild needs, a waiting chunk, weights; and gradients to it."""
    fetched = refetched = taken = weights = sums = None
    if spec.fetch is not None:
        place = HostPlace(row_to_fetch(row["fetch_row"], state), row_to_fetch(row["fetch_short"], state))
        fetched = run.layout(spec.fetch).fetch_host(state.host[spec.fetch], place)
    if spec.refetch is not None:
        place = HostPlace(row_to_fetch(row["refetch_row"], state), row_to_fetch(row["refetch_short"], state))
        refetched = run.layout(spec.refetch).fetch_again(state.host[spec.refetch], place)
    if spec.take:
        number = row_to_fetch(row["take_row"], state)
        taken = to_device(buffers.read_slot(state.room, number))
    if spec.streams:
        weights = run.sharded.fetch(row["fetch_group"][0], row["fetch_part"][0])
    if spec.streams and spec.kind == "B":
        place = row["leave_group"][0], row["leave_part"][0]
        sums = run.sharded.write(state.grads.layers.sums, state.leaving, *place)
    coming = Coming(fetched, refetched, taken, weights, sums)
    return None if all(part is None for part in coming) else coming


def arrive(run: Run, row, state: TrainingState, coming: Coming) -> TrainingState:
    """Returns the state with what has come from the host in a tick, and what has left for it."""
    state = state._replace(fetched=coming.fetched, refetched=coming.refetched, taken=coming.taken)
    if coming.weights is not None:
        incoming = run.sharded.take(state.incoming, coming.weights, row["fetch_part"][0])
        state = state._replace(incoming=incoming)
    return state if coming.sums is None else _with_sums(state, coming.sums)


def put(run: Run, row, state: TrainingState, arrived_TD) -> jax.Array:
    """Returns the waiting room on the host with what came in the tick before, behind the fetch of this tick."""
    number, room = row["put_row"].number, state.room
    if state.taken is not None:
        # Without an order between the two XLA copies the whole room.
        _, room = lax.optimization_barrier((state.taken, room))
        if not run.keeps_order:
            number += buffers.after(state.taken)
    return buffers.write_slot(room, number, to_host(arrived_TD))


def scatter(run: Run, row, state: TrainingState, group, slot) -> TrainingState:
    """Adds up the gradients of the group whose turn ends; those of the turn before have left by then."""
    left_group, left = row["left_group"][0], row["left"][0]

    def change(carried):
        totals, sums, leaving = carried
        totals = totals._replace(sums=run.sharded.flush(totals.sums, leaving, left_group, left))
        return run.sharded.scatter(totals, sums, leaving, group, slot)

    carried = state.grads.layers, state.sums, state.leaving
    totals, sums, leaving = when(row["scatters"], change, carried)
    return state._replace(grads=state.grads._replace(layers=totals), sums=sums, leaving=leaving)


def flush(run: Run, state: TrainingState) -> TrainingState:
    """Writes the gradients of the last turn, those of the first group of layers, to the host."""
    return _with_sums(state, run.sharded.flush(state.grads.layers.sums, state.leaving, 0, 0))


def _with_sums(state: TrainingState, sums) -> TrainingState:
    return state._replace(grads=state.grads._replace(layers=state.grads.layers._replace(sums=sums)))


def row_to_fetch(row: HostRow, state: TrainingState) -> jax.Array:
    """Returns the number of a row; of one that XLA may know only once the tick before is done.

    XLA then starts the copy in this tick and not earlier, where it would hold memory. XLA 0.12 also ends in a
    segmentation fault where it knows that two ticks write and read one row: it takes what was written, and its
    pass that legalizes host copies does not find the copy that it looks for. A loop's turns are one tick after
    another anyway.
    """
    return row.number if row.is_counted else row.number + begun(state)
