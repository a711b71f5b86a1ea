"""The local kernel against plain softmax attention: values, gradients, documents, odd sizes, merging."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sppo_jax.attention import blockwise
from sppo_jax.attention.dense import dense_attention
from sppo_jax.attention.operands import Cotangent, Gradients, Mask, Prefix
from sppo_jax.attention.tags import Tags, block_range, visible


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(blockwise, "BLOCK_Q", 8)
    monkeypatch.setattr(blockwise, "BLOCK_K", 16)


def random_tags(rng, length, padding=3):
    cuts = np.sort(rng.choice(np.arange(1, length), size=3, replace=False))
    documents = np.searchsorted(cuts, np.arange(length), side="right")
    positions = np.arange(length) - np.concatenate([[0], cuts])[documents]
    documents[length - padding :] = -1
    return Tags(jnp.asarray(positions, jnp.int32), jnp.asarray(documents, jnp.int32))


def naive(q_TNH, k_TKH, v_TKH, tags, window=0):
    groups = q_TNH.shape[1] // k_TKH.shape[1]
    k, v = (jnp.repeat(x, groups, axis=1) for x in (k_TKH, v_TKH))
    s = jnp.einsum("tnh,snh->nts", q_TNH, k) * q_TNH.shape[-1] ** -0.5
    far = tags.positions[:, None] - tags.positions
    s = jnp.where(visible(tags, tags) & (far < (window or far.size)), s, -1e30)
    out = jnp.einsum("nts,snh->tnh", jax.nn.softmax(s), v)
    return jnp.where((tags.documents >= 0)[:, None, None], out, 0.0)


@pytest.mark.parametrize(
    "length,heads,kv_heads,window",
    [
        (13, 2, 2, 0),
        (50, 6, 3, 0),
        (64, 4, 2, 9),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((37, 4, 2, 0), (64, 3, 1, 0), (64, 4, 2, 1), (50, 3, 3, 30))
        ),
    ],
)
def test_values_and_gradients_match_plain_softmax(x64, length, heads, kv_heads, window):
    rng = np.random.default_rng(length)
    tags = random_tags(rng, length)
    q, k, v, w = (jnp.asarray(rng.normal(size=(length, n, 6))) for n in (heads, kv_heads, kv_heads, heads))

    def ours(q, k, v):
        return jnp.sum(w * dense_attention(q[None], k[None], v[None], *(x[None] for x in tags), window=window)[0])

    def theirs(q, k, v):
        return jnp.sum(w * naive(q, k, v, tags, window))

    got, want = (jax.value_and_grad(f, argnums=(0, 1, 2))(q, k, v) for f in (ours, theirs))
    chex.assert_trees_all_close(got, want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("window", [0, 1, 2, 7, 16, 40])
def test_block_range_covers_everything_visible_and_skips_the_rest(window):
    rng = np.random.default_rng(0)
    for _ in range(20):
        tags = random_tags(rng, 75, padding=int(rng.integers(0, 20)))
        queries = Tags(tags.positions[30:55], tags.documents[30:55])
        got = block_range(queries, tags, 8, 16, window)
        mask = np.asarray(visible(queries, tags, window))
        for block in range(4):
            seen = np.flatnonzero(mask[block * 8 : block * 8 + 8].any(0)) // 16
            first, last = (seen.min(), seen.max() + 1) if seen.size else (0, 0)
            assert (int(got.first[block]), int(got.last[block])) == (first, last)


def test_a_window_is_so_many_keys_the_token_itself_among_them():
    tags = Tags(jnp.asarray([0, 1, 2, 3, 0, 1, 2], jnp.int32), jnp.asarray([0, 0, 0, 0, 1, 1, 1], jnp.int32))
    assert visible(tags, tags, 2).sum(1).tolist() == [1, 2, 2, 2, 1, 2, 2]
    assert visible(tags, tags, 1).tolist() == np.eye(7, dtype=bool).tolist()


def test_blocks_that_a_window_visits_grow_with_the_window_and_not_with_the_prefix():
    keys = Tags(jnp.arange(4096, dtype=jnp.int32), jnp.zeros(4096, jnp.int32))

    def visited(start, window):
        found = block_range(Tags(*(x[start : start + 64] for x in keys)), keys, 16, 16, window)
        return int((found.last - found.first).sum())

    assert [visited(start, 64) for start in (64, 1024, 4032)] == [4 * (64 // 16 + 1)] * 3
    assert visited(4032, 1024) == 4 * (1024 // 16 + 1)
    assert visited(4032, 0) == 253 + 254 + 255 + 256


def test_products_over_queries_are_made_in_the_form_that_cpus_make_quickly():
    """[K, C, H] takes twice the time of [K, H, C], and the compiler chooses the slow one if it can."""
    tags, heads, kv_heads, width = random_tags(np.random.default_rng(0), 32), 6, 2, 5
    q, k = jnp.ones((32, heads, width), jnp.float32), jnp.ones((kv_heads, 32, width), jnp.float32)
    mask = Mask(tags, tags, blockwise.find_blocks(tags, tags))

    def gradients(q, k):
        cotangent = Cotangent(q, jnp.zeros((32, heads)), jnp.zeros((32, heads)))
        return blockwise.backward(q, Prefix(k, k, ()), mask, cotangent, Gradients(k, k))

    text = jax.jit(gradients).lower(q, k).compile().as_text()
    products = [line.split(" = ")[1].split("{")[0] for line in text.splitlines() if " dot(" in line]
    assert products.count("f32[2,5,16]") == 2 and "f32[2,16,5]" not in products and len(products) == 5, products


def test_merging_two_halves_gives_the_whole(x64):
    rng = np.random.default_rng(1)
    tags = random_tags(rng, 40)
    q, k, v = (jnp.asarray(rng.normal(size=(40, n, 4))) for n in (4, 2, 2))

    def part(rows):
        cut = Tags(tags.positions[rows], tags.documents[rows])
        prefix = Prefix(k[rows].swapaxes(0, 1), v[rows].swapaxes(0, 1), ())
        return blockwise.forward(q, prefix, Mask(tags, cut, blockwise.find_blocks(tags, cut)))

    whole = part(slice(None))
    merged = blockwise.merge(*part(slice(0, 17)), *part(slice(17, None)))
    np.testing.assert_allclose(merged[0], whole[0], rtol=1e-12, atol=1e-13)
    real = np.asarray(tags.documents) >= 0
    np.testing.assert_allclose(merged[1][real], whole[1][real], rtol=1e-12)
    assert np.isneginf(np.asarray(merged[1])[~real]).all()


def test_low_precision_inputs_keep_float32_output_and_lse():
    tags = Tags(jnp.arange(20, dtype=jnp.int32), jnp.zeros(20, jnp.int32))
    q, k = jnp.ones((20, 2, 4), jnp.bfloat16), jnp.ones((2, 20, 4), jnp.bfloat16)
    out, lse = blockwise.forward(q, Prefix(k, k, ()), Mask(tags, tags, block_range(tags, tags, 8, 16)))
    assert out.dtype == lse.dtype == jnp.float32
    np.testing.assert_allclose(lse[:, 0], 2 + np.log(np.arange(1, 21)), rtol=1e-3)


def test_the_buffer_is_addressed_by_index_and_only_its_row_changes(x64):
    rng = np.random.default_rng(2)
    tags = random_tags(rng, 24)
    q, k, v = (jnp.asarray(rng.normal(size=s)) for s in ((24, 2, 4), (3, 2, 2, 24, 4), (3, 2, 2, 24, 4)))
    mask = Mask(tags, tags, block_range(tags, tags, 8, 16))
    prefix = Prefix(k, v, (jnp.int32(1), jnp.int32(0)))
    out, lse = blockwise.forward(q, prefix, mask)
    alone, _ = blockwise.forward(q, Prefix(k[1, 0], v[1, 0], ()), mask)
    np.testing.assert_array_equal(out, alone)
    zeros = jnp.zeros_like(k)
    cotangent = Cotangent(q, lse, blockwise.delta(out, q))
    _, gradients = blockwise.backward(q, prefix, mask, cotangent, Gradients(zeros, zeros))
    changed = np.abs(np.asarray(gradients.dk)).sum((2, 3, 4)) > 0
    assert changed.tolist() == [[False, False], [True, False], [False, False]]


def test_skipped_blocks_are_not_computed():
    tags = random_tags(np.random.default_rng(3), 64, padding=0)
    lonely = Tags(jnp.zeros(64, jnp.int32), jnp.arange(64, dtype=jnp.int32))  # every token its own document
    blocks = block_range(lonely, lonely, 8, 16)
    assert int((blocks.last - blocks.first).max()) == 1
    whole = block_range(tags, tags, 8, 16)
    assert int((whole.last - whole.first).sum()) < 8 * 4
    mask = Mask(tags, tags, whole)
    trips = jax.make_jaxpr(lambda q, k: blockwise.forward(q, Prefix(k, k, ()), mask))(
        jnp.zeros((64, 2, 4)), jnp.zeros((2, 64, 4))
    )
    assert "while" in str(trips)
