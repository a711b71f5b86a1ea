"""A chunk's attention by the fused kernel's calls: hard patterns against plain attention, and what the calls are given.

The stand-in for the kernel computes the calls. Rows that a call is not asked for are filled with garbage here, because
the kernel leaves any values in them.

Letters: T queries, S keys, N query heads, K key/value heads, H head dim.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sppo_jax.arrays.dtypes import accumulator
from sppo_jax.attention import cudnn, flash
from sppo_jax.attention.operands import Cotangent, Gradients, Mask, Prefix
from sppo_jax.attention.spans import NOTHING_KNOWN, Known, find_spans
from sppo_jax.attention.tags import Tags, visible

HEADS, KV_HEADS, HEAD_DIM = 2, 1, 8
# Of each number, relative to 1 or to the largest number of its array. A score of -200 in float32 is off by 1e-5.
TOLERANCE = {"float64": 1e-10, "float32": 2e-4}

# Tokens of the prefix and of the chunk, the length of each document (padding follows them), what is taken from every
# query and added to every key, and the keys in a tile of the past.
PATTERNS = {
    "length % 128 = 64 and LSE below -88.7": (320, 192, (512,), 7.0, 32768),
    "length % 128 = 64 and LSE below -88.7, two documents": (320, 192, (384, 64), 7.0, 32768),
    "a last document of one token": (64, 32, (70, 25, 1), 7.0, 32768),
    "a last document of one token, then padding": (64, 32, (70, 20, 1), 0.0, 32768),
    "a chunk of one-token documents": (8, 8, (8, 1, 1, 1, 1, 1, 1), 7.0, 32768),
    "48 merges": (24500, 64, (24564,), 0.0, 512),
    "16 merges, LSE below -88.7": (8192, 64, (8200, 40), 7.0, 512),
    "padding alone": (0, 16, (), 0.0, 32768),
    "one document, then padding": (0, 192, (150,), 0.0, 32768),
    "documents, then padding": (0, 192, (100, 30, 1), 0.0, 32768),
}
# A pattern and a window: shorter and longer than documents, than the chunk, than the prefix.
WINDOWS = {
    "one key": ("a last document of one token", 1),
    "a window shorter than the chunk": ("length % 128 = 64 and LSE below -88.7, two documents", 100),
    "a window longer than the chunk": ("length % 128 = 64 and LSE below -88.7, two documents", 300),
    "a window longer than the prefix": ("a last document of one token, then padding", 80),
    "documents of one token in a window": ("a chunk of one-token documents", 4),
    "a window that needs no merges": ("48 merges", 40),
}


def draw(pattern, dtype):
    """Draws q_TNH, k_KSH, v_KSH, dout_TNH, the documents of all tokens, and the first token of the chunk."""
    prefix, chunk, lengths, shift, _ = pattern
    rng = np.random.default_rng(0)
    q, dout = (rng.normal(size=(chunk, HEADS, HEAD_DIM)) for _ in range(2))
    k, v = (rng.normal(size=(KV_HEADS, prefix + chunk, HEAD_DIM)) for _ in range(2))
    documents = np.full(prefix + chunk, -1, np.int32)
    documents[: sum(lengths)] = np.repeat(np.arange(len(lengths)), lengths)
    dout[documents[prefix:] < 0] = 0
    floats = (jnp.asarray(x, dtype) for x in (q - shift, k + shift, v, dout))
    return *floats, jnp.asarray(documents), prefix


# A pattern, a window, and what is known of it while tracing.
KNOWN = {
    "a document that begins in the chunk": ("one document, then padding", 0, Known(False, True)),
    "padding alone": ("padding alone", 0, Known(False, True)),
    "padding alone in a window": ("padding alone", 4, Known(True, True)),
    "documents that begin in the chunk": ("documents, then padding", 0, Known(False, False)),
    "documents that begin in the chunk, in a window": ("documents, then padding", 50, Known(False, False)),
    "one document with a past": ("length % 128 = 64 and LSE below -88.7", 0, Known(True, True)),
    "one document with a past in a window": ("length % 128 = 64 and LSE below -88.7", 100, Known(True, True)),
}
# A pattern, what is known of it, among it the queries of a backward's call, and the keys of a tile.
BLOCKS = {
    "a past, two documents, three blocks": (
        "length % 128 = 64 and LSE below -88.7, two documents",
        Known(True, False, 64),
        96,
    ),
    "one document without a past": ("one document, then padding", Known(False, True, 80), 64),
    "documents that begin in the chunk": ("documents, then padding", Known(False, False, 70), 32768),
    "documents of one token": ("a chunk of one-token documents", Known(True, False, 3), 4),
    "padding alone": ("padding alone", Known(False, True, 8), 32768),
    "a past and one document": ("length % 128 = 64 and LSE below -88.7", Known(True, True, 100), 100),
}
BLOCKS_IN_CI = tuple(BLOCKS)[:3]
KNOWN_IN_CI = "a document that begins in the chunk", "padding alone in a window"


def by_calls(q, k, v, dout, documents, start, window=0, known=NOTHING_KNOWN):
    """Returns out, LSE, dq, dk, dv by the fused kernel's calls."""
    tags = Tags(jnp.arange(len(documents), dtype=jnp.int32), documents)
    queries = Tags(*(x[start:] for x in tags))
    spans = find_spans(queries.documents, documents, start, False, window, known)
    prefix, mask = Prefix(k, v, ()), Mask(queries, tags, spans, window)
    out, lse = flash.forward(q, prefix, mask)
    zeros = Gradients(*(jnp.zeros(x.shape, accumulator(x.dtype)) for x in (k, v)))
    dq, grads = flash.backward(q, prefix, mask, Cotangent(dout, lse, out), zeros)
    return out, lse, dq, *grads


def plain(q, k, v, dout, documents, start, window=0, known=None):
    """Returns the same by one softmax and autodiff."""
    tags = Tags(jnp.arange(len(documents), dtype=jnp.int32), documents)
    mask_TS = visible(Tags(*(x[start:] for x in tags)), tags, window)

    def attend(q, k, v):
        s = jnp.einsum("tnh,nsh->nts", q, jnp.repeat(k, HEADS // KV_HEADS, axis=0)) * HEAD_DIM**-0.5
        s = jnp.where(mask_TS, s, -jnp.inf)
        lse = jax.nn.logsumexp(s, axis=-1)
        p = jnp.where(mask_TS, jnp.exp(s - jnp.where(jnp.isinf(lse), 0, lse)[..., None]), 0)
        return jnp.einsum("nts,nsh->tnh", p, jnp.repeat(v, HEADS // KV_HEADS, axis=0)), lse.T

    out, pull, lse = jax.vjp(attend, q, k, v, has_aux=True)
    return out, lse, *pull(dout)


@pytest.fixture
def dirty(monkeypatch):
    """Makes the stand-in leave garbage where the kernel may leave garbage: not even zero times garbage may be used."""
    forward, backward = cudnn.forward, cudnn.backward

    def soil(x, count):
        rows = (jnp.arange(x.shape[1], dtype=jnp.int32) >= count).reshape(-1, *(1,) * (x.ndim - 2))
        return jnp.where(rows, jnp.nan, x)

    def dirty_forward(given, **how):
        return tuple(soil(x, given.num_queries) for x in forward(given, **how))

    def dirty_backward(given, results, **how):
        grads = backward(given, results, **how)
        counts = given.num_queries, given.num_keys, given.num_keys
        return tuple(soil(x, count) for x, count in zip(grads, counts, strict=True))

    monkeypatch.setattr(flash.cudnn, "forward", dirty_forward)
    monkeypatch.setattr(flash.cudnn, "backward", dirty_backward)


@pytest.mark.parametrize(
    "name,dtype",
    [*((name, "float64") for name in PATTERNS), *((name, "float32") for name in PATTERNS if "LSE below" in name)],
)
def test_hard_patterns_are_plain_attention(name, dtype, dirty, monkeypatch, request):
    if dtype == "float64":
        request.getfixturevalue("x64")
    monkeypatch.setattr(flash, "MAX_TILE", PATTERNS[name][4])
    assert_plain(PATTERNS[name], dtype)


@pytest.mark.parametrize("name", WINDOWS)
def test_bands_are_plain_attention_in_a_window(name, x64, dirty):
    pattern, window = WINDOWS[name]
    assert_plain(PATTERNS[pattern], "float64", window)


@pytest.mark.parametrize(
    "name",
    [
        *KNOWN_IN_CI,
        *(pytest.param(name, marks=pytest.mark.slow) for name in KNOWN if name not in KNOWN_IN_CI),
    ],
)
def test_what_is_known_while_tracing_changes_no_value(name, x64, dirty):
    pattern, window, known = KNOWN[name]
    assert_plain(PATTERNS[pattern], "float64", window, known)


@pytest.mark.parametrize(
    "name", [*BLOCKS_IN_CI, *(pytest.param(one, marks=pytest.mark.slow) for one in BLOCKS if one not in BLOCKS_IN_CI)]
)
def test_blocks_of_queries_change_no_value(name, x64, dirty, monkeypatch):
    pattern, known, tile = BLOCKS[name]
    calls, backward = [], cudnn.backward

    def record(operands, results, **how):
        calls.append(operands.q_NTH.shape[1])
        return backward(operands, results, **how)

    monkeypatch.setattr(flash.cudnn, "backward", record)
    monkeypatch.setattr(flash, "MAX_TILE", tile)
    assert_plain(PATTERNS[pattern], "float64", 0, known)
    assert max(calls) <= known.backward_queries and len(calls) == 2 + known.has_past


def assert_plain(pattern, dtype, window=0, known=NOTHING_KNOWN):
    arrays = draw(pattern, dtype)
    got, want = (jax.jit(f, static_argnums=(5, 6, 7))(*arrays, window, known) for f in (by_calls, plain))
    lse, want_lse = np.asarray(got[1]), np.asarray(want[1])
    sees = np.isfinite(want_lse)
    if pattern[3] and not window:
        assert want_lse[sees].max() < -88.7
    np.testing.assert_array_equal(np.isneginf(lse), ~sees)
    np.testing.assert_allclose(lse[sees], want_lse[sees], rtol=TOLERANCE[dtype])
    for x, right in zip((got[0], *got[2:]), (want[0], *want[2:]), strict=True):
        assert np.isfinite(np.asarray(x)).all()
        largest = max(float(jnp.abs(right).max()), 1.0)
        np.testing.assert_allclose(np.asarray(x) / largest, np.asarray(right) / largest, atol=TOLERANCE[dtype])


def test_the_backward_is_never_given_an_lse_of_minus_infinity(monkeypatch):
    """With scores masked by -inf before the LSE is taken from them, -inf less -inf is no number in a kernel."""
    given, backward = [], cudnn.backward

    def record(operands, results, **how):
        jax.debug.callback(lambda *call: given.append(call), results, operands.num_queries)
        return backward(operands, results, **how)

    monkeypatch.setattr(flash.cudnn, "backward", record)
    arrays = draw((24, 16, (30, 1, 4), 0.0, 0), "float32")  # 5 tokens of padding
    lse, dq = jax.jit(by_calls, static_argnums=5)(*arrays)[1:3]
    jax.effects_barrier()
    assert np.isneginf(np.asarray(lse)[-5:]).all() and not np.asarray(dq)[-5:].any()
    assert len(given) == 4  # the past, and a triangle for each document
    for results, num_queries in given:
        assert not np.isneginf(np.asarray(results.lse_NT)).any()
        assert np.isfinite(np.asarray(results.lse_NT)[:, :num_queries]).all()
    past = next(results for results, num_queries in given if num_queries == 6)
    infinite = np.isposinf(np.asarray(past.lse_NT))
    assert infinite[:, -5:].all() and infinite.sum() == 5 * HEADS
    for x in (past.out_NTH, past.dout_NTH):
        assert not np.asarray(x)[:, -5:].any()


def test_many_merges_of_bfloat16_partials_are_as_exact_as_one_call(monkeypatch):
    """Each partial leaves the kernel in bfloat16, and partials are merged in float32, so that roundings average out."""
    arrays = draw((24500, 64, (24564,), 0.0, 0), "bfloat16")
    floats = [np.asarray(x, np.float32) for x in arrays[:4]]
    right = jax.jit(plain, static_argnums=5)(*floats, *arrays[4:])

    def errors(tile):
        monkeypatch.setattr(flash, "MAX_TILE", tile)
        got = jax.jit(lambda *floats: by_calls(*floats, *arrays[4:]))(*arrays[:4])
        return [float(np.linalg.norm(np.float64(a) - b) / np.linalg.norm(b)) for a, b in zip(got, right, strict=True)]

    whole, tiled = errors(32768), errors(512)
    assert max(whole) < 0.02
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), tiled, whole, strict=True):
        assert a < 1.5 * b or name == "lse" and a < 1e-6, (name, a, b)  # the LSE is never rounded to bfloat16
