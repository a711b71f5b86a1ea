"""The digits of a program change with what decides the compiled program, and with nothing else."""

import os
import random
import subprocess
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from sppo_jax.fit.fingerprint import Asked, asked_of, compiler_versions, fingerprint, kernel_calls
from sppo_jax.fit.targets import GPUS, topology_of
from sppo_jax.hardware import parse_cluster

ASKED = Asked(
    options={"xla_gpu_enable_latency_hiding_scheduler": True, "xla_gpu_memory_limit_slop_factor": 2000},
    flags=("--xla_gpu_autotune_level=0",),
    target=topology_of(parse_cluster("h100:1x8")),
    versions={"jaxlib": "0.12.0.1", "jax-cuda13-pjrt": "0.12.0.1"},
)
# A program whose locals, comments and places the tests change; drawn numbers are its constants.
PROGRAM = """
import jax
import jax.numpy as jnp
{above}
def step({x}, {y}):
    {comment}
    {local} = jnp.sin({x}) * {constant}
{between}
    return jax.lax.scan(lambda {y}, {x}: ({y} + {x} @ {local}, {y}), {y}, None if {x} is None else {x}[None])[0]

LOWERED = jax.jit(step).lower(jnp.zeros(({rows}, {rows})), jnp.zeros(({rows}, {rows}))).as_text()
"""
WORDS = {"above": "", "x": "x", "y": "y", "comment": "# a", "local": "z", "constant": 2.5, "between": "", "rows": 3}


def digits(**changed) -> str:
    found: dict = {}
    exec(PROGRAM.format(**WORDS | changed), found)
    return fingerprint(found["LOWERED"], ASKED)


@pytest.mark.parametrize("seed", range(8))
def test_names_comments_and_places_do_not_change_the_digits(seed):
    rng = random.Random(seed)
    names = rng.sample(["a", "b", "left", "query", "w_DF", "carry"], 3)
    lines = "\n" * rng.randrange(9) + "# a comment\n" * rng.randrange(4)
    inner = "    # between\n" * rng.randrange(5)
    moved = dict(zip(("x", "y", "local"), names, strict=True))
    moved |= {"above": lines, "between": inner, "comment": "# other"}
    constant = rng.choice([2.5, 0.75])
    assert digits(**moved, constant=constant) == digits(constant=constant)


@pytest.mark.parametrize("change", [{"constant": 2.25}, {"rows": 4}, {"comment": "x = x + y"}], ids=str)
def test_another_program_has_other_digits(change):
    assert digits(**change) != digits()


@pytest.mark.parametrize(
    "change",
    [
        {"options": {**ASKED.options, "xla_gpu_memory_limit_slop_factor": 1999}},
        {"options": {"xla_gpu_enable_latency_hiding_scheduler": True}},
        {"flags": ("--xla_gpu_autotune_level=1",)},
        {"target": topology_of(parse_cluster("h100:2x4"))},
        {"target": topology_of(parse_cluster("h200:1x8"))},
        {"target": topology_of(parse_cluster("v5p:2x2x1"))},
        {"versions": {**ASKED.versions, "jaxlib": "0.12.1"}},
        {"versions": {"jaxlib": "0.12.0.1"}},
    ],
    ids=str,
)
def test_what_xla_is_asked_changes_the_digits(change):
    assert fingerprint("module {}", replace(ASKED, **change)) != fingerprint("module {}", ASKED)


def test_the_order_of_options_does_not(monkeypatch):
    turned = replace(ASKED, options=dict(reversed(ASKED.options.items())))
    assert fingerprint("module {}", turned) == fingerprint("module {}", ASKED)
    monkeypatch.setenv("XLA_FLAGS", "--xla_b=1 --xla_a=2 --xla_dump_to=/x --xla_force_host_platform_device_count=8")
    assert asked_of(None, parse_cluster("h100:1x8")).flags == ("--xla_a=2", "--xla_b=1")


def test_a_changed_figure_of_a_device_changes_the_target(monkeypatch):
    before = topology_of(parse_cluster("h100:1x8"))
    monkeypatch.setitem(GPUS, "h100", replace(GPUS["h100"], l2_bytes=1))
    assert topology_of(parse_cluster("h100:1x8")) != before


def test_three_processes_agree():
    """Hashes of text differ between processes, so that an order that follows them would show."""
    code = "from test_fit_fingerprint import digits; print(digits())"
    path = os.pathsep.join((os.path.dirname(__file__), os.getcwd()))
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"},
            capture_output=True, text=True, check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }  # fmt: skip
    assert found == {digits()}


def test_versions_are_those_of_the_compiler_of_a_platform():
    assert compiler_versions("cpu").keys() == {"jaxlib"} <= compiler_versions("gpu").keys()


def test_calls_of_fused_kernels_are_counted():
    text = "@__cudnn$fmhaSoftmax(%1)\n@__cudnn$fmhaSoftmaxBackward(%2)\n@tpu_custom_call(%3) @Sharding(%4)"
    assert kernel_calls(text) == 3
    assert kernel_calls(jax.jit(jnp.sin).lower(jnp.zeros(2)).as_text()) == 0
