"""Loss and every gradient of the pipeline against the dense model, over meshes, schedules, chunks, stashes and data."""

from dataclasses import replace

import chex
import jax
import numpy as np
import pytest
from exactness import quick_jit, random_batch, relative_errors, small_model, small_plan
from flax import nnx
from programs import HOST, NOTHING, Case, compare

from sppo_jax.pipeline.api import value_and_grad
from sppo_jax.schedule.csv_format import to_csv
from sppo_jax.schedule.generators import make_table


def own_table():
    """A table that no generator makes: two sequences forward, then alternately back, heads and all."""
    gpipe = make_table("gpipe", 2, 3, (8, 8), 1)
    seq1f1b = make_table("seq1f1b", 2, 3, (8, 8), 1)
    assert gpipe.ticks != seq1f1b.ticks
    ticks = list(seq1f1b.ticks)
    # The first backward tick waits one more forward tick: still a legal order, with one stash more.
    first = next(i for i, tick in enumerate(ticks) if tick.op == "B")
    after = next(i for i in range(first, len(ticks)) if ticks[i].op == "F")
    last = after + 2 if ticks[after + 1].op == "H" else after + 1
    ticks = ticks[:first] + ticks[after:last] + ticks[first:after] + ticks[last:]
    return to_csv(replace(seq1f1b, ticks=tuple(ticks), name="own"))


CASES = {
    "one-device": Case(
        dict(chunks=(16,) * 5, places=HOST, alpha=0.3),
        dict(num_kv_heads=1, tied_embeddings=True, num_layers=3),
    ),
    "data-only": Case(
        dict(chunks=(11, 17, 5), mesh=(2, 1, 1), sequences=2, places=("host", "recompute", "recompute"), alpha=1.0),
        dict(mlp="gelu", head_dim=2, num_layers=2),
        blocks=(4, 8),
    ),
    "ring-kv-unequal": Case(
        dict(chunks=(14, 22, 6, 18), mesh=(1, 2, 2), kind="ring", ring_pass="kv"),
        dict(mlp="gelu", qkv_bias=True, vocab_size=51),
    ),
    "ring-q-1f1b": Case(
        dict(chunks=(42,), mesh=(1, 2, 2), kind="ring", ring_pass="q", schedule="1f1b", sequences=3),
        dict(qk_norm=True, num_heads=3, num_kv_heads=3),
    ),
    "ulysses-replicates-kv": Case(
        dict(chunks=(16, 16, 16), mesh=(1, 1, 4), schedule="gpipe", sequences=2, places=("keep", "keep", "keep")),
        dict(num_heads=8, num_kv_heads=2, head_dim=4, num_layers=2),
    ),
    "ulysses-lcm": Case(
        dict(chunks=(12,) * 4, mesh=(1, 2, 3), schedule="seq1f1b", sequences=3, places=HOST, alpha=0.3),
        dict(num_heads=6, num_kv_heads=2, head_dim=4, qkv_bias=True, tied_embeddings=True, vocab_size=47),
    ),
    "hybrid-alpha-by-diagonal": Case(
        dict(
            chunks=(16,) * 4,
            mesh=(1, 2, 4),
            kind="hybrid",
            ulysses=2,
            places=("host", "host", "keep"),
            alpha=(1.0, 0.0, 0.3, 0.3),
        ),
        dict(num_kv_heads=1, qk_norm=True),
    ),
    "four-stages-rest-on-host": Case(
        dict(chunks=(10,) * 4, mesh=(1, 4, 1), schedule="seq1f1b", sequences=2, places=("host",) * 3, alpha=1.0),
        dict(num_layers=8, vocab_size=50),
    ),
    "four-stages-ring-auto": Case(
        dict(chunks=(16,) * 6, mesh=(1, 4, 2), kind="ring", places=NOTHING),
        dict(num_layers=4, tied_embeddings=True, num_kv_heads=4),
    ),
    "interleaved-seq1f1b": Case(
        dict(
            chunks=(8,) * 4,
            mesh=(2, 2, 2),
            schedule="interleaved-seq1f1b",
            interleave=2,
            sequences=2,
            places=HOST,
            alpha=0.3,
        ),
        dict(num_layers=8),
    ),
    "interleaved-1f1b": Case(
        dict(chunks=(24,), mesh=(1, 2, 2), kind="ring", schedule="interleaved-1f1b", interleave=2, sequences=4),
        dict(mlp="gelu"),
    ),
    "interleaved-sppo": Case(
        dict(chunks=(24, 12, 12, 6), mesh=(1, 2, 3), kind="ring", interleave=3, places=("keep", "recompute", "keep")),
        dict(num_layers=6, qkv_bias=True, qk_norm=True),
    ),
    "ring-of-three-gpipe": Case(
        dict(chunks=(15, 9, 21), mesh=(2, 1, 3), kind="ring", schedule="gpipe", places=("keep", "host", "keep")),
        dict(num_layers=2, head_dim=10, vocab_size=40),
    ),
    "three-stages-five-members": Case(
        dict(chunks=(10, 20), mesh=(1, 1, 5), kind="ring", ring_pass="q", sequences=2, places=HOST, alpha=(0.3, 1.0)),
        dict(num_layers=3, num_heads=4, num_kv_heads=1, hidden_size=10),
    ),
    "three-stages": Case(
        dict(chunks=(8,) * 5, mesh=(1, 3, 2), places=("host", "keep", "host"), alpha=(0.0, 0.6)),
        dict(num_layers=6, tied_embeddings=True, vocab_size=43),
    ),
    "own-table": Case(
        dict(chunks=(8, 8), mesh=(1, 2, 2), sequences=3, csv=own_table()),
        dict(num_kv_heads=4),
    ),
    "float32-ulysses": Case(
        dict(chunks=(16,) * 4, mesh=(1, 2, 2), places=("host",) * 3, alpha=0.6), dict(qk_norm=True), dtype="float32"
    ),
    "float32-ring": Case(
        dict(chunks=(20, 20, 8), mesh=(2, 2, 2), kind="ring", schedule="seq1f1b", sequences=2),
        dict(mlp="gelu", tied_embeddings=True),
        dtype="float32",
    ),
    "fused-hybrid-unequal": Case(
        dict(chunks=(24, 12, 12), mesh=(1, 2, 4), kind="hybrid", ulysses=2, kernel="cudnn", places=HOST, alpha=0.3),
        dict(num_kv_heads=1, qk_norm=True),
    ),
    "fused-ring-kv-seq1f1b": Case(
        dict(
            chunks=(18, 12),
            mesh=(2, 1, 3),
            kind="ring",
            ring_pass="kv",
            schedule="seq1f1b",
            sequences=2,
            kernel="cudnn",
            places=NOTHING,
        ),
        dict(num_layers=2, tied_embeddings=True),
    ),
    "bfloat16-kv-gradients": Case(
        dict(chunks=(16,) * 4, mesh=(1, 2, 2), kind="ring", kv_grad_dtype="bfloat16"), dtype="float32"
    ),
}


# The others' features are in the combinations that CI compiles, in all pairs (test_pipeline_combinations.py).
QUICK = ("one-device",)


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in CASES])
def test_every_gradient_is_the_dense_one(name, request):
    case = CASES[name]
    if case.dtype == "float64":
        request.getfixturevalue("x64")
    compare(case, seed=list(CASES).index(name), count=3)


PLACES = {
    "host": dict(places=("host",) * 3, alpha=1.0),
    "half": dict(places=("host", "host", "keep"), alpha=0.5),
    "most": dict(places=("host", "host", "keep"), alpha=0.93),
    "rest": dict(places=("keep", "keep", "recompute")),
    "attention": dict(places=("keep", "recompute", "keep")),
    "all": dict(places=NOTHING),
}


def run_with(places):
    plan, model = dict(chunks=(16,) * 4, mesh=(1, 2, 2)), small_model()
    batch = random_batch(np.random.default_rng(0), 1, 64, model.config.vocab_size, padding=3)
    return quick_jit(value_and_grad(small_plan(**plan, **places), model))(nnx.state(model, nnx.Param), batch)


@pytest.mark.parametrize("names", [("most",), pytest.param(("host", "half"), marks=pytest.mark.slow)])
def test_where_a_stash_waits_does_not_change_what_comes_of_it(names, x64):
    kept = run_with(dict(places=("keep",) * 3))
    for name in names:
        chex.assert_trees_all_equal(run_with(PLACES[name]), kept)


@pytest.mark.slow
def test_what_is_made_again_is_what_was_stashed(x64):
    kept = run_with(dict(places=("keep",) * 3))
    for name in ("rest", "attention", "all"):
        assert max(relative_errors(run_with(PLACES[name]), kept).values()) < 1e-12, name


def test_a_batch_without_targets_has_no_loss_and_no_gradient():
    plan, model = small_plan((8, 8), mesh=(1, 2, 2)), small_model(dtype="float32")
    batch = random_batch(np.random.default_rng(0), 1, 16, model.config.vocab_size)
    batch["targets"][:] = -1
    loss, grads = quick_jit(value_and_grad(plan, model))(nnx.state(model, nnx.Param), batch)
    assert loss == 0 and not any(np.asarray(grad).any() for grad in jax.tree.leaves(grads))


def good_batch():
    return random_batch(np.random.default_rng(0), 1, 16, 53)


def breaks(key, value, where=(0, 3)):
    batch = good_batch()
    batch[key][where] = value
    return batch


@pytest.mark.parametrize(
    "batch,rule,change",
    [
        (breaks("tokens", 53), "'tokens' must lie in 0..52", "vocab_size"),
        (breaks("tokens", -1), "'tokens' must lie in 0..52", "tokenizer"),
        (breaks("targets", 53), "'targets' must lie in -1..52", "vocab_size"),
        (breaks("targets", -2), "'targets' must lie in -1..52", "vocab_size"),
        (breaks("document_ids", 9), "document_ids must not decrease", "number the documents"),
        (breaks("positions", -1), "'positions' must not be negative", "count from 0"),
        (breaks("positions", 5, (0, 0)), "positions must increase", "restart positions"),
        ({key: value[:, :-1] for key, value in good_batch().items()}, "shape", "change the batch or the plan"),
        ({key: np.repeat(value, 2, 0) for key, value in good_batch().items()}, "shape", "change the batch or the plan"),
        ({key: x for key, x in good_batch().items() if key != "positions"}, "must have the keys", "add 'positions'"),
    ],
)
def test_a_batch_that_breaks_the_contract_is_refused(batch, rule, change):
    plan, model = small_plan((8, 8)), small_model(dtype="float32")
    with pytest.raises(ValueError, match=f"{rule}.*, got .*; .*{change}"):
        value_and_grad(plan, model)(nnx.state(model, nnx.Param), batch)


@pytest.mark.parametrize(
    "plan,model,rule,change",
    [
        (dict(mesh=(2, 2, 4)), {}, "must not exceed the number of devices", "lower an axis"),
        (dict(mesh=(1, 1, 3)), {}, "mesh.seq must divide model.num_heads=4 for ulysses", "sequence.split=ring"),
        (dict(mesh=(1, 3, 1)), {}, "mesh.pipe must divide model.num_layers=4", "3 or 6 layers"),
        (
            dict(mesh=(1, 4, 1)),
            dict(num_layers=2),
            "mesh.pipe must divide model.num_layers=2",
            "use 2 virtual stages",
        ),
    ],
)
def test_a_plan_and_a_model_that_do_not_fit_are_refused(plan, model, rule, change):
    plan, model = small_plan(**dict(chunks=(12, 12)) | plan), small_model(dtype="float32", **model)
    with pytest.raises(ValueError, match=f"{rule}.*, got .*[;:] .*{change}"):
        value_and_grad(plan, model)


def test_another_mesh_than_the_plan_s_is_refused():
    mesh = jax.make_mesh((2, 1, 1), ("data", "pipe", "seq"), axis_types=(jax.sharding.AxisType.Auto,) * 3)
    with pytest.raises(ValueError, match="the mesh must be the plan's.*, got .*; use make_mesh"):
        value_and_grad(small_plan((8, 8)), small_model(dtype="float32"), mesh)


def test_a_plan_for_cudnn_says_that_something_else_stands_in_for_it():
    with pytest.warns(
        UserWarning, match="the plan's kernel is cudnn, got cpu devices, on which a plain kernel replaces cudnn"
    ):
        value_and_grad(small_plan((8, 8), kernel="cudnn"), small_model(dtype="float32"))
