"""Experts' products in both forms against every expert on every token: outputs, gradients, tiles, and neighbours."""

from functools import lru_cache, partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exactness import quick_jit
from hypothesis import given, settings
from hypothesis import strategies as st

from sppo_jax.models.moe import grouped, tiles
from sppo_jax.models.moe.experts import ACTIVATIONS

NUM_TOKENS, HIDDEN, SIZE, NUM_EXPERTS = 11, 6, 5, 4
FORMS = {"tiles": (), "ragged": ("cpu", "tpu")}


def dense_mix(activate, x_TD, weights_Tk, chosen_Tk, experts):
    """Runs every expert on every token and adds up those that were chosen."""

    def run(gate_DF, up_DF, down_FD, gate_F=0.0, up_F=0.0, down_D=0.0):
        return activate(x_TD @ gate_DF + gate_F, x_TD @ up_DF + up_F) @ down_FD + down_D

    out_ETD = jax.vmap(run)(*(array for array in experts if array is not None))
    of_expert_TkE = jax.nn.one_hot(chosen_Tk, out_ETD.shape[0], dtype=x_TD.dtype)
    return jnp.einsum("tke,tk,etd->td", of_expert_TkE, weights_Tk, out_ETD)


def make_case(chosen_Tk, *, bias=False, dtype=np.float64, seed=0):
    rng = np.random.default_rng(seed)
    shapes = [(HIDDEN, SIZE), (HIDDEN, SIZE), (SIZE, HIDDEN), *([(SIZE,), (SIZE,), (HIDDEN,)] if bias else [])]
    experts = grouped.Experts(*(jnp.asarray(rng.normal(size=(NUM_EXPERTS, *shape)), dtype) for shape in shapes))
    x_TD = jnp.asarray(rng.normal(size=(len(chosen_Tk), HIDDEN)), dtype)
    weights_Tk = jnp.asarray(rng.uniform(0.1, 1, np.shape(chosen_Tk)), dtype)
    return x_TD, weights_Tk, jnp.asarray(chosen_Tk, jnp.int16), experts


def choices(num_tokens, top_k, among=NUM_EXPERTS, seed=1):
    """Draws different experts for each token, from the last `among` of them."""
    rng = np.random.default_rng(seed)
    return np.stack([NUM_EXPERTS - 1 - rng.permutation(among)[:top_k] for _ in range(num_tokens)])


# Choices of one shape, for which a form is compiled once.
CHOICES = {
    "two of four": (choices(NUM_TOKENS, 2), choices(NUM_TOKENS, 2, among=2)),  # in the second two experts are empty
    "one": (choices(NUM_TOKENS, 1), np.full((NUM_TOKENS, 1), 2)),  # in the second all tokens go to one expert
    "all": (choices(NUM_TOKENS, NUM_EXPERTS),),
    "one token": (choices(1, 2),),
}
TWO = CHOICES["two of four"][0]


@pytest.fixture(params=FORMS)
def form(request, monkeypatch):
    """Computes with one form; tiles are so small that an expert has several, and lots have few.

    Memory that is not written yet is NaN.
    """
    monkeypatch.setattr(jnp, "empty", lambda shape, dtype: jnp.full(shape, jnp.nan, dtype))
    monkeypatch.setattr(jnp, "empty_like", lambda array: jnp.full_like(array, jnp.nan))
    monkeypatch.setattr(grouped, "RAGGED", FORMS[request.param])
    monkeypatch.setattr(tiles, "TILE", 4)
    monkeypatch.setattr(tiles, "LOT", 3)
    return request.param


def gradients_of(mix, chosen_Tk, activation):
    """Returns a jitted function of a case to gradients and outputs, for choices of one shape."""
    dy = jnp.asarray(np.random.default_rng(2).normal(size=(len(chosen_Tk), HIDDEN)))

    def run(x, weights, experts, chosen):
        y = mix(ACTIVATIONS[activation], x, weights, chosen, experts)
        return (y * dy).sum(), y

    return quick_jit(jax.grad(run, argnums=(0, 1, 2), has_aux=True))


@pytest.mark.parametrize("name", CHOICES)
def test_outputs_and_gradients_are_those_of_all_experts_on_all_tokens(x64, form, name):
    activation = "clamped" if name == "two of four" else "swiglu"
    got, want = (gradients_of(mix, CHOICES[name][0], activation) for mix in (grouped.mix, dense_mix))
    for chosen_Tk in CHOICES[name]:
        x, weights, chosen, experts = make_case(chosen_Tk, bias=activation == "clamped")
        case = x, weights, experts, chosen
        chex.assert_trees_all_close(got(*case), want(*case), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("platform", "is_native"), [("cpu", False), ("cuda", False), ("tpu", True)])
def test_ragged_products_are_used_where_they_are_native(platform, is_native):
    args = make_case(TWO, dtype=np.float32)
    traced = jax.jit(partial(grouped.mix, ACTIVATIONS["swiglu"])).trace(*args)
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert ("ragged_dot" in text) == is_native
    assert ("stablehlo.while" in text) == (not is_native)  # the scan over lots of tiles


@lru_cache
def tiles_of(num_pairs, num_experts, tile, lot):
    """Compiles the search for tiles; returns it, and rows of a tile, tiles of a lot and all tiles."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "TILE", tile)
        patch.setattr(tiles, "LOT", lot)
        find = jax.jit(lambda sizes_E: grouped.find_tiles(sizes_E, num_pairs))
        find(jnp.zeros(num_experts, jnp.int32))
        return find, *tiles.tile_sizes(num_pairs, num_experts), tiles.num_tiles(num_pairs, num_experts)


@settings(max_examples=50)
@given(
    shape=st.sampled_from([(60, 7, 4, 3), (61, 5, 512, 64), (9, 12, 8, 4), (40, 1, 8, 64)]),
    ends=st.lists(st.floats(0, 1), min_size=11, max_size=11),
)
def test_tiles_hold_every_row_once_whatever_the_router_does(shape, ends):
    num_pairs, num_experts, _, _ = shape
    find, size, tiles_of_lot, total = tiles_of(*shape)
    cuts = sorted(int(end * num_pairs) for end in ends[: num_experts - 1])
    sizes = np.diff([0, *cuts, num_pairs])
    found = find(jnp.asarray(sizes, jnp.int32))
    rows, expert = np.asarray(found.rows_LNB).reshape(-1, size), np.asarray(found.expert_LN).ravel()
    assert len(rows) == len(expert) == total and total % tiles_of_lot == 0
    used = (rows < num_pairs).any(1)
    # Whole lots apart, no router needs more tiles than pairs fill, and one an expert.
    assert used.sum() <= num_pairs // size + num_experts and total < num_pairs // size + num_experts + tiles_of_lot
    assert sorted(rows[rows < num_pairs]) == list(range(num_pairs))
    of_row = np.repeat(np.arange(num_experts), sizes)
    for row, of_tile in zip(rows, expert, strict=True):
        assert (of_row[row[row < num_pairs]] == of_tile).all()


@pytest.mark.parametrize("chosen", [chosen for same in CHOICES.values() for chosen in same], ids=lambda x: str(x.shape))
def test_pairs_are_sorted_by_expert_and_then_by_token(chosen):
    got = jax.jit(grouped.sort_pairs, static_argnums=1)(jnp.asarray(chosen, jnp.int16), NUM_EXPERTS)
    want = np.argsort(chosen.ravel(), kind="stable")
    np.testing.assert_array_equal(got.pair_P, want)
    np.testing.assert_array_equal(got.row_P, np.argsort(want))
    np.testing.assert_array_equal(got.sizes_E, np.bincount(chosen.ravel(), minlength=NUM_EXPERTS))


@pytest.mark.parametrize("chosen", [0, 2, NUM_EXPERTS, -1], ids=lambda x: f"all {x}")
def test_every_pair_has_a_row_where_no_router_chose(form, chosen):
    """An idle stage may read any integers: rows that nobody writes would turn into gradients."""
    x, weights, chosen, experts = make_case(np.full((NUM_TOKENS, 2), chosen), dtype=np.float32)
    by_expert = jax.jit(grouped.sort_pairs, static_argnums=1)(chosen, NUM_EXPERTS)
    np.testing.assert_array_equal(by_expert.pair_P[by_expert.row_P], np.arange(2 * NUM_TOKENS))
    assert by_expert.sizes_E.sum() == 2 * NUM_TOKENS
    got = gradients_of(grouped.mix, chosen, "swiglu")(x, weights, experts, chosen)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(got))


def test_gate_and_up_are_one_product_and_one_array():
    """Two products forward and five backward; on GPUs a barrier before each part of what products read together."""
    x, weights, chosen, experts = make_case(TWO, dtype=np.float32)
    both = gradients_of(grouped.mix, chosen, "swiglu").trace(x, weights, experts, chosen)
    text = both.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.dot_general") == 2 + 5 + 1  # one sums the outputs of a token
    assert text.count("stablehlo.optimization_barrier") == 2 + 3


def test_other_tokens_do_not_change_a_bit(form):
    """Neither their values nor the experts to which they go, which moves the rows of a token to other tiles."""
    activate, token = ACTIVATIONS["swiglu"], 5
    mix = jax.jit(partial(grouped.mix, activate))
    x, weights, chosen, experts = make_case(TWO, dtype=np.float32)
    want = np.asarray(mix(x, weights, chosen, experts))[token]
    others, _, elsewhere, _ = make_case(choices(NUM_TOKENS, 2, seed=7), dtype=np.float32, seed=8)
    for x_TD, chosen_Tk in ((others, chosen), (x, elsewhere), (1e6 * others, elsewhere)):
        got = mix(x_TD.at[token].set(x[token]), weights, chosen_Tk.at[token].set(chosen[token]), experts)
        np.testing.assert_array_equal(np.asarray(got)[token], want)
