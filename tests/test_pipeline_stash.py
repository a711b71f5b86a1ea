"""How a layer's stash is packed for the host, and fetched."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sppo_jax.pipeline.layer_types import At
from sppo_jax.pipeline.mechanism import TickOnDevice
from sppo_jax.pipeline.rows import HostRow
from sppo_jax.pipeline.stash.buffers import HostPlace, StashLayout, chunk_entries
from sppo_jax.program.program import TickSpec
from sppo_jax.program.stash import StashClass

PIECES = [(1024,), (858, 166), (300, 24, 700)]


def layout(stash: StashClass, tokens: int, again: tuple[str, ...] = (), **shapes) -> StashLayout:
    named = {name: jax.ShapeDtypeStruct((tokens, *dims), dtype) for name, (dims, dtype) in shapes.items()}
    entries = chunk_entries(stash, {None: named}, [(None, None)], lambda _, name: name in again)
    return StashLayout(entries, num_layers=2, num_slots=3)


def at(layer) -> At:
    return At(None, {None: layer})


@pytest.mark.parametrize("host_pieces", PIECES)
@pytest.mark.parametrize("host_rows", [(5, 5), (7, 5), (0, 7), (7, 0)])
def test_what_is_stashed_comes_back_bit_for_bit(host_rows, host_pieces):
    shapes = {"x": ((6,), jnp.bfloat16), "out": ((2, 3), jnp.bfloat16), "lse": ((2,), jnp.float32)}
    stash = layout(StashClass(7, host_inputs=host_rows[0], host_attention=host_rows[1]), 7, **shapes)
    if stash.host_shape[1] < len(host_pieces):
        with pytest.raises(
            ValueError, match="host_pieces of a plan must be at most 2, the elements of a line.*, got 3; use"
        ):
            replace(stash, host_pieces=host_pieces).host_part()
        return
    stash = replace(stash, host_pieces=host_pieces)
    rng = np.random.default_rng(0)
    values = {name: jnp.asarray(rng.normal(size=(7, *dims)), dtype) for name, (dims, dtype) in shapes.items()}
    kept, part = stash.put(stash.kept_buffers(), stash.host_part(), 2, at(1), values)
    back = stash.get(kept, part, 2, at(1))
    for name, value in values.items():
        np.testing.assert_array_equal(np.asarray(back[name], np.float32), np.asarray(value, np.float32))
    elements = 2 * sum(entry.host_elements for entry in stash.entries.values())
    assert sum(piece.size for piece in part) == elements and len(part) == len(host_pieces)  # nothing is padded


@pytest.mark.parametrize("lanes,ordered", [(0, 0), (8, 2)])
def test_arrays_of_whole_lanes_have_the_order_of_their_dims(lanes, ordered):
    """XLA:TPU would else choose one for what writes and another for what reads, and copy all slots between."""
    shapes = {"x": ((16,), jnp.bfloat16), "out": ((2, 4), jnp.bfloat16)}
    stash = replace(layout(StashClass(6), 6, **shapes), lanes=lanes)
    values = {name: jnp.ones((6, *dims), dtype) for name, (dims, dtype) in shapes.items()}

    def put_and_get(values):
        return stash.get(stash.put(stash.kept_buffers(), None, 1, at(0), values)[0], None, 1, at(0))

    constraints = jax.jit(put_and_get).lower(values).as_text().count("@LayoutConstraint(")
    assert constraints == ordered, "of what is written and of what is read"
    back = jax.jit(put_and_get)(values)
    assert all((back[name] == values[name]).all() for name in values)


@pytest.mark.parametrize("host_pieces", PIECES)
@pytest.mark.parametrize("again", [(), ("x",)])
def test_a_short_row_ends_where_the_next_row_begins(again, host_pieces):
    shapes = {"out": ((2, 3), jnp.bfloat16), "lse": ((2,), jnp.float32), "x": ((6,), jnp.bfloat16)}
    stash = layout(StashClass(7, host_inputs=7, host_attention=7), 7, again, **shapes)
    stash = replace(stash, has_short_rows=True, host_pieces=host_pieces)
    short, values, buffer = [True, True, False, True, False], [], stash.host_buffer(5, 3)
    places = [HostPlace(row, sum(short[:row])) for row in range(5)]
    for row, place in enumerate(places):
        rng = np.random.default_rng(row)
        values.append({name: jnp.asarray(rng.normal(size=(7, *dims)), dtype) for name, (dims, dtype) in shapes.items()})
        part = stash.host_part()
        for layer in range(2):
            _, part = stash.put({}, part, 0, at(layer), {name: (1 + layer) * x for name, x in values[-1].items()})
        buffer = stash.write_host(buffer, place, part)
    elements = {name: 2 * entry.host_elements for name, entry in stash.entries.items()}
    assert sum(piece.size for piece in buffer) == 5 * elements["x"] + 2 * (elements["out"] + elements["lse"])
    for row, place in enumerate(places):
        back = stash.get({}, stash.fetch_host(buffer, place), 0, at(1))
        if again:
            back["x"] = stash.get_again({}, stash.fetch_again(buffer, place), 0, at(1))["x"]
        for name in ("x",) if short[row] else shapes:
            np.testing.assert_array_equal(
                np.asarray(back[name], np.float32), 2 * np.asarray(values[row][name], np.float32)
            )


def test_a_part_of_more_elements_than_an_int32_counts_has_offsets():
    """256K tokens of Llama-3.2-1B with all of a layer on the host: 2.2e9 elements a layer."""
    tokens, stash = 2**18, StashClass(2**18, host_inputs=2**18, host_attention=2**18, host_rest=True)
    shapes = {"x": ((2048,), jnp.bfloat16), "rest0": ((6144,), jnp.bfloat16), "lse": ((32,), jnp.float32)}
    packed = layout(stash, tokens, **shapes)
    assert sum(entry.host_elements for entry in packed.entries.values()) > 2**31 > max(packed.host_shape)
    values = {name: jax.ShapeDtypeStruct((tokens, *dims), dtype) for name, (dims, dtype) in shapes.items()}

    def there_and_back(values):
        return packed.get(*packed.put(packed.kept_buffers(), packed.host_part(), 0, at(1), values), 0, at(1))

    assert jax.eval_shape(there_and_back, values) == values


def test_the_compiler_does_not_know_the_row_that_a_tick_outside_of_loops_fetches():
    """A known row ends XLA 0.12's GPU compiler where another tick wrote it."""

    def fetched(x_TD):
        row = {"stash.fetch_row": HostRow(jnp.array([5, 2])[1], is_counted=False)}
        return TickOnDevice(TickSpec("B", 8), row, x_TD, jnp.zeros((8, 4))).row_to_fetch("stash.fetch_row")

    x_TD = jnp.ones((8, 4))
    assert fetched(x_TD) == 2
    assert "compare" in jax.jit(fetched).lower(x_TD).compile().as_text()
