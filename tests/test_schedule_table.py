"""Diagonals, their bundles and the static shapes of ticks."""

from dataclasses import replace

from schedule_cases import all_tables

from sppo_jax.schedule.generators import make_table
from sppo_jax.schedule.table import Unit


def test_a_diagonal_is_chunk_plus_stage_where_there_is_one_group():
    for table in all_tables():
        if table.num_groups == 1:
            for (_, chunk, stage), diagonal in table.unit_diagonals.items():
                assert diagonal == chunk + stage


def test_number_of_diagonals():
    for table in all_tables():
        chunks, stages, groups = table.num_chunks, table.num_stages, table.num_groups
        in_turn = (groups - 1) * max(chunks, stages) + chunks + stages - 1
        expected = chunks * groups + stages - 1 if chunks % stages == 0 or groups == 1 else stages * groups + chunks - 1
        expected = in_turn if table.name == "breadth-first" else expected
        assert len(table.diagonal_bundles) == expected


def test_every_diagonal_is_alone_in_sppo_and_mod_n_in_a_stream():
    for table in all_tables():
        bundles = table.diagonal_bundles
        if table.num_groups > 1:
            continue
        if table.name == "sppo" or table.num_sequences == 1:
            assert bundles == tuple(range(len(bundles)))
        elif table.num_sequences > 2 * table.num_stages:
            assert bundles == tuple(diagonal % table.num_chunks for diagonal in range(len(bundles)))


def test_units_of_a_tick_are_in_one_bundle_and_unmixed_diagonals_are_not_merged():
    for table in all_tables()[::11]:
        bundles, diagonals = table.diagonal_bundles, table.unit_diagonals
        links = {diagonal: {diagonal} for diagonal in range(len(bundles))}
        for tick in table.ticks:
            if tick.op == "H":
                continue
            together = {diagonals[u.sequence, u.chunk, u.virtual_stage] for u in tick.units if u is not None}
            assert len({bundles[diagonal] for diagonal in together}) == 1
            for diagonal in together:
                links[diagonal] |= together
        # Reachability by flooding, as a second opinion on the merging.
        for start in links:
            reached, frontier = {start}, [start]
            while frontier:
                new = links[frontier.pop()] - reached
                reached |= new
                frontier += new
            assert reached == {diagonal for diagonal in links if bundles[diagonal] == bundles[start]}


def test_gaps_of_sppo_fall_by_two_a_diagonal_to_one():
    table = make_table("sppo", 3, 2, (8,) * 4)
    assert table.bundle_gaps == (11, 9, 7, 5, 3, 1)


def test_gaps_are_the_least_of_their_units():
    for table in all_tables()[::11]:
        bundles, diagonals, ticks = table.diagonal_bundles, table.unit_diagonals, table.unit_ticks
        found = {}
        for key, diagonal in diagonals.items():
            between = table.ticks[ticks[Unit("F", *key)] : ticks[Unit("B", *key)]]
            gap = sum(tick.op != "H" for tick in between)
            found.setdefault(bundles[diagonal], []).append(gap)
        assert table.bundle_gaps == tuple(min(found[bundle]) for bundle in sorted(found))


def test_forward_and_backward_of_a_unit_have_one_shape_that_holds_all_units_of_the_tick():
    for table in all_tables():
        tokens, ticks = table.tick_tokens, table.unit_ticks
        before = None
        for index, tick in enumerate(table.ticks):
            if tick.op == "H":
                assert tokens[index] == before
            elif tick.op == "F":
                before = tokens[index]
            for unit in tick.units:
                if unit is not None:
                    assert tokens[index] >= table.chunk_lengths[unit.chunk]
                    if unit.op == "F":
                        back = Unit("B", unit.sequence, unit.chunk, unit.virtual_stage)
                        assert tokens[ticks[back]] == tokens[index]


def test_a_tick_is_as_long_as_the_longest_chunk_of_its_diagonals():
    table = make_table("sppo", 2, 1, (16, 12, 8))
    assert [tokens for tokens, tick in zip(table.tick_tokens, table.ticks, strict=True) if tick.op == "F"] == [
        16,
        16,
        12,
        8,
    ]


def test_all_units_of_a_tick_are_in_its_bundle():
    for table in all_tables():
        bundles, diagonals = table.diagonal_bundles, table.unit_diagonals
        for tick, bundle in zip(table.ticks, table.tick_bundles, strict=True):
            units = [unit for unit in tick.units if unit is not None]
            found = {bundles[diagonals[unit.sequence, unit.chunk, unit.virtual_stage]] for unit in units}
            assert (bundle is None) == (tick.op == "H") and (bundle is None or found == {bundle})


def test_a_table_keeps_what_was_found_and_a_changed_one_starts_anew():
    table = make_table("sppo", 2, 1, (16, 8, 8))
    assert table.unit_ticks is table.unit_ticks
    other = replace(table, chunk_lengths=(8, 8, 16))
    assert other.tick_tokens != table.tick_tokens
    assert table == make_table("sppo", 2, 1, (16, 8, 8)) and hash(table) == hash(make_table("sppo", 2, 1, (16, 8, 8)))
