"""Heads spread over the whole `seq` axis: in natural order, back again, and the transpose of each."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from sppo_jax.mixers import heads

RING, ULYSSES = 2, 2
MEMBERS = RING * ULYSSES
SHAPES = {"a": (3, 8, 2), "b": (3, 2), "c": (3, 12, 1, 3)}  # tokens of a member, heads, ...


def on_members(f):
    """Runs `f` on each member's tokens; all tokens lie in natural order, and striped over ring and then Ulysses."""
    mesh = jax.make_mesh((RING, ULYSSES), ("ring", "ulysses"), devices=jax.devices()[:MEMBERS])

    def member(whole):
        me = lax.axis_index("ulysses") * RING + lax.axis_index("ring")
        own = jax.tree.map(lambda x: x.reshape(-1, MEMBERS, *x.shape[1:])[:, me], whole)
        return jax.tree.map(lambda x: x[None], f(own))

    spec = PartitionSpec(("ulysses", "ring"))
    return jax.jit(jax.shard_map(member, mesh=mesh, in_specs=PartitionSpec(), out_specs=spec, check_vma=False))


@pytest.fixture
def whole():
    rng = np.random.default_rng(0)
    return {
        name: jnp.asarray(rng.normal(size=(shape[0] * MEMBERS, *shape[1:])), jnp.float32)
        for name, shape in SHAPES.items()
    }


def test_each_member_has_all_tokens_in_order_for_its_heads(whole):
    found = on_members(lambda own: heads.scatter(own, MEMBERS))(whole)
    for name, x in whole.items():
        times = -(-MEMBERS // x.shape[1]) if x.shape[1] % MEMBERS else 1
        want = np.split(np.repeat(x, times, axis=1), MEMBERS, axis=1)
        np.testing.assert_array_equal(found[name], np.stack(want))


def test_gathering_is_the_inverse_and_adds_up_replicas(whole):
    back = on_members(lambda own: heads.gather(heads.scatter(own, MEMBERS), own, MEMBERS))(whole)
    for name, x in whole.items():
        times = 2 if x.shape[1] == 2 else 1
        want = times * np.stack([x[m::MEMBERS] for m in range(MEMBERS)])
        np.testing.assert_allclose(back[name], want, rtol=1e-6)


def test_arrays_of_one_dtype_are_one_message(whole):
    whole["c"] = whole["c"].astype(jnp.bfloat16)
    jaxpr = str(jax.make_jaxpr(on_members(lambda own: heads.scatter(own, MEMBERS)))(whole))
    assert jaxpr.count("all_to_all[") == 2


def test_a_member_has_its_share_of_constants_and_gives_back_its_part():
    taps = jnp.arange(6.0).reshape(2, 3)

    def f(own):
        share, pull = jax.vjp(lambda x: heads.own_constants(x, MEMBERS), taps)
        return share, pull(jnp.ones_like(share))[0]

    shares, parts = on_members(f)(jnp.zeros((MEMBERS, 1)))
    np.testing.assert_array_equal(shares, np.repeat(taps, 2, axis=0)[:, None])
    np.testing.assert_array_equal(parts.sum(0), np.full((2, 3), 2.0))
