"""Chunks of which a plan knows that nothing is past, or that there is one document: the dense loss and gradients."""

import numpy as np
import pytest
from exactness import random_batch, small_model, small_plan
from flax import nnx
from programs import Case, compare

from sppo_jax.pipeline.api import evaluate, value_and_grad

ONE = dict(kernel="cudnn", sequence_documents="one")
IN_CI = {
    "one chunk, pipe 2, ring 2": Case(
        dict(chunks=(16,), mesh=(1, 2, 2), kind="ring", ring_pass="kv"), dict(num_layers=2)
    ),
    "windows and sinks": Case(dict(chunks=(12, 12)), dict(num_layers=2, sliding_window=8, sinks=True)),
}
SLOWLY = {
    "one chunk, two sequences": Case(dict(chunks=(24,), mesh=(1, 2, 2), kind="ring", ring_pass="kv", sequences=2)),
    "windows and sinks, data 2, ulysses 2": Case(
        dict(chunks=(12, 6, 12), mesh=(2, 1, 2)), dict(num_layers=2, sliding_window=8, sinks=True)
    ),
    "three chunks": Case(dict(chunks=(12, 6, 12), mesh=(1, 2, 1), sequences=2, schedule="seq1f1b")),
    "three chunks, ring 2, keys": Case(dict(chunks=(12, 8, 12), mesh=(1, 1, 2), kind="ring", ring_pass="kv")),
    "three chunks, ring 4, queries": Case(dict(chunks=(16, 8, 16), mesh=(1, 1, 4), kind="ring", ring_pass="q")),
    "one chunk, data 2, ulysses 2, pipe 2": Case(dict(chunks=(16,), mesh=(2, 2, 2))),
    "one chunk, ring 2, queries, sinks": Case(
        dict(chunks=(16,), mesh=(1, 1, 2), kind="ring", ring_pass="q"), dict(num_layers=2, sinks=True)
    ),
    "one chunk, windows, ring 2 of ulysses 2": Case(
        dict(chunks=(32,), mesh=(1, 1, 4), kind="hybrid", ulysses=2), dict(num_layers=2, sliding_window=10)
    ),
    "two chunks, windows, ring 2": Case(
        dict(chunks=(16, 8), mesh=(1, 2, 2), kind="ring"), dict(num_layers=2, sliding_window=6, sinks=True)
    ),
    "attention again": Case(
        dict(chunks=(12, 12), mesh=(1, 1, 1), places=("recompute",) * 3), dict(num_layers=2, sliding_window=5)
    ),
    "one chunk, keys made again": Case(
        dict(chunks=(16,), mesh=(1, 1, 2), schedule="breadth-first", interleave=2, kv="recompute")
    ),
    "tails": Case(
        dict(chunks=(12, 6, 12), schedule="breadth-first", interleave=2, kv="rebuild"),
        dict(num_layers=4, layers="2x(local,full)", layer_types={"local": {"sliding_window": 8}}),
    ),
}


def one_document(rng, plan, vocab_size, count):
    """Draws batches of a document a sequence: of any length, of all tokens, or of none, with padding before some."""
    for number in range(count):
        batch = random_batch(rng, plan.num_sequences, plan.sequence_length, vocab_size, documents=1)
        for row in range(plan.num_sequences):
            begin, end = sorted(rng.integers(0, plan.sequence_length + 1, 2))
            if number == row % 2:
                begin, end = 0, [plan.sequence_length, 0][row // 2 % 2]
            for name in ("document_ids", "targets"):
                batch[name][row, :begin], batch[name][row, end:] = -1, -1
        yield batch


def with_one(case):
    """Returns the case with sequences of one document."""
    return Case(case.plan | ONE, case.model)


@pytest.mark.parametrize("name", IN_CI)
def test_sequences_of_one_document_have_the_dense_loss_and_gradients(name, request):
    compare(with_one(IN_CI[name]), seed=0, count=3, batches=one_document, request=request)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOWLY)
def test_more_sequences_of_one_document_have_the_dense_loss_and_gradients(name, request):
    compare(with_one(SLOWLY[name]), seed=1, count=4, batches=one_document, request=request)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, case in (IN_CI | SLOWLY).items() if len(case.plan["chunks"]) == 1])
def test_one_chunk_of_several_documents_has_the_dense_loss_and_gradients(name, request):
    case = (IN_CI | SLOWLY)[name]
    compare(Case(case.plan | dict(kernel="cudnn"), case.model), seed=2, count=3, request=request)


BLOCKS = dict(kernel="cudnn", backward_queries=5)


@pytest.mark.parametrize(
    "name",
    [name for name, case in SLOWLY.items() if not case.model.get("sliding_window")],
)
@pytest.mark.slow
def test_backwards_in_blocks_of_queries_have_the_dense_loss_and_gradients(name, request):
    """Blocks of 3 to 5 queries of a ring member, of several documents and of one."""
    case = SLOWLY[name]
    compare(Case(case.plan | BLOCKS, case.model), seed=3, count=3, request=request)
    if "ring" not in name:
        compare(Case(case.plan | ONE | BLOCKS, case.model), seed=4, count=3, batches=one_document, request=request)


def test_batches_are_as_they_say():
    drawn = list(one_document(np.random.default_rng(0), small_plan((16,), sequences=4), 20, 4))
    counts = {int(count) for batch in drawn for count in (batch["document_ids"] >= 0).sum(1)}
    assert {0, 16} < counts and all(batch["document_ids"].max() == 0 for batch in drawn)


@pytest.mark.parametrize("make", [value_and_grad, evaluate])
def test_a_second_document_is_refused_on_the_host(make):
    model, plan = small_model(dtype="float32"), small_plan((8, 8), sequence_documents="one")
    batch = random_batch(np.random.default_rng(0), 1, 16, 50, documents=2)
    with pytest.raises(ValueError, match="hold one document at most .*, got documents 0 and 1 in sequence 0; give"):
        make(plan, model)(nnx.state(model, nnx.Param), batch)
