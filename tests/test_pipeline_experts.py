"""Layers with experts in the pipeline: exact with their balance loss in every plan, whatever the router does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from combinations import draw_experts
from exactness import assert_exact, quick_jit, random_batch, small_model, small_plan
from flax import nnx
from jaxprs import walk
from programs import compare

from sppo_jax.models import grouped, tiles
from sppo_jax.models.balance import loads_of
from sppo_jax.models.dense import dense_losses
from sppo_jax.pipeline.api import Step, evaluate, value_and_grad

# Six in each order of chunks. Together: every place of the stash, hybrids, waves, weights that are gathered.
DRAWN_IN_CI = (4, 10, 14, 30, 44, 52, 3, 9, 17, 21, 33, 45)
DRAWN_SLOWLY = range(20_000, 20_040)
EXPERTS = dict(count=5, chosen=2, size=7, balance=0.3, z=0.02, shared_size=6, shared_gate=True)
BREADTH_FIRST = dict(
    chunks=(8, 12, 4), mesh=(1, 2, 2), schedule="breadth-first", interleave=2, sequences=2, wave=2, weights="gathered"
)


@pytest.mark.parametrize("seed", DRAWN_IN_CI)
def test_drawn_experts_have_the_dense_loss_and_gradients(seed, request):
    compare(draw_experts(seed), seed, count=2, request=request)


@pytest.mark.slow
@pytest.mark.parametrize("seed", DRAWN_SLOWLY)
def test_more_drawn_experts_have_the_dense_loss_and_gradients(seed, request):
    compare(draw_experts(seed), seed, count=2, request=request)


def totals_of(plan, model, batch):
    params = nnx.state(model, nnx.Param)
    return quick_jit(value_and_grad(plan, model).with_totals)(params, batch)[-1]


@pytest.mark.parametrize("form", ["model", "layer"])
@pytest.mark.parametrize("over", ["sequence", "batch"])
def test_the_balance_loss_does_not_depend_on_chunks(form, over, x64):
    model = small_model(experts=EXPERTS | dict(balance_form=form, balance_over=over), num_layers=2)
    batch = random_batch(np.random.default_rng(0), 2, 20, 53, padding=3)
    want = dense_losses(model, nnx.state(model, nnx.Param), jax.tree.map(jnp.asarray, batch))[1]
    assert want > 0.1
    for chunks in ((20,), (10, 10), (4,) * 5, (9, 8, 3)):
        plan = small_plan(chunks, sequences=2, wave=2 if len(chunks) > 1 else 1)
        np.testing.assert_allclose(totals_of(plan, model, batch).penalty, want, rtol=1e-12)


def test_a_balance_loss_of_the_batch_is_exact_where_all_heads_come_first(x64):
    model = small_model(experts=EXPERTS | dict(balance_over="batch"))
    plan = small_plan(**BREADTH_FIRST | dict(mesh=(2, 2, 2)))
    assert_exact(plan, model, random_batch(np.random.default_rng(1), 4, 24, 53, padding=3))


def test_sums_count_each_real_token_once(x64):
    model = small_model(experts=EXPERTS)
    batch = random_batch(np.random.default_rng(2), 4, 24, 53, padding=5, holes=2)
    sums = totals_of(small_plan(**BREADTH_FIRST | dict(mesh=(2, 2, 2))), model, batch).sums
    num_tokens = np.sum(batch["document_ids"] >= 0)
    np.testing.assert_array_equal(sums.tokens, np.full(4, num_tokens))
    np.testing.assert_array_equal(sums.chosen.sum(-1), np.full(4, 2 * num_tokens))
    np.testing.assert_allclose(sums.probs.sum(-1), np.full(4, num_tokens))
    loads = loads_of(sums)
    assert 1 <= loads.max_over_mean <= 5 and 0 < loads.entropy <= 1 and 0 <= loads.dead_fraction < 1


@pytest.mark.parametrize("form", ["tiles", "ragged"])
def test_a_router_that_wants_few_experts_is_exact(form, x64, monkeypatch):
    """All tokens go to two of five experts; three have none. Tiles of two rows: each expert has many."""
    monkeypatch.setattr(tiles, "TILE", 2)
    monkeypatch.setattr(tiles, "LOT", 3)
    monkeypatch.setattr(grouped, "RAGGED", ("cpu",) if form == "ragged" else ())
    model = small_model(experts=EXPERTS | dict(choice_bias=True))
    bias_LE = model.layers.experts.choice_bias
    bias_LE[...] = jnp.zeros_like(bias_LE[...]).at[:, 1:3].set(5)
    plan = small_plan((8, 12, 4), mesh=(1, 2, 2), places=("host", "host", "keep"), alpha=0.6)
    batch = random_batch(np.random.default_rng(3), 1, 24, 53)
    assert_exact(plan, model, batch)
    chosen_LE = totals_of(plan, model, batch).sums.chosen
    np.testing.assert_array_equal(chosen_LE, np.tile([0.0, 24, 24, 0, 0], (4, 1)))


def test_backwards_never_choose(x64):
    """A choice that is made again could differ in a narrow dtype; the backward has the forward's."""
    for places in (("recompute",) * 3, ("host", "recompute", "recompute"), ("keep", "keep", "keep")):
        model = small_model(experts=EXPERTS)
        plan = small_plan((8, 12, 4), mesh=(1, 2, 2), places=places, alpha=1.0 if "host" in places else 0.0)
        batch = random_batch(np.random.default_rng(4), 1, 24, 53)
        step = Step(plan, model, None, train=True)
        jaxpr = jax.make_jaxpr(step)(nnx.state(model, nnx.Param), batch)
        scopes = [str(found.eqn.source_info.name_stack) for found in walk(jaxpr.jaxpr) if found.name == "top_k"]
        assert scopes and not any("backward_tick" in scope for scope in scopes)


def test_scoring_ignores_the_balance_loss(x64):
    model = small_model(experts=EXPERTS)
    batch = random_batch(np.random.default_rng(6), 1, 24, 53)
    scores = quick_jit(evaluate(small_plan((8, 12, 4), mesh=(1, 2, 2)), model))(nnx.state(model, nnx.Param), batch)
    loss, _ = dense_losses(model, nnx.state(model, nnx.Param), jax.tree.map(jnp.asarray, batch))
    np.testing.assert_allclose(scores.losses_BS.sum() / (batch["targets"] >= 0).sum(), loss, rtol=1e-12)
