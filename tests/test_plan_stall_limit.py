"""The limit of a run without progress: by hand, in words, and above the step of every config."""

import json
import math
from dataclasses import replace

import pytest
from distributed_cases import REPO
from exactness import small_plan

from sppo_jax.config import config_from_dict, load_config
from sppo_jax.plan.json_format import read_object
from sppo_jax.plan.plan import Plan
from sppo_jax.plan.stall_limit import first_step_pinning_s, pinning_s, stall_limit_s, stall_problem, stall_text
from sppo_jax.report.plan.figures import figures_of
from sppo_jax.report.plan.html import plan_html
from sppo_jax.report.plan.json_report import plan_dict
from sppo_jax.report.plan.text import plan_text
from sppo_jax.search.search import search

GiB = 2**30
# Their predicted steps are longer than half an hour, the limit of every run once.
LONG_STEPS = (
    "gpt-7b-4m-8gpu",
    "llama3-70b-32gpu",
    "llama3-8b-1gpu",
    "llama3-8b-1gpu-80g",
    "llama3-8b-5m",
    "llama3-8b-7m-8gpu",
    "qwen3-32b-8gpu",
)
QUICK_TO_PLAN = ("gpt-7b-4m-8gpu", "llama3-8b-1gpu-80g")


def a_plan(*, step_s, host_gb=0.0, mesh=(1, 2, 1)):
    plan = small_plan((16,) * 4, mesh=mesh)
    host_bytes = (0,) * (mesh[1] - 1) + (int(host_gb * GiB),)
    return replace(plan, predicted=replace(plan.predicted, step_s=step_s, host_bytes=host_bytes))


@pytest.mark.parametrize(
    "plan, limit_s",
    [
        (dict(step_s=1.0), 1800),
        (dict(step_s=449.0), 1800),
        (dict(step_s=451.0), 1804),
        (dict(step_s=2000.0), 8000),
        (dict(step_s=2000.0, host_gb=100), 8100),  # two devices of a host pin 200 GiB at 2 GiB/s
        (dict(step_s=2000.0, host_gb=100, mesh=(2, 2, 1)), 8200),
        (dict(step_s=2000.0, host_gb=100, mesh=(4, 4, 4)), 8400),  # at most eight devices share a host
        (dict(step_s=2000.2), 8001),
    ],
)
def test_the_limit_is_four_steps_and_the_pinning(plan, limit_s):
    assert stall_limit_s(a_plan(**plan)) == limit_s
    assert f"ends after {limit_s} s without progress (4 steps and " in stall_text(a_plan(**plan))


def test_seconds_of_pinning_are_of_a_whole_host():
    assert pinning_s(2 * GiB) == 1.0 and pinning_s(0) == 0.0
    assert first_step_pinning_s(a_plan(step_s=1.0, host_gb=64, mesh=(4, 2, 1))) == 8 * 32


@pytest.mark.parametrize(
    "given, limit_s, words", [(0.0, 0, "never ends, as given"), (60.0, 60, "60 s without progress,")]
)
def test_a_number_that_is_given_is_the_limit(given, limit_s, words):
    plan = a_plan(step_s=2000.0, host_gb=100)
    assert stall_limit_s(plan, given) == limit_s and words in stall_text(plan, given)


@pytest.mark.parametrize("given, warned", [("auto", False), (0.0, False), (1999.0, True), (2000.0, False)])
def test_a_limit_below_the_step_is_warned_of(given, warned):
    problem = stall_problem(a_plan(step_s=2000.0), given)
    assert (problem is not None) == warned
    if problem:
        assert "\n" not in problem and "must be above the predicted step of 2000 s, got 1999 s" in problem
        assert "train.stall_s=auto (8000 s)" in problem


@pytest.mark.parametrize(
    "name", [name if name in QUICK_TO_PLAN else pytest.param(name, marks=pytest.mark.slow) for name in LONG_STEPS]
)
def test_the_limit_of_a_config_is_above_its_step(name):
    config = load_config(REPO / "configs" / f"{name}.yaml", [])
    plan = search(config).plan
    assert plan.predicted.step_s > 1800, "the limit of every run once: take the config out of this list"
    assert config.train.stall_s == "auto" and stall_limit_s(plan) > 4 * plan.predicted.step_s
    assert stall_limit_s(plan) < 4 * plan.predicted.step_s + 1000


def test_text_page_and_json_say_the_limit():
    settings = {
        "model": {"preset": "llama3-8b"},
        "data": {"source": "tokens.npy"},
        "sequence": {"length": 65536, "chunks": 4},
        "hardware": {"cluster": "h100:1x8"},
        "train": {"steps": 1},
    }
    for given, words in (
        ("auto", "ends after 1800 s without progress"),
        (0.5 + 0.5, "ends after 1 s without progress"),
    ):
        config = config_from_dict(settings | {"train": {"steps": 1, "stall_s": given}})
        figures = figures_of(search(config), config)
        report = plan_dict(figures)
        assert words in " ".join(plan_text(figures).split()) and words in plan_html(figures)
        assert report["stall_s"] == stall_limit_s(figures.plan, given)
        assert Plan.from_dict(read_object(json.dumps(report))) == figures.plan, "a reader leaves it aside"
        below = "must be above the predicted step"
        assert (below in plan_html(figures)) == (not math.isclose(report["stall_s"], 1800))
