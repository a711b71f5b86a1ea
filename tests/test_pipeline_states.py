"""Layers with a state in the pipeline: exact in every plan, and each mask that keeps states apart is needed."""

from functools import cache

import jax.numpy as jnp
import numpy as np
import pytest
from exactness import dense_step, quick_jit, random_batch, relative_errors, small_model, small_plan
from flax import nnx
from programs import compare
from state_cases import STATE_MLP, StateCase, UnawareLayer, draw_states, packed_batches, state_layer

from sppo_jax.pipeline import api, mixing
from sppo_jax.pipeline.api import evaluate, value_and_grad
from sppo_jax.rules import Broken

KINDS = {"state": {"mlp_size": STATE_MLP}}
HYBRID = dict(num_layers=4, layers="2x(state,full)", kinds=KINDS)
# Both orders of chunks; states alone.
DRAWN_IN_CI = (46, 15)
DRAWN_SLOWLY = (2, 6, 37, 43, 45, 56, 70, 73)
# Layers with a state beside attention.
BY_GROUPS = dict(schedule="breadth-first", interleave=2)
DELTA = dict(layers="2x(delta,full)", kinds={})
ON_HOST = dict(places=("host", "recompute", "recompute"), alpha=1.0)
BESIDE_ATTENTION = {
    "the delta rule": (dict(chunks=(8, 4), mesh=(1, 1, 2)), dict(layers="delta,full", kinds={}, num_layers=2)),
    "an only chunk": (dict(chunks=(8,), mesh=(1, 1, 2), weights="gathered", kv="recompute", **BY_GROUPS), {}),
}
SLOWLY_BESIDE_ATTENTION = {
    "gathered, rebuilt": (
        dict(chunks=(8, 4, 8), mesh=(1, 1, 2), weights="gathered", kv="rebuild", **BY_GROUPS)
        | dict(places=("host", "host", "recompute"), alpha=1.0),
        {},
    ),
    "late attention": (
        dict(chunks=(8, 4, 8), mesh=(1, 1, 2), weights="gathered", kv="rebuild", attention_from=1, **BY_GROUPS)
        | dict(places=("host", "host", "recompute"), alpha=1.0),
        {},
    ),
    "keys and values on the host, a wave": (
        dict(chunks=(8, 4), mesh=(1, 1, 2), kind="ring", sequences=2, wave=2, kv="host", **ON_HOST, **BY_GROUPS),
        {},
    ),
    "a group's input alone": (
        dict(chunks=(8, 4), mesh=(1, 1, 2), weights="gathered", places=("recompute",) * 3, **BY_GROUPS),
        {},
    ),
    "the delta rule, gathered": (
        dict(chunks=(8, 4), mesh=(1, 1, 2), weights="gathered", kv="rebuild", **ON_HOST, **BY_GROUPS),
        DELTA,
    ),
    "the delta rule on two stages": (
        dict(chunks=(8, 4), mesh=(1, 2, 2), kind="ring", sequences=2, places=("keep", "keep", "keep")),
        DELTA,
    ),
    "unlike groups": (
        dict(chunks=(8, 4), mesh=(1, 1, 2), kv="rebuild", **ON_HOST, **BY_GROUPS),
        dict(layers="state,full,full,state"),
    ),
    "shapes": (
        dict(chunks=(4, 8, 4), mesh=(1, 1, 2), shapes=(6, 8), places=("keep", "recompute", "recompute")),
        {},
    ),
    "interleaved": (
        dict(chunks=(8, 4), mesh=(1, 2, 1), sequences=2, schedule="interleaved-seq1f1b", interleave=2)
        | dict(places=("recompute",) * 3),
        dict(num_layers=8, layers="4x(state,full)"),
    ),
    "waiting on the host": (
        dict(chunks=(8, 4, 8), mesh=(1, 2, 1), sequences=2, wave=2, kv="rebuild", waiting="host", **BY_GROUPS),
        dict(num_layers=8, layers="4x(state,full)"),
    ),
}


@pytest.fixture(autouse=True)
def unprobed(monkeypatch):
    """The mixers here are tried by `test_pipeline_probe_mixer.py`, once."""
    monkeypatch.setattr(api, "check_block", lambda *_: None)


def model_of(**changes):
    return small_model(layer=state_layer, **HYBRID | changes)


@pytest.mark.parametrize("seed", DRAWN_IN_CI)
def test_drawn_states_have_the_dense_loss_and_gradients(seed, request):
    compare(draw_states(seed), seed, count=2, batches=packed_batches, request=request)


@pytest.mark.slow
@pytest.mark.parametrize("seed", DRAWN_SLOWLY)
def test_more_drawn_states_have_the_dense_loss_and_gradients(seed, request):
    compare(draw_states(seed), seed, count=2, batches=packed_batches, request=request)


def compare_named(named, request):
    plan, model = named
    case = StateCase(plan, HYBRID | {"hidden_size": 8} | model)
    compare(case, seed=3, count=3, batches=packed_batches, request=request)


@pytest.mark.parametrize("name", BESIDE_ATTENTION)
def test_states_beside_attention_have_the_dense_loss_and_gradients(name, request):
    compare_named(BESIDE_ATTENTION[name], request)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOWLY_BESIDE_ATTENTION)
def test_more_states_beside_attention_have_the_dense_loss_and_gradients(name, request):
    compare_named(SLOWLY_BESIDE_ATTENTION[name], request)


CHUNKS, SEQUENCES = (8, 4), 2


def one_by_one() -> str:
    """Returns a table in which a stage works while the other is idle, also between two chunks of a sequence."""
    rows = [[], []]
    for sequence in range(SEQUENCES):
        for chunk in range(len(CHUNKS)):
            rows[0] += [f"F{sequence}.{chunk}.0", "", f"H{sequence}.{chunk}"]
            rows[1] += ["", f"F{sequence}.{chunk}.1", f"H{sequence}.{chunk}"]
        for chunk in reversed(range(len(CHUNKS))):
            rows[0] += ["", f"B{sequence}.{chunk}.0"]
            rows[1] += [f"B{sequence}.{chunk}.1", ""]
    lengths = " ".join(map(str, CHUNKS))
    header = f"name=own,stages=2,groups=1,sequences={SEQUENCES},chunk_lengths={lengths}"
    return "\n".join([header, *map(",".join, rows)]) + "\n"


SHAPE = dict(chunks=CHUNKS, mesh=(1, 2, 1), sequences=SEQUENCES, csv=one_by_one())
ALONE = dict(num_layers=2, layers="2xstate", hidden_size=8)


class Dense:
    """A model, a batch, and the dense loss and gradients, which several tests compare with."""

    def __init__(self, model, num_documents, padding=0):
        self.model, self.params = model, nnx.state(model, nnx.Param)
        rng = np.random.default_rng(4)
        self.batch = random_batch(rng, SEQUENCES, sum(CHUNKS), 53, documents=num_documents, padding=padding)
        self.loss, self.grads = dense_step(model)(self.params, self.batch)

    def largest_error(self, plan):
        """Returns the largest relative error of the loss and of the gradients of a plan."""
        loss, grads = quick_jit(value_and_grad(plan, self.model))(self.params, self.batch)
        return max(abs(loss / self.loss - 1), *relative_errors(grads, self.grads).values())


@cache
def of_two_documents():
    return Dense(model_of(**ALONE), num_documents=2, padding=2)


@cache
def of_an_unaware_mixer():
    return Dense(small_model(**HYBRID | ALONE | {"layer": UnawareLayer}), num_documents=1)


def one_document(place):
    return place._replace(documents_T=jnp.minimum(place.documents_T, 0), before_W=jnp.minimum(place.before_W, 0))


def without_tokens_before(place):
    return place._replace(before_W=jnp.full_like(place.before_W, -1))


def inner(unit):
    return unit._replace(is_first=jnp.bool(False))


def always_active(unit):
    return unit._replace(is_active=jnp.bool(True))


def of_place(change):
    return lambda found: lambda *args: change(found(*args))


def of_unit(change):
    return lambda method: lambda unit, *args: method(change(unit), *args)


@pytest.mark.parametrize("change", [None, one_document, without_tokens_before])
def test_documents_are_kept_apart(change, x64, monkeypatch):
    dense = of_two_documents()
    if change is not None:
        monkeypatch.setattr(mixing, "chunk_place", of_place(change)(mixing.chunk_place))
    error = dense.largest_error(small_plan(**SHAPE))
    assert error < 1e-9 if change is None else error > 1e-4


# What is left out, and how.
LEFT_OUT = {
    "the state before a sequence": ("before", of_unit(inner)),
    "idle stages write nothing": ("leave", of_unit(always_active)),
    "idle stages hand nothing on": ("hand_on", of_unit(always_active)),
    "zeros for the next sequence": ("hand_on", of_unit(inner)),
}


@pytest.mark.parametrize("name", [None, *LEFT_OUT])
def test_sequences_are_kept_apart(name, x64, monkeypatch):
    """Of a mixer that sees no documents, in sequences of one document, the states lie apart without its help."""
    dense = of_an_unaware_mixer()
    if name is not None:
        attribute, change = LEFT_OUT[name]
        monkeypatch.setattr(mixing.StateUnit, attribute, change(getattr(mixing.StateUnit, attribute)))
    error = dense.largest_error(small_plan(**SHAPE))
    assert error < 1e-9 if name is None else error > 1e-4


CASES = {
    "one stage": dict(chunks=(12, 20), sequences=2),
    "ring, two pipelines": dict(chunks=(16, 16), mesh=(2, 2, 2), kind="ring"),
    "breadth-first": dict(chunks=(12, 8, 12), mesh=(1, 2, 2), sequences=2, schedule="breadth-first", interleave=2)
    | dict(kv="rebuild", weights="gathered"),
}


@pytest.mark.parametrize("name", CASES)
def test_an_evaluation_has_the_dense_loss(name, x64):
    plan, model = small_plan(**CASES[name]), model_of(num_layers=8, layers="4x(state,full)")
    batch = random_batch(np.random.default_rng(0), 2, 32, 53, padding=3)
    params = nnx.state(model, nnx.Param)
    scores = quick_jit(evaluate(plan, model))(params, batch)
    want, _ = dense_step(model)(params, batch)
    assert np.asarray(scores.losses_BS).sum() / (batch["targets"] >= 0).sum() == pytest.approx(float(want), rel=1e-9)


REFUSED = {
    "more members than heads": (
        dict(mesh=(1, 1, 8), chunks=(8, 8), kind="ring"),
        {},
        "mesh.seq must divide the 4 heads of a layer with a state, got mesh.seq=8; use one of",
    ),
    "flexible groups": (
        dict(mesh=(1, 1, 2), chunks=(8, 8), groups="flex"),
        {},
        "must have sequence.groups=static, got sequence.groups=flex",
    ),
    "no keys and values": (
        dict(chunks=(8, 8), schedule="breadth-first", interleave=2, kv="rebuild"),
        dict(layers="4xstate"),
        "a model without attention must have stash.kv=keep, because it has no keys and values, got stash.kv=rebuild",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_layers_with_a_state_cannot_do_is_refused(name):
    plan, model, message = REFUSED[name]
    with pytest.raises(Broken, match=message):
        api.Step(small_plan(**plan), model_of(dtype="float32", **model), None, train=True)


def test_padding_before_a_document_is_refused():
    plan, model = small_plan((8, 8)), model_of(dtype="float32")
    batch = random_batch(np.random.default_rng(0), 1, 16, 53, documents=2)
    batch["document_ids"][0, 3], batch["targets"][0, 3] = -1, -1
    with pytest.raises(
        ValueError, match="padding must lie behind all documents for layers with a state, got padding before"
    ):
        value_and_grad(plan, model)(nnx.state(model, nnx.Param), batch)
