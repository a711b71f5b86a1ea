"""Attention alone over a mesh axis: outputs and gradients against one device's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from sppo_jax.attention import dense_attention, make_attention, spread_attention


def make_mesh(**axes) -> Mesh:
    devices = np.array(jax.devices()[: int(np.prod(list(axes.values())))]).reshape(*axes.values())
    return Mesh(devices, tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def make_inputs(tokens=24, heads=(6, 2, 2), batch=2):
    keys = jax.random.split(jax.random.key(0), 3)
    qkv = tuple(jax.random.normal(key, (batch, tokens, n, 4)) for key, n in zip(keys, heads, strict=True))
    ids = jnp.sort(jax.random.randint(jax.random.key(1), (batch, tokens), -1, 3, jnp.int32), axis=1)
    positions = jnp.tile(jnp.arange(tokens, dtype=jnp.int32), (batch, 1))
    return qkv, (positions, ids)


def value_and_gradients(attention, qkv, tags):
    def loss(qkv):
        out = attention(*qkv, *tags)
        return (jnp.sin(out) * jnp.arange(out.size, dtype=out.dtype).reshape(out.shape)).sum(), out

    (_, out), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(qkv)
    return out, *grads


CASES = {
    "ring of 3": (dict(seq=3), "ring", None),
    "ulysses, fewer key heads than members": (dict(data=2, seq=3), "ulysses", "data"),
    "an axis of no concern": (dict(seq=2, model=2), "ring", None),
}


@pytest.mark.parametrize("name", CASES)
def test_it_is_the_attention_of_one_device(x64, name):
    axes, kind, batch_axis = CASES[name]
    qkv, tags = make_inputs()
    attention = make_attention(make_mesh(**axes), kind=kind, batch_axis=batch_axis)
    got = value_and_gradients(attention, qkv, tags)
    for a, b in zip(got, value_and_gradients(dense_attention, qkv, tags), strict=True):
        assert np.abs(b).max() > 0.1
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-11)


def test_a_shard_map_of_ones_own_takes_both_axes(x64):
    qkv, tags = make_inputs()
    mesh = make_mesh(ring=2, ulysses=2)
    striped = P(None, None, ("ulysses", "ring"))

    def on_device(q, k, v, positions, ids):
        return spread_attention(q[:, :, 0], k[:, :, 0], v[:, :, 0], positions, ids)[:, :, None]

    spread = jax.shard_map(
        on_device, mesh=mesh, in_specs=(striped,) * 3 + (P(),) * 2, out_specs=striped, check_vma=False
    )

    def attention(q, k, v, *tags):
        return spread(*(x.reshape(2, -1, 4, *x.shape[2:]) for x in (q, k, v)), *tags).reshape(q.shape)

    got = value_and_gradients(attention, qkv, tags)
    for a, b in zip(got, value_and_gradients(dense_attention, qkv, tags), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-11)


def test_outside_of_a_shard_map_the_axes_are_missed():
    qkv, tags = make_inputs()
    with pytest.raises(ValueError, match="inside shard_map .* got no axis ring; add the axis with size 1"):
        spread_attention(*qkv, *tags)


@pytest.mark.parametrize(
    "settings,words",
    [
        (dict(axis="time"), "must have the axis time, got data, seq"),
        (dict(kind="zigzag"), "ring or ulysses, got zigzag"),
    ],
)
def test_what_is_not_there_is_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        make_attention(make_mesh(data=2, seq=2), **settings)


@pytest.mark.parametrize(
    "name,shapes,words",
    [
        ("tokens do not divide", dict(tokens=23), "a multiple of 2 .the mesh axis., got .2, 23, 6, 4."),
        ("heads do not divide", dict(heads=(6, 4, 4)), "a multiple of key/value heads, got 6 and 4"),
        ("keys without values", dict(heads=(6, 2, 3)), "keys and values must be .2, 24, heads, 4."),
        ("too few positions", dict(), r"positions must be \[2, 24\] like the queries, got \[1, 24\]"),
    ],
)
def test_a_batch_of_the_wrong_shape_is_refused(name, shapes, words):
    with jax.enable_x64(True):
        qkv, (positions, ids) = make_inputs(**shapes)
    if not shapes:
        positions = positions[:1]
    with pytest.raises(ValueError, match=words) as error:
        make_attention(make_mesh(seq=2))(*qkv, positions, ids)
    assert "\n" not in str(error.value)


def test_ulysses_needs_heads_for_every_member():
    qkv, tags = make_inputs(heads=(3, 3, 3))
    with pytest.raises(ValueError, match="heads must be a multiple of ulysses = 2, got 3; use a ring"):
        make_attention(make_mesh(seq=2), kind="ulysses")(*qkv, *tags)
