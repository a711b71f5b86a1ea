"""The search for the documents of a run: by brute force the fastest, other choices than for full documents, reasons."""

import re
from dataclasses import replace

import pytest
from test_search_search import TIGHT, TINY, Bounds, config, of_equal_cost, outcomes, small, that_fit

from bench.documents import alike, drawn
from sppo_jax.hardware import DEVICES, make_cluster
from sppo_jax.search.collector import without_collector
from sppo_jax.search.evaluate import by_seconds, documents_step_s, memory_of
from sppo_jax.search.search import search
from sppo_jax.search.space.request import preferences, read_request

LENGTH = 4096


@pytest.fixture(autouse=True)
def no_collector():
    """Brute force makes as many small objects as a search."""
    with without_collector():
        yield


def documents_for(asked, mean=300, **given):
    """Returns drawn documents for a config."""
    return drawn(asked.model, asked.sequence.length, mean, **given)


# Layers of two kinds, one of them with a window; and of a kind that has a state.
KINDS = TINY | {"layers": "4x(near,full)", "layer_types": {"near": {"sliding_window": 256}}}
STATES = TINY | {"layers": "4x(delta,full)"}
LONG, PLAIN = {"smallest_chunk": 1024}, {"interleave": 1}
SLOW_LINK = {"host_link_bytes_s": 2e7}
# Of each case the devices, the groups of the config, and whether it is in CI: several stages and chunks, several
# sequences, pipelines, windows, a slow ring; all settings of the brute force for full documents.
BRUTE = (
    ({}, {"mesh": {"pipe": 4}}, True),
    (LONG, {"sequence": {"per_step": 4}, "mesh": {"data": 2}}, True),
    (LONG, {"sequence": {"per_step": 4}, "mesh": {"data": 1, "pipe": 4}, "schedule": PLAIN}, True),
    (LONG, {"model": KINDS, "mesh": {"pipe": 2}, "stash": {"rest": "recompute"}}, True),
    (LONG | TIGHT[4], {"mesh": {"pipe": 1}}, True),
    (LONG | SLOW_LINK, {"mesh": {"pipe": 2}}, False),
    (LONG | SLOW_LINK, {"sequence": {"per_step": 4}}, False),
    (LONG, {"model": STATES}, False),
    (LONG, {"sequence": {"per_step": 8}, "mesh": {"data": 2, "pipe": 2}}, False),
    ({}, {"sequence": {"per_step": 4, "balance": "cost"}}, False),
    *((figures, {"sequence": {"per_step": per_step}}, False) for figures in TIGHT for per_step in (0, 4)),
)


@pytest.mark.parametrize(
    ("figures", "groups"), [pytest.param(*values, marks=[pytest.mark.slow] * (not in_ci)) for *values, in_ci in BRUTE]
)
def test_nothing_is_faster_for_the_documents_than_what_is_found(figures, groups):
    cluster, asked = small(platform="gpu", **figures), config(**groups)
    documents = documents_for(asked)
    request = read_request(asked, cluster, documents)
    fitting, found = list(that_fit(request)), search(asked, cluster, documents)
    assert found.num_considered > 100 and (fitting or figures.get("hbm_bytes"))
    plan = found.plan
    # What fits, and what it holds, does not depend on documents.
    assert found.fits == search(asked, cluster).fits and found.memory == memory_of(plan, asked, cluster)
    assert plan.predicted.documents_step_s == pytest.approx(documents_step_s(plan, asked, documents, cluster), rel=1e-9)
    if fitting:
        fastest = next(by_seconds(fitting))
        least_s = fastest.step_s
        if asked.sequence.asked_balance == "auto":
            least_s = min(least_s, *of_equal_cost(request, [fastest]))
        # Chunks of equal cost beside another plan may be faster still.
        assert found.fastest_s <= least_s * (1 + 1e-9)
        assert plan.predicted.documents_step_s <= least_s * 1.005
        assert least_s <= found.fastest_s * (1.005 if plan.schedule.shapes else 1 + 1e-9)


# Devices and groups of the config where the choice for documents differs from that for full ones.
DIFFERENT = (
    ({}, {"mesh": {"pipe": 4}}),
    (LONG, {"sequence": {"per_step": 4}}),
    (LONG, {"sequence": {"per_step": 4}, "mesh": {"data": 1, "pipe": 4}, "schedule": PLAIN}),
    (LONG, {"model": KINDS, "mesh": {"pipe": 2}}),
    (LONG, {"sequence": {"per_step": 2}, "mesh": {"data": 1, "pipe": 2}, "schedule": PLAIN}),
)


@pytest.mark.parametrize(("figures", "groups"), DIFFERENT)
def test_the_choice_for_documents_is_another_one_where_it_is_faster(figures, groups):
    cluster, asked = small(platform="gpu", **figures), config(**groups)
    documents = documents_for(asked)
    full, found = search(asked, cluster), search(asked, cluster, documents)
    assert documents_step_s(full.plan, asked, documents, cluster) > 1.02 * found.plan.predicted.documents_step_s
    assert full.plan.predicted.step_s <= found.plan.predicted.step_s
    compared = [
        one for one in found.plan.reasons.values() if re.search(r"x as long|% faster|saves .* of the step", one)
    ]
    assert compared and all("for the documents of data.source" in one for one in compared)
    assert not any("for the documents" in one for one in full.plan.reasons.values())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["h100", "v5p"])
def test_nothing_of_any_order_or_way_is_faster_for_the_documents(kind):
    device = replace(DEVICES[kind], smallest_chunk=512, overhead_s=1e-4, matmul_flops_s=1e11, hbm_bytes=70_000_000)
    asked = config(length=2048, sequence={"per_step": 2})
    documents = documents_for(asked)
    request = read_request(asked, make_cluster(device, 2), documents)
    found = search(asked, request.cluster, documents)
    for trials in preferences(request):
        fitting = [one for trial in trials for one in that_fit(replace(request, way=trial.way), trial.kv_grad_dtype)]
        if fitting:
            break
    least_s = next(by_seconds(fitting)).step_s
    assert found.fits and found.fastest_s <= least_s * (1 + 1e-9)


@pytest.mark.parametrize(
    ("tight", "groups", "every"),
    [
        (0, {"sequence": {"per_step": 4}}, 67),
        (4, {"schedule": {"name": "breadth-first"}}, 67),
        (0, {"model": KINDS}, 37),
        pytest.param(2, {"sequence": {"per_step": 4}}, 1, marks=pytest.mark.slow),
        pytest.param(4, {"schedule": {"name": "gpipe"}, "sequence": {"per_step": 4}}, 1, marks=pytest.mark.slow),
    ],
)
def test_bounds_are_below_the_steps_of_documents(tight, groups, every):
    asked = config(**groups)
    request = read_request(asked, small(**TIGHT[tight]), documents_for(asked))
    bounds = Bounds(request)
    for outcome in outcomes(request, among=bounds.partitions[::every]):
        bounds.check(outcome)
        assert outcome.least_s <= outcome.step_s


def test_full_documents_change_nothing():
    asked, cluster = config(sequence={"per_step": 4}), small()
    full, whole = search(asked, cluster), search(asked, cluster, alike(asked.model, LENGTH, LENGTH))
    assert full.fastest_s == pytest.approx(whole.fastest_s, rel=1e-9)
    assert full.plan.predicted.documents_step_s is None and full.plan.planned_for.documents == "full"
    for name in ("mesh", "chunk_lengths", "schedule", "stash"):
        assert getattr(full.plan, name) == getattr(whole.plan, name)
    assert whole.plan.predicted.step_s == full.plan.predicted.step_s


@pytest.mark.parametrize("settings", [{"sequence": {"plan_for": "full"}}, {"planner": "paper"}])
def test_documents_that_are_not_to_count_change_nothing(settings):
    asked = config(**settings)
    full, found = search(asked, small()), search(asked, small(), documents_for(asked))
    assert found.plan == full.plan and found.plan.reasons == full.plan.reasons


def test_seconds_of_a_step_are_worked_out_late(monkeypatch):
    asked = config(sequence={"per_step": 4})
    counts = {}
    for name in ("expected_seconds", "simulate"):
        counts[name] = count_calls(monkeypatch, name)
    search(asked, small(), documents_for(asked))
    assert 0 < len(counts["expected_seconds"]) < len(counts["simulate"])


def count_calls(monkeypatch, name):
    from sppo_jax.search import evaluate as module

    calls, work = [], getattr(module, name)
    monkeypatch.setattr(module, name, lambda *given: calls.append(name) or work(*given))
    return calls
