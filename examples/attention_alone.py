"""Attention without the trainer: sequences spread over a mesh axis, in a model of one's own; equal to one device's.

python examples/attention_alone.py      # 8 simulated devices on the CPU, some seconds
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from sppo_jax.attention import dense_attention, make_attention

BATCH, TOKENS, HEADS, KV_HEADS, SIZE = 2, 256, 8, 2, 16
Arrays = tuple[jax.Array, ...]


def make_inputs(seed: int = 0) -> tuple[Arrays, Arrays]:
    """Returns q, k, v, and positions and document ids of two documents and some padding a sequence."""
    keys = jax.random.split(jax.random.key(seed), 3)
    heads = (HEADS, KV_HEADS, KV_HEADS)
    q, k, v = (jax.random.normal(key, (BATCH, TOKENS, n, SIZE)) for key, n in zip(keys, heads, strict=True))
    ends = np.array([100, 180, TOKENS])  # of the documents; the last is padding
    ids = np.searchsorted(ends, np.arange(TOKENS), side="right")
    positions = np.arange(TOKENS) - np.concatenate([[0], ends])[ids]
    ids = np.where(ids < 2, ids, -1)
    rows = (jnp.asarray(np.tile(x, (BATCH, 1)), jnp.int32) for x in (positions, ids))
    return (q, k, v), tuple(rows)


def gradients(attention: Callable[..., jax.Array], qkv: Arrays, tags: Arrays) -> tuple[jax.Array, Arrays]:
    """Returns the output, and the gradients of a loss that weighs every output differently."""

    def loss(qkv: Arrays) -> tuple[jax.Array, jax.Array]:
        out = attention(*qkv, *tags)
        return jnp.sum(jnp.sin(out) * jnp.arange(out.size).reshape(out.shape) / out.size), out

    (_, out), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(qkv)
    return out, grads


def main() -> dict[str, float]:
    """Compare both kinds with one device; returns the largest difference of each, of outputs and gradients."""
    mesh = jax.make_mesh((2, 4), ("data", "seq"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    qkv, tags = make_inputs()
    want = gradients(dense_attention, qkv, tags)
    errors = {}
    for kind in ("ring", "ulysses"):
        got = gradients(make_attention(mesh, axis="seq", kind=kind, batch_axis="data"), qkv, tags)
        errors[kind] = max(float(abs(a - b).max()) for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True))
        print(f"{kind:8} differs from one device by at most {errors[kind]:.1e}")
    return errors


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    main()
