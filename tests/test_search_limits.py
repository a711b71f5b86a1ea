"""The longest sequence and the smallest cluster: both sides of the bound are searched, and nothing twice."""

import dataclasses
import itertools

import pytest
from report_cases import HOST, gpus, small_config

from sppo_jax.config import config_from_dict
from sppo_jax.hardware import parse_cluster
from sppo_jax.report.plan.limits_text import bound_dict, max_length_text, min_devices_text
from sppo_jax.search.feasible import Feasibility
from sppo_jax.search.limits import max_length, min_devices
from sppo_jax.search.make import resolve_cluster
from sppo_jax.search.search import search

FREE = {"mesh": {"pipe": "auto"}, "sequence": {"length": 65536, "chunks": "auto"}}


@pytest.mark.parametrize("length", [2**14, 2**17, 2**21])
def test_the_longest_sequence_fits_and_the_next_does_not(length):
    config = small_config(mesh={"pipe": 4}, sequence={"length": length, "chunks": 8}, hardware={"hbm_bytes": 2**30})
    bound = max_length(config)
    assert bound.best is not None and bound.stopped is not None
    assert bound.best.found.fits and bound.best.found.plan.sequence_length == bound.best.size
    assert bound.stopped.problem and bound.best.size < bound.stopped.size <= bound.best.size * 1.2
    assert {trial.size: trial.problem for trial in bound.tried}[bound.best.size] == ""
    assert len({trial.size for trial in bound.tried}) == len(bound.tried) <= 16


def test_from_wherever_one_starts_the_longest_sequence_is_about_the_same():
    found = [
        max_length(small_config(sequence={"length": length}, hardware={"hbm_bytes": 2**30})).best.size
        for length in (2**14, 2**21)
    ]
    assert max(found) <= 1.13 * min(found)


def test_nothing_fits_at_any_length():
    config = small_config(hardware={"hbm_bytes": 2**20})
    bound = max_length(config)
    assert bound.best is None and "No sequence fits h100:1x4" in max_length_text(bound, resolve_cluster(config))
    assert bound_dict(bound)["value"] is None


def test_the_fastest_plan_is_searched_at_the_answer_alone(monkeypatch):
    config = small_config(hardware={"hbm_bytes": 2**30})
    found, searched, asked = search(config), [], []

    def counted(config, cluster=None):
        searched.append(config.sequence.length)
        return search(config, cluster)

    def counted_feasibility(config, cluster=None, first=()):
        asked.append(config.sequence.length)
        return Feasibility(config, cluster, first)

    monkeypatch.setattr("sppo_jax.search.limits.search", counted)
    monkeypatch.setattr("sppo_jax.search.limits.Feasibility", counted_feasibility)
    bound = max_length(config, found=found)
    assert searched == [bound.best.size]
    assert config.sequence.length not in asked and len(set(asked)) == len(asked) == len(bound.tried) - 1


def test_a_slow_machine_gives_the_same_answer(monkeypatch):
    config = small_config(hardware={"hbm_bytes": 2**30})
    want = max_length(config)
    hours = itertools.count(step=3600.0)
    monkeypatch.setattr("time.perf_counter", lambda: next(hours))
    bound = max_length(config)
    assert bound.seconds >= 3600
    assert (bound.best.size, bound.stopped.size) == (want.best.size, want.stopped.size)


def test_a_plan_that_a_run_cannot_pin_is_not_the_answer(monkeypatch):
    """XLA's pool of host memory may refuse what fits by its bytes: the next shorter length is searched then."""
    config = small_config(hardware={"hbm_bytes": 2**30})
    want = max_length(config).best.size

    def refused(config, cluster=None):
        found = search(config, cluster)
        return dataclasses.replace(found, problem="pinned") if config.sequence.length == want else found

    monkeypatch.setattr("sppo_jax.search.limits.search", refused)
    bound = max_length(config)
    assert bound.best.size < want == bound.stopped.size and bound.stopped.problem == "pinned"


@pytest.mark.parametrize("start", [pytest.param("h100:1x1", marks=pytest.mark.slow), "h100:1x8", "h100:4x8"])
def test_the_smallest_cluster_fits_and_the_next_smaller_does_not(start):
    config = small_config(
        start, **FREE | {"sequence": {"length": 2**21, "chunks": "auto"}}, hardware={"hbm_bytes": 2**30}
    )
    bound = min_devices(config)
    assert bound.best.found.fits
    mesh = bound.best.found.plan.mesh
    assert mesh.data * mesh.pipe * mesh.seq == bound.best.size
    smaller = [trial for trial in bound.tried if trial.size < bound.best.size]
    assert smaller and all(trial.problem for trial in smaller)
    assert bound.stopped in smaller and bound.stopped.size == bound.best.size // 2
    text = min_devices_text(bound, resolve_cluster(config), 2**21)
    assert f"{bound.best.size} devices, {bound.best.name}" in text and "too large" in text


def test_one_device_may_do():
    bound = min_devices(small_config("h100:2x8", **FREE))
    assert (bound.best.size, bound.best.name, bound.stopped) == (1, "h100:1x1", None)


def test_pinned_axes_are_kept():
    bound = min_devices(small_config("h100:1x8", **FREE | {"mesh": {"pipe": 4}}))
    assert bound.best.size == 4 and bound.best.found.plan.mesh.pipe == 4
    assert "mesh.pipe=4 does not divide 2 devices" in {trial.problem for trial in bound.tried}


def test_where_no_cluster_will_do():
    config = small_config("h100:1x8", **FREE, hardware={"hbm_bytes": 2**20})
    bound = min_devices(config)
    assert bound.best is None
    assert "No cluster of up to 1024 h100 fits" in min_devices_text(bound, resolve_cluster(config), 65536)


# Neither the heads nor the layers nor the length divide by most numbers of devices.
LITTLE = {"vocab_size": 256, "hidden_size": 32, "num_layers": 2, "num_heads": 2, "mlp_size": 64}
IN_CI = (1, 2, 3, 5, 7, 8, 12, 16, 24, 31, 72)
COUNTS = [pytest.param(count, marks=[pytest.mark.slow] * (count not in IN_CI)) for count in [*range(1, 33), 72]]


def little_config(length=4096, **groups):
    """A config of a little model; the schedule is given, to search less."""
    settings = {"model": LITTLE, "schedule": {"name": "sppo", "interleave": 1}, "train": {"steps": 1}}
    return config_from_dict(settings | {"sequence": {"length": length, "chunks": 4}} | groups)


@pytest.mark.parametrize("count", COUNTS)
def test_every_number_of_devices_has_a_longest_sequence(count):
    cluster = parse_cluster(gpus(count))
    config = little_config(hardware={"hbm_bytes": 2**30})
    bound = max_length(config, cluster)
    assert bound.best is not None and bound.best.found.fits and bound.stopped.problem
    assert bound.best.size % (count * 16) == 0 and bound.stopped.size <= 1.2 * bound.best.size
    mesh = bound.best.found.plan.mesh
    assert mesh.data * mesh.pipe * mesh.seq == count


def test_the_longest_sequence_does_not_depend_on_the_length_of_the_config():
    found = {
        max_length(little_config(length, hardware={"hbm_bytes": 2**30}), parse_cluster("h100:1x3")).best.size
        for length in (4096, 48 * 85, 131072, 131088)
    }
    assert len(found) == 1


@pytest.mark.parametrize("count", COUNTS)
def test_from_every_number_of_devices_a_smallest_cluster_is_found(count):
    bound = min_devices(little_config(2**20, hardware={"hbm_bytes": 2**30}), parse_cluster(gpus(count)))
    assert bound.best.found.fits and bound.best.found.plan.sequence_length == 2**20
    per_host = 8 if count <= 8 else int(gpus(count).partition("x")[2])
    assert bound.best.size in {1, 2, 4} or bound.best.size % per_host == 0
    assert bound.stopped.size < bound.best.size and bound.stopped.problem


def test_a_smallest_cluster_has_a_multiple_of_the_given_axes():
    bound = min_devices(little_config(48 * 1024, mesh={"seq": 3}), parse_cluster("h100:1x8"))
    assert (bound.best.size, bound.best.name) == (3, "h100:1x3")


@pytest.mark.parametrize("name", ["v5e:2x2", "v5p:2x2x1", "tpu7x:2x2x1", "gb200:1x4"])
def test_the_smallest_cluster_exists(name):
    config = little_config(2**22, hardware={"hbm_bytes": 2**30})
    bound = min_devices(config, parse_cluster(name))
    assert bound.best.found.fits
    for trial in bound.tried:
        assert parse_cluster(trial.name).num_devices == trial.size


def test_where_no_length_has_a_plan_it_says_what_to_change():
    config = little_config(mesh={"pipe": 3})
    with pytest.raises(ValueError, match="mesh.pipe must divide model.num_layers=2, got mesh.pipe=3.*; use mesh.pipe="):
        max_length(config, parse_cluster("h100:1x3"))
    with pytest.raises(ValueError, match="; use "):
        min_devices(config, parse_cluster("h100:1x3"))


WRONG = {
    "a list of chunks": (
        max_length,
        {"sequence": {"chunks": [32768, 32768]}},
        "sequence.chunks must be auto or one number for --max-length",
    ),
    "a list of alpha": (
        max_length,
        {"stash": HOST | {"alpha": [0.0] * 11}},
        "stash.alpha must be auto or one number for --max-length",
    ),
    "a whole mesh": (
        min_devices,
        {"mesh": {"data": 1, "pipe": 4, "seq": 1}},
        "one axis of the mesh must be auto for --min-devices",
    ),
}


@pytest.mark.parametrize(("bound", "groups", "message"), WRONG.values(), ids=WRONG)
def test_settings_that_pin_the_answer_are_refused(bound, groups, message):
    with pytest.raises(ValueError, match=message):
        bound(small_config(**groups))


def test_text_and_json_say_the_same():
    config = small_config(hardware={"hbm_bytes": 2**30})
    bound = max_length(config)
    text, values = max_length_text(bound, resolve_cluster(config)), bound_dict(bound)
    assert f"{values['value']:,} tokens" in text and values["stopped"]["problem"].split(":")[0] in text
    assert sum(values["best"]["plan"]["chunk_lengths"]) == values["value"]
    assert len(values["tried"]) == len(bound.tried)
    assert max(map(len, text.splitlines())) <= 100
