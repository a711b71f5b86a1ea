"""Steps whose documents choose their members: exact, one program, no device waits for another, no exchange too many."""

import jax
import numpy as np
import pytest
from combinations import features, pairs, possible_pairs
from exactness import quick_jit, small_model, small_plan
from flax import nnx
from flex_cases import KINDS, contents_of, draw_sizes, make_shape, pack
from jax.extend.core import Literal
from programs import HOST, NOTHING, Case, compare
from team_cases import batches, breadth_first_case, case, columns, row, with_tokens
from uniform import loops_that_may_part

from sppo_jax.attention.spreading import near
from sppo_jax.flex.baselines import baselines
from sppo_jax.flex.rows import Content, write
from sppo_jax.pipeline import api
from sppo_jax.pipeline.api import evaluate, value_and_grad

# Together with the slow ones they have every pair of features that can stand in one program with teams.
DRAWN_IN_CI = (313, 1719, 10_028)
MANY = [seed for seed in range(10_000, 10_110) if case(seed)][:44]
DRAWN_SLOWLY = (2, 23, 56, 59, 63, 81, 130, 188, 199, 215, 341, 459, 543, *sorted({*MANY} - {*DRAWN_IN_CI}))
# Chunks pass one group of layers at a time, whose keys and values are made again.
BREADTH_FIRST = (28, 7, 8, 14, 15, 34, 54, 56, 58)
WRITTEN = {
    "ulysses-8-copied-heads": Case(
        dict(chunks=(24, 16), mesh=(1, 1, 8), groups="flex", places=NOTHING), dict(num_heads=8, num_layers=2)
    ),
    "bfloat16-ring-fused-host": Case(
        dict(chunks=(16, 24), mesh=(1, 2, 4), kind="ring", kernel="cudnn", places=HOST, alpha=1.0, groups="flex"),
        dict(head_dim=8),
        dtype="bfloat16",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ulysses-8-copied-heads", "bfloat16-ring-fused-host"])
def test_teams_have_the_dense_loss_and_gradients(name, request):
    compare(WRITTEN[name], seed=0, count=4, batches=batches, request=request)


def test_the_draws_have_every_pair_of_features():
    drawn = [case(seed) for seed in (*DRAWN_IN_CI, *DRAWN_SLOWLY)]
    of_ci, names = [features(each) for each in map(case, DRAWN_IN_CI)], set().union(*map(features, drawn))
    assert set().union(*map(pairs, drawn)) == possible_pairs(names)
    floats = {"float32", "float64", "bfloat16", "bfloat16 dK, dV"}
    assert set().union(*of_ci) >= names - floats
    assert {each.plan["mesh"][1] for each in map(case, DRAWN_IN_CI)} >= {1, 2, 3}


@pytest.mark.parametrize("seed", DRAWN_IN_CI)
def test_drawn_teams_have_the_dense_loss_and_gradients(seed, request):
    compare(case(seed), seed, count=4, batches=batches, request=request)


@pytest.mark.slow
@pytest.mark.parametrize("seed", DRAWN_SLOWLY)
def test_more_drawn_teams_have_the_dense_loss_and_gradients(seed, request):
    compare(case(seed), seed, count=4, batches=batches, request=request)


@pytest.mark.slow
@pytest.mark.parametrize("seed", BREADTH_FIRST)
def test_breadth_first_rebuilds_the_keys_of_stream_chunks_alone(seed, request):
    drawn = breadth_first_case(seed)
    assert drawn.plan["kv"] in ("rebuild", "host")
    compare(drawn, seed, count=4, batches=batches, request=request)


def levels_of(plan, rows):
    """Returns the level of each chunk of a pipeline's rows, -1 for a stream chunk, counted from the tags alone."""
    levels = []
    for documents, _ in rows:
        ends = np.cumsum([0, *plan.chunk_lengths])
        chunks = [documents[a:b] for a, b in zip(ends[:-1], ends[1:], strict=True)]
        crossing = [
            any(set(chunk[chunk >= 0]) & set(other[other >= 0]) for other in chunks[:c] + chunks[c + 1 :])
            for c, chunk in enumerate(chunks)
        ]
        for chunk, crosses in zip(chunks, crossing, strict=True):
            device = np.argsort(columns(plan))[np.arange(len(chunk)) % plan.mesh.seq]
            level = max(
                (int(min(device[chunk == d]) ^ max(device[chunk == d])).bit_length() for d in set(chunk[chunk >= 0])),
                default=0,
            )
            levels.append(-1 if crosses or 2**level == plan.mesh.seq else level)
    return np.reshape(levels, (len(rows), -1))


def loops_that_part(plan, model, batch, monkeypatch):
    """Returns the communicating loops of a device's step, as accelerators run it, whose trips may differ."""
    monkeypatch.setattr(api, "keeps_order", lambda platform: True)
    closed = jax.make_jaxpr(value_and_grad(plan, model))(nnx.state(model, nnx.Param), batch)
    (step,) = [eqn for eqn in closed.eqns if eqn.primitive.name == "shard_map" and "while" in str(eqn.params["jaxpr"])]
    constants = set(closed.jaxpr.constvars)
    inputs = [isinstance(x, Literal) or x in constants for x in step.invars]
    return loops_that_may_part(step.params["jaxpr"], inputs, AXES)


AXES = ("data", "pipe", "ring", "ulysses")


@pytest.mark.parametrize("kind", ["ring", pytest.param("ulysses", marks=pytest.mark.slow)])
def test_all_devices_make_as_many_trips(kind, monkeypatch):
    plan = small_plan((16, 8), mesh=(2, 2, 2), kind=kind, schedule="seq1f1b", sequences=2, groups="flex")
    model = small_model(num_layers=2, dtype="float32")
    batch = with_tokens(np.random.default_rng(0), [row(np.random.default_rng(0), plan, (True, False))] * 4, 53)
    assert loops_that_part(plan, model, batch, monkeypatch) == []


def test_a_trip_count_of_one_pipeline_alone_would_be_found(monkeypatch):
    monkeypatch.setattr(jax.lax, "pmax", lambda x, axes: jax.lax.psum(x, axes[1:]))
    plan = small_plan((16, 8), mesh=(2, 1, 4), groups="flex")
    model = small_model(num_layers=1, dtype="float32")
    batch = with_tokens(np.random.default_rng(0), [row(np.random.default_rng(0), plan, (True, False))] * 2, 53)
    assert loops_that_part(plan, model, batch, monkeypatch)


@pytest.mark.slow
def test_other_documents_keep_their_losses_to_the_bit():
    plan = small_plan((16, 16, 8), mesh=(1, 2, 4), kind="hybrid", ulysses=2, groups="flex")
    model = small_model(num_layers=2, dtype="float32")
    rng = np.random.default_rng(5)
    score, params = quick_jit(evaluate(plan, model)), nnx.state(model, nnx.Param)
    for kinds in [(False, True, False), (True, True, False), (False, False, False)]:
        batch = with_tokens(rng, [row(rng, plan, kinds)], 53)
        documents, losses = batch["document_ids"][0], np.asarray(score(params, batch).losses_BS)[0]
        for changed in rng.choice(np.unique(documents[documents >= 0]), 2):
            own = documents == changed
            other = {**batch, "tokens": np.where(own, (batch["tokens"] + 1) % 53, batch["tokens"])}
            again = np.asarray(score(params, other).losses_BS)[0]
            np.testing.assert_array_equal(again[~own], losses[~own])
            assert (again[own] != losses[own]).any()


def test_devices_make_the_exchanges_that_the_tags_ask_for_and_no_more(monkeypatch):
    """Each exchange of a doubling is counted where it happens."""
    plan = small_plan((16, 16, 16), mesh=(1, 1, 8), groups="flex", places=NOTHING)
    model = small_model(num_layers=1, dtype="float32", num_heads=8)
    seen, swap = [], near._swap

    def counted(x, level):
        jax.debug.callback(lambda: seen.append(level))
        return swap(x, level)

    monkeypatch.setattr(near, "_swap", counted)
    rng, score = np.random.default_rng(1), quick_jit(evaluate(plan, model))
    params = nnx.state(model, nnx.Param)
    for largest in (1, 2, 4):
        seen.clear()
        rows = [row(rng, plan, (False, False, False), largest)]
        jax.block_until_ready(score(params, with_tokens(rng, rows, 53)))
        jax.effects_barrier()
        levels = levels_of(plan, rows)
        assert levels.max() == largest.bit_length() - 1
        want = {level: 8 * int((levels > level).sum()) for level in range(2)}
        assert {level: seen.count(level) for level in range(2)} == want


def of_vocabulary(pieces):
    return [Content(x.tokens % 53, x.targets % 53, x.positions) for x in contents_of(pieces)]


def test_one_program_takes_60_batches_of_all_baselines_in_turns():
    chunks, rng = (32, 16), np.random.default_rng(2)
    plan = small_plan(chunks, mesh=(2, 1, 4), kind="ring", groups="flex")
    shape = make_shape(2, chunks, data=2, ring=4, stages=1, hidden=1)
    model = small_model(num_layers=1, dtype="float32")
    step, params, several = quick_jit(value_and_grad(plan, model)), nnx.state(model, nnx.Param), 0
    for number in range(15):
        pieces = pack(draw_sizes(rng, KINDS[number % len(KINDS)], shape), shape, 0.9)
        found = {name: way.windows[0] for name, way in baselines(pieces, shape).items()}
        several += len(set(found["flex"].degree.tolist())) > 1
        # static takes several windows; its first one is a batch like any other.
        losses = {
            name: float(step(params, write(window, of_vocabulary(window.pieces)))[0]) for name, window in found.items()
        }
        for name in ("per_batch", "flex"):
            assert losses[name] == pytest.approx(losses["packed"], rel=1e-5), (number, name)
    assert several >= 3 and step._cache_size() == 1


# Documents and positions of 4 members: one line a slot.
BAD = {
    "the document id": ([1, -1, -1, -1] + [0, -1, -1, -1], [0] * 8, "rising document ids"),
    "dealing": ([0, 0, -1, -1] * 3, [0, 3, 0, 0] + [1, 4, 0, 0] + [2, 5, 0, 0], r"must lie on member \(o \+ p\) mod 2"),
    "padding": ([0, 3, -1, -1] + [-1] * 4 + [1, -1, -1, -1], [0] * 12, "padding of a team chunk must lie behind"),
    "natural order": ([0, 0, 0, 0] * 2, [0, 2, 4, 6] + [1, 3, 5, 7], "must be in natural order"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_batch_that_breaks_a_rule_of_teams_is_refused_in_one_line(name):
    documents, positions, words = BAD[name]
    plan, model = (
        small_plan((16,), mesh=(1, 1, 4), groups="flex", kernel="cudnn"),
        small_model(num_layers=1, dtype="float32"),
    )
    with pytest.warns(UserWarning, match="plan's kernel is cudnn"):
        step = value_and_grad(plan, model)
    row = np.pad(documents, (0, 16 - len(documents)), constant_values=-1), np.pad(positions, (0, 16 - len(positions)))
    with pytest.raises(ValueError, match=words) as error:
        step(nnx.state(model, nnx.Param), with_tokens(np.random.default_rng(0), [row], 53))
    assert "\n" not in str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ulysses", "ring"])
def test_teams_have_the_dense_loss_and_gradients_breadth_first(kind, request):
    """Team chunks keep their own keys in the cache, which rebuilding makes again."""
    plan = dict(chunks=(24, 16, 16), mesh=(1, 2, 4), kind=kind, schedule="breadth-first", interleave=2, kv="rebuild")
    more = dict(places=("host", "recompute", "recompute"), alpha=1.0, groups="flex")
    compare(Case(plan | more, dict(num_layers=4, num_heads=4)), seed=0, count=4, batches=batches, request=request)
