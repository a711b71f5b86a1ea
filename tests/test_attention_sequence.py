"""A chunk's attention over a `seq` axis, by itself: every split against plain attention of the whole sequence."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exactness import quick_jit, random_batch
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from sppo_jax.attention import blockwise, flash
from sppo_jax.attention.dense import dense_attention
from sppo_jax.attention.pallas_blocks import Target
from sppo_jax.attention.spreading import sequence, ulysses
from sppo_jax.attention.spreading.sequence import Cache, Chunk, Split
from sppo_jax.attention.tags import Tags
from sppo_jax.hardware.tpu_chips import TPU_CHIPS

HEAD_DIM = 4
STRIPED = P(None, ("ulysses", "ring"))


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(blockwise, "BLOCK_Q", 4)
    monkeypatch.setattr(blockwise, "BLOCK_K", 8)
    monkeypatch.setattr(flash, "MAX_TILE", 8)


def by_chunks(split, lengths, heads, kv_heads, dtype=jnp.float64):
    """Returns out, dq, dk, dv of striped q, k, v, dout: chunks forward, then backward, each padded to the longest."""
    seq, total, longest = split.ulysses * split.ring, sum(lengths), max(lengths)
    size, starts = longest // seq, np.cumsum([0, *lengths[:-1]])

    def on_device(q, k, v, dout, tags):
        q, k, v, dout = (jnp.pad(x[:, 0], ((0, size), (0, 0), (0, 0))) for x in (q, k, v, dout))
        keys = sequence.member_tags(*tags, split, size * split.ulysses)
        room = total // split.ring + size * split.ulysses
        shape = (1, 1, sequence.cache_heads(kv_heads, split.ulysses), room, HEAD_DIM)
        cache = Cache(*(jnp.full(shape, 9.0, dtype),) * 2)  # garbage, as a slot's last user leaves it
        sums = Cache(*(jnp.zeros(shape, dtype),) * 2)
        at = jnp.asarray([starts, lengths], jnp.int32).T

        def cut(x, start):
            return jax.lax.dynamic_slice_in_dim(x, start // seq, size)

        def chunk_of(start, length):
            start, count = start // split.ring, length // split.ring
            tags = sequence.chunk_tags(keys, start, count, size * split.ulysses, split, bound=total // split.ring)
            return Chunk(jnp.int32(0), start, count, tags)

        def forward(carry, at):
            (cache, out), (start, length) = carry, at
            chunk = chunk_of(start, length)
            cache = sequence.write_prefix(cache, cut(k, start), cut(v, start), chunk, 0, split)
            o, lse = sequence.forward(cut(q, start), cache, chunk, 0, split)
            return (cache, jax.lax.dynamic_update_slice_in_dim(out, o, start // seq, 0)), (o, lse)

        (cache, out), saved = jax.lax.scan(forward, (cache, jnp.zeros_like(q)), at)

        def backward(carry, at_and_saved):
            (sums, grads), ((start, length), (o, lse)) = carry, at_and_saved
            chunk, real = chunk_of(start, length), (jnp.arange(size, dtype=jnp.int32) < length // seq)[:, None, None]
            do = jnp.where(real, cut(dout, start), 0.0)
            dq, sums = sequence.backward(sequence.Attended(cut(q, start), o, lse, do), cache, sums, chunk, 0, split)
            dk, dv, sums = sequence.take_gradient(sums, chunk, 0, cut(k, start), split)
            grads = [
                jax.lax.dynamic_update_slice_in_dim(old, jnp.where(real, x, cut(old, start)), start // seq, 0)
                for old, x in zip(grads, (dq, dk, dv), strict=True)
            ]
            return (sums, grads), None

        zeros = [jnp.zeros_like(x) for x in (q, k, v)]
        (sums, grads), _ = jax.lax.scan(backward, (sums, zeros), (at, saved), reverse=True)
        left = jnp.abs(sums.k).max() + jnp.abs(sums.v).max()
        return [x[: total // seq, None] for x in (out, *grads)], left[None, None]

    devices = np.array(jax.devices()[:seq]).reshape(split.ring, split.ulysses)
    mesh = Mesh(devices, ("ring", "ulysses"), axis_types=(AxisType.Auto,) * 2)
    return jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(STRIPED,) * 4 + (P(),),
        out_specs=([STRIPED] * 4, P("ring", "ulysses")),
        check_vma=False,
    )


SPLITS = [
    (Split(4, 1, "q"), (16, 12, 8), 8, 2),
    (Split(2, 2, "kv", window=10), (16, 12, 8), 4, 1),
    (Split(1, 3, "kv", "cudnn"), (15, 9, 12), 2, 1),
    (Split(2, 1, "q", "cudnn", 5), (10, 8, 14), 4, 2),
]
SPLITS_SLOWLY = [
    (Split(2, 3, "q"), (18, 12), 2, 2),
    (Split(1, 1, "q", window=5), (10, 7, 13), 4, 2),
    (Split(1, 1, "q"), (10, 7, 13), 4, 2),
    (Split(1, 3, "kv"), (15, 9, 12), 2, 1),
    (Split(1, 4, "q", window=20), (16, 8, 16), 3, 3),
    (Split(1, 4, "q", "cudnn", 12), (16, 8, 16), 3, 3),
    (Split(2, 2, "kv", "cudnn"), (16, 12, 8), 4, 1),
    (Split(3, 1, "q"), (12, 9), 6, 2),
    (Split(1, 4, "q"), (16, 8, 16), 3, 3),
    (Split(2, 2, "kv"), (16, 12, 8), 4, 1),
    (Split(4, 1, "q", window=9), (16, 12, 8), 8, 2),
    (Split(1, 3, "kv", window=3), (15, 9, 12), 2, 1),
    (Split(1, 1, "q", "cudnn"), (10, 7, 13), 4, 2),
    (Split(4, 1, "q", "cudnn"), (16, 12, 8), 8, 2),
    (Split(1, 4, "q", "cudnn"), (16, 8, 16), 3, 3),
    (Split(1, 3, "kv", "cudnn", 6), (15, 9, 12), 2, 1),
    (Split(2, 2, "kv", "cudnn", 4), (16, 12, 8), 4, 1),
]


@pytest.mark.parametrize(
    "split,lengths,heads,kv_heads",
    [*SPLITS, *(pytest.param(*case, marks=pytest.mark.slow) for case in SPLITS_SLOWLY)],
    ids=str,
)
def test_every_split_gives_plain_attention_and_its_gradients(x64, split, lengths, heads, kv_heads):
    batch = random_batch(np.random.default_rng(0), 1, sum(lengths), 50, documents=3, padding=2)
    tags = Tags(*(jnp.asarray(batch[key][0]) for key in ("positions", "document_ids")))
    step = quick_jit(by_chunks(split, lengths, heads, kv_heads))
    assert_plain_attention(split, step, heads, kv_heads, tags)


TILED = [(Split(1, 2, "kv", window=256), (256, 512), 2, 1)]
TILED_SLOWLY = [
    (Split(2, 2, "q"), (256, 512), 4, 1),
    (Split(1, 3, "kv"), (768, 384), 2, 2),
    (Split(1, 1, "q"), (256, 128, 256), 4, 2),
    (Split(4, 1, "q"), (256, 128), 8, 2),
    (Split(1, 2, "kv"), (256, 512), 2, 1),
    (Split(1, 3, "q"), (384, 768), 3, 1),
    (Split(1, 1, "q", window=50), (256, 128), 2, 1),
    (Split(1, 3, "q", window=100), (384, 384), 2, 1),
]


@pytest.mark.parametrize(
    "split,lengths,heads,kv_heads",
    [*TILED, *(pytest.param(*case, marks=pytest.mark.slow) for case in TILED_SLOWLY)],
    ids=str,
)
def test_every_split_of_the_kernel_for_tpus_gives_plain_attention(split, lengths, heads, kv_heads):
    batch = random_batch(np.random.default_rng(0), 1, sum(lengths), 50, documents=4, padding=20)
    tags = Tags(*(jnp.asarray(batch[key][0]) for key in ("positions", "document_ids")))
    target = Target(TPU_CHIPS["cpu"], heads // kv_heads, itemsize=4)
    with jax.default_matmul_precision("highest"):
        split = split._replace(kernel="pallas", target=target)
        step = quick_jit(by_chunks(split, lengths, heads, kv_heads, jnp.float32))
        assert_plain_attention(split, step, heads, kv_heads, tags, dtype=jnp.float32)


@pytest.mark.parametrize(
    "split", [Split(2, 2, "q", "cudnn"), pytest.param(Split(1, 4, "kv", "cudnn"), marks=pytest.mark.slow)], ids=str
)
def test_a_last_document_of_one_token_behind_low_scores(x64, split):
    """On a ring the triangle of that document is strict for some members, which then have no query of the document."""
    step = quick_jit(by_chunks(split, (32, 32), 4, 2))
    for lengths in ((63, 1), (50, 13, 1), (50, 10, 1), (50, 9, 1, 1)):  # padding follows
        documents = np.full(64, -1, np.int32)
        documents[: sum(lengths)] = np.repeat(np.arange(len(lengths)), lengths)
        tags = Tags(jnp.arange(64, dtype=jnp.int32), jnp.asarray(documents))
        assert_plain_attention(split, step, 4, 2, tags, shift=9.0)  # scores of about -162


def assert_plain_attention(split, step, heads, kv_heads, tags, shift=0.0, dtype=jnp.float64):
    """Compares a step with dense attention; `shift` is taken from every query and added to every key."""
    rng, total, seq = np.random.default_rng(0), len(tags.documents), split.ulysses * split.ring
    positions, documents = (x[None] for x in tags)
    q, dout = (jnp.asarray(rng.normal(size=(total, heads, HEAD_DIM)), dtype) for _ in range(2))
    k, v = (jnp.asarray(rng.normal(size=(total, kv_heads, HEAD_DIM)), dtype) for _ in range(2))
    q, k, dout = q - shift, k + shift, jnp.where((documents[0] >= 0)[:, None, None], dout, 0.0)

    def plain(q, k, v):
        return dense_attention(q[None], k[None], v[None], positions, documents, window=split.window)[0]

    @quick_jit
    def right(q, k, v, dout):
        out, vjp = jax.vjp(plain, q, k, v)
        return out, *vjp(dout)

    striped = [x.reshape(-1, seq, *x.shape[1:]) for x in (q, k, v, dout)]
    got, left = step(*striped, tags)
    for x, want in zip(got, right(q, k, v, dout), strict=True):
        bounds = dict(rtol=1e-9, atol=1e-11) if dtype == jnp.float64 else dict(rtol=1e-4, atol=2e-5)
        np.testing.assert_allclose(x.reshape(want.shape), want, **bounds)
    assert not np.asarray(left).any()  # the next sequence in this slot finds zeros


@pytest.mark.parametrize("kv_heads,members,copies", [(1, 4, 4), (2, 4, 2), (4, 2, 1), (2, 3, 3), (6, 4, 2)])
def test_key_heads_are_repeated_next_to_each_other_and_their_gradients_added(kv_heads, members, copies):
    x = jnp.arange(2.0 * kv_heads).reshape(2, kv_heads, 1)
    many = ulysses.replicate(x, members)
    assert many.shape[1] == kv_heads * copies and many.shape[1] % members == 0
    np.testing.assert_array_equal(many[0, :, 0], np.repeat(np.asarray(x[0, :, 0]), copies))
    np.testing.assert_array_equal(ulysses.sum_replicas(many, kv_heads), copies * x)
    assert sequence.cache_heads(kv_heads, members) * members == many.shape[1]


@pytest.mark.parametrize("split", [Split(1, 4, "kv"), Split(1, 4, "q", "cudnn")], ids=str)
def test_a_ring_in_bfloat16_merges_in_float32(split):
    rng, total, heads, dim = np.random.default_rng(1), 64, 2, 16
    q, k, v = (jnp.asarray(rng.normal(size=(total, heads, dim)) * 2, jnp.bfloat16) for _ in range(3))
    positions, documents = jnp.arange(total, dtype=jnp.int32), jnp.zeros(total, jnp.int32)

    def on_device(q, k, v, tags):
        keys = sequence.member_tags(*tags, split, 0)
        chunk_tags = sequence.chunk_tags(keys, 0, total // 4, total // 4, split, bound=total // 4)
        chunk = Chunk(jnp.int32(0), jnp.int32(0), jnp.int32(total // 4), chunk_tags)
        cache = Cache(*(jnp.zeros((1, 1, heads, total // 4, dim), jnp.bfloat16),) * 2)
        cache = sequence.write_prefix(cache, k[:, 0], v[:, 0], chunk, 0, split)
        out, lse = sequence.forward(q[:, 0], cache, chunk, 0, split)
        return out[:, None], lse[:, None]

    mesh = Mesh(np.array(jax.devices()[:4]).reshape(4, 1), ("ring", "ulysses"), axis_types=(AxisType.Auto,) * 2)
    specs = dict(in_specs=(STRIPED,) * 3 + (P(),), out_specs=(STRIPED, STRIPED), check_vma=False)
    run = quick_jit(jax.shard_map(on_device, mesh=mesh, **specs))
    out, lse = run(*(x.reshape(-1, 4, heads, dim) for x in (q, k, v)), Tags(positions, documents))

    exact_q, exact_k, exact_v = (np.asarray(x, np.float64) for x in (q, k, v))
    scores = np.einsum("tnh,snh->nts", exact_q, exact_k) / np.sqrt(dim)
    scores = np.where(np.tril(np.ones((total, total), bool)), scores, -np.inf)
    exact_lse = np.log(np.exp(scores).sum(-1)).T
    # Scores are products of bfloat16 numbers, added in float32. A merge in bfloat16 would be off by a hundredth.
    assert lse.dtype == jnp.float32
    np.testing.assert_allclose(np.asarray(lse).reshape(total, heads), exact_lse, atol=2e-5)
    exact_out = np.einsum("nts,snh->tnh", np.exp(scores - exact_lse.T[..., None]), exact_v)
    np.testing.assert_allclose(np.asarray(out, np.float64).reshape(exact_out.shape), exact_out, atol=0.05)


@pytest.mark.parametrize("kernel", ["cudnn", "blockwise"])
def test_keys_for_cudnn_keep_their_order_in_memory(kernel):
    split = Split(1, 1, "q", kernel)
    lowered = jax.jit(lambda x: sequence.prefix_block(x, split)).lower(jnp.ones((4, 2, 3)))
    assert ("LayoutConstraint" in lowered.as_text()) == (kernel == "cudnn")


@pytest.mark.parametrize("kernel", ["pallas", "cudnn", "blockwise"])
def test_what_the_kernel_for_tpus_takes_out_of_dk_and_dv_is_read_before_the_zeros_are_written(kernel):
    """Else XLA:TPU copies a whole buffer in each layer of a tick. The programs of other kernels are as they were."""
    sums, split = Cache(*(jnp.ones((1, 2, 2, 16, HEAD_DIM)),) * 2), Split(1, 1, "q", kernel)

    def take(sums, start):
        return sequence.take_gradient(sums, Chunk(0, start, 4, None), 1, jnp.zeros((8, 2, HEAD_DIM)), split)

    equations = jax.make_jaxpr(take)(sums, jnp.int32(4)).jaxpr.eqns
    barriers = [equation for equation in equations if equation.primitive.name == "optimization_barrier"]
    assert len(barriers) == (2 if kernel == "pallas" else 0)
    used = [x for equation in equations for x in equation.invars]
    for barrier in barriers:
        (before,), (behind,) = barrier.invars, barrier.outvars
        assert before.aval.size == 2 * 8 * HEAD_DIM
        assert [used.count(before), used.count(behind)] == [1, 2]  # the zeros and the result are made behind it


def bodies_of(jaxpr):
    """Yields the bodies of all scans of a jaxpr but those within kernels."""
    for equation in (x for x in jaxpr.eqns if x.primitive.name != "pallas_call"):
        for inner in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from [inner] if equation.primitive.name == "scan" else []
                yield from bodies_of(inner)


@pytest.mark.parametrize("passes", ["kv", "q"])
def test_nothing_stands_behind_the_kernel_for_tpus_in_a_loop_of_hops(passes):
    """XLA:TPU starts a hop beside what stands behind the kernel, and then not beside the kernel."""
    split = Split(1, 4, passes, "pallas", target=Target(TPU_CHIPS["cpu"], 2, itemsize=4))
    x, k = jnp.zeros((512, 4, HEAD_DIM), jnp.float32), jnp.zeros((512, 2, HEAD_DIM), jnp.float32)
    tags = Tags(jnp.arange(512, dtype=jnp.int32), jnp.zeros(512, jnp.int32))
    step = by_chunks(split, (512,), 4, 2, jnp.float32)
    jaxpr = jax.make_jaxpr(step)(*(a.reshape(-1, 4, *a.shape[1:]) for a in (x, k, k, x)), tags)
    loops = 0
    for body in bodies_of(jaxpr.jaxpr):
        kernels = [equation for equation in body.eqns if equation.primitive.name == "pallas_call"]
        if kernels and not list(bodies_of(body)):
            loops += 1
            results = [x for kernel in kernels for x in kernel.outvars]
            assert not [x for equation in body.eqns for x in equation.invars if x in results]
    assert loops == 2  # forward and backward
