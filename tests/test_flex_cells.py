"""The planner of a window keeps every rule, predicts what the arrays say, and is never slower than a simpler plan."""

import dataclasses

import numpy as np
import pytest
from flex_cases import KINDS, contents_of, draw_shape, draw_sizes, make_shape, pack, same, wikipedia_like

from bench.flex_counts import count_pairs
from sppo_jax.flex.baselines import per_batch
from sppo_jax.flex.cells import candidates, plan_cells, today
from sppo_jax.flex.contract import check_columns, far_cells
from sppo_jax.flex.greedy import deal
from sppo_jax.flex.placement import Pieces
from sppo_jax.flex.rows import write
from sppo_jax.predict.seconds.simulate import simulate

CASES = [(kind, seed) for kind in KINDS for seed in range(15)]


def window(kind, seed):
    rng = np.random.default_rng([seed, KINDS.index(kind)])
    shape = draw_shape(rng)
    return pack(draw_sizes(rng, kind, shape), shape, float(rng.choice([0.5, 0.9, 0.99]))), shape


def cost_of(batch, shape):
    """Adds up the ticks from the arrays of a batch, one unit after the other."""
    pairs, (far, level) = count_pairs(batch, shape), far_cells(batch["document_ids"], shape)
    total, per_pipeline = 0, shape.table.num_sequences
    for tick, (tokens, _, has_ends) in zip(shape.table.ticks, shape.table.tick_shapes, strict=True):
        slots = tokens // shape.members
        costs = shape.weights.of(tick.op)
        if has_ends:
            total += costs.ends[0] + costs.ends[1] * slots
        cells = [
            (pipeline * per_pipeline + unit.sequence, unit.chunk)
            for unit in tick.units
            if unit is not None
            for pipeline in range(shape.data)
        ]
        near = max([int(pairs[cell].max()) for cell in cells if not far[cell]], default=0)
        stream = max([int(pairs[cell].max()) for cell in cells if far[cell]], default=0)
        total += costs.fixed + costs.slot * slots + costs.pair * (near + stream)
        total += costs.sent[max(int(level[cell]) for cell in cells)] * slots
        total += max([costs.stream[cell[1]] for cell in cells if far[cell]], default=0)
    return total


@pytest.mark.parametrize(("kind", "seed"), CASES)
def test_every_candidate_keeps_the_rules_and_is_predicted_from_what_it_writes(kind, seed):
    pieces, shape = window(kind, seed)
    found, contents = candidates(pieces, shape), contents_of(pieces)
    assert next(iter(found)) == "packed"
    for name, placement in found.items():
        batch = write(placement, contents)
        check_columns(batch, shape, dealing=True)
        real = batch["document_ids"] >= 0
        assert np.array_equal(np.sort(batch["tokens"][real]), np.arange(pieces.size.sum())), name
        assert np.array_equal(batch["targets"][real], batch["tokens"][real] + 1)
        assert np.array_equal(placement.attention, count_pairs(batch, shape))
        far, level = far_cells(batch["document_ids"], shape)
        assert np.array_equal(placement.cells.far, far) and np.array_equal(placement.cells.level, level)
        assert placement.cost == cost_of(batch, shape)
        in_teams = placement.begin < 0
        assert (placement.degree[in_teams] <= np.minimum(pieces.size[in_teams], shape.members // 2)).all()
        if "degree" in name:  # "degree 2", "alpha 3 up to degree 2"
            assert placement.degree[in_teams].max(initial=1) <= int(name.split()[-1])


@pytest.mark.parametrize(("kind", "seed"), CASES)
def test_a_plan_is_never_slower_than_a_simpler_one_and_always_the_same(kind, seed):
    pieces, shape = window(kind, seed)
    chosen = plan_cells(pieces, shape)
    assert chosen.cost == min(chosen.costs.values()) == chosen.costs[chosen.winner]
    assert chosen.cost <= today(pieces, shape).cost
    assert chosen.cost <= per_batch(pieces, shape).cost
    again = plan_cells(Pieces(*(x.copy() for x in (pieces.row, pieces.begin, pieces.size))), shape)
    assert same(chosen, again) and chosen.costs == again.costs
    assert "chosen" in chosen.describe()


@pytest.mark.parametrize("name", ["seq1f1b", "sppo", "gpipe"])
def test_a_step_of_one_kind_of_cell_is_what_the_schedule_simulation_says(name):
    cases = ((64, 64, 64), 10, "packed", True), ((64, 32, 64), 4, "degree 1", False)
    for lengths, size, candidate, far in cases:
        shape = make_shape(4, lengths, data=2, stages=2, name=name)
        placement = candidates(Pieces.packed([[size] * (sum(lengths) // size - 1)] * 4), shape)[candidate]
        cells = placement.cells
        assert (cells.far == far).all()

        def cost(unit, tick, shape=shape, cells=cells, far=far):
            slots = tick.tokens // shape.members
            costs = shape.weights.of(unit.op)
            rows = [pipeline * shape.table.num_sequences + unit.sequence for pipeline in range(shape.data)]
            attention = costs.pair * max(int(cells.top[row, unit.chunk]) for row in rows)
            ends = costs.ends[0] + costs.ends[1] * slots if tick.has_ends else 0
            return costs.fixed + costs.slot * slots + ends + attention + (costs.stream[unit.chunk] if far else 0)

        assert placement.cost == simulate(shape.table, cost).step_s


def test_places_are_those_of_the_batch_that_pipelines_share():
    shape = make_shape(6, data=2)
    in_time = [shape.row_of(order) for order in range(6)]
    # Row d * per_pipeline + j is sequence j of pipeline d; sequence 0 of both pipelines runs first.
    assert in_time == np.arange(6).reshape(2, 3).T.ravel().tolist()


def test_long_documents_are_stream_and_come_first():
    shape = make_shape(2, (64, 64, 64), hidden=1)
    pieces = Pieces.packed([[100, *[4] * 8], [4] * 30])
    for name, placement in candidates(pieces, shape).items():
        if name != "packed":
            assert placement.begin[0] == 0 and placement.degree[0] == 4
            assert placement.cells.far[placement.row[0]].tolist() == [True, True, False]


def test_a_document_that_spoils_the_balance_gets_a_larger_team():
    shape = make_shape(1, (256, 256), ring=8, hidden=1)
    pieces = Pieces.packed([[64] + [8] * 50])
    degrees = {name: int(placement.degree[0]) for name, placement in candidates(pieces, shape).items()}
    assert degrees["alpha 1/2"] > degrees["alpha 3"] > 1
    # 32 slots of a member: its 64 tokens need two members at least.
    assert degrees["degree 2"] == 2 and degrees["degree 1"] == 8


def test_cells_of_similar_cost_run_side_by_side():
    shape = make_shape(8, (64, 64), data=4, hidden=1)
    pieces = pack(np.minimum(20, np.random.default_rng(0).geometric(0.1, 1000)), shape, 0.8)
    placement = candidates(pieces, shape)["alpha 3"]
    assert not placement.cells.far.any() and set(placement.cells.level.ravel().tolist()) == {0, 1}

    def in_time(values):
        return values.reshape(4, 2, 2).transpose(1, 2, 0).ravel()  # sequence, chunk, pipeline

    level, pairs = in_time(placement.cells.level), in_time(placement.attention.sum(2))
    steps = list(zip(level.tolist(), pairs.tolist(), strict=True))
    assert steps == sorted(steps, reverse=True)


def dealt(sizes, degrees, slots, *, members=4, penalty=(0, 0), largest=1):
    sizes, degrees, slots = (np.array(values, np.int64) for values in (sizes, degrees, slots))
    found = deal(sizes, degrees, slots, members=members, penalty=np.array(penalty), largest=largest)
    return list(zip(found.cell.tolist(), found.member.tolist(), found.degree.tolist(), strict=True))


def test_a_document_goes_where_a_cell_grows_least_then_where_it_fits_best_then_first():
    # Two documents of 5 tokens have fewer pairs than one of 9, so they share a member of the first cell.
    assert dealt([9, 5, 5, 5, 5], [1] * 5, [10, 10]) == [(0, 0, 1), (0, 1, 1), (0, 1, 1), (0, 2, 1), (0, 2, 1)]
    # Beside 5 tokens a document of 5 would raise the maximum of a cell with 6: the next member takes it.
    assert dealt([6, 5, 5, 5], [1] * 4, [10, 10]) == [(0, 0, 1), (0, 1, 1), (0, 2, 1), (0, 3, 1)]
    # Members 1 and 2 hold 8 and 7 of 12 slots: 3 tokens more do not raise the maximum, and leave least on member 1.
    assert dealt([11, 8, 7, 3], [1] * 4, [12])[3] == (0, 1, 1)
    assert dealt([9, 9], [1] * 2, [10, 9]) == [(1, 0, 1), (1, 1, 1)]
    # 4 tokens raise no maximum on member 2 of the first cell nor on member 3 of the second, which has fewer slots left.
    places = [(1, 0, 1), (1, 1, 1), (1, 2, 1), (1, 3, 1), (0, 0, 1), (0, 1, 1), (1, 3, 1)]
    assert dealt([13, 12, 11, 10, 9, 8, 4], [1] * 7, [12, 14]) == places
    # 6 tokens fit nowhere but on member 3.
    assert dealt([9, 8, 7, 6, 5], [1] * 5, [10]) == [(0, 0, 1), (0, 1, 1), (0, 2, 1), (0, 3, 1), (-1, 0, 1)]


def test_a_new_level_costs_what_travels():
    # Documents of 9 tokens need two members. Both go to one cell where a level is dear, though the other has less left.
    sizes, degrees, slots = [9, 9, 7, 2], [1] * 4, [6, 7]
    assert dealt(sizes, degrees, slots, largest=2)[:2] == [(1, 2, 2), (0, 0, 2)]
    assert dealt(sizes, degrees, slots, largest=2, penalty=(0, 50))[:2] == [(0, 0, 2), (0, 2, 2)]


def test_a_larger_team_takes_what_does_not_fit_into_a_smaller_one():
    sizes, degrees = [7, 7, 7, 7, 6], [1] * 5
    assert dealt(sizes, degrees, [10])[4] == (-1, 0, 1)
    assert dealt(sizes, degrees, [10], largest=2)[4] == (0, 0, 2)


def test_what_fits_nowhere_becomes_stream_and_nothing_else():
    shape = make_shape(3, (64,), stages=1, hidden=1)
    # Twelve members of 16 slots take one document each; the thirteenth needs stream, whose row four others lose.
    pieces = Pieces.packed([[15, 14, 13, 12, 11], [10, 10, 10, 10], [10, 10, 10, 9]])
    stream = candidates(pieces, shape)["degree 1"].begin >= 0
    assert stream.tolist() == [False] * 8 + [True] * 5


def test_real_lengths_fill_the_window_with_balanced_cells():
    shape = make_shape(16, (32768,) * 4, ring=1, ulysses=8, stages=4)
    pieces = pack(wikipedia_like(4000, 0), shape, 0.985)
    assert pieces.size.sum() >= 0.97 * shape.rows * shape.length
    found = candidates(pieces, shape)
    assert {"alpha 1/2", "alpha 1", "alpha 3"} & set(found)
    chosen = plan_cells(pieces, shape)
    assert chosen.winner != "packed" and chosen.balance <= 1.05
    assert any("up to degree" in name for name in found)
    assert all(placement.balance <= 1.05 for name, placement in found.items() if name.startswith("alpha"))


@pytest.mark.parametrize(("low", "high"), [(4800, 5200), (19000, 21000), (1, 40000)])
def test_lengths_that_fill_cells_badly_are_placed_all_the_same(low, high):
    shape = make_shape(16, (32768,) * 4, ring=1, ulysses=8, stages=4)
    pieces = pack(np.random.default_rng(0).integers(low, high, 4000), shape, 0.985)
    chosen = plan_cells(pieces, shape)
    assert (chosen.order >= 0).all() and chosen.cost <= chosen.costs["packed"]
    assert {"degree 1", "alpha 1/2"} <= set(chosen.costs)
    # Every document lies inside the window, without another: the tokens of a cell fit into the cell.
    seg, in_teams = chosen.segments, chosen.begin < 0
    tokens = np.zeros((shape.rows, shape.num_chunks), np.int64)
    np.add.at(tokens, (chosen.row[in_teams], chosen.chunk[in_teams]), pieces.size[in_teams])
    np.add.at(tokens, (chosen.row[seg.piece], seg.chunk), seg.tokens)
    assert tokens.sum() == pieces.size.sum() and (tokens <= 32768).all()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"ring": 3}, "power of two"),
        ({"chunk_lengths": (62, 66)}, "multiples of its 4 members"),
        ({"rows": 5}, "sequences of the schedule table"),
    ],
)
def test_a_window_that_does_not_hold_together_is_refused(change, words):
    with pytest.raises(ValueError, match=words) as error:
        dataclasses.replace(make_shape(), **change)
    assert "\n" not in str(error.value)
