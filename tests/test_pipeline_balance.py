"""The experts' loss over a packed sequence is one function, wherever a sequence's tokens are computed."""

from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exactness import dense_step, quick_jit, relative_errors, small_model, small_plan
from flax import nnx

from sppo_jax.data.rows import flex
from sppo_jax.flex import cells
from sppo_jax.flex.rows import PACKED_ROWS
from sppo_jax.flex.shape import plan_shape
from sppo_jax.models.dense import dense_losses
from sppo_jax.models.moe.balance import sequence_weights
from sppo_jax.pipeline.api import value_and_grad

NUM_ROWS, LENGTH = 4, 32
# Tokens of each document of each row: one row is full, one has three tokens.
DOCUMENTS = ((5, 9, 3, 8, 7), (3,), (12, 6, 2), (20, 1, 4))
EXPERTS = dict(count=5, chosen=2, size=7, balance=0.3, z=0.02)
GATHERED = dict(schedule="breadth-first", interleave=2, weights="gathered", places=("host", "recompute", "recompute"))
PLANS = {
    "one device": dict(chunks=(16, 16), sequences=4),
    "waves": dict(chunks=(16, 16), sequences=4, mesh=(1, 2, 2), wave=2),
    "data 2": dict(chunks=(16, 16), sequences=2, mesh=(2, 1, 2), kind="ring"),
    "data 2 and waves": dict(chunks=(16, 16), sequences=2, mesh=(2, 2, 1), wave=2),
    "teams": dict(chunks=(16, 16), sequences=2, mesh=(2, 2, 2), kind="ring", groups="flex", wave=2),
    "teams of one pipeline": dict(chunks=(16, 8, 8), sequences=4, mesh=(1, 2, 4), groups="flex", schedule="gpipe"),
    "teams, gathered": dict(chunks=(16, 16), sequences=4, mesh=(1, 1, 2), groups="flex", wave=4, **GATHERED),
}
IN_CI = ("data 2 and waves",)


class Rows:
    """The packed rows of one step."""

    def __init__(self):
        rng, self.batch = np.random.default_rng(0), []
        for sizes in DOCUMENTS:
            pad = LENGTH - sum(sizes)
            ids = np.r_[np.repeat(np.arange(len(sizes)), sizes), np.full(pad, -1)]
            targets = np.where(ids >= 0, rng.integers(0, 53, LENGTH), -1)
            positions = np.r_[*map(np.arange, sizes), np.zeros(pad, int)]
            arrays = rng.integers(0, 53, LENGTH), targets, positions, ids
            names = "tokens", "targets", "positions", "document_ids"
            self.batch.append({name: x.astype(np.int32) for name, x in zip(names, arrays, strict=True)})

    def __len__(self):
        return NUM_ROWS

    def __getitem__(self, index):
        return self.batch[index]


def stacked(rows):
    rows = [rows[number] for number in range(NUM_ROWS)]
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def moved(plan, monkeypatch):
    """Returns the rows with documents in teams, also where the planner would leave them."""

    def in_teams(pieces, shape):
        found = cells.candidates(pieces, shape)
        return min((found[name] for name in found if name != cells.TODAY), key=lambda placement: placement.cost)

    monkeypatch.setattr(flex, "plan_cells", in_teams)
    return stacked(flex.FlexRows(Rows(), window=NUM_ROWS, shape=plan_shape(plan), per_step=NUM_ROWS))


@lru_cache(maxsize=1)
def dense():
    """Returns the model, and its loss, gradients and penalty on one device."""
    model, batch = small_model(num_layers=2, experts=EXPERTS), stacked(Rows())
    params = nnx.state(model, nnx.Param)
    loss, grads = dense_step(model)(params, batch)
    return model, (loss, grads, quick_jit(lambda p, b: dense_losses(model, p, b)[1])(params, batch))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in IN_CI else pytest.mark.slow) for name in PLANS]
)
def test_the_penalty_and_the_gradients_are_those_of_one_device(x64, monkeypatch, name):
    plan, batch = small_plan(**PLANS[name]), stacked(Rows())
    if plan.groups == "flex":
        batch = moved(plan, monkeypatch)
        rows = np.arange(NUM_ROWS)[:, None]
        assert ((batch[PACKED_ROWS] != rows) & (batch["document_ids"] >= 0)).sum() > 10
    model, (want_loss, want, want_penalty) = dense()
    loss, grads, measures = quick_jit(value_and_grad(plan, model).with_measures)(nnx.state(model, nnx.Param), batch)
    totals = measures.totals
    np.testing.assert_allclose([loss, totals.penalty], [want_loss, want_penalty], rtol=1e-9)
    errors = relative_errors(grads, want)
    assert max(errors.values()) < 1e-9, errors
    np.testing.assert_array_equal(totals.sums.tokens, [sum(map(sum, DOCUMENTS))] * 2)


def test_a_sequence_weighs_by_its_real_tokens(x64):
    """Three tokens beside a full row weigh as three tokens."""
    np.testing.assert_allclose(sequence_weights(jnp.array([32, 3, 0]), jnp.float64), np.array([32, 3, 0]) / 35)
    assert not sequence_weights(jnp.zeros(2, jnp.int32), jnp.float32).any()
    model, (_, _, penalty) = dense()
    alone, params = quick_jit(lambda p, b: dense_losses(model, p, b)[1]), nnx.state(model, nnx.Param)
    of_each = [float(alone(params, {name: x[None] for name, x in row.items()})) for row in Rows().batch]
    weights = np.array([sum(sizes) for sizes in DOCUMENTS])
    assert float(penalty) == pytest.approx(np.average(of_each, weights=weights), rel=1e-12)
    assert float(penalty) != pytest.approx(np.mean(of_each), rel=1e-3)


def test_teams_need_all_forwards_first():
    """A packed row's documents may lie in any row of the batch."""
    model = small_model(num_layers=2, experts=EXPERTS, dtype="float32")
    plan = small_plan((16, 16), sequences=4, mesh=(1, 1, 2), groups="flex")
    words = "balance_over=sequence with sequence.groups=flex must have all forwards of a step before its first backward"
    with pytest.raises(ValueError, match=f"{words}, got 4 .* waves of 1 .*; use schedule.wave=4, or sequence.groups="):
        value_and_grad(plan, model)
    value_and_grad(plan, small_model(num_layers=2, experts=EXPERTS | dict(balance=0.0, z=0.0), dtype="float32"))


def test_packed_rows_are_those_of_the_batch():
    model, batch = small_model(num_layers=2, experts=EXPERTS, dtype="float32"), stacked(Rows())
    params = jax.eval_shape(lambda: nnx.state(model, nnx.Param))
    rows = np.broadcast_to(np.arange(NUM_ROWS, dtype=np.int32)[:, None], (NUM_ROWS, LENGTH))
    for plan, given, words in (
        (small_plan(**PLANS["one device"]), rows, "must be left out without teams"),
        (small_plan(**PLANS["teams"]), rows + 1, r"must lie in 0..3, got 1..4"),
        (small_plan(**PLANS["teams"]), rows[:2], "must have the plan's shape"),
    ):
        with pytest.raises(ValueError, match=words):
            value_and_grad(plan, model)(params, batch | {PACKED_ROWS: given})
