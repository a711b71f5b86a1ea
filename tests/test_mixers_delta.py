"""Gated DeltaNet's mixer against its definition: chunks, shares of the heads, documents, padding, dtypes."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from delta_cases import (
    cut_operands,
    draw_documents,
    draw_operands,
    place_of,
    plain_mix,
    share_of,
    worst,
)
from exactness import quick_jit

from sppo_jax.mixers import convolution, delta
from sppo_jax.mixers.delta import GatedDelta
from sppo_jax.mixers.delta_work import Cut, delta_flops
from sppo_jax.mixers.mixer import Operands, StateMixer

MIXER = GatedDelta()


def whole(operands, documents, mix=None):
    """Runs a whole sequence from the state before it."""
    mix = mix or MIXER.mix
    return mix(operands, MIXER.empty_state(operands), place_of(documents, 0, len(documents)))


def in_chunks(operands, documents, lengths, room=5, fill=7.0):
    """Runs a sequence in chunks with padding behind each of them."""
    state, parts, start = MIXER.empty_state(operands), [], 0
    for length in lengths:
        run = cut_operands(operands, start, start + length, room, fill)
        out, state = MIXER.mix(run, state, place_of(documents, start, start + length, room))
        parts.append(out[:length])
        start += length
    return jnp.concatenate(parts), state


def both_ways(f, *args, cotangents):
    """Returns the values of a function, and what its vjp makes of cotangents."""

    def run(*args):
        values, pull = jax.vjp(f, *args)
        return values, pull(cotangents)

    return quick_jit(run)(*args)


def compare(seed, length, documents, lengths, **shape):
    """Returns the largest error of chunks against the definition: outputs and the gradients of all operands."""
    rng = np.random.default_rng(seed)
    operands = draw_operands(rng, length, **shape)
    ids = documents if isinstance(documents, np.ndarray) else draw_documents(rng, length, documents)
    dout = jnp.asarray(rng.normal(size=operands.heads.v.shape))
    want = both_ways(lambda o: whole(o, ids, plain_mix)[0], operands, cotangents=dout)
    return worst(both_ways(lambda o: in_chunks(o, ids, lengths)[0], operands, cotangents=dout), want)


def test_it_is_a_mixer_with_a_state():
    assert isinstance(MIXER, StateMixer) and hash(MIXER) == hash(GatedDelta(3)) and MIXER.reach == 3


@pytest.mark.parametrize(
    ("length", "documents", "lengths"),
    [
        pytest.param(90, 1, (90,), marks=pytest.mark.slow),
        pytest.param(90, 3, (40, 2, 48), marks=pytest.mark.slow),
        pytest.param(80, 30, (1, 70, 9), marks=pytest.mark.slow),
        (70, np.array([0] * 20 + [1] + [2] * 2 + [3] * 3 + [5] * 44, np.int32), (21, 1, 48)),
    ],
)
def test_chunks_of_any_length_are_the_definition(x64, length, documents, lengths):
    assert compare(length, length, documents, lengths) < 1e-11


SHAPES = [dict(key_heads=1, value_heads=3), dict(taps=2)]
SHAPES_SLOWLY = [dict(key_heads=4), dict(taps=1)]


@pytest.mark.parametrize("shape", [*SHAPES, *(pytest.param(shape, marks=pytest.mark.slow) for shape in SHAPES_SLOWLY)])
def test_heads_and_taps_of_any_number(x64, shape):
    assert compare(1, 70, 4, (30, 40), **shape) < 1e-11


def test_a_document_that_begins_within_the_taps_hides_what_is_before(x64, monkeypatch):
    assert compare(2, 60, 20, (13, 2, 45)) < 1e-11
    own = convolution.convolve

    def blind(x, tail, taps, place):
        """A convolution that knows no documents."""
        zeros = place._replace(documents_T=jnp.minimum(place.documents_T, 0), before_W=jnp.minimum(place.before_W, 0))
        return own(x, tail, taps, zeros)

    monkeypatch.setattr(delta, "convolve", blind)
    assert compare(2, 60, 20, (13, 2, 45)) > 1e-3


def test_states_and_cotangents_of_two_parts_are_those_of_the_whole(x64):
    """mix(a ++ b, s) is mix(a, s), then mix(b, state behind a): values, and what goes back to the state before."""
    rng = np.random.default_rng(3)
    operands = draw_operands(rng, 150)
    ids = draw_documents(rng, 150, 4)
    state = MIXER.empty_state(operands)
    state = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape)), state)
    place = _starting(place_of(ids, 0, 150), ids)

    def parts(operands, state, at):
        ends = _starting(place_of(ids, 0, at, 3), ids), _starting(place_of(ids, at, 150), ids)
        first, state = MIXER.mix(cut_operands(operands, 0, at, 3), state, ends[0])
        second, state = MIXER.mix(cut_operands(operands, at, 150), state, ends[1])
        return jnp.concatenate([first[:at], second]), state

    cotangents = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape)), (operands.heads.v, state))
    want = both_ways(lambda o, s: MIXER.mix(o, s, place), operands, state, cotangents=cotangents)
    for at in (2, 101):
        assert worst(both_ways(partial(parts, at=at), operands, state, cotangents=cotangents), want) < 1e-11
    assert np.abs(want[1][1].memory).max() > 1e-3


def test_the_state_behind_every_chunk_and_its_cotangent_are_those_of_the_definition(x64):
    """Documents begin and end at a border between chunks, and up to three tokens before and behind others."""
    rng, lengths = np.random.default_rng(10), (20, 3, 41, 1, 30)
    operands = draw_operands(rng, sum(lengths))
    ends = np.cumsum(lengths)
    # Chunks end behind 20, 23, 64 and 65 tokens.
    ids = np.searchsorted([17, 22, 26, 61, 64, 66], np.arange(sum(lengths)), side="right").astype(np.int32)
    dout = jnp.asarray(rng.normal(size=operands.heads.v.shape))
    zeros = [MIXER.empty_state(operands)] * len(lengths)

    def in_order(mix, operands, added):
        """Returns the outputs, and the state behind each chunk, to each of which something is added."""
        state, outs, states, start = MIXER.empty_state(operands), [], [], 0
        for end, more in zip(ends, added, strict=True):
            out, state = mix(cut_operands(operands, start, end), state, place_of(ids, start, end))
            state = jax.tree.map(jnp.add, state, more)
            outs, states, start = [*outs, out], [*states, state], end
        return jnp.concatenate(outs), states

    got, want = (
        both_ways(partial(in_order, mix), operands, zeros, cotangents=(dout, zeros)) for mix in (MIXER.mix, plain_mix)
    )
    assert worst(got, want) < 1e-11
    (_, states), (_, of_states) = want
    # Where a chunk begins with a document, nothing goes back to the state before it.
    assert [np.abs(state.memory).max() > 1e-3 for state in of_states] == [True, True, False, True, False]
    assert all(np.abs(state.memory).max() > 1e-3 for state in states)


def _starting(place, ids):
    """Puts tokens of the first document before the sequence."""
    return place._replace(before_W=jnp.where(place.before_W < 0, ids[0], place.before_W))


@pytest.mark.parametrize("members", [2, 4])
def test_shares_of_the_heads_are_worked_out_alone(x64, members):
    rng = np.random.default_rng(4)
    operands, ids = draw_operands(rng, 70), draw_documents(rng, 70, 3)
    mixed = quick_jit(lambda operands: whole(operands, ids))
    out, state = mixed(operands)
    found = [mixed(share_of(operands, members, member)) for member in range(members)]
    assert worst(jnp.concatenate([one for one, _ in found], axis=1), out) < 1e-12
    assert worst(jnp.concatenate([of.memory for _, of in found]), state.memory) < 1e-12


def test_padding_of_any_value_changes_nothing(x64):
    rng = np.random.default_rng(5)
    operands, ids = draw_operands(rng, 70), draw_documents(rng, 70, 3)
    want = quick_jit(lambda: in_chunks(operands, ids, (30, 40), room=0))()
    padded = quick_jit(lambda fill: in_chunks(operands, ids, (30, 40), room=66, fill=fill))
    for fill in (0.0, -3e8, 1e300):
        assert worst(padded(fill), want) < 1e-12


def test_a_run_of_padding_alone_hands_on_its_state(x64):
    rng = np.random.default_rng(6)
    operands, ids = draw_operands(rng, 70), draw_documents(rng, 70, 3)
    _, state = whole(operands, ids)
    run = cut_operands(operands, 0, 0, 80)
    out, behind = MIXER.mix(run, state, place_of(ids, 70, 70, 80))
    assert not np.asarray(out).any() and worst(behind, state) == 0
    _, pull = jax.vjp(lambda s: MIXER.mix(run, s, place_of(ids, 70, 70, 80)), state)
    cotangents = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape)), (out, state))
    assert worst(pull(cotangents)[0], cotangents[1]) == 0


@pytest.mark.parametrize("padding", [pytest.param(0, marks=pytest.mark.slow), 300])
def test_stretches_and_spans_are_exact(x64, monkeypatch, padding):
    """A run of several stretches, the last ones with padding or nothing else, is the run as a whole."""
    rng = np.random.default_rng(7)
    operands = draw_operands(rng, 500)
    ids = draw_documents(rng, 500 - padding, 6)
    dout = jnp.asarray(rng.normal(size=operands.heads.v.shape))

    def mixed(operands):
        place = place_of(ids, 0, len(ids), padding)
        return MIXER.mix(operands, MIXER.empty_state(operands), place)

    ones = jax.tree.map(jnp.ones_like, MIXER.empty_state(operands))
    want = both_ways(mixed, operands, cotangents=(dout, ones))
    for cut in (Cut(4, 2, 128), Cut(8, 1, 64)):
        monkeypatch.setattr(delta, "cut_of", lambda *_, cut=cut: cut)
        assert worst(both_ways(mixed, operands, cotangents=(dout, ones)), want) < 1e-11


def test_bfloat16_is_near_float32():
    """The rule's sums are float32 in both; only operands and outputs are rounded."""
    rng = np.random.default_rng(8)
    operands, ids = draw_operands(rng, 3000, dtype=np.float32), draw_documents(rng, 3000, 4)
    wide = operands._replace(heads=operands.heads._replace(g=0.05 * operands.heads.g))
    heads = wide.heads
    narrow = Operands(
        heads._replace(**{name: getattr(heads, name).astype(jnp.bfloat16) for name in "qkv"}),
        jax.tree.map(lambda x: x.astype(jnp.bfloat16), wide.constants),
    )
    cotangents = jnp.asarray(rng.normal(size=heads.v.shape), jnp.float32)
    got = both_ways(lambda o: whole(o, ids)[0], narrow, cotangents=cotangents.astype(jnp.bfloat16))
    want = both_ways(lambda o: whole(o, ids)[0], wide, cotangents=cotangents)
    assert got[0].dtype == jnp.bfloat16 and got[1][0].heads.g.dtype == jnp.float32
    assert worst(got[0], want[0]) < 0.02
    assert worst(got[1], want[1]) < 0.05


@pytest.mark.slow
def test_64k_tokens_of_one_document_stay_finite():
    """Repeated keys, writes of one and hardly any decay: where errors would grow."""
    rng, length = np.random.default_rng(9), 65536
    operands = draw_operands(rng, length, key_heads=1, value_heads=2, key_size=16, value_size=16, dtype=np.float32)
    heads = operands.heads._replace(
        k=jnp.ones_like(operands.heads.k), b=jnp.ones_like(operands.heads.b), g=1e-6 * operands.heads.g
    )
    operands = Operands(heads, operands.constants)
    ids = np.zeros(length, np.int32)
    (out, state), pull = jax.vjp(lambda o: whole(o, ids), operands)
    found = out, state, pull((jnp.ones_like(out), jax.tree.map(jnp.ones_like, state)))
    assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(found))
    with jax.enable_x64(True):
        exact = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), operands)
        assert worst(out, whole(exact, ids)[0]) < 1e-3


def test_flops_are_counted_from_shapes():
    operands = draw_operands(np.random.default_rng(0), 3, dtype=np.float32)
    assert MIXER.flops_per_token(operands) == delta_flops(2, 4, 6, 5, 4)
