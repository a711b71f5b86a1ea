"""What `sppo check` stores is what the planner reads: the slowest device of all processes counts."""

import dataclasses
import json
import re

import pytest

from sppo_jax.check.rates import measured_line, place_of, profile_of, to_json
from sppo_jax.check.row import Row
from sppo_jax.config import config_from_dict
from sppo_jax.hardware import DEVICES, make_cluster
from sppo_jax.hardware.attention_rates import AttentionCall
from sppo_jax.hardware.cluster import measured, with_profile
from sppo_jax.hardware.measured_figures import (
    AttentionFigure,
    MatmulFigure,
    Profile,
    profile_from_dict,
    read_profile,
)
from sppo_jax.predict.seconds.loop_waits import Write
from sppo_jax.search.make import make_plan

MATMUL = MatmulFigure(rows=8192, inner=4096, columns=4096, flops_s=700e12)
CHUNK = AttentionFigure(chunk_tokens=8192, prefix_tokens=0, forward_s=1.0, backward_s=2.5, flops_s=500e12)
PROFILE = Profile(
    device="h100",
    jax="0.12.0.1",
    date="2026-11-29",
    dtype="bfloat16",
    kernel="cudnn",
    num_devices=4,
    matmul_flops_s=700e12,
    layer_flops_s=600e12,
    matmul=(MATMUL,),
    attention=(CHUNK,),
    host_link_bytes_s=None,
    link_bytes_s=None,
    hbm_bytes_s=3e12,
    overhead_s=1e-4,
    overhead_tokens=100.0,
)


def found(**changes):
    """Returns the figures of two processes of two devices each."""
    calls = [
        {"way": "forward", "queries": 32768, "keys": 32768, "flops_s": [580e12, 579e12]},
        {"way": "backward", "queries": 32768, "keys": 32768, "flops_s": [490e12, 491e12]},
    ]
    rows = {
        "software": {"facts": {"driver": "580.1", "cuDNN": "9.20.0"}},
        "products": {"flops_s": [700e12, 630e12]},
        "attention rates": {"attention": calls},
        "host copies": {"all": {"out": [33e9, 31e9], "back": [34e9, 35e9]}, "alone": {"out": 48e9, "back": 49e9}},
        "loops wait": {"wait_share": 0.8},
        "pinning": {"pinning_bytes_s": 2e9},
        "collectives in a host": {"ring": [340e9, 330e9], "all-to-all": [300e9, 310e9]},
        "collectives between hosts": {"steps": [[45e9, 44e9], [48e9, 48e9]]},
        "collectives beside copies": {"left": [0.9, 1.1]},
        "rates": {"profile": dataclasses.asdict(PROFILE)},
    }
    return json.loads(
        json.dumps({name: [{"host": host, **row} for host in "ab"] for name, row in (rows | changes).items()})
    )


def test_the_slowest_device_counts():
    profile = profile_of(found())
    assert profile is not None
    assert (profile.driver, profile.cudnn, profile.host_link_bytes_s) == ("580.1", "9.20.0", 31e9)
    assert profile.attention_calls[0] == AttentionCall(way="forward", queries=32768, keys=32768, flops_s=579e12)
    assert (profile.link_bytes_s, profile.all_to_all_bytes_s, profile.network_bytes_s) == (330e9, 300e9, 44e9)
    assert (profile.loop_wait_share, profile.beside_copies_share, profile.pinning_bytes_s) == (0.8, 0.9, 2e9)
    assert profile.slowest_share == pytest.approx(630 / 665)


def test_rows_that_failed_or_were_left_out_leave_the_datasheet():
    assert profile_of({}) is None
    failed = found(**{"host copies": {"error": "out of memory"}, "loops wait": {"error": "no"}})
    profile = profile_of(failed)
    assert profile.host_link_bytes_s is None and profile.loop_wait_share is None
    assert profile_of(found(rates={"error": "no"})) is None


def test_what_is_stored_is_read_again_and_planned_with(tmp_path):
    path = tmp_path / "check.json"
    figures = found()
    rows = {name: Row(value="x") for name in figures}
    path.write_text(json.dumps(to_json(rows, figures)))
    assert read_profile(path) == profile_of(figures)
    device = measured(DEVICES["h100"], path)
    assert device.attention_rates.flops_s("forward", 32768, 32768) == 579e12
    assert (device.host_link_bytes_s, device.link_bytes_s, device.network_bytes_s) == (31e9, 300e9, 44e9)
    assert device.loop_wait_share == 0.8
    with pytest.raises(ValueError, match="hardware.measured must be of the device that the plan is for, h200, got"):
        measured(DEVICES["h200"], path)


def test_a_check_on_cpus_stores_no_rates(tmp_path):
    path = tmp_path / "check.json"
    path.write_text(json.dumps(to_json({}, {})))
    with pytest.raises(ValueError, match="sppo check stored no rates: it ran on CPUs, or a row failed"):
        read_profile(path)


def test_files_of_the_first_version_are_read():
    old = {name: value for name, value in json.loads(json.dumps(dataclasses.asdict(PROFILE))).items() if name in OLD}
    profile = profile_from_dict({**old, "schema_version": 1})
    assert profile == PROFILE
    assert with_profile(DEVICES["h100"], profile).loop_wait_share == 1.0
    with pytest.raises(ValueError, match="schema_version must be 1 or 2, got 3"):
        profile_from_dict({**old, "schema_version": 3})
    with pytest.raises(ValueError, match=r"copies\[0\].way must be one of"):
        profile_from_dict({**old, "schema_version": 2, "copies": [{"way": "up", "devices": "all", "bytes_s": 1.0}]})


OLD = {
    field.name
    for field in dataclasses.fields(Profile)[: [f.name for f in dataclasses.fields(Profile)].index("head_dim")]
}


def test_a_loop_waits_for_the_measured_share():
    assert Write(10.0, 2.0).tick_s(12.0) == 20.0
    assert Write(10.0, 2.0, 0.5).tick_s(12.0) == 16.0


def test_another_machine_has_another_file():
    places = {place_of("h100", driver, cudnn, count) for driver in "ab" for cudnn in "cd" for count in (4, 8)}
    assert len(places) == 8


def test_a_run_says_its_step_with_the_rates_that_were_measured_here(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = {"preset": "llama3.2-1b"}
    mesh = {"pipe": 4, "seq": 1, "data": 1}
    config = config_from_dict(
        {"model": model, "sequence": {"length": 65536, "chunks": 4}, "mesh": mesh, "train": {"steps": 1}}
    )
    cluster = make_cluster(DEVICES["h100"], 4)
    plan, facts = make_plan(config, cluster), {"driver": "580.1", "cuDNN": "9.20.0"}
    assert measured_line(config, plan, cluster, facts) == ""
    figures = found()
    path = place_of("h100", "580.1", "9.20.0", 4)
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(to_json({}, figures)))
    line = measured_line(config, plan, cluster, facts)
    here = dataclasses.replace(cluster, device=with_profile(cluster.device, profile_of(figures)))
    seconds = make_plan(config, here).predicted.step_s
    words = r"predicted (\S+) s a step with the rates that sppo check measured here, (\S+) s from the datasheet; "
    got = re.match(words + rf"hardware.measured={path} plans with them", line)
    # A plan that is made with these rates may be another, as fast within 2%.
    assert float(got[1]) == pytest.approx(seconds, rel=0.02) and got[2] == f"{plan.predicted.step_s:.2f}"
    assert got[1] != got[2]
    assert measured_line(config, plan, cluster, {**facts, "driver": "590.1"}) == ""
    assert measured_line(config, plan, make_cluster(DEVICES["h100"], 8), facts) == ""


def test_measured_figures_of_another_driver_or_cudnn_are_told(tmp_path):
    path = tmp_path / "check.json"
    path.write_text(json.dumps(to_json({}, found())))
    settings = {"model": {"preset": "llama3.2-1b"}, "sequence": {"length": 65536}, "train": {"steps": 1}}
    config = config_from_dict({**settings, "hardware": {"measured": str(path)}})
    cluster, facts = make_cluster(DEVICES["h100"], 4), {"driver": "580.1", "cuDNN": "9.20.0"}

    def line(**changes):
        return measured_line(config, None, cluster, facts | changes)

    assert line() == line(driver="") == ""
    rule = "hardware.measured should be of the driver of this run, 590.1"
    assert line(driver="590.1") == f"{rule}, got {path}, measured with 580.1; run sppo check again"
    assert "of the cuDNN of this run, 9.21.0, got" in line(cuDNN="9.21.0")
    path.unlink()  # a run that goes on has its plan
    assert line(driver="590.1") == ""
