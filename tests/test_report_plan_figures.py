"""What reports derive from a plan: sums that must come out, against the planner's own figures."""

import dataclasses

import pytest
from report_cases import small_config, small_figures, too_large

from bench.documents import alike
from sppo_jax.predict import states
from sppo_jax.report.plan import figures as module
from sppo_jax.report.plan.figures import figures_of, hbm_columns
from sppo_jax.report.plan.html import plan_html
from sppo_jax.report.plan.json_report import plan_dict
from sppo_jax.report.plan.text import brief_text, plan_text
from sppo_jax.search.evaluate import documents_step_s
from sppo_jax.search.search import search

CASES = {
    "one sequence": {},
    "several sequences": {"sequence": {"per_pipeline": 3}},
    "interleaved": {"schedule": {"interleave": 2}},
    "breadth-first": {"schedule": {"name": "breadth-first", "interleave": 2}},
    "unequal chunks": {"sequence": {"chunks": [16384, 16384, 8192, 8192, 8192, 8192]}},
    "sequence members": {"mesh": {"pipe": 2, "seq": 2}},
    "copies too slow to hide": {"hardware": {"host_link_bytes_s": 1e6}, "stash": {"alpha": 1.0}},
}


@pytest.mark.parametrize("groups", CASES.values(), ids=CASES)
def test_parts_and_stages_add_up_to_the_predicted_step(groups):
    figures = small_figures(**groups)
    step_s = figures.plan.predicted.step_s
    assert sum(figures.parts.values()) == pytest.approx(step_s)
    assert min(figures.parts.values()) >= -1e-12
    for stage in figures.stages:
        spent = stage.forward_s + stage.backward_s + stage.head_s + stage.idle_s
        assert spent == pytest.approx(figures.simulation.step_s)
        assert sum(stage.hbm.values()) == stage.hbm_bytes == figures.found.memory.hbm_bytes
    idle = sum(stage.idle_s for stage in figures.stages) / len(figures.stages)
    assert idle == pytest.approx(sum(figures.parts[name] for name in ("bubble", "copies", "waits")))


def test_the_parts_answer_to_their_causes():
    plain, slow_links = small_figures(), small_figures(mesh={"pipe": 2, "seq": 2}, hardware={"link_bytes_s": 1e9})
    quick_links = small_figures(mesh={"pipe": 2, "seq": 2})
    assert slow_links.parts["communication"] > 50 * quick_links.parts["communication"] > 0
    unequal = small_figures(sequence={"chunks": [32768, 16384, 8192, 8192]})
    assert unequal.parts["padding"] > plain.parts["padding"] == 0
    assert small_figures(**CASES["copies too slow to hide"]).parts["copies"] > plain.parts["copies"]
    # Twice the length: four times the scores, twice the linear layers.
    longer = small_figures(sequence={"length": 131072, "chunks": 16})
    assert longer.parts["attention"] / plain.parts["attention"] == pytest.approx(4, rel=0.1)
    assert longer.parts["linear"] / plain.parts["linear"] == pytest.approx(2, rel=0.1)


def test_mixers_with_a_state_are_a_part_of_their_own(monkeypatch):
    def parts():
        config = small_config(model={"layers": "4x(3xdelta,full)"})
        return figures_of(search(config), config).parts

    plain = parts()
    monkeypatch.setattr(states, "STATE_STEP_S", 2 * states.STATE_STEP_S)
    slow = parts()
    assert 1.2 * plain["states"] < slow["states"] < 2 * plain["states"]
    assert {name: slow[name] for name in ("linear", "sums")} == pytest.approx(
        {name: plain[name] for name in ("linear", "sums")}
    )


def test_throughput_counts_all_pipelines():
    one = small_figures(mesh={"data": 1, "pipe": 4, "seq": 1})
    two = small_figures("h100:1x8", mesh={"data": 2, "pipe": 4, "seq": 1})
    assert two.tokens_s / one.tokens_s == pytest.approx(2, rel=0.02)
    assert two.mfu == pytest.approx(one.mfu, rel=0.02)
    assert 0 < one.mfu < 1 and one.num_devices == 4


def test_a_cpu_has_no_mfu():
    assert small_figures("cpu:1x4").mfu is None


def test_unknown_holders_count_as_working():
    columns = hbm_columns({"params": 4, "grads": 1, "kv": 2, "kv_grad": 4, "stash": 1, "news": 7})
    assert columns == {"params": 5, "kv": 2, "kv_grad": 4, "stash": 1, "working": 7}


def test_a_plan_that_does_not_fit_has_figures_too():
    assert not too_large().found.fits and too_large().found.problem


@pytest.mark.parametrize("wave", [1, 3])
@pytest.mark.parametrize("schedule", ["sppo", "seq1f1b", "gpipe", "interleaved-seq1f1b"])
def test_figures_of_a_step_too_long_to_draw_are_those_of_the_whole_step(schedule, wave, monkeypatch):
    interleave = 2 if "interleaved" in schedule else 1
    groups = dict(schedule={"name": schedule, "interleave": interleave, "wave": wave}, sequence={"per_pipeline": 24})
    whole = small_figures(**groups)
    monkeypatch.setattr(module, "_MOST_CELLS", 100)
    short = figures_of(whole.found, small_config(**groups))
    assert len(short.table.ticks) < len(whole.table.ticks)
    assert short.sequences_left_out > 0 == whole.sequences_left_out
    for stage, expected in zip(short.stages, whole.stages, strict=True):
        got, wanted = dataclasses.asdict(stage), dataclasses.asdict(expected)
        assert got.pop("hbm") == wanted.pop("hbm") and got == pytest.approx(wanted)
    assert short.parts == pytest.approx(whole.parts)
    assert short.link_busy_s == pytest.approx(whole.link_busy_s) and min(whole.link_busy_s) > 0
    note = f"shows a step of {short.table.num_sequences} of the 24 sequences"
    assert note in " ".join(plan_text(short).split()) and note in plan_html(short)
    assert "shows a step of" not in plan_text(whole)


@pytest.mark.parametrize("groups", CASES.values(), ids=CASES)
def test_documents_take_the_seconds_of_attention_away_and_the_plan_stays_for_full_ones(groups):
    full = small_figures(**groups)
    config = small_config(**groups)
    steps, length = {}, config.sequence.length
    for size in (length, length // 4, length // 1024):
        figures = figures_of(full.found, config, alike(config.model, length, size))
        steps[size] = figures.documents_step_s
        assert figures.plan == full.plan and figures.parts == full.parts and figures.tokens_s == full.tokens_s
    whole, some, none = steps.values()
    assert whole == pytest.approx(full.plan.predicted.step_s, rel=1e-9)
    assert whole >= some >= none > 0
    if groups == {}:
        # What the kernel takes for the diagonals of documents stays.
        assert 0.25 < (some - none) / (whole - none) < 0.35


def test_a_plan_says_what_a_step_of_known_documents_takes():
    found, config = small_figures().found, small_config()
    documents = alike(config.model, config.sequence.length, config.sequence.length // 4)
    plain, figures = (figures_of(found, config, known) for known in (None, documents))
    text = " ".join(brief_text(figures).split())
    mean = config.sequence.length // 4
    assert f"about {figures.documents_step_s:.4g} s a step for the documents of data.source" in text
    assert f"(mean {mean:,} tokens; attention 25.0% of that of a full document, counted in pairs of tokens)" in text
    assert "; the plan is for full documents" in text
    assert "documents of data.source" not in brief_text(plain)
    assert plan_dict(plain)["documents"] is None
    known = {
        "mean_tokens": mean,
        "attended": documents.attended,
        "step_s": figures.documents_step_s,
        "teams_gain": None,
    }
    assert plan_dict(figures) == plan_dict(plain) | {"documents": known}


def test_a_plan_for_documents_says_so_and_keeps_the_figures_of_full_ones():
    config = small_config()
    documents = alike(config.model, config.sequence.length, 1000)
    figures = figures_of(search(config, documents=documents), config, documents)
    plan = figures.plan
    assert ", for which this plan is" in " ".join(brief_text(figures).split())
    assert figures.documents_step_s == plan.predicted.documents_step_s < plan.predicted.step_s
    assert plan.planned_for.documents == "known" and plan.planned_for.attended == documents.attended
    assert figures.documents_step_s == pytest.approx(documents_step_s(plan, config, documents), rel=1e-9)
    assert "s a step for those of data.source (mean " in plan.describe()
    assert sum(figures.parts.values()) == pytest.approx(plan.predicted.step_s)
    told = plan_dict(figures)
    assert told["planned_for"]["documents"] == "known" and told["search"]["fastest_step_s"] <= figures.documents_step_s


def test_a_plan_whose_documents_are_not_known_says_so():
    figures = figures_of(small_figures().found, small_config(), planned_for="planned for full documents; so it is")
    row = next(line for line in brief_text(figures).splitlines() if line.startswith("  documents"))
    assert row.split(maxsplit=1)[1] == "planned for full documents; so it is"
