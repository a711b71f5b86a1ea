"""The gated delta rule in blocks against its definition, token by token: outputs, state, and every gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from delta_cases import draw_documents, sequential, worst

from sppo_jax.mixers import gated_delta
from sppo_jax.mixers.gated_delta import Tokens, inverse_of_unit_lower, run


def draw(rng, length, heads=2, key=6, value=5, dtype=np.float64):
    def normal(*dims):
        return rng.normal(size=dims)

    k = normal(length, heads, key)
    tokens = Tokens(
        normal(length, heads, key),
        k / np.linalg.norm(k, axis=-1, keepdims=True),
        normal(length, heads, value),
        -np.exp(rng.normal(-1, 2, (length, heads))),
        rng.uniform(0, 1, (length, heads)),
    )
    state = normal(heads, key, value)
    return jax.tree.map(lambda x: jnp.asarray(x, dtype), (tokens, state))


def results(rule, tokens, documents, before, state, cotangents):
    """Returns outputs, state, and the gradients of tokens and state."""
    value, pull = jax.vjp(lambda tokens, state: rule(tokens, documents, before, state), tokens, state)
    return value, pull(cotangents)


def compare(seed, length, documents, spans, padding=0, before=None):
    rng = np.random.default_rng(seed)
    tokens, state = draw(rng, length)
    ids = draw_documents(rng, length - padding, documents)
    ids = jnp.asarray(np.concatenate([ids, np.full(padding, -1, np.int32)]))
    before = ids[0] if before is None else jnp.asarray(before, jnp.int32)
    cotangents = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape)), (tokens.v, state))
    got, want = (
        jax.jit(lambda t, s, rule=rule: results(rule, t, ids, before, s, cotangents))(tokens, state)
        for rule in (lambda *args: run(*args, spans=spans), sequential)
    )
    return worst(got, want)


@pytest.mark.parametrize(
    ("length", "documents", "spans", "padding", "before"),
    [
        (1, 1, 1, 0, None),
        (200, 1, 1, 0, None),
        (200, 40, 1, 9, None),
        (640, 3, 8, 30, None),
        (700, 90, 4, 150, None),
        (130, 2, 2, 0, 0),
        (192, 1, 1, 191, None),
    ],
)
def test_blocks_are_the_recurrence(x64, length, documents, spans, padding, before):
    assert compare(length, length, documents, spans, padding, before) < 1e-11


def test_a_state_of_another_document_is_not_seen(x64):
    rng = np.random.default_rng(0)
    tokens, state = draw(rng, 100)
    ids = jnp.full(100, 3, jnp.int32)
    nothing = jnp.zeros_like(state)
    assert worst(run(tokens, ids, 2, state), run(tokens, ids, 2, nothing)) == 0
    assert worst(run(tokens, ids, 3, state), run(tokens, ids, 3, nothing)) > 0.1


def test_all_masks_are_enough(x64):
    assert compare(5, 200, 9, 2, 20, before=0) < 1e-11


@pytest.mark.parametrize("mask", gated_delta.Seen._fields)
def test_each_mask_is_needed(x64, monkeypatch, mask):
    """Each of the four masks is lifted once."""
    whole = gated_delta.find_seen

    def blind(*args):
        seen = whole(*args)
        return seen._replace(**{mask: jnp.ones_like(getattr(seen, mask))})

    monkeypatch.setattr(gated_delta, "find_seen", blind)
    assert compare(5, 200, 9, 2, 20, before=0) > 1e-3


def test_an_inverse_holds_where_keys_repeat():
    """The case in which the product of powers is wrong by many orders."""
    rng = np.random.default_rng(0)
    for size, share in ((64, 1.0), (64, 0.9), (2, 0.5), (1, 0.5)):
        k = np.ones((size, 128)) + 0.1 * rng.normal(size=(size, 128)) * (share < 1)
        k /= np.linalg.norm(k, axis=-1, keepdims=True)
        a = np.tril(share * k @ k.T, -1)
        got = np.asarray(inverse_of_unit_lower(jnp.asarray(a, jnp.float32)))
        assert worst(got, np.linalg.inv(np.eye(size) + a)) < 2e-6


def test_the_gradient_of_an_inverse_is_that_of_solving(x64):
    rng = np.random.default_rng(1)
    a, dx = jnp.asarray(np.tril(rng.normal(size=(3, 16, 16)), -1)), jnp.asarray(rng.normal(size=(3, 16, 16)))
    lower = jnp.tril(jnp.ones((16, 16), bool), -1)
    got, want = (
        jax.vjp(lambda a, f=f: f(jnp.where(lower, a, 0)), a)[1](dx)[0]
        for f in (inverse_of_unit_lower, lambda a: jnp.linalg.inv(jnp.eye(16) + a))
    )
    assert worst(got, want) < 1e-11


def test_decays_of_any_size_give_no_infinity():
    """A decay that leaves nothing, and none at all, forward and backward, in float32."""
    rng = np.random.default_rng(2)
    tokens, state = draw(rng, 192, dtype=np.float32)
    found_with = jax.jit(lambda tokens, ids: results(run, tokens, ids, ids[0], state, (tokens.v, state)))
    for decay in (-1e6, -90.0, 0.0):
        ids = jnp.asarray(draw_documents(rng, 192, 5))
        found = jax.tree.leaves(found_with(tokens._replace(g=jnp.full_like(tokens.g, decay)), ids))
        assert all(bool(jnp.isfinite(x).all()) for x in found)
