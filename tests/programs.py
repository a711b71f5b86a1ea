"""One program of the pipeline step, and its loss and every gradient against the dense model's."""

import warnings
from dataclasses import dataclass, field
from functools import partial

import jax
import numpy as np
import pytest
from exactness import assert_exact, dense_step, quick_jit, random_batch, relative_errors, small_model, small_plan
from flax import nnx
from hlo_order import overtaking
from quick_flags import NORMAL_LEVEL

from sppo_jax.attention import blockwise, flash
from sppo_jax.pipeline import api
from sppo_jax.pipeline.api import value_and_grad
from sppo_jax.schedule.table import MIN_HOST_GAP

TOLERANCE = {"float64": 1e-9, "float32": 1e-4}
# Each time that a block of queries adds to dK and dV their sum is rounded to bfloat16, by up to 2^-9 of it. In these
# programs some 25 such roundings, which are independent, come to 5 of 2^-9.
KV_GRAD_ROUNDINGS, KV_GRAD_TOLERANCE = 25, 1e-2
AFTER_KV = ("query", "query_bias", "query_norm", "output", "output_bias", "mlp_norm", "gate", "up", "down")
HOST = ("host", "host", "recompute")
NOTHING = ("recompute", "recompute", "recompute")


@dataclass(frozen=True)
class Case:
    """A program, and how it is compiled.

    Args:
        plan: arguments of `small_plan`.
        model: arguments of `small_model`.
        dtype: compute dtype.
        blocks: queries and keys in a block of the blockwise kernel; the second is also the fused kernel's tile.
        optimised: whether to compile at the compiler's normal level, as a user's run does.
    """

    plan: dict
    model: dict = field(default_factory=dict)
    dtype: str = "float64"
    blocks: tuple[int, int] = (8, 16)
    optimised: bool = False

    def make_plan(self):
        return small_plan(**self.plan)

    def make_model(self, dtype=None):
        # Smaller weights in bfloat16: a flatter softmax magnifies roundings less, so smaller mistakes show.
        scale = {"init_scale": 0.1} if self.dtype == "bfloat16" else {}
        return small_model(dtype=dtype or self.dtype, **scale, **self.model)


def host_kinds(plan) -> tuple[bool, bool, bool]:
    """Returns whether shares of tokens wait on the host, whether the rest of a layer does, and keys and values."""
    shares = any(plan.stash.alpha) and {"host", "period"} & {plan.stash.inputs, plan.stash.attention}
    has_time = max(plan.table().bundle_gaps) >= MIN_HOST_GAP
    return bool(shares), plan.stash.rest == "host" and has_time, plan.stash.kv == "host" and has_time


def batches(rng, plan, vocab_size, count):
    """Draws batches; of several, one has holes, and one has so much padding that whole chunks have no token."""
    length, rows = plan.sequence_length, plan.mesh.data * plan.sequences_per_pipeline
    for index in range(count):
        documents = int(rng.integers(1, min(7, length)))
        padding = [int(rng.integers(0, 4)), 0, int(rng.integers(length // 3, length))][index % 3]
        holes = [0, int(rng.integers(1, length // 2)), 0][index % 3]
        holes = holes if plan.kernel == "blockwise" else 0  # the others want documents in one piece
        yield random_batch(rng, rows, length, vocab_size, documents=documents, padding=padding, holes=holes)


def compiled_step(case, plan, model, batch):
    """Compiles the pipeline step with the blocks of the case, which uses the host where the case says so.

    Refuses a program whose collectives have no order.
    """
    jit = partial(jax.jit, compiler_options=NORMAL_LEVEL) if case.optimised else quick_jit
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the plan's kernel is")
        patch.setattr(blockwise, "BLOCK_Q", case.blocks[0])
        patch.setattr(blockwise, "BLOCK_K", case.blocks[1])
        patch.setattr(flash, "MAX_TILE", case.blocks[1])
        params = nnx.state(model, nnx.Param)
        step = jit(value_and_grad(plan, model)).lower(params, batch).compile()
        assert api._made(plan, model, None, train=True)[0].uses_host == any(host_kinds(plan))
    unordered = overtaking(step.as_text())
    assert not unordered, unordered
    return step


def compare(case, seed, count, batches=batches, request=None):
    """Compares one program with the dense model on several batches; the dense one has its blocks whole.

    Args:
        case: the program.
        seed: of the batches.
        count: number of batches.
        batches: draws them.
        request: pytest's, for drawn cases: float64 is enabled for those that compute in float64.
    """
    if request is not None and case.dtype == "float64":
        request.getfixturevalue("x64")
    plan, model = case.make_plan(), case.make_model()
    drawn = list(batches(np.random.default_rng(seed), plan, model.config.vocab_size, count))
    step, dense = compiled_step(case, plan, model, drawn[0]), dense_step(model)
    if case.dtype == "bfloat16":
        exact = dense_step(case.make_model("float32"))
        for batch in drawn:
            assert_as_exact_as_dense(nnx.state(model, nnx.Param), batch, step, dense, exact)
        return
    rounded, tolerance = plan.stash.kv_grad_dtype == "bfloat16", TOLERANCE[case.dtype]
    for batch in drawn:
        if rounded:
            assert_exact_but_for_kv(nnx.state(model, nnx.Param), batch, step, dense, tolerance)
        assert_exact(plan, model, batch, tolerance=KV_GRAD_TOLERANCE if rounded else tolerance, step=step, dense=dense)


def assert_exact_but_for_kv(params, batch, step, dense, tolerance):
    """Compares the loss, and the gradients that do not depend on dK and dV: the head's and part of the last layer's.

    A tied embedding is left out: its gradient depends on dK and dV through the first layer.
    """
    (loss, grads), (want_loss, want) = (f(params, batch) for f in (step, dense))
    np.testing.assert_allclose(loss, want_loss, rtol=tolerance)

    def free(tree):
        last = {k: jax.tree.map(lambda x: x[-1], tree["layers"][k]) for k in AFTER_KV if k in tree["layers"]}
        return last | {k: tree[k] for k in ("head", "final_norm") if k in tree}

    errors = relative_errors(free(grads), free(want))
    assert max(errors.values()) < tolerance, errors


def distances(got, want) -> dict[str, float]:
    """Returns each leaf's distance over the length of `want`, and the distance of all leaves together under "all"."""
    got, want = (jax.tree_util.tree_flatten_with_path(tree)[0] for tree in (got, want))
    squares = {
        jax.tree_util.keystr(path): (np.square(np.float64(a) - np.float64(b)).sum(), np.square(np.float64(b)).sum())
        for (path, a), (_, b) in zip(got, want, strict=True)
    }
    squares["all"] = tuple(map(sum, zip(*squares.values(), strict=True)))
    return {name: float(np.sqrt(over / max(under, 1e-60))) for name, (over, under) in squares.items()}


def assert_as_exact_as_dense(params, batch, step, dense, exact):
    """Compares a bfloat16 step with the dense step in bfloat16 and in float32: loss and every gradient.

    bfloat16 has 8 bits of mantissa, so a rounding changes a value by up to 2^-8 and by 2^-10 in the root mean square.
    A layer rounds about 30 times, forward and backward, so the gradients of L layers are off by about sqrt(30 L) 2^-10,
    0.01 with 4 layers. The model decides how much a rounding is magnified: the dense step's own error is the measure.

    The pipeline rounds what the dense step rounds, and also each chunk's part of a sum; the sums are float32. If each
    of its roundings were made twice and independently, its error would be sqrt(2) of the dense step's. Two independent
    errors of one size are also sqrt(2) apart. So 1.5 bounds both for the whole gradient. 2 bounds them for a leaf,
    because some leaves have only 20 numbers. A loss is a mean over tokens with independent errors: 2^-8 is its bound.
    """
    (loss, grads), (dense_loss, dense_grads), (true_loss, true) = (f(params, batch) for f in (step, dense, exact))
    assert jax.tree.map(lambda g: g.dtype, grads) == jax.tree.map(lambda p: p.dtype, params)
    assert max(abs(loss - true_loss), abs(loss - dense_loss)) < 2**-8 * true_loss, (loss, dense_loss, true_loss)
    measure = distances(dense_grads, true)
    assert measure["all"] < 0.1, measure  # or the dense step says nothing
    for want in (true, dense_grads):
        shares = {name: error / measure[name] for name, error in distances(grads, want).items()}
        assert shares["all"] < 1.5 and max(shares.values()) < 2, shares
