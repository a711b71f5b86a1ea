"""A kernel's calls against plain attention in float32, on the device: small, with everything that a run does.

A call attends from the first queries and keys of its operands. The rows behind hold other documents and padding. The
backward gets an LSE and an output over more keys than its own. So a kernel that reads the rows behind, or computes an
LSE of its own, is found out.

Letters: N query heads, K key/value heads, G = N // K, T queries, S keys, H head dim.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, PartitionSpec

from sppo_jax.attention import cudnn
from sppo_jax.attention.blockwise import merge
from sppo_jax.attention.cudnn import CudnnOperands, CudnnResults

# Rows of the operands of cuDNN's kernel: a few tiles, which have 64 or 128 rows, and a part of a tile.
NUM_QUERIES, NUM_KEYS = 320, 1216
# Scores of this size: exp of less than -88.7 is no normal float32.
LOW_SCORE = -150.0

# A result may differ by this many roundings to its dtype, where every term of its sum is rounded the worst way. Shares
# and gradients of scores are rounded once before they are summed, and the sum once. A kernel may also round each query
# head's part of dK and dV. One is for its exponentials and the order of its sums.
MOST_ROUNDINGS = 4
# Roundings are independent. So the distance of a whole result from the right one is far less than that bound: no more
# than this many times the distance of plain attention in the same dtype. Two roundings instead of one make it sqrt(2)
# times that distance. A result that is wrong by 1.5% makes it more than 4 times.
MOST_TIMES_PLAIN = 4
# Scores in float32 are off by more than a rounding of a float32 result; so are their exponentials.
_LEAST_UNIT = 2**-13
# An LSE is never rounded. Scores of LOW_SCORE that are summed in float32 may be off by 128 * 2^-24 of their size.
MOST_LSE_ERROR = 2e-3


class CallHeads(NamedTuple):
    """Heads of one call: queries', keys' and values', and elements of a head."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    def __str__(self) -> str:
        return f"{self.num_heads}/{self.num_kv_heads} heads of {self.head_dim}"


class Pattern(NamedTuple):
    """Which rows a call is asked for, of the rectangle and of the triangle, and the size of the scores."""

    rectangle: tuple[int, int]
    triangle: tuple[int, int]
    score: float


class Extent(NamedTuple):
    """Rows of the operands, and what calls are asked for; `windows`: keys that a query of a checked band sees."""

    num_queries: int
    num_keys: int
    patterns: dict[str, Pattern]
    windows: tuple[int, ...]


class CheckedKernel(NamedTuple):
    """A `forward` and a `backward` as in `attention.cudnn`, and with how many rows they are checked."""

    forward: Callable
    backward: Callable
    extent: Extent | None = None  # that of cuDNN's kernel


FUSED = CheckedKernel(cudnn.forward, cudnn.backward)
PLAIN = CheckedKernel(cudnn.plain_forward, cudnn.plain_backward)
PATTERNS = {
    "ragged lengths": Pattern((250, 1100), (250, 249), 0.0),
    "lengths % 128 = 64 and low scores": Pattern((192, 1088), (192, 192), LOW_SCORE),
    "one query and low scores": Pattern((1, 1), (1, 1), LOW_SCORE),
}
_CALLS = {"rectangle": dict(causal=False), "causal triangle": dict(causal=True)}
# Keys that a query of the checked band sees: less than a tile, and more than one, of which the last is cut.
WINDOWS = (24, 150)
_TINY = 1e-30  # for what is zero
_NAMES = ("out", "LSE", "dQ", "dK", "dV")
_AXIS = "device"


def find_difference(
    heads: CallHeads,
    dtype,
    *,
    has_window: bool = False,
    kernel: CheckedKernel = FUSED,
    devices: Sequence[jax.Device] = (),
) -> str | None:
    """Compares each call of a kernel with plain attention, on all devices at once, with one program.

    Args:
        heads: of the calls.
        dtype: of queries, keys and values.
        has_window: whether the calls are those of attention with a window.
        kernel: what to check.
        devices: where, all of this process; none: the default device.

    Returns:
        What differs, by how much, in which call and on which of several devices; None if nothing differs.
    """
    on_gpu = bool(devices) and devices[0].platform in ("gpu", "cuda")
    mesh = Mesh(np.array(devices or jax.devices()[:1]), (_AXIS,), axis_types=(AxisType.Auto,))
    extent = kernel.extent or Extent(NUM_QUERIES, NUM_KEYS, PATTERNS, WINDOWS)
    options = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False} if on_gpu else None  # compile quickly
    with jax.default_device(mesh.devices[0]), jax.default_matmul_precision("highest"):
        for call, how in _calls(extent.windows if has_window else ()).items():
            everywhere = _on_each(partial(_compare, kernel, how), mesh)
            compare = jax.jit(everywhere, compiler_options=options)
            for name, pattern in extent.patterns.items():
                arrays = _draw(heads, extent, dtype, pattern.score)
                lengths = pattern.triangle if how["causal"] else pattern.rectangle
                judged = jax.device_get(compare(arrays, tuple(map(np.int32, lengths))))
                for result, errors in zip(_NAMES, judged, strict=True):
                    times = np.max(errors, axis=0)  # no number if one is none
                    for number in np.flatnonzero(~(times <= 1)):
                        off = _off(float(times[number]))
                        on = f" on device {number}" if len(devices) > 1 else ""
                        return f"{result} of the {call} {off} ({heads}, {name}){on}"
    return None


def _on_each(f: Callable, mesh: Mesh) -> Callable:
    """Returns a function that does the same on every device, and returns each scalar as a vector of all devices'."""

    def here(*arguments):
        return jax.tree.map(lambda x: x[None], f(*arguments))

    return jax.shard_map(here, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(_AXIS), check_vma=False)


def _off(times: float) -> str:
    return "that is no number" if np.isnan(times) else f"off by {times:.3g} times what rounding does"


def _calls(windows: tuple[int, ...]) -> dict[str, dict]:
    return {f"band of {window} keys": dict(causal=True, window=window) for window in windows} or _CALLS


def _draw(heads: CallHeads, extent: Extent, dtype, score: float) -> list[jax.Array]:
    """Draws q, k, v, dout, and what the queries get from keys elsewhere: an output, and an LSE less the call's own."""
    rng = np.random.default_rng(0)
    of_queries, of_keys = ((count, size, heads.head_dim) for count, size in zip(heads[:2], extent[:2], strict=True))
    q, k, v, dout = (rng.normal(size=size) for size in (of_queries, of_keys, of_keys, of_queries))
    shift = np.sqrt(-score / np.sqrt(heads.head_dim))
    arrays = [jnp.asarray(x, dtype) for x in (q - shift, k + shift, v, dout)]
    return [*arrays, *(jnp.asarray(rng.normal(size=size), jnp.float32) for size in (of_queries, of_queries[:2]))]


def _compare(kernel: CheckedKernel, how: dict, arrays, lengths):
    """Returns of each result the largest error of an element, and its distance, both over what is allowed.

    Args:
        kernel: what to check.
        how: whether its queries see the keys up to their own, and how many of these.
        arrays: what `_draw` returns.
        lengths: queries and keys of the call.
    """
    q_NTH, k_KSH, v_KSH, dout_NTH, more_NTH, more_NT = arrays
    num_queries, num_keys = lengths
    given = CudnnOperands(q_NTH, k_KSH, v_KSH, num_queries, num_keys)
    wide = CudnnOperands(*(x.astype(jnp.float32) for x in given[:3]), num_queries, num_keys)
    right_out, right_lse = PLAIN.forward(wide, **how)
    results = _global_results(right_out, right_lse, more_NTH, more_NT, dout_NTH, num_queries)
    wide_results = CudnnResults(*(x.astype(jnp.float32) for x in results))
    right = (right_out, right_lse, *PLAIN.backward(wide, wide_results, **how))
    bounds = _bounds(wide, wide_results, right_out, how)
    got, plain = ((*each.forward(given, **how), *each.backward(given, results, **how)) for each in (kernel, PLAIN))
    counts = (num_queries, num_queries, num_queries, num_keys, num_keys)
    unit = max(_LEAST_UNIT, float(jnp.finfo(q_NTH.dtype).eps) / 2)
    return [
        _judge(*each, unit, is_lse=name == "LSE")
        for name, each in zip(_NAMES, zip(got, plain, right, bounds, counts, strict=True), strict=True)
    ]


def _global_results(out_NTH, lse_NT, more_NTH, more_NT, dout_NTH, num_queries) -> CudnnResults:
    """Makes output and LSE over the call's keys and others; every other row behind the asked ones is padding."""
    # A row behind may see no key of a band; a run gives no such row an output that is no number.
    has_seen = lse_NT > -jnp.inf
    out_NTH, lse_NT = jnp.where(has_seen[..., None], out_NTH, 0), jnp.where(has_seen, lse_NT, 0)
    out, lse = merge(out_NTH, lse_NT, more_NTH, lse_NT + more_NT)
    rows = jnp.arange(lse.shape[1], dtype=jnp.int32)
    behind = rows >= num_queries
    padding = behind & (rows % 2 == 0)
    # A query of another document has nothing to do with these keys: exp(score - LSE) overflows.
    lse = jnp.where(padding, jnp.inf, jnp.where(behind, lse - 100, lse))
    # XLA on GPUs drops a cast to dtype and back: the reference would have the output that no call gets.
    info = jnp.finfo(dout_NTH.dtype)
    out = lax.reduce_precision(out.astype(jnp.float32), exponent_bits=info.nexp, mantissa_bits=info.nmant)
    out, dout = (jnp.where(padding[:, None], 0, x).astype(dout_NTH.dtype) for x in (out, dout_NTH))
    return CudnnResults(out, lse, dout)


def _bounds(wide: CudnnOperands, results: CudnnResults, out_NTH, how: dict) -> tuple[jax.Array, ...]:
    """Returns the sums of the sizes of all terms of each result: what a rounding of every term is relative to."""
    p, ds = (jnp.abs(x) for x in cudnn.shares(wide, results, **how))
    q, dout, out = (jnp.abs(cudnn.asked_rows(wide, x)) for x in (wide.q_NTH, results.dout_NTH, results.out_NTH))
    k, v = jnp.abs(wide.k_KSH), jnp.abs(wide.v_KSH)
    # A gradient of a score is a difference of two sums, in float32.
    sums = jnp.einsum("kgth,ksh->kgts", dout, v) + jnp.sum(out * dout, axis=-1, keepdims=True)
    ds = ds + p * sums * wide.q_NTH.shape[-1] ** -0.5 * 2**-10
    own = PLAIN.forward(wide._replace(v_KSH=v), **how)[0]
    dq = jnp.einsum("kgts,ksh->kgth", ds, k).reshape(out_NTH.shape)
    return own, jnp.zeros(()), dq, jnp.einsum("kgts,kgth->ksh", ds, q), jnp.einsum("kgts,kgth->ksh", p, dout)


def _judge(got, plain, right, bound, count, unit: float, *, is_lse: bool) -> tuple[jax.Array, jax.Array]:
    asked = (jnp.arange(right.shape[1], dtype=jnp.int32) < count).reshape(-1, *(1,) * (right.ndim - 2))
    got, plain, right = (jnp.where(asked, x.astype(jnp.float32), 0) for x in (got, plain, right))
    if is_lse:
        return jnp.max(jnp.abs(got - right)) / MOST_LSE_ERROR, jnp.zeros(())
    bound = jnp.where(asked, bound, 1) + _TINY
    element = jnp.max(jnp.abs(got - right) / (MOST_ROUNDINGS * unit * bound))
    # Roundings make a distance of half a unit or more. The compiler may leave some out of plain attention.
    allowed = jnp.maximum(jnp.linalg.norm(plain - right), unit / 2 * jnp.linalg.norm(right)) + _TINY
    return element, jnp.linalg.norm(got - right) / (MOST_TIMES_PLAIN * allowed)
