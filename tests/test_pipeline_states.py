"""Layers with a state in the pipeline: exact in every plan, and each mask that keeps states apart is needed."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from combinations import in_lone_groups
from delta_cases import plain_mix, worst
from exactness import dense_step, quick_jit, random_batch, relative_errors, small_model, small_plan
from flax import nnx
from jax import lax
from programs import compare
from state_cases import STATE_MLP, StateCase, UnawareLayer, draw_states, packed_batches, state_layer

from sppo_jax.mixers.mixer import Operands, TokenRun
from sppo_jax.models import decoder
from sppo_jax.models.dense import dense_value_and_grad
from sppo_jax.pipeline import api
from sppo_jax.pipeline.api import evaluate, value_and_grad
from sppo_jax.pipeline.pasts import states as mixing
from sppo_jax.rules import Broken

KINDS = {"state": {"mlp_size": STATE_MLP}}
HYBRID = dict(num_layers=4, layers="2x(state,full)", layer_types=KINDS)
# Both orders of chunks; 15 has states alone.
DRAWN_IN_CI = (46,)
LONE_SLOWLY = (49, 87, 105)
DRAWN_SLOWLY = (2, 6, 15, 37, 43, 45, 56, 70, 73)
# Layers with a state beside attention.
BY_GROUPS = dict(schedule="breadth-first", interleave=2)
DELTA = dict(layers="2x(delta,full)", layer_types={})
ON_HOST = dict(places=("host", "recompute", "recompute"), alpha=1.0)
BESIDE_ATTENTION = {
    "the delta rule": (dict(chunks=(8, 4), mesh=(1, 1, 2)), dict(layers="delta,full", layer_types={}, num_layers=2)),
    "an only chunk": (dict(chunks=(16,), mesh=(1, 1, 2), weights="gathered", kv="recompute", **BY_GROUPS), {}),
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


@pytest.mark.slow
@pytest.mark.parametrize("seed", LONE_SLOWLY)
def test_states_in_groups_of_one_layer_have_the_dense_loss_and_gradients(seed, request):
    compare(in_lone_groups(draw_states(seed)), seed, count=2, batches=packed_batches, request=request)


def compare_named(named, request):
    plan, model = named
    case = StateCase(plan, HYBRID | {"hidden_size": 8} | model)
    compare(case, seed=3, count=3, batches=packed_batches, request=request)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name == "an only chunk")) for name in BESIDE_ATTENTION]
)
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


@pytest.mark.parametrize("change", [None, one_document, pytest.param(without_tokens_before, marks=pytest.mark.slow)])
def test_documents_are_kept_apart(change, x64, monkeypatch):
    dense = of_two_documents()
    if change is not None:
        monkeypatch.setattr(mixing, "chunk_place", of_place(change)(mixing.chunk_place))
    error = dense.largest_error(small_plan(**SHAPE))
    assert error < 1e-9 if change is None else error > 1e-4


LEFT_OUT_IN_CI = ("the state before a sequence", "idle stages write nothing")
# What is left out, and how.
LEFT_OUT = {
    "the state before a sequence": ("before", of_unit(inner)),
    "idle stages write nothing": ("leave", of_unit(always_active)),
    "idle stages hand nothing on": ("hand_on", of_unit(always_active)),
    "zeros for the next sequence": ("hand_on", of_unit(inner)),
}


@pytest.mark.parametrize(
    "name",
    [None, *(name if name in LEFT_OUT_IN_CI else pytest.param(name, marks=pytest.mark.slow) for name in LEFT_OUT)],
)
def test_sequences_are_kept_apart(name, x64, monkeypatch):
    """Of a mixer that sees no documents, in sequences of one document, the states lie apart without its help."""
    dense = of_an_unaware_mixer()
    if name is not None:
        attribute, change = LEFT_OUT[name]
        monkeypatch.setattr(mixing.StateUnit, attribute, change(getattr(mixing.StateUnit, attribute)))
    error = dense.largest_error(small_plan(**SHAPE))
    assert error < 1e-9 if name is None else error > 1e-4


# Documents end at a border between chunks, and one and two tokens before others; the last chunk has padding.
ENDS, LENGTHS = (6, 8, 11, 18, 22), (8, 4, 12)


def tapped(note, number):
    """Returns a function that gives what it gets, and notes what comes back to it."""

    @jax.custom_vjp
    def same(x):
        return x

    def back(_, grads):
        jax.debug.callback(partial(note, "cotangents", number), grads)
        return (grads,)

    same.defvjp(lambda x: (x, None), back)
    return same


def by_chunks(note):
    """Returns a stand-in for `mix_sequences`: the definition chunk by chunk, its states and cotangents noted."""

    def mix(mixer, operands, documents_BS):
        heads, documents = jax.tree.map(lambda x: x[0], operands.heads), documents_BS[0]
        state, outs, start = mixer.empty_state(Operands(heads, operands.constants)), [], 0
        for number, length in enumerate(LENGTHS):
            own = slice(start, start + length)
            before = jnp.concatenate([jnp.full(3, -1, jnp.int32), documents])[start : start + 3]
            place = TokenRun(documents[own], before, (documents[own] >= 0).sum())
            run = Operands(jax.tree.map(lambda x, own=own: x[own], heads), operands.constants)
            out, state = plain_mix(run, state, place)
            jax.debug.callback(partial(note, "states", number), state)
            outs, state, start = [*outs, out], tapped(note, number)(state), start + length
        return jnp.concatenate(outs)[None]

    return mix


@pytest.mark.slow
def test_the_state_behind_every_chunk_and_its_cotangent_are_those_of_the_definition(x64, monkeypatch):
    plan = small_plan(LENGTHS, mesh=(1, 1, 2), kind="ring", places=("keep", "keep", "recompute"))
    model = small_model(layers="delta,full", num_layers=2, hidden_size=8)
    batch = random_batch(np.random.default_rng(4), 1, 24, 53, documents=1)
    batch["document_ids"][0] = np.searchsorted(ENDS, np.arange(24), side="right")
    batch["document_ids"][0, 22:], batch["targets"][0, 21:] = -1, -1
    params, want, got = nnx.state(model, nnx.Param), {}, {"states": [], "cotangents": []}
    with monkeypatch.context() as patch:
        patch.setattr(decoder, "mix_sequences", by_chunks(lambda what, number, x: want.update({(what, number): x})))
        jax.block_until_ready(quick_jit(dense_value_and_grad(model))(params, batch))
        jax.effects_barrier()

    def noted(what, method, at):
        def run(self, *args):
            found = method(self, *args)
            state = (*args, found)[at]
            jax.debug.callback(lambda *x: got[what].append(x), lax.axis_index("ring"), state)
            return found

        return run

    monkeypatch.setattr(mixing.StateUnit, "leave", noted("states", mixing.StateUnit.leave, 2))
    monkeypatch.setattr(mixing.StateUnit, "cotangent", noted("cotangents", mixing.StateUnit.cotangent, -1))
    jax.block_until_ready(quick_jit(value_and_grad(plan, model))(params, batch))
    jax.effects_barrier()
    for what, order in (("states", (0, 1, 2)), ("cotangents", (2, 1, 0))):
        members = [[state for member, state in got[what] if member == n] for n in range(2)]
        for number, *shares in zip(order, *members, strict=True):
            found = jax.tree.map(lambda *x: np.concatenate(x), *shares)
            if (what, number) == ("cotangents", 2):  # nothing is behind the last chunk
                assert not any(x.any() for x in jax.tree.leaves(found))
            else:
                assert worst(found, want[what, number]) < 1e-9
                # Where a chunk begins with a document, nothing goes back to the state before it.
                assert (np.abs(found.memory).max() > 1e-4) == ((what, number) != ("cotangents", 0))


CASES = {
    "one stage": dict(chunks=(12, 20), sequences=2),
    "ring, two pipelines": dict(chunks=(16, 16), mesh=(2, 2, 2), kind="ring"),
    "breadth-first": dict(chunks=(12, 8, 12), mesh=(1, 2, 2), sequences=2, schedule="breadth-first", interleave=2)
    | dict(kv="rebuild", weights="gathered"),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name == "one stage")) for name in CASES]
)
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
