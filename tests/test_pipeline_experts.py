"""Layers with experts in the pipeline: exact with their balance loss in every plan, whatever the router does."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from combinations import draw_experts
from exactness import assert_exact, quick_jit, random_batch, small_model, small_plan
from flax import nnx
from jaxprs import walk
from programs import compare
from team_cases import batches, case

from sppo_jax.models.dense import dense_losses
from sppo_jax.models.layers import DecoderLayer
from sppo_jax.models.moe import grouped, tiles
from sppo_jax.models.moe.balance import Balance, loads_of
from sppo_jax.pipeline.api import Step, evaluate, value_and_grad

# Both orders of chunks: every kind of sequence, place and router; waves, and chunks that wait on the host.
DRAWN_IN_CI = (10, 21_249, 21_297)
DRAWN_SLOWLY = (6, 22, 23, 46, 93, 94, 115, 128, 131, 137, 141, 21_114, 21_116, 21_146, 21_157, *range(20_000, 20_040))
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


@pytest.mark.slow
@pytest.mark.parametrize("seed", (199, 130, 81, 188, 215))
def test_documents_with_members_of_their_own_have_the_dense_gradients(seed, request):
    program = case(seed)
    plan = program.plan | {"kv_grad_dtype": "float32"}
    if plan.get("schedule", "sppo") == "sppo":
        plan["wave"] = plan.get("sequences", 1)  # the sums of moved sequences need all forwards first
    program = dataclasses.replace(program, plan=plan, model=program.model | {"experts": EXPERTS}, dtype="float64")
    compare(program, seed, count=3, batches=batches, request=request)


def run_with_totals(plan, model, batch):
    """Returns the loss and the gradients, and the totals of a step."""
    *found, measures = quick_jit(value_and_grad(plan, model).with_measures)(nnx.state(model, nnx.Param), batch)
    return found, measures.totals


@pytest.mark.slow
def test_the_sums_do_not_depend_on_chunks(x64):
    """So no balance loss does, of either form."""
    model = small_model(experts=EXPERTS, num_layers=2)
    batch = random_batch(np.random.default_rng(0), 1, 20, 53, padding=3)
    want = dense_losses(model, nnx.state(model, nnx.Param), jax.tree.map(jnp.asarray, batch))[1]
    of_layers = Balance.of(dataclasses.replace(model.config.experts, balance_form="layer"))
    found = [run_with_totals(small_plan(chunks), model, batch)[1] for chunks in ((20,), (9, 8, 3))]
    assert want > 0.1
    for totals in found:
        np.testing.assert_allclose(totals.penalty, want, rtol=1e-12)
        np.testing.assert_allclose(of_layers(totals.sums), of_layers(found[0].sums), rtol=1e-12)


def test_a_balance_loss_of_the_batch_is_exact_where_all_heads_come_first(x64):
    model = small_model(experts=EXPERTS | dict(balance_over="batch"))
    plan = small_plan(**BREADTH_FIRST | dict(chunks=(8, 8, 8), mesh=(2, 2, 1)))
    assert_exact(plan, model, random_batch(np.random.default_rng(1), 4, 24, 53, padding=3))


@pytest.mark.slow
def test_sums_count_each_real_token_once(x64):
    model = small_model(experts=EXPERTS)
    batch = random_batch(np.random.default_rng(2), 4, 24, 53, padding=5, holes=2)
    sums = run_with_totals(small_plan(**BREADTH_FIRST | dict(mesh=(2, 1, 2))), model, batch)[1].sums
    num_tokens = np.sum(batch["document_ids"] >= 0)
    np.testing.assert_array_equal(sums.tokens, np.full(4, num_tokens))
    np.testing.assert_array_equal(sums.chosen.sum(-1), np.full(4, 2 * num_tokens))
    np.testing.assert_allclose(sums.probs.sum(-1), np.full(4, num_tokens))
    loads = loads_of(sums)
    assert 1 <= loads.max_over_mean <= 5 and 0 < loads.entropy <= 1 and 0 <= loads.dead_fraction < 1


@pytest.mark.parametrize("form", ["tiles", pytest.param("ragged", marks=pytest.mark.slow)])
def test_a_router_that_wants_few_experts_is_exact(form, x64, monkeypatch):
    """All tokens go to two of five experts; three have none. Tiles of two rows: each expert has many."""
    monkeypatch.setattr(tiles, "TILE", 2)
    monkeypatch.setattr(tiles, "LOT", 3)
    monkeypatch.setattr(grouped, "RAGGED", ("cpu",) if form == "ragged" else ())
    model = small_model(experts=EXPERTS | dict(choice_bias=True), num_layers=2)
    bias_LE = model.layers.experts.choice_bias
    bias_LE[...] = jnp.zeros_like(bias_LE[...]).at[:, 1:3].set(5)
    plan = small_plan((8, 12, 4), mesh=(1, 2, 2), places=("host", "host", "keep"), alpha=0.6)
    batch = random_batch(np.random.default_rng(3), 1, 24, 53)
    found, totals = run_with_totals(plan, model, batch)
    assert_exact(plan, model, batch, step=lambda *_: found)
    np.testing.assert_array_equal(totals.sums.chosen, np.tile([0.0, 24, 24, 0, 0], (2, 1)))


def test_backwards_never_choose(x64):
    """A choice that is made again could differ in a narrow dtype; the backward has the forward's."""
    for places in (("recompute",) * 3, ("keep", "keep", "keep")):
        model = small_model(experts=EXPERTS, num_layers=2)
        plan = small_plan((8, 12, 4), places=places)
        batch = random_batch(np.random.default_rng(4), 1, 24, 53)
        step = Step(plan, model, None, train=True)
        jaxpr = jax.make_jaxpr(step)(nnx.state(model, nnx.Param), batch)
        scopes = [str(found.eqn.source_info.name_stack) for found in walk(jaxpr.jaxpr) if found.name == "top_k"]
        assert scopes and not any("backward_tick" in scope for scope in scopes)


def test_no_barrier_takes_the_gradients_of_all_experts(x64):
    """One that did would make the compiler write them in the compute dtype, and read them again for their sums."""
    model = small_model(experts=EXPERTS, num_layers=2)
    step = Step(small_plan((8, 12, 4)), model, None, train=True)
    batch = random_batch(np.random.default_rng(4), 1, 24, 53)
    jaxpr = jax.make_jaxpr(step)(nnx.state(model, nnx.Param), batch).jaxpr
    barriers = [found.eqn for found in walk(jaxpr) if found.name == "optimization_barrier"]
    shapes = [[var.aval.shape for var in eqn.invars] for eqn in barriers]
    gate = model.layers.experts.gate.shape[1:]
    assert gate[0] == EXPERTS["count"] and not any(gate in of_one for of_one in shapes)
    assert any(of_one.count(()) > 3 for of_one in shapes)  # an element of each, before the sums


@dataclasses.dataclass(frozen=True)
class Quiet:
    """A user's penalty: the mean square of what layers return."""

    over: str = "sequence"

    def __call__(self, sums):
        return jnp.sum(sums["squares"] / sums["tokens"])


class QuietLayer(DecoderLayer):
    penalty = Quiet()

    def after_attention(self, x_TD, out_TNH):
        y = super().after_attention(x_TD, out_TNH)
        squares = jnp.mean(jnp.square(y), axis=-1)
        return y, {"squares": squares, "tokens": jnp.ones_like(squares)}


def test_a_users_penalty_of_its_own_shares_is_exact(x64):
    model = small_model(layer=QuietLayer, num_layers=2)
    plan = small_plan((8, 12, 4), mesh=(1, 2, 1), sequences=2)
    assert_exact(plan, model, random_batch(np.random.default_rng(7), 2, 24, 53, padding=3))


def test_scoring_ignores_the_balance_loss(x64):
    model = small_model(experts=EXPERTS, num_layers=2)
    batch = random_batch(np.random.default_rng(6), 1, 24, 53)
    scores = quick_jit(evaluate(small_plan((8, 12, 4), mesh=(1, 2, 2)), model))(nnx.state(model, nnx.Param), batch)
    loss, _ = dense_losses(model, nnx.state(model, nnx.Param), jax.tree.map(jnp.asarray, batch))
    num_targets = float(np.sum(batch["targets"] >= 0))
    np.testing.assert_allclose(scores.losses_BS.sum() / num_targets, loss, rtol=1e-12)
