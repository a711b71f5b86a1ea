"""The gated delta rule on one device, in blocks of tokens: what is between two blocks is a state and nothing else.

S_t = a_t S_{t-1} + k_t outer (b_t (v_t - a_t S_{t-1}^T k_t)) and out_t = S_t^T q_t, with a_t = exp(g_t).

Within a block everything but the state is a product of matrices, and a block is an affine map of the state that comes
in: S' = M S + B. So spans of a run need not wait for each other: their maps are found side by side, then the state
before each span, then all of them run side by side from these states.

Letters: T tokens, N value heads, K key size, V value size, J blocks, C tokens of a block, P spans.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sppo_jax.mixers.delta_work import BLOCK


class Tokens(NamedTuple):
    """What the rule reads of each token and head, all in one dtype, at least float32.

    Args:
        q: [T, N, K], scaled.
        k: [T, N, K], of length one or zero.
        v: [T, N, V].
        g: [T, N], logarithm of the decay, at most 0.
        b: [T, N], how much of a value is written.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    g: jax.Array
    b: jax.Array


class TokenBlocks(NamedTuple):
    """Blocks of tokens with the state left open.

    new = u - w S, out = read S + scores new, S' = decay S + keep^T new.
    """

    read: jax.Array  # [..., N, C, K]
    scores: jax.Array  # [..., N, C, C]
    u: jax.Array  # [..., N, C, V]
    w: jax.Array  # [..., N, C, K]
    keep: jax.Array  # [..., N, C, K]
    decay: jax.Array  # [..., N, 1, 1]


def run(
    tokens: Tokens, documents_T: jax.Array, before: jax.Array, state_NKV: jax.Array, spans: int = 1
) -> tuple[jax.Array, jax.Array]:
    """Returns out_TNV, zero for padding, and the state behind the run.

    Args:
        tokens: of the run; those of padding must be finite.
        documents_T: the document of each token; they do not decrease, and -1 is padding, behind all other tokens.
        before: the document of the last token before the run, to which the state belongs.
        state_NKV: the state before the run.
        spans: how many parts of the run are worked out side by side; the result is the same but for rounding.
    """
    size = documents_T.shape[0]
    blocks = find_blocks(tokens, documents_T, before, -(-size // (BLOCK * spans)) * spans)
    by_block = jax.tree.map(lambda x: jnp.moveaxis(x.reshape(spans, -1, *x.shape[1:]), 0, 1), blocks)
    ends_PNKV, out = lax.scan(_step, _states_before(by_block, state_NKV, spans), by_block)  # [J, P, N, C, V]
    out = jnp.moveaxis(out, (1, 3), (0, 2)).reshape(-1, *state_NKV.shape[:1], state_NKV.shape[-1])[:size]
    return jnp.where((documents_T >= 0)[:, None, None], out, 0), ends_PNKV[-1]


def _product(x: jax.Array, y: jax.Array) -> jax.Array:
    """Multiplies matrices in full float32: TF32 has three digits, and errors of chains of products add up."""
    return jnp.matmul(x, y, precision=lax.Precision.HIGHEST)


def _transposed(x: jax.Array) -> jax.Array:
    return jnp.swapaxes(x, -1, -2)


def _step(state: jax.Array, one: TokenBlocks) -> tuple[jax.Array, jax.Array]:
    """Runs one block of each span from the states before them."""
    new = one.u - _product(one.w, state)
    out = _product(one.read, state) + _product(one.scores, new)
    return one.decay * state + _product(_transposed(one.keep), new), out


def _states_before(by_block: TokenBlocks, state_NKV: jax.Array, spans: int) -> jax.Array:
    """Returns the state before each span, [P, N, K, V].

    Args:
        by_block: blocks [J, P, ...].
        state_NKV: the state before the first span.
        spans: P.
    """
    if spans == 1:
        return state_NKV[None]

    def widen(maps: tuple[jax.Array, jax.Array], one: TokenBlocks) -> tuple[tuple[jax.Array, jax.Array], None]:
        m, b = maps
        keep = _transposed(one.keep)
        m = one.decay * m - _product(keep, _product(one.w, m))
        return (m, one.decay * b + _product(keep, one.u - _product(one.w, b))), None

    # No span asks for what is behind the last one.
    earlier = jax.tree.map(lambda x: x[:, :-1], by_block)
    heads, key, _ = state_NKV.shape
    eye = jnp.broadcast_to(jnp.eye(key, dtype=state_NKV.dtype), (spans - 1, heads, key, key))
    nothing = jnp.zeros((spans - 1, *state_NKV.shape), state_NKV.dtype)
    maps, _ = lax.scan(widen, (eye, nothing), earlier)

    def follow(state: jax.Array, span: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        state = _product(span[0], state) + span[1]
        return state, state

    return jnp.concatenate([state_NKV[None], lax.scan(follow, state_NKV, maps)[1]])


def find_blocks(tokens: Tokens, documents_T: jax.Array, before: jax.Array, count: int) -> TokenBlocks:
    """Works out all that does not depend on the state.

    Args:
        tokens: of the run.
        documents_T: of each token, as in `run`.
        before: the document of the last token before the run.
        count: blocks; tokens that they hold beyond the run are padding.

    Returns:
        Blocks [J, ...].
    """
    seen = find_seen(documents_T, before, count)
    q, k, v = (_cut(x, count) for x in tokens[:3])
    # Padding neither decays nor writes.
    g, b = (_cut(jnp.where(seen.real_T[:, None], x, 0), count) for x in tokens[3:])
    sums = jnp.cumsum(g, axis=-1)  # [J, N, C]
    lower = jnp.tril(jnp.ones((BLOCK, BLOCK), bool))
    # Differences of what is not seen may be large: they are masked before exp. No sum ever holds an infinity.
    apart = jnp.exp(jnp.where(seen.pairs_JCC[:, None] & lower, sums[..., :, None] - sums[..., None, :], -jnp.inf))
    since = jnp.where(seen.state_JC[:, None], jnp.exp(sums), 0)
    left = jnp.exp(jnp.where(seen.kept_JC[:, None], sums[..., -1:] - sums, -jnp.inf))
    beside = _product(k * b[..., None], _transposed(k)) * apart
    solved = inverse_of_unit_lower(jnp.where(jnp.tril(lower, -1), beside, 0))
    return TokenBlocks(
        read=q * since[..., None],
        scores=_product(q, _transposed(k)) * apart,
        u=_product(solved, v * b[..., None]),
        w=_product(solved, k * (b * since)[..., None]),
        keep=k * left[..., None],
        decay=since[..., -1:, None],
    )


class Seen(NamedTuple):
    """What belongs to one document: two tokens of a block, a token and the state before its block, a token and its end.

    Args:
        pairs_JCC: whether two tokens of a block are of one document.
        state_JC: whether a token is of the document before its block.
        kept_JC: whether a token is of the document at the end of its block.
        real_T: whether a token is no padding.
    """

    pairs_JCC: jax.Array
    state_JC: jax.Array
    kept_JC: jax.Array
    real_T: jax.Array


def find_seen(documents_T: jax.Array, before: jax.Array, count: int) -> Seen:
    """Compares documents by block; arguments as `find_blocks`.

    Padding gets the document before it, so that a state passes through.
    """
    before = jnp.asarray(before, documents_T.dtype)
    carried_T = jnp.maximum(lax.cummax(documents_T), before)
    room = count * BLOCK - documents_T.shape[0]
    of_JC = jnp.pad(carried_T, (0, room), mode="edge").reshape(count, BLOCK)
    came_J = jnp.concatenate([before[None], of_JC[:-1, -1]])
    pairs_JCC = of_JC[:, :, None] == of_JC[:, None, :]
    return Seen(pairs_JCC, of_JC == came_J[:, None], of_JC == of_JC[:, -1:], documents_T >= 0)


def _cut(x: jax.Array, count: int) -> jax.Array:
    """Cuts [T, N, ...] into blocks [J, N, C, ...]; what is behind the tokens is zero."""
    x = jnp.pad(x, ((0, count * BLOCK - x.shape[0]),) + ((0, 0),) * (x.ndim - 1))
    return jnp.moveaxis(x.reshape(count, BLOCK, *x.shape[1:]), 2, 1)


@jax.custom_vjp
def inverse_of_unit_lower(a: jax.Array) -> jax.Array:
    """Returns (1 + a)^-1 by halves.

    The product (1 - a)(1 + a^2)(1 + a^4)... is the same on paper, and wrong by 1e9 in float32 where keys repeat.

    Args:
        a: strictly lower matrices [..., C, C], C a power of two.
    """
    size = a.shape[-1]
    if size <= 2:
        return jnp.eye(size, dtype=a.dtype) - a
    half = size // 2
    first, last = inverse_of_unit_lower(jnp.stack([a[..., :half, :half], a[..., half:, half:]]))
    corner = -_product(_product(last, a[..., half:, :half]), first)
    upper = jnp.concatenate([first, jnp.zeros_like(corner)], axis=-1)
    return jnp.concatenate([upper, jnp.concatenate([corner, last], axis=-1)], axis=-2)


def _forward(a: jax.Array) -> tuple[jax.Array, jax.Array]:
    inverse = inverse_of_unit_lower(a)
    return inverse, inverse


def _backward(inverse: jax.Array, cotangent: jax.Array) -> tuple[jax.Array]:
    turned = _transposed(inverse)
    return (-_product(_product(turned, cotangent), turned),)


inverse_of_unit_lower.defvjp(_forward, _backward)
