"""Random cases of the kernel for TPUs, and plain attention in float64 to compare it with."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from sppo_jax.attention.intervals import Intervals, from_spans
from sppo_jax.attention.spans import find_spans
from sppo_jax.attention.tags import Tags, visible
from sppo_jax.plan.parts import cache_head_dim

PLACE = (1, 2)  # slot and layer of the keys and values
GRAD_SLOT = 0


class Masks(NamedTuple):
    """A chunk's queries on one ring member and the keys of a member: tags, where the chunk starts, its members."""

    queries: Tags
    keys: Tags
    start: int
    members: tuple[int, int]
    num_members: int

    def intervals(self) -> Intervals:
        """What the kernel gets."""
        own, other = self.members
        spans = find_spans(self.queries.documents, self.keys.documents, self.start, other > own)
        return from_spans(spans, len(self.queries.documents))

    def seen(self, window: int = 0) -> np.ndarray:
        """Which keys each query sees, by comparing tags."""
        return np.asarray(visible(self.queries, self.keys, window))


def draw_masks(rng, num_queries: int, num_keys: int) -> Masks:
    """Draws documents and padding between them, a chunk, and two members of a ring of 1 to 4."""
    num_members = int(rng.choice([1, 2, 3, 4]))
    documents, positions, number = [], [], 0
    total = num_keys * num_members
    while len(documents) < total:
        size = int(rng.integers(1, max(2, total // int(rng.integers(1, 6)))))
        documents += [-1 if rng.random() < 0.2 else number] * size
        positions += range(size)
        number += 1
    own, other = (int(rng.integers(0, num_members)) for _ in range(2))
    start, length = int(rng.integers(0, num_keys - num_queries + 1)), int(rng.integers(1, num_queries + 1))

    def of_member(values, member):
        return np.array(values[:total], np.int32).reshape(-1, num_members).T[member].copy()

    keys = Tags(of_member(positions, other), of_member(documents, other))
    keys.documents[start + length :] = -1  # not yet written
    chunk = slice(start, start + num_queries)
    queries = Tags(of_member(positions, own)[chunk], of_member(documents, own)[chunk])
    queries.documents[length:] = -1
    return Masks(Tags(*map(jnp.array, queries)), Tags(*map(jnp.array, keys)), start, (own, other), num_members)


class Case(NamedTuple):
    """Inputs of both kernels: q, dout, LSE and delta of the queries, k, v [2, 3, K, S, E], dk, dv [1, 3, K, S, E]."""

    seen: np.ndarray
    intervals: Intervals
    q: np.ndarray
    dout: np.ndarray
    lse: np.ndarray
    delta: np.ndarray
    k: np.ndarray
    v: np.ndarray
    dk: np.ndarray
    dv: np.ndarray


def draw_case(rng, heads: tuple[int, int, int], num_queries: int, num_keys: int) -> Case:
    """Draws a case of so many key-value heads, query heads of each, and elements of a head."""
    num_kv_heads, num_groups, head_dim = heads
    masks = draw_masks(rng, num_queries, num_keys)
    intervals, seen = masks.intervals(), masks.seen()
    q, dout = (rng.standard_normal((num_kv_heads, num_groups, num_queries, head_dim), np.float32) for _ in range(2))
    in_cache = cache_head_dim("pallas", head_dim)  # what fills a head up is nothing that the kernel may use
    k, v = (rng.standard_normal((2, 3, num_kv_heads, num_keys, in_cache), np.float32) for _ in range(2))
    dk, dv = (rng.standard_normal((1, *k.shape[1:]), np.float32) for _ in range(2))
    # The LSE is over more keys than these.
    lse = plain_forward(q, *(x[PLACE][..., :head_dim] for x in (k, v)), seen)[1]
    lse = (lse + rng.random(lse.shape)).astype(np.float32)
    return Case(seen, intervals, q, dout, lse, rng.standard_normal(lse.shape, np.float32), k, v, dk, dv)


def _wide(*arrays):
    """Returns arrays in float64; of keys and values that all query heads of a key-value head share, with a dim."""
    return [x.astype(np.float64) if x.ndim == 4 else x.astype(np.float64)[:, None] for x in arrays]


def _scores(q, k, seen):
    q, k = _wide(q, k)
    return np.where(seen, q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1]), -np.inf)


def plain_forward(q, k, v, seen):
    """Returns out_KGTH and lse_KGT."""
    s = _scores(q, k, seen)
    top = s.max(-1, keepdims=True)
    p = np.exp(s - np.where(np.isinf(top), 0, top))
    total = p.sum(-1)
    with np.errstate(divide="ignore"):
        lse = np.where(total > 0, top[..., 0] + np.log(total), -np.inf)
    (v,) = _wide(v)
    return p / np.where(total > 0, total, 1)[..., None] @ v, lse


def plain_backward(case: Case):
    """Returns dQ, dK and dV of the case's rows."""
    k, v = (x[PLACE][..., : case.q.shape[-1]] for x in (case.k, case.v))
    p = np.exp(_scores(case.q, k, case.seen) - np.where(np.isinf(case.lse), np.inf, case.lse)[..., None])
    q, dout, k, v = _wide(case.q, case.dout, k, v)
    ds = p * (dout @ v.swapaxes(-1, -2) - case.delta[..., None]) / np.sqrt(case.q.shape[-1])
    dk, dv = ((x.swapaxes(-1, -2) @ rows).sum(1) for x, rows in ((ds, q), (p, dout)))
    return ds @ k, dk, dv
