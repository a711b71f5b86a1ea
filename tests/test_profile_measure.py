"""Measuring: every figure is there, positive and counted as it says; not how fast this machine is."""

import json

import jax
import jax.numpy as jnp
import pytest

from sppo_jax import cli, hardware
from sppo_jax.config import ModelConfig
from sppo_jax.hardware.measured_figures import read_profile, write_profile
from sppo_jax.profile import measure
from sppo_jax.profile.measure import Sizes, default_model, default_sizes
from sppo_jax.profile.timing import Timer

TINY = ModelConfig(
    vocab_size=32, hidden_size=16, num_layers=2, num_heads=2, num_kv_heads=1, mlp_size=32, compute_dtype="float32"
)
SIZES = Sizes(tokens=64, square=32, chunks=(16, 32), prefixes=(0, 48), stream_bytes=2**16, run_s=0.001, runs=1)


pytestmark = pytest.mark.xdist_group("profile_measure")


@pytest.fixture(scope="module")
def found():
    lines: list[str] = []
    return measure.measure(TINY, SIZES, lines.append), lines


def test_every_figure_is_measured(found):
    profile, lines = found
    assert (profile.device, profile.dtype, profile.kernel) == ("cpu", "float32", "blockwise")
    assert profile.num_devices == len(jax.devices()) and profile.jax == jax.__version__
    positive = (
        profile.matmul_flops_s,
        profile.layer_flops_s,
        profile.link_bytes_s,
        profile.hbm_bytes_s,
        profile.overhead_s,
        profile.attention_flops_s,
    )
    assert all(value > 0 for value in positive) and profile.overhead_tokens >= 0
    shapes = [(figure.chunk_tokens, figure.prefix_tokens) for figure in profile.attention]
    assert shapes == [(16, 0), (32, 0), (16, 48), (32, 48)]
    assert [(f.rows, f.inner, f.columns) for f in profile.matmul] == [(64, 16, 32), (64, 16, 16), (32, 32, 32)]
    assert (
        any("host copies: not measured, because on a CPU" in line for line in lines)
        and profile.host_link_bytes_s is None
    )


def test_attention_counts_two_products_forward_and_five_backward(found):
    figure = found[0].attention[3]
    pairs = 32 * 48 + 32 * 32 / 2
    flops = 2 * 2 * 8 * 2 * pairs  # 2 FLOPs, 2 products, 8 elements, 2 heads
    assert figure.flops_s == pytest.approx(flops * 3.5 / (figure.forward_s + figure.backward_s))


def test_the_planner_takes_the_figures(found, tmp_path):
    path = tmp_path / "profile.json"
    write_profile(found[0], path)
    assert read_profile(path) == found[0]
    device = hardware.measured(hardware.DEVICES["cpu"], path)
    assert device.matmul_flops_s * device.matmul_efficiency == pytest.approx(found[0].layer_flops_s)


def test_a_timer_counts_iterations_on_all_devices():
    timer = Timer(devices=tuple(jax.devices()), run_s=0.001, runs=3)
    short_s, long_s = (
        timer.seconds(
            lambda: jnp.full((64, 64), 0.01),
            lambda x, iterations=iterations: jax.lax.fori_loop(0, iterations, lambda _, y: jnp.tanh(y @ y), x),
        )
        for iterations in (4, 400)
    )
    assert 0 < short_s < long_s


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
@pytest.mark.parametrize("quick", [True, False])
def test_defaults_are_there_for_every_platform(platform, quick):
    sizes, model = default_sizes(platform, quick=quick), default_model(platform)
    assert sizes.prefixes[0] == 0 and max(sizes.prefixes) > max(sizes.chunks) and sizes.runs % 2 == 1
    assert model.num_heads % model.num_kv_heads == 0


def test_the_command_stores_what_it_prints(found, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(measure, "measure", lambda model, sizes, say: found[0])
    out = tmp_path / "figures.json"
    assert cli.main(["profile", "--quick", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "best matmul" in printed and f"hardware.measured={out}" in printed
    assert json.loads(out.read_text())["device"] == "cpu"


@pytest.mark.parametrize(
    "words, why",
    [
        (["--devices", "gpu:2"], "--devices must be auto or cpu:N with N at least 1, got 'gpu:2'"),
        (["--devices", "cpu:0"], "got 'cpu:0'"),
        (["--out", "nowhere/at/all.json"], "--out must name a file that can be written"),
        (["--config", "nothing.yaml"], "nothing.yaml"),
        (["extra"], "unrecognized arguments: extra"),
    ],
)
def test_wrong_words_are_refused_in_one_line(words, why, capsys):
    assert cli.main(["profile", *words]) == 2
    error = capsys.readouterr().err
    assert why in error and error.count("\n") == 1
