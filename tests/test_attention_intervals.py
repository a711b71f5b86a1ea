"""Intervals and steps of the kernel for TPUs, against the comparison of all tags."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pallas_cases import draw_masks

from sppo_jax.attention import intervals
from sppo_jax.attention.intervals import EDGE, FULL, NONE, Intervals, find_steps, read_field, within_window
from sppo_jax.attention.spans import find_team_spans
from sppo_jax.attention.tags import Tags, visible

compiled_steps = jax.jit(find_steps, static_argnames=("num_keys", "blocks", "num_lists", "by"))


def seen_by(found: Intervals, num_keys: int) -> np.ndarray:
    keys = np.arange(num_keys)
    return (keys >= np.asarray(found.lo)[:, None]) & (keys < np.asarray(found.hi)[:, None])


@pytest.mark.parametrize("seed", range(8))
def test_an_interval_is_what_a_query_sees(seed):
    rng = np.random.default_rng(seed)
    masks = draw_masks(rng, num_queries=24, num_keys=64)
    found = masks.intervals()
    np.testing.assert_array_equal(seen_by(found, 64), masks.seen())
    window = int(rng.integers(1, 80))
    shorter = within_window(found, masks.start, window, masks.members, masks.num_members)
    np.testing.assert_array_equal(seen_by(shorter, 64), masks.seen(window))


@pytest.mark.parametrize("seed", range(5))
def test_an_interval_of_a_team_is_what_a_query_sees(seed):
    """Documents lie on two members of their team in turn, or on one of them alone."""
    rng, size = np.random.default_rng(seed), 48
    rows = [[], []]
    for number in range(8):
        length, spread = int(rng.integers(1, 12)), rng.random() < 0.6
        for token in range(length):
            rows[token % 2 if spread else number % 2].append((token, number))
    rows = [(row + [(0, -1)] * size)[:size] for row in rows]
    tags = [Tags(*(jnp.array(x, jnp.int32) for x in zip(*row, strict=True))) for row in rows]
    for queries in tags:
        for keys in tags:
            found = intervals.from_spans(find_team_spans(queries, keys), size)
            np.testing.assert_array_equal(seen_by(found, size), np.asarray(visible(queries, keys)))


@pytest.mark.parametrize("by", ["query", "key"])
@pytest.mark.parametrize("num_lists", [1, 2, 3])
@pytest.mark.parametrize("seed", range(2))
def test_steps_visit_each_pair_of_blocks_that_is_needed_once(seed, num_lists, by):
    block_q, block_k, num_keys = 8, 16, 128
    masks = draw_masks(np.random.default_rng(seed), num_queries=48, num_keys=num_keys)
    found = masks.intervals()
    steps = compiled_steps(found, num_keys, (block_q, block_k), num_lists=num_lists, by=by)
    blocks = masks.seen().reshape(-1, block_q, num_keys // block_k, block_k).swapaxes(1, 2)
    kinds = np.where(blocks.all((2, 3)), FULL, np.where(blocks.any((2, 3)), EDGE, NONE))
    visited, written = np.zeros_like(kinds), [[] for _ in range(num_lists)]
    for core, table in enumerate(np.asarray(steps.table)[:, : int(steps.count)]):
        words = {
            name: np.asarray(read_field(jnp.array(table), name)) for name in ("kind", "first", "last", "query", "key")
        }
        assert (words["kind"] != NONE).sum() == steps.active[core]
        for kind, query, key in zip(words["kind"], words["query"], words["key"], strict=True):
            if kind != NONE:
                assert visited[query, key] == NONE, "once"
                visited[query, key] = kind
                assert (query if by == "query" else key) % num_lists == core
        firsts, lasts = (words["query"][words[name] == 1].tolist() for name in ("first", "last"))
        assert firsts == lasts, "each block of queries that begins ends"
        written[core] = firsts
    np.testing.assert_array_equal(visited, kinds)
    num_q = len(kinds)
    own = [[q for q in range(num_q) if by == "key" or q % num_lists == core] for core in range(num_lists)]
    assert written == own, "each output is written, by one core if queries are dealt"


def test_too_many_pairs_of_blocks_are_refused():
    found = Intervals(*(jnp.zeros(2**17, jnp.int32),) * 2)
    with pytest.raises(ValueError, match="at most 196608 pairs of blocks in a chunk, got 1024 blocks of queries"):
        find_steps(found, 2**17, (128, 512), num_lists=1, by="query")


@pytest.mark.parametrize("by", ["query", "key"])
def test_cores_share_the_pairs_of_blocks_that_a_table_holds(by):
    """A core has a list of its own share, so that two of them visit as many pairs as one."""
    found = Intervals(*(jnp.zeros(2**16, jnp.int32),) * 2)

    def list_steps(num_keys):
        return jax.eval_shape(lambda: find_steps(found, num_keys, (256, 512), num_lists=2, by=by))

    assert list_steps(768 * 512).table.shape == (2, 256 * 768 // 2)
    with pytest.raises(ValueError, match="at most 196608 pairs of blocks in a chunk, got 256 blocks"):
        list_steps(770 * 512)
