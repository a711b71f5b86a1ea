"""How often a tick's loops have a turn is what the rows of the program say."""

from exactness import small_plan

from sppo_jax.fit.turns import turn_shares
from sppo_jax.program.program import lower
from sppo_jax.program.ring import AttentionShape

SHAPE = AttentionShape(num_heads=2, num_kv_heads=1, head_dim=6, itemsize=8)
ORDER = dict(chunks=(8,) * 8, schedule="breadth-first", interleave=4, kv="rebuild")
PLACES = dict(places=("host", "recompute", "recompute"), alpha=1.0, weights="gathered", mesh=(1, 1, 2))


def test_only_ticks_of_loops_whose_runs_differ_have_a_share():
    """Four groups of 8 chunks: loops of 17 and of 15 ticks gather 3 and 2 times, loops of 7 and of 15 scatter once."""
    program = lower(small_plan(**ORDER, **PLACES), SHAPE)
    assert program.rows["weights.gathers"][:, 0].sum() == 7 and program.rows["weights.scatters"][:, 0].sum() == 4
    assert turn_shares(program) == {"gather_turn": 5 / 32, "scatter_turn": 2 / 22}


def test_attention_has_a_turn_where_a_late_chunk_leaves_none():
    """Four groups of 8 chunks, of which the first 6 attend again; three ticks, of which two attend, are no loops."""
    late = PLACES | dict(places=("host", "host", "recompute"), attention_from=6)
    program = lower(small_plan(**ORDER, **late), SHAPE)
    assert program.rows["stash.attends_again"][:, 0].sum() == 4 * 6
    assert turn_shares(program)["attention_turn"] == 22 / 29


def test_resident_weights_have_no_turns():
    resident = ORDER | PLACES | dict(weights="resident")
    assert turn_shares(lower(small_plan(**resident), SHAPE)) == {}


def test_each_pattern_has_the_share_of_its_groups():
    """Of four groups the second is unlike the others: 15 of the 32 ticks of the loops in which it is met."""
    shares = turn_shares(lower(small_plan(**ORDER, **PLACES), SHAPE, [0, 1, 0, 0]))
    assert (shares["pattern_0_turn"], shares["pattern_1_turn"]) == (17 / 32, 15 / 32)
    assert (shares["again_pattern_0_turn"], shares["again_pattern_1_turn"]) == (7 / 15, 8 / 15)
