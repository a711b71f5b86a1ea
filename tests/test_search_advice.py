"""What is advised where no mesh suits: the smallest changes, and each of them leaves a mesh."""

import re
import time

import pytest
from report_cases import gpus

from sppo_jax.config import config_from_dict, to_dict
from sppo_jax.hardware import parse_cluster
from sppo_jax.search.search import search
from sppo_jax.search.space.layouts import layouts
from sppo_jax.search.space.request import read_request

LLAMA = {"preset": "llama3-8b"}
WORDS = re.compile(r"(?:sequence|mesh|schedule)\.\w+=\w+|a cluster of [\d or]+ devices?")


def config(length=8192, model=LLAMA, **groups):
    sequence = {"length": length, **groups.pop("sequence", {})}
    return config_from_dict({"model": model, "sequence": sequence, "train": {"steps": 1}, **groups})


def refusal(asked, cluster):
    """The error of a search, and what it says to change."""
    with pytest.raises(ValueError) as error:
        search(asked, parse_cluster(cluster))
    text = str(error.value)
    assert "\n" not in text and len(text) < 700
    return text, text.rpartition("use ")[2]


@pytest.mark.parametrize(
    ("asked", "devices", "advice"),
    [
        (config(), 3, "sequence.length=8208 (+0.2%), a cluster of 2 or 4 devices, or sequence.per_step=3"),
        (config(), 5, "sequence.length=8160 (-0.4%), a cluster of 4 or 8 devices, or sequence.per_step=5"),
        (config(), 12, "sequence.length=8208 (+0.2%), or sequence.per_step=3"),
        (config(8191), 8, "sequence.length=8192"),
        (config(1000), 128, "sequence.length=1024 (+2.4%)"),
        (
            config(sequence={"per_step": 4}),
            3,
            "sequence.length=8208 (+0.2%), sequence.per_step=3, or a cluster of 2 or",
        ),
        (config(sequence={"per_pipeline": 2}), 3, "a cluster of 2 or 4 devices, or sequence.per_step=6"),
        (
            config(sequence={"per_step": 6, "per_pipeline": 2}),
            8,
            "sequence.per_step=8, or a cluster of 6 or 12 devices",
        ),
        (config(sequence={"chunks": [4096, 4096]}), 6, "a cluster of 4 or 8 devices, or sequence.per_step=3"),
        (config(sequence={"chunks": 1000}), 8, "sequence.chunks=auto, or sequence.length=16000 (+95.3%)"),
        (config(sequence={"split": "ulysses"}, length=8208), 3, "sequence.split=auto, a cluster of 2 or 4 devices, or"),
        (config(sequence={"ulysses": 3}), 8, "sequence.ulysses=auto"),
        (config(schedule={"interleave": 3}), 8, "schedule.interleave=auto"),
        (config(schedule={"wave": 3}, sequence={"per_step": 4}), 4, "schedule.wave=auto, or sequence.per_step=6"),
        (config(schedule={"interleave": 8}, mesh={"pipe": 8}), 8, "mesh.pipe=auto, or schedule.interleave=auto"),
        (config(mesh={"pipe": 3}), 8, "mesh.pipe=auto"),
        (config(mesh={"data": 3}), 8, "mesh.data=4, a cluster of 6 or 12 devices, or mesh.data=auto"),
        (
            config(mesh={"pipe": 2}),
            6,
            "sequence.length=8208 (+0.2%), a cluster of 4 or 8 devices, or sequence.per_step=3",
        ),
        (config(mesh={"seq": 3}), 12, "sequence.length=8208 (+0.2%)"),
        (config(mesh={"pipe": 6}), 6, "mesh.pipe=auto together with sequence.length=8208 (+0.2%), a cluster of 4 or 8"),
        (config(mesh={"data": 1, "pipe": 3, "seq": 2}), 8, "mesh.pipe=auto"),
    ],
)
def test_the_smallest_changes_are_named(asked, devices, advice):
    text, named = refusal(asked, gpus(devices))
    assert advice in named, text


def test_the_rules_are_named_with_what_was_got():
    text, _ = refusal(config(sequence={"per_step": 4}), "h100:1x3")
    for rule in (
        "no mesh of 3 devices suits",
        "mesh.pipe must divide model.num_layers=32",
        "mesh.seq * 16 (the tile of a device) must divide sequence.length=8192",
        "mesh.data must divide sequence.per_step=4",
    ):
        assert rule in text
    waves = config(schedule={"wave": 3}, sequence={"per_step": 4})
    assert "schedule.wave=3 must divide the sequences of a pipeline" in refusal(waves, "h100:1x4")[0]
    assert "mesh.data must be 1 where sequence.per_step is not given" in refusal(config(), "h100:1x3")[0]


PINS = ({}, {"pipe": 1}, {"pipe": 2}, {"pipe": 3}, {"seq": 3}, {"data": 2}, {"data": 3, "pipe": 1})
SEQUENCES = ({}, {"per_step": 4}, {"per_pipeline": 2}, {"chunks": 4}, {"chunks": 100}, {"split": "ulysses"})


@pytest.mark.parametrize("counts", [(3, 8), pytest.param((5, 6, 7, 12, 48), marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize(
    "mesh",
    [pytest.param(pins, marks=[pytest.mark.slow] * (pins in ({"pipe": 2}, {"seq": 3}))) for pins in PINS],
    ids=str,
)
def test_every_change_that_is_named_leaves_a_plan(mesh, counts):
    refused = 0
    for devices in counts:
        for sequence in SEQUENCES:
            for length in (8192, 8191):
                try:
                    asked = config(length, mesh=mesh, sequence=sequence)
                    layouts(read_request(asked, parse_cluster(gpus(devices))))
                    continue
                except ValueError as error:
                    text = str(error)
                if sequence.get("per_step", mesh.get("data", 1)) % mesh.get("data", 1):
                    continue  # the config refuses it by itself
                refused += 1
                if "change several of" in text:
                    continue
                _, _, named = text.rpartition("; use ")
                changes = WORDS.findall(named)
                assert changes, text
                first = [change for change in changes if change.endswith("=auto") and "together with" in named]
                for change in changes[len(first) :]:
                    check_leaves_a_mesh(asked, devices, [*first, change])
    assert refused > 10


def check_leaves_a_mesh(asked, devices, changes):
    counts, overrides = [devices], [change for change in changes if "cluster" not in change]
    if "cluster" in changes[-1]:
        counts = [int(count) for count in re.findall(r"\d+", changes[-1])]
    for count in counts:
        found = layouts(read_request(config_from_dict(to_dict(asked), overrides), parse_cluster(gpus(count))))
        assert found, changes


def test_hosts_are_taken_whole_and_the_advice_takes_no_time():
    start = time.perf_counter()
    text, named = refusal(config(2**20), "h100:1536x8")
    assert time.perf_counter() - start < 1
    assert named == "sequence.length=1050624 (+0.2%), a cluster of 8192 or 16384 devices, or sequence.per_step=3", text
    assert "a cluster of 32 or 64 devices" in refusal(config(), "h100:6x8")[1]


def test_where_no_single_change_is_enough_it_says_so():
    text, _ = refusal(config(8191, sequence={"split": "ulysses"}), "h100:1x3")
    assert "; change several of sequence.length, sequence.per_step, the axes of the mesh" in text
    text, _ = refusal(config(8191, sequence={"split": "ulysses"}, mesh={"pipe": 3}), "h100:1x3")
    assert "got mesh.pipe=3; change several of" in text
